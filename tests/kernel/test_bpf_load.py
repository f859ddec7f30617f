"""If the BPF map can't be loaded, a message gives the reason, and no part of the map is left behind."""

import contextlib
import ctypes
import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from resolver.base.errors import CannotKnow
from resolver.cli import main
from resolver.pids import bpf_load
from resolver.pids.bpf_load import BTF, BpfUnavailable, bpf_directory
from resolver.pids.bpf_map import Kernel, start
from tests.fakes.daemon import children_of
from tests.fakes.process import watched
from tests.kernel.conftest import ROOT
from tests.patience import PATIENCE_S, until
from tests.programs import script

#: Loads the map and waits, or prints the reason as JSON.
CHILD = """
import json, sys
from resolver.pids.bpf_map import BpfUnavailable, start
try:
    start()
except BpfUnavailable as error:
    print(json.dumps({"error": str(error), "cause": error.cause})); sys.exit()
sys.stdin.read()
"""
IDS = {"prog_id": 13, "map_id": 14, "link_id": 30}  # BPF_PROG_, BPF_MAP_, BPF_LINK_GET_FD_BY_ID


def refusal(**constants: Any) -> BpfUnavailable:
    """Return the loader's error with these constants of its module."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(bpf_load, name, value)
        with pytest.raises(BpfUnavailable) as caught:
            start()
    assert isinstance(caught.value, CannotKnow)
    return caught.value


def test_cut_btf_and_absent_python_are_named(tmp_path: Path) -> None:
    (tmp_path / "vmlinux").write_bytes(Path(BTF).read_bytes()[:100_000])
    assert "is not understood: it is cut off" in str(refusal(BTF=str(tmp_path / "vmlinux")))
    assert "No such file" in str(refusal(PYTHON=str(tmp_path / "absent")))


#: Installs a seccomp filter that answers bpf() with EPERM, then executes the command.
FORBIDDING = """
import ctypes, errno, os, platform, struct, sys
number = {"x86_64": 321, "aarch64": 280}[platform.machine()]
code = b"".join(struct.pack("=HBBI", *line) for line in (
    (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)))
lines = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", 4, ctypes.addressof(lines)))
assert ctypes.CDLL(None).prctl(22, 2, program) == 0
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_seccomp_denial_differs_from_missing_rights() -> None:
    command = [sys.executable, "-c", FORBIDDING, sys.executable, "-c", CHILD]
    answer = json.loads(subprocess.check_output(command, cwd=ROOT, stdin=subprocess.DEVNULL))
    assert answer["error"].startswith(
        "bpf() is forbidden here (EPERM) by the seccomp filter of this process:"
    )
    assert answer["cause"] == "seccomp"


def test_refused_programs_are_named_with_detail_for_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message is for people; the debug log and doctor have the output of compiler and verifier."""
    subprocess.run(["cp", "-r", bpf_directory(), tmp_path / "bpf"], check=True)
    monkeypatch.setattr("resolver.pids.bpf_load.bpf_directory", lambda: str(tmp_path / "bpf"))
    copied = tmp_path / "bpf" / "pidmap.c"
    text = copied.read_text()
    copied.write_text(text + "\nint broken(void) { return nonsense; }\n")
    error = refusal()
    assert "could not be compiled" in str(error)
    assert "nonsense" not in str(error)
    assert "use of undeclared identifier 'nonsense'" in error.detail

    # The verifier returns EACCES, as for missing rights; its message is at the end of a long log.
    assert text.count("there && same(there, process)") == 1
    # An offset beyond the value: every verifier refuses it.
    copied.write_text(text.replace("same(there, process)", "same(&there[process->host_tgid], process)"))
    error = refusal()
    assert str(error).startswith("the kernel's verifier refused the BPF program (on_fork: Permission denied)")
    assert f"Linux {os.uname().release}" in str(error)
    assert error.cause == "verifier"
    assert "unbounded memory access" in error.detail or "invalid access to map value" in error.detail
    assert re.search(r"^processed \d+ insns", error.detail.splitlines()[-1])

    words = ["doctor", "--only", "bpf", "--source", "bpf"]
    assert main([*words, "--json"]) == 1
    (result,) = json.loads(capsys.readouterr().out)
    assert "processed" in result["detail"]

    def refused(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("resolver.pids.bpf_map.start", refused)  # the same error, without another compilation
    assert main(words) == 1
    short = capsys.readouterr().out
    assert "the kernel's verifier refused the BPF program" in short
    assert "report resolver doctor --json --only bpf" in short
    assert "capabilities" not in short
    assert "processed" not in short


@pytest.mark.parametrize(
    ("commands", "says"),
    [
        ("kill -KILL $$", "out of memory"),
        ("exec sleep 1000", "was not done within 0.5 s"),
        ("exit 7", "ended with code 7 and gave no answer"),
        ("dd bs=65536 count=1 of=/dev/null 2>/dev/null; echo nonsense >&0", "is not JSON"),
    ],
)
def test_failed_loader_delays_no_start(tmp_path: Path, commands: str, says: str) -> None:
    program, began = script(tmp_path / "python", commands), time.monotonic()
    assert says in str(refusal(PYTHON=str(program), TIMEOUT=0.5 if "sleep" in commands else 60))
    assert time.monotonic() - began < PATIENCE_S


def kernel_ids(host_pid: int, descriptors: list[int]) -> list[tuple[int, int]]:
    """Return ``(command to open it, id)`` for each BPF object behind these descriptors."""
    found = []
    for fd in descriptors:
        fields = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{host_pid}/fdinfo/{fd}").read_text().splitlines()
            if ":" in line
        )
        (kind,) = [name for name in ("link_id", "prog_id", "map_id") if name in fields][:1]
        found.append((IDS[kind], int(fields[kind])))
    return found


def still_there(identity: tuple[int, int]) -> bool:
    command, number = identity
    fd = Kernel().call(command, ctypes.create_string_buffer(struct.pack("=III", number, 0, 0), 12))
    if fd < 0:
        assert fd == -2, os.strerror(-fd)
        return False
    os.close(fd)
    return True


def test_closed_map_leaves_nothing_and_llvm_is_not_loaded() -> None:
    pidmap = start()
    maps = Path("/proc/self/maps").read_text()
    ids = kernel_ids(os.getpid(), [*pidmap.loaded.descriptors.values()])
    assert len(ids) == 11
    assert all(map(still_there, ids))
    pidmap.close()
    pidmap.close()
    until(lambda: not any(map(still_there, ids)), "the end of programs, maps and links")
    assert pidmap.report["python"] == "/usr/bin/python3"
    assert pidmap.report["bcc"] != "kept"
    assert "libbcc" not in maps
    assert "LLVM" not in maps


def test_loader_dies_with_its_owner() -> None:
    for delay in (0.0, 0.2, 0.4, 0.6):
        owner = subprocess.Popen([sys.executable, "-c", CHILD], cwd=ROOT, stdin=subprocess.PIPE)
        until(lambda this=owner: children_of(this.pid), "the loader")  # type: ignore[misc]
        with contextlib.ExitStack() as stack:
            ended = [stack.enter_context(watched(loader)) for loader in children_of(owner.pid).values()]
            time.sleep(delay)
            owner.kill()
            owner.communicate()
            until(lambda these=ended: all(gone() for gone in these), "the end of the loader")  # type: ignore[misc]
