"""File and directory events (inotify(7)) of inodes, through any name; stores through mappings cause none."""

import contextlib
import errno
import os
from functools import partial
from struct import Struct

from resolver.linux.safe_open import drop, let_go

# include/uapi/linux/inotify.h
MODIFY = 0x2  # a program has written into it by a system call
MOVED_FROM, MOVED_TO, CREATE, DELETE, MOVE_SELF = 0x40, 0x80, 0x100, 0x200, 0x800
#: Reported without a request: events were lost, and this inode is no longer watched.
OVERFLOW, IGNORED = 0x4000, 0x8000
_ONLY_DIRECTORY = 0x1000000
#: Changes of names in a directory, and of the directory's own name.
OF_A_DIRECTORY = MOVED_FROM | MOVED_TO | CREATE | DELETE | MOVE_SELF | _ONLY_DIRECTORY
#: Bytes per read: some thousand events, half a millisecond. An event has at most 16 bytes and a name.
_READ_BYTES = 16384
_EVENT = Struct("=iIII")  # watch, mask, cookie, length of the name behind it


class Inotify:
    """Queue of events; ``fd`` is readable while there are any. Raises OSError at the limits."""

    def __init__(self) -> None:
        import ctypes

        self._errno = ctypes.get_errno
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def add(self, fd: int, mask: int) -> int:
        """Watch the file open as ``fd``, without walking a path; an inode has one watch. Raises OSError."""
        return self._checked(self._libc.inotify_add_watch(self.fd, b"/proc/self/fd/%d" % fd, mask))

    def remove(self, watch: int) -> None:
        """Stop watching, soon; queued events still come. The watch may be the last reference to a tenant's file."""
        drop(partial(self._libc.inotify_rm_watch, self.fd, watch))

    def read(self) -> list[tuple[int, int]]:
        """Return the next ``(watch, mask)`` events, some thousand at most."""
        with contextlib.suppress(BlockingIOError):
            return parse(os.read(self.fd, _READ_BYTES))
        return []

    def close(self) -> None:
        if self.fd >= 0:
            let_go(self.fd)
            self.fd = -1

    def _checked(self, result: int) -> int:
        if result < 0:
            code = self._errno()
            raise OSError(code, os.strerror(code))
        return result


def parse(data: bytes) -> list[tuple[int, int]]:
    """Decode events into ``(watch, mask)``."""
    events = []
    at = 0
    while at + _EVENT.size <= len(data):
        watch, mask, _cookie, name_bytes = _EVENT.unpack_from(data, at)
        events.append((watch, mask))
        at += _EVENT.size + name_bytes
    return events


def why_not(error: OSError) -> str:
    """Explain the error, with the fix."""
    if error.errno == errno.EMFILE:
        return "no more inotify instances are allowed: raise fs.inotify.max_user_instances (sysctl)"
    if error.errno == errno.ENOSPC:
        return "no more inotify watches are allowed: raise fs.inotify.max_user_watches (sysctl)"
    return f"inotify does not work here: {error.strerror}"
