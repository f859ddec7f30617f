"""Obstacles to the BPF map, found by a kernel's answers to programs of a few instructions.

The kernels are fakes of ``bpf(2)``. ``make kernels`` boots real kernels; tests/kernel/test_bpf_load.py limits
the running kernel as far as that is possible.
"""

import ctypes
import errno
import os
import struct
from typing import Any

import pytest

from resolver.base.source_records import SourceFailure
from tests.unit.bpf import part

obstacles = part("obstacles")
READS, ITERATES = 113, 127  # helpers: bpf_probe_read_kernel, bpf_seq_write


def raised(
    *,
    to_the_call: int = errno.E2BIG,
    to_every_program: int = 0,
    to_calls_of: dict[int, str] | None = None,
    profile: str = "",
    filtered: bool = False,
) -> Any:
    """Return the error that a kernel with these answers (error numbers) causes."""

    class Answering(obstacles.Kernel):  # type: ignore[misc, name-defined]
        def call(self, command: int, attributes: bytes, size: int) -> int:
            assert command == 5
            if size > 4096:
                return -to_the_call
            if to_the_call != errno.E2BIG:
                return -to_the_call
            kind, count, instructions, licence, level, log_size, log = struct.unpack_from(
                "=IIQQIIQ", attributes
            )
            assert (kind, level, ctypes.string_at(licence)) == (17, 1, b"GPL")
            program = list(struct.iter_unpack("=BBhi", ctypes.string_at(instructions, 8 * count)))
            assert program[-1][0] == 0x95
            words = {ITERATES: "unknown func bpf_seq_write#127", **(to_calls_of or {})}
            refusals = [words[helper] for code, _, _, helper in program if code == 0x85 and helper in words]
            for refusal in refusals:
                ctypes.memmove(log, refusal.encode() + b"\0", min(log_size, len(refusal) + 1))
            answer = to_every_program or (errno.EINVAL if refusals else 0)
            return -answer if answer else os.open("/dev/null", os.O_RDONLY)

        def filtered(self) -> bool:
            return filtered

        def confinement(self) -> str:
            return profile

    kernel = Answering()
    kernel.machine = "x86_64"
    try:
        obstacles.require_kernel(kernel)
    except obstacles.LoadError as error:
        return error
    return obstacles.LoadError("", "nothing is in the way")


@pytest.mark.parametrize(
    ("how", "cause", "says"),
    [
        ({}, "", "nothing is in the way"),
        ({"filtered": True, "profile": "docker-default (enforce)"}, "", "nothing is in the way"),
        ({"to_calls_of": {ITERATES: "invalid func unknown#127"}}, "kernel", "which Linux has since 5.8"),
        ({"to_calls_of": {READS: "unknown func bpf_probe_read_kernel#113"}}, "lockdown", "blocked by kernel lockdown"),
        ({"to_every_program": errno.EINVAL}, "kernel", "takes no BPF program for tracepoints"),
        ({"to_the_call": errno.ENOSYS}, "kernel", "was built without bpf()"),
        ({"to_the_call": errno.ENOSYS, "filtered": True}, "seccomp", "forbidden here (ENOSYS) by the seccomp filter"),
        ({"to_the_call": errno.EPERM, "filtered": True}, "seccomp", "forbidden here (EPERM) by the seccomp filter"),
        (
            {"to_the_call": errno.EPERM, "filtered": True, "profile": "cri (enforce)"},
            "seccomp",
            "seccomp filter of this process, or by the security module that holds this process to 'cri (enforce)'",
        ),
        ({"to_the_call": errno.EPERM, "profile": "cri (enforce)"}, "module", "holds this process to 'cri (enforce)'"),
        ({"to_every_program": errno.EACCES, "profile": "spc_t"}, "module", "forbidden here (EACCES)"),
        ({"to_every_program": errno.EPERM}, "module", "before Linux 5.11 by the limit on locked memory"),
    ],
)  # fmt: skip
def test_obstacle_is_named(how: dict[str, Any], cause: str, says: str) -> None:
    error = raised(**how)
    assert (error.cause, says in str(error)) == (cause, True), error
    assert [*how.get("to_calls_of", {}).values()] in ([], [error.detail])  # the kernel's message


def test_unsupported_machine_is_named() -> None:
    kernel = obstacles.Kernel()
    kernel.machine = "riscv64"
    with pytest.raises(obstacles.LoadError, match=r"runs on x86_64 and aarch64, and this is riscv64"):
        obstacles.require(kernel)


def test_every_cause_has_a_fix() -> None:
    named = set(
        obstacles.LoadError.__doc__.split("``cause`` is one of")[1].replace("``", "`").split("`")[1::2]
    )
    assert named == {*SourceFailure} - {SourceFailure.MEMORY, SourceFailure.NETLINK, SourceFailure.SCAN}
