"""Opening files below a directory that tenants write to, without touching anything that is not a plain file.

A name is one component below an open directory, so O_NOFOLLOW at each step is all that openat2's
RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS would add, on every kernel and without ctypes. What openat2 does not
do either, and is done here: the file is taken hold of with O_PATH, which opens no FIFO and wakes no device
driver, then looked at, and only a plain file is opened for real, by the descriptor and not by its name.
"""

from __future__ import annotations

import errno
import os
import stat

from resolver.errors import RegionRejected
from resolver.types import RegionReason

_HOLD = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def translate(error: OSError, what: str) -> RegionRejected:
    """An error of the operating system as a reason from the fixed list."""
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return RegionRejected(RegionReason.GONE, f"{what} does not exist")
    if error.errno in (errno.EACCES, errno.EPERM):
        return RegionRejected(
            RegionReason.ACCESS_DENIED, f"{what} may not be read ({error.strerror}): run as root"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return RegionRejected(
            RegionReason.IO_ERROR, f"{what} cannot be opened, all descriptors are in use: raise ulimit -n"
        )
    if error.errno == errno.ELOOP:
        return RegionRejected(RegionReason.SYMLINK, f"{what} is a symbolic link")
    if error.errno == errno.ENOTDIR:
        return RegionRejected(RegionReason.NOT_REGULAR, f"{what} is not a directory")
    return RegionRejected(RegionReason.IO_ERROR, f"{what} cannot be read: {error.strerror}")


def mount_id(fd: int) -> int:
    """The mount that an open file was reached through (``mnt_id`` of its fdinfo, Linux 3.15; proc(5)).

    This is what NO_XDEV means. Comparing st_dev instead misses a bind mount within one file system and
    refuses plain files on an overlay, where files and directories may have different device numbers.
    """
    with open(f"/proc/self/fdinfo/{fd}", "rb", buffering=0) as info:
        for line in info.read(4096).splitlines():
            if line.startswith(b"mnt_id:"):
                return int(line[7:])
    raise OSError(errno.ENOSYS, "the kernel tells no mnt_id (before Linux 3.15)")


def check_plain(info: os.stat_result, what: str) -> None:
    """Raise `RegionRejected` unless this is a regular file with exactly one name."""
    if stat.S_ISLNK(info.st_mode):
        raise RegionRejected(RegionReason.SYMLINK, f"{what} is a symbolic link and is not followed")
    if not stat.S_ISREG(info.st_mode):
        raise RegionRejected(RegionReason.NOT_REGULAR, f"{what} is no regular file, so no shared region")
    if info.st_nlink > 1:
        raise RegionRejected(
            RegionReason.HARD_LINK, f"{what} has {info.st_nlink} names: it may be another container's file"
        )
    if info.st_nlink == 0:
        raise RegionRejected(RegionReason.GONE, f"{what} was deleted")


def open_plain(dir_fd: int, name: str, what: str, flags: int = os.O_RDONLY) -> tuple[int, os.stat_result]:
    """Open a regular file with one link, in this very directory and mount: ``(descriptor, its fstat)``.

    ``flags`` is O_RDONLY or O_RDWR, ``what`` the path for messages. Raises `RegionRejected`.
    """
    try:
        if "/" in name or name in ("", ".", ".."):
            raise RegionRejected(RegionReason.NOT_REGULAR, f"{what}: {name!r} is not the name of a file")
        hold = os.open(name, _HOLD, dir_fd=dir_fd)
        try:
            info = os.fstat(hold)
            check_plain(info, what)
            if mount_id(hold) != mount_id(dir_fd):
                raise RegionRejected(RegionReason.OTHER_DEVICE, f"{what} is a mount of its own: left alone")
            return _reopen(hold, flags), info
        finally:
            os.close(hold)
    except OSError as error:
        raise translate(error, what) from None


def _reopen(hold: int, flags: int) -> int:
    """Open what an O_PATH descriptor holds; its link in /proc leads to the inode, not to a name."""
    try:
        return os.open(f"/proc/self/fd/{hold}", (flags | _PLAIN) & ~os.O_NOFOLLOW)
    except FileNotFoundError:
        raise OSError(errno.EIO, "/proc is not mounted here") from None


def open_directory(name: str, what: str, dir_fd: int | None = None) -> int:
    """Open a directory that is no symbolic link, for listing. Raises `RegionRejected`."""
    try:
        return os.open(name, _DIRECTORY, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ENOTDIR and _is_link(name, dir_fd):
            raise RegionRejected(RegionReason.SYMLINK, f"{what} is a symbolic link") from None
        raise translate(error, what) from None


def _is_link(name: str, dir_fd: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except OSError:
        return False
