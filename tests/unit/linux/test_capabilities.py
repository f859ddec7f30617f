"""Capabilities: a process keeps those that it needs, and never regains a dropped one."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from resolver.base.source_records import SOURCE_RECORDS
from resolver.linux.capabilities import NUMBERS
from tests.kernel.rights import rights

ROOT = str(Path(__file__).parents[3])


def python(code: str, *wrapper: str) -> list[str]:
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


SHOW = """
    import subprocess
    from resolver.linux.capabilities import limit
    limit(frozenset({running!r}), frozenset({children!r}))
    def masks(text):
        fields = dict(line.split(":", 1) for line in text.splitlines())
        return [int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")]
    with open("/proc/self/status") as status:
        print(masks(status.read()))
    print(masks(subprocess.check_output(["cat", "/proc/self/status"], text=True)))
"""


def mask(*names: str) -> int:
    return sum(1 << NUMBERS[name] for name in names)


def limited(running: set[str], children: set[str], *wrapper: str) -> list[str]:
    return python(SHOW.format(running=sorted(running), children=sorted(children)), *wrapper)


PTRACE, BPF = mask("SYS_PTRACE"), mask("BPF")
_BOUNDED = ("--inh-caps", "-all", "--bounding-set")


@pytest.mark.parametrize(
    ("running", "children", "wrapper", "own", "child", "bound"),
    [
        ({"SYS_PTRACE"}, {"BPF"}, (), PTRACE, PTRACE | BPF, PTRACE | BPF),
        (set(), set(), (), 0, 0, 0),
        # Without CAP_SETPCAP the bounding set stays as it was at the start.
        (
            {"SYS_PTRACE", "BPF"},
            {"SYS_PTRACE"},
            ("setpriv", *_BOUNDED, "-all,+sys_ptrace,+kill"),
            *(PTRACE, PTRACE, PTRACE | 1 << 5),
        ),
        # As in a pod: capabilities outside the bounding set can't be gained.
        (
            {"SYS_PTRACE"},
            {"BPF", "PERFMON"},
            ("setpriv", "--no-new-privs", *_BOUNDED, "-all,+sys_ptrace,+bpf,+kill"),
            *(PTRACE, PTRACE | BPF, PTRACE | BPF | 1 << 5),
        ),
    ],
    ids=["needs", "nothing", "not held", "no new privileges"],
)
def test_processes_and_children_keep_needed_rights_only(
    running: set[str], children: set[str], wrapper: tuple[str, ...], own: int, child: int, bound: int
) -> None:
    assert limited(running, children, *wrapper) == [
        str([own, child, bound, 0, 0]),
        str([child, child, bound, 0, 0]),
    ]


def test_other_user_passes_on_ambient_rights() -> None:
    names = "+sys_ptrace,+bpf,+perfmon,+kill"
    user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", f"--bounding-set=-all,{names}")
    own, child = mask("SYS_PTRACE"), mask("SYS_PTRACE", "BPF")
    got = limited({"SYS_PTRACE"}, {"BPF"}, *user, "--inh-caps", names, "--ambient-caps", names)
    assert [json.loads(line)[:2] + json.loads(line)[3:] for line in got] == [
        [own, child, child, child],
        [child] * 4,
    ]


def test_dropped_rights_are_gone() -> None:
    code = """
        import os
        from resolver.linux.capabilities import held, limit
        print(sorted(held()))
        limit(frozenset({"SYS_PTRACE"}), frozenset({"SYS_PTRACE"}))
        limit(frozenset({"SYS_PTRACE", "BPF", "SYS_ADMIN"}), frozenset({"BPF"}))
        print(sorted(held()))
    """
    everything = NUMBERS.keys() & rights(os.getpid()).bounding  # that root has on this machine
    assert python(code) == [str(sorted(everything)), "['SYS_PTRACE']"]


def test_capability_numbers_match_the_kernel_header() -> None:
    header = Path("/usr/include/linux/capability.h").read_text()
    numbers = {name: int(number) for name, number in re.findall(r"#define CAP_(\w+)\s+(\d+)\n", header)}
    assert {name: numbers[name] for name in NUMBERS} == NUMBERS


@pytest.mark.parametrize(
    ("source", "release", "kept"),
    [
        ("bpf", "6.18.44-fc", {"SYS_PTRACE"}),
        ("bpf", "5.19.0", {"SYS_PTRACE"}),
        ("bpf", "5.15.0-91-generic", {"SYS_PTRACE", "BPF"}),
        ("bpf", "unheard of", {"SYS_PTRACE", "BPF"}),
        ("bpf", "next-20261128", {"SYS_PTRACE", "BPF"}),
        ("netlink", "5.15.0", {"SYS_PTRACE"}),
        ("scan", "4.18.0", {"SYS_PTRACE"}),
    ],
)
def test_kept_rights_depend_on_the_kernel(source: str, release: str, kept: set[str]) -> None:
    assert SOURCE_RECORDS[source].keeps(release) == kept
