"""``bpf/pidmap.h``, as a C compiler lays it out, compared with the Python code."""

import re
import subprocess
from pathlib import Path
from struct import Struct

import pytest

from resolver.linux.procfs import HOST_PIDNS
from resolver.pids.bpf_load import bpf_directory
from resolver.pids.bpf_map import COUNTERS, LAYOUTS
from tests.programs import completed

#: Struct, and its members in the order of the Python format; an array stands for its elements.
MEMBERS = {
    "level": ("pidns", "ns_pid"),
    "process": ("start_time", "host_tgid", "level", "levels", "next.pidns", "next.ns_pid"),
    "init": ("start_time", "host_tgid", "padding"),
    "counters": COUNTERS,
}


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """``{expression: number}`` of every size and offset, and of the limits."""
    expressions = ["HOST_PIDNS"]
    for name, members in MEMBERS.items():
        expressions.append(f"sizeof(struct {name})")
        for member in members:
            expressions.append(f"offsetof(struct {name}, {member})")
            expressions.append(f"sizeof(((struct {name} *)0)->{member})")
    lines = [f'printf("%s=%llu\\n", "{each}", (unsigned long long)({each}));' for each in expressions]
    place = tmp_path_factory.mktemp("layout")
    source = '#include <stddef.h>\n#include <stdio.h>\n#include "pidmap.h"\nint main(void)\n{\n'
    (place / "layout.c").write_text(source + "\n".join(lines) + "\nreturn 0;\n}\n")
    command = ["cc", "-Wall", "-Werror", f"-I{bpf_directory()}", "-o", f"{place}/layout", f"{place}/layout.c"]
    subprocess.run(command, check=True)
    said = completed(place / "layout", check=True).stdout
    return {name: int(value) for name, value in (line.split("=") for line in said.splitlines())}


@pytest.mark.parametrize("name", MEMBERS)
def test_c_members_are_at_pythons_offsets(in_c: dict[str, int], name: str) -> None:
    layout, members = LAYOUTS[name], MEMBERS[name]
    codes = "".join(
        code * int(count or 1) for count, code in re.findall(r"(\d*)([A-Za-z])", layout.format.lstrip("="))
    )
    assert len(codes) == len(members)
    assert in_c[f"sizeof(struct {name})"] == layout.size
    for index, member in enumerate(members):
        assert in_c[f"offsetof(struct {name}, {member})"] == Struct("=" + codes[:index]).size, member
        assert in_c[f"sizeof(((struct {name} *)0)->{member})"] == Struct("=" + codes[index]).size, member


def test_header_has_no_other_struct_counter_or_limit(in_c: dict[str, int]) -> None:
    header = (Path(bpf_directory()) / "pidmap.h").read_text()
    assert set(re.findall(r"^struct (\w+) {", header, re.MULTILINE)) == MEMBERS.keys()
    assert set(LAYOUTS) == MEMBERS.keys() | {"u32"}
    counters = header[header.index("struct counters {") :]
    assert tuple(re.findall(r"__u64 (\w+);", counters)) == COUNTERS
    assert in_c["HOST_PIDNS"] == HOST_PIDNS
