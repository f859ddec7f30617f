"""Opens plain files below a directory that tenants write to, and touches nothing else.

A name is one component, so O_NOFOLLOW is enough on every kernel. O_PATH opens no FIFO and wakes no driver; the result
is checked, then opened by descriptor.
"""

import _thread
import atexit
import errno
import mmap
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial

from resolver.base.errors import RegionRejected
from resolver.base.reasons import RegionReason
from resolver.linux.pidfd import fetch

_HOLD = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_CACHESTAT = 451  # on x86-64 and arm64 alike
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_dropping: deque[Callable[[], object]] = deque()
#: Most threads that drop references: tenants can make each of them wait.
_droppers = deque(range(16))
_starting: deque[None] = deque()  # one entry for each thread that has not begun yet


def translate(error: OSError) -> RegionRejected:
    """Translate an error into a reason."""
    code = error.errno
    if code in (errno.ENOENT, errno.ESTALE):
        return RegionRejected(RegionReason.GONE, "there is no such file")
    if code in (errno.EACCES, errno.EPERM):
        return RegionRejected(
            RegionReason.ACCESS_DENIED, f"it may not be read ({error.strerror}): run as root"
        )
    if code in (errno.EMFILE, errno.ENFILE):
        return RegionRejected(
            RegionReason.IO_ERROR,
            "it cannot be opened, all descriptors are in use: raise the limit (ulimit -n)",
        )
    if code == errno.ELOOP:
        return RegionRejected(RegionReason.SYMLINK, "it is a symbolic link, and none is followed here")
    if code == errno.ENOTDIR:
        return RegionRejected(RegionReason.NOT_REGULAR, "it is not a directory")
    return RegionRejected(RegionReason.IO_ERROR, f"it cannot be read: {error.strerror}")


# A line: 'mnt_id:\t1361'
def mount_id(fd: int) -> int:
    """Return an open file's mount (fdinfo, Linux 3.15). st_dev would miss bind mounts."""
    with open(f"/proc/self/fdinfo/{fd}", "rb", buffering=0) as info:
        for line in info.read(4096).splitlines():
            if line.startswith(b"mnt_id:"):
                return int(line[7:])
    raise OSError(errno.ENOSYS, "the kernel shows no mnt_id (before Linux 3.15)")


def check_plain(info: os.stat_result) -> None:
    """Raise `RegionRejected` unless it is a regular file with one name."""
    if stat.S_ISLNK(info.st_mode):
        raise RegionRejected(RegionReason.SYMLINK, "it is a symbolic link, and none is followed here")
    if not stat.S_ISREG(info.st_mode):
        raise RegionRejected(
            RegionReason.NOT_REGULAR, "it is not a regular file, so it is not a shared region"
        )
    if info.st_nlink > 1:
        raise RegionRejected(
            RegionReason.HARD_LINK, f"it has {info.st_nlink} names, so it may be another container's file"
        )
    if info.st_nlink == 0:
        raise RegionRejected(RegionReason.GONE, "it was deleted")


def open_plain(dir_fd: int, name: str, flags: int = os.O_RDONLY) -> tuple[int, os.stat_result]:
    """Open a regular file with one link, in this very directory and mount: descriptor and ``fstat``.

    Raises `RegionRejected`.
    """
    if "/" in name or name in ("", ".", ".."):
        raise RegionRejected(RegionReason.NOT_REGULAR, f"{name!r} is not the name of a file")
    try:
        with closing(os.open(name, _HOLD, dir_fd=dir_fd)) as hold:
            info = os.fstat(hold)
            check_plain(info)
            if mount_id(hold) != mount_id(dir_fd):
                raise RegionRejected(
                    RegionReason.OTHER_DEVICE,
                    "something else is mounted over it, so it is not the tenant's file",
                )
            flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{hold}", flags), info
    except OSError as error:
        raise translate(error) from None


def let_go(fd: int) -> None:
    """Close a descriptor as `drop` does."""
    drop(partial(os.close, fd))


def drop(reference: Callable[[], object]) -> None:
    """Drop a reference in a new or a later thread, because dropping the last one to a tenant's file can take long."""
    _dropping.append(reference)
    _starting.append(None)
    try:
        _thread.start_new_thread(_drop, ())
    except RuntimeError:  # no more threads
        _starting.pop()


@atexit.register
def _wait_for_starts() -> None:
    """Let every thread begin: Python 3.11 crashes in one that begins after the interpreter's end."""
    for _ in range(1000):
        if not _starting:
            return
        time.sleep(0.001)


def _drop() -> None:
    _starting.pop()
    with suppress(IndexError):
        place = _droppers.pop()
        try:
            while True:
                _dropping.popleft()()
        finally:
            _droppers.append(place)


def cached(fd: int, start: int, length: int) -> bool:
    """Check that a range of a file is in the page cache, without a lock; True before Linux 6.5, which can't tell.

    A read with RWF_NOWAIT begins to read missing pages ahead, and waits there for a process that punches a hole.
    """
    import ctypes

    call, place, counts = _system_call(), (ctypes.c_uint64 * 2)(start, length), (ctypes.c_uint64 * 5)()
    if call(_CACHESTAT, fd, place, counts, 0) == 0:
        return counts[0] > (start + length - 1) // mmap.PAGESIZE - start // mmap.PAGESIZE
    return ctypes.get_errno() == errno.ENOSYS


@cache
def _system_call() -> Callable[..., int]:
    import ctypes

    return ctypes.CDLL(None, use_errno=True).syscall


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor after a ``with`` block."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_offered(path: str) -> int:
    """Open a file by another process's ``/proc`` link."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def take_offered(path: str, flags: int = 0) -> int:
    """Take another process's open file by its ``/proc`` link; before Linux 5.6 it is opened again, with ``flags``."""
    _, _, host_pid, _, number = path.split("/")
    try:
        return fetch(int(host_pid), [int(number)])[0]
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def open_directory(name: str, dir_fd: int | None = None) -> int:
    """Open a directory, not through symbolic links, nor mounts below ``dir_fd``. Raises `RegionRejected`."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ENOTDIR and _is_link(name, dir_fd):
            error.errno = errno.ELOOP
        raise translate(error) from None
    if dir_fd is None:
        return fd
    try:
        same = mount_id(fd) == mount_id(dir_fd)
    except OSError as error:
        os.close(fd)
        raise translate(error) from None
    if not same:
        os.close(fd)
        raise RegionRejected(RegionReason.OTHER_DEVICE, "it is a mount of its own")
    return fd


def _is_link(name: str, dir_fd: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except OSError:
        return False
