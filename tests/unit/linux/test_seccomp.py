"""The filter of system calls, in separate processes: refused calls, allowed calls, and their numbers."""

import errno
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from resolver.linux.seccomp import DANGEROUS, OF_THE_WRITER, program

ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000

UNDER = """
import ctypes, os, socket, sys
from resolver.linux import capabilities, seccomp
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return ctypes.get_errno() if libc.syscall(number, *arguments) < 0 else 0
capabilities.limit(capabilities.held())
"""


def under(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that can install a filter; ``call`` returns the error number of a system call."""
    return subprocess.run(
        [sys.executable, "-c", UNDER + code], capture_output=True, text=True, check=False, timeout=60
    )


def number(name: str) -> int:
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    found = (DANGEROUS | OF_THE_WRITER)[name][column]
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["unshare", "mount", "ptrace", "bpf", "io_uring_setup", "finit_module"])
def test_a_dangerous_call_is_refused_and_the_others_go_on(name: str) -> None:
    code = f"print(seccomp.forbid_dangerous(), call({number(name)}, 0, 0, 0, 0, 0))\n"
    done = under(code + "print(socket.socket().fileno() > 0, os.system('exit 3') >> 8)")
    assert done.stdout.splitlines() == [f"True {errno.EPERM}", "True 3"], done.stderr


def test_children_inherit_the_filter() -> None:
    code = "seccomp.forbid_dangerous(); os.execvp('unshare', ['unshare', '--mount', 'true'])"
    done = under(code)
    assert done.returncode == 1
    assert "Operation not permitted" in done.stderr


@pytest.mark.parametrize(
    "attempt",
    ["socket.socket()", "os.fork()", "os.execv('/bin/true', ['true'])", "os.kill(os.getppid(), 9)",
     "os.unlink('/nonexistent')", "os.mkdir('/tmp/never')", "os.chmod('/', 0)"],
)  # fmt: skip
def test_writer_keeps_only_needed_calls(attempt: str) -> None:
    done = under(
        f"""
import errno
seccomp.allow_only(seccomp.OF_THE_WRITER)
try:
    {attempt}
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    )
    assert done.stdout == "EPERM\n", done.stderr


def test_call_of_foreign_architecture_ends_process() -> None:
    """In x86-64's 32-bit variant, forbidden calls have other numbers."""
    done = under(f"seccomp.forbid_dangerous(); call({0x40000000 | number('mount')})")
    assert done.returncode == -signal.SIGSYS


def run(text: bytes, call: int, architecture: int) -> int:
    """Run a filter as the kernel does, and return its result; our filters use four kinds of instructions."""
    instructions = list(struct.iter_unpack("=HBBI", text))  # struct sock_filter
    at, accumulator = 0, 0
    while True:
        code, true, false, value = instructions[at]
        at += 1
        if code == 0x20:
            accumulator = {0: call, 4: architecture}[value]
        elif code == 0x06:
            return int(value)
        else:
            held = accumulator == value if code == 0x15 else accumulator >= value
            at += true if held else false


def test_the_program_tells_every_number() -> None:
    numbers = [7, 3, 200, 0]
    text = program(numbers, 0xC00000B7, listed=REFUSE, others=ALLOW)
    for call in range(300):
        assert run(text, call, 0xC00000B7) == (REFUSE if call in numbers else ALLOW)
        assert run(text, call, 0xC000003E) == KILL
    assert run(text, 0x40000000, 0xC00000B7) == KILL
    with pytest.raises(ValueError, match="255"):
        program(list(range(300)), 1, listed=ALLOW, others=REFUSE)


def test_the_numbers_are_the_kernels() -> None:
    """Compare with the C compiler's kernel headers."""
    generic = dict(
        re.findall(
            r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path("/usr/include/asm-generic/unistd.h").read_text()
        )
    )
    (header,) = Path("/usr/include").glob("*/asm/unistd*_64.h")
    own = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    for name, (x86, arm) in (DANGEROUS | OF_THE_WRITER).items():
        if os.uname().machine == "x86_64":
            assert str(x86) == own[name]
        if arm is not None:  # newfstatat is fstatat on arm64
            assert str(arm) == generic.get(name, generic.get(name.removeprefix("new"))), name
