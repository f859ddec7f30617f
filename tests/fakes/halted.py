"""A process halted at the very moment at which a test changes the world under it."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.patience import until


@contextmanager
def halted_when_it_maps(path: Path, host_pid: int) -> Iterator[None]:
    """Halt a process as soon as it maps a file, and let it run on after the block. The block begins before the map.

    `wait_until_halted` says when it has happened.
    """
    command = ["strace", "-p", str(host_pid), "-P", str(path), "-e", "trace=mmap"]
    command += ["-e", "inject=mmap:signal=STOP:when=1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as tracer:
        assert tracer.stderr is not None
        assert b"attached" in tracer.stderr.readline()
        try:
            yield
        finally:
            tracer.terminate()
            tracer.wait()
            # In the stop between the call's end and the signal, it runs on with its tracer's end.
            with suppress(ProcessLookupError):
                os.kill(host_pid, signal.SIGCONT)


def wait_until_halted(path: Path, host_pid: int) -> None:
    until(lambda: _maps(path, host_pid) and _stands_still(host_pid), f"process {host_pid} halted")


def _maps(path: Path, host_pid: int) -> bool:
    return path.name in Path(f"/proc/{host_pid}/maps").read_text()


def _stands_still(host_pid: int) -> bool:
    return Path(f"/proc/{host_pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "tT"


@contextmanager
def stopped_in_its_exit(host_pid: int) -> Iterator[None]:
    """Halt a container's process in its exit, as in a driver, until the block ends."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    assert ptrace(0x4206, host_pid, None, ctypes.c_void_p(0x40)) == 0  # PTRACE_SEIZE, PTRACE_O_TRACEEXIT
    os.kill(psutil.Process(host_pid).ppid(), signal.SIGKILL)
    try:
        until(lambda: _stands_still(host_pid), f"process {host_pid} halted")
        yield
    finally:
        assert ptrace(17, host_pid, None, None) == 0  # PTRACE_DETACH
