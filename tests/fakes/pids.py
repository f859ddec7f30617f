"""Processes with a chosen PID, as a wrap of the PID space makes them by chance.

clone3(2) takes the numbers as ``set_tid`` (Linux 5.5), innermost namespace first. The number must be free.
"""

import contextlib
import ctypes
import errno
import os
import signal
import struct
import time
from collections.abc import Iterator

_CLONE3 = 435  # the same on every architecture
_CLONE_NEWPID = 0x20000000
_TIMEOUT_S = 60.0


@contextlib.contextmanager
def reborn(host_pid: int) -> Iterator[int]:
    """Start a process with this freed host PID in a new PID namespace; yield that namespace's inode.

    Whoever had the number must have been reaped, or be about to be.
    """
    numbers = (ctypes.c_int32 * 2)(1, host_pid)
    arguments = struct.pack(
        "=11Q", _CLONE_NEWPID, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(numbers), 2, 0
    )
    libc = ctypes.PyDLL(None, use_errno=True)  # holds the interpreter's lock, as os.fork does
    deadline = time.monotonic() + _TIMEOUT_S
    while (child := libc.syscall(_CLONE3, arguments, len(arguments))) < 0:
        if ctypes.get_errno() != errno.EEXIST or time.monotonic() > deadline:
            raise OSError(ctypes.get_errno(), f"no process can be given the PID {host_pid}")
        time.sleep(0.002)
    if child == 0:
        try:
            os.execv("/bin/sleep", ["sleep", "60"])  # noqa: S606
        finally:
            os._exit(1)
    try:
        assert child == host_pid
        yield os.stat(f"/proc/{host_pid}/ns/pid").st_ino
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
