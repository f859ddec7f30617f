"""A listening Unix socket in the file system: made under another name, then renamed into place."""

import contextlib
import glob
import os
import socket
import stat
from collections.abc import Iterator

from resolver.base.errors import UsageError
from resolver.linux.node_lock import make_directory, unusable
from resolver.linux.peers import Listener

#: Length of the kernel's queue. If it is full, a blocking client waits, and a non-blocking one gets EAGAIN.
_BACKLOG = 512


def group_of(name: str) -> int | None:
    """Return a group's id by its name or number, None for an empty name. Raises `UsageError`."""
    if not name:
        return None
    if name.isdecimal() and len(name) <= 10:
        return int(name)
    import grp

    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise UsageError(
            f"there is no group {name!r} for the socket (--socket-group): groupadd --system {name}, or give its number"
        ) from None


class UnixSocket:
    """Listening socket at ``path``, which ``option`` sets, unreachable before `open`. Raises `UsageError`.

    Creating it may need privileges that the daemon drops soon; opening it needs none.
    """

    def __init__(
        self,
        path: str,
        option: str,
        *,
        mode: int = 0o660,
        group: int | None = None,
        backlog: int = _BACKLOG,
    ) -> None:
        self.path = path
        self._option = option
        self._backlog = backlog
        self.listener = Listener()
        self._temporary = f"{path}.{os.getpid()}"
        self._inode = 0
        try:
            with self._explained():
                make_directory(os.path.dirname(path) or ".", option)
                _remove_abandoned(path)
                self._bind(mode, group)
        except BaseException:
            self.close()
            raise

    def _bind(self, mode: int, group: int | None) -> None:
        before = os.umask(0o777 & ~mode)
        try:
            self.listener.bind(self._temporary)
        finally:
            os.umask(before)
        if group is None:
            return
        try:
            os.chown(self._temporary, -1, group, follow_symlinks=False)
        except PermissionError:
            raise UsageError(
                f"the socket cannot be given to group {group}: this takes CAP_CHOWN, or a daemon that is in that group "
                "(setpriv --groups; in Kubernetes: supplementalGroups)"
            ) from None

    def open(self) -> None:
        """Listen at ``path``, in place of a stale socket; `UsageError` if it is in use or no socket."""
        with self._explained():
            self._require_free()
            self.listener.listen(self._backlog)
            os.rename(self._temporary, self.path)
            self._inode = os.lstat(self.path).st_ino

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unusable(f"the socket {self.path}", self._option, error) from None

    def close(self) -> None:
        """Remove the socket unless another process has replaced it, and leftovers of killed daemons."""
        with contextlib.suppress(FileNotFoundError):
            if self._inode and os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        _remove_abandoned(self.path)
        self.listener.close()

    def _require_free(self) -> None:
        stale = contextlib.suppress(FileNotFoundError, ConnectionRefusedError)
        with stale, socket.socket(socket.AF_UNIX) as probe:
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise UsageError(
                    f"{self.path} exists and is not a socket: remove it, or set another path with {self._option}"
                )
            probe.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # its queue is full: the process is slow to answer
                probe.connect(self.path)
            raise UsageError(f"another process listens at {self.path}: stop it, or change {self._option}")


def _remove_abandoned(path: str) -> None:
    """Remove sockets that killed daemons never opened: the PID in the name is unused, or this process's."""
    for left in glob.glob(f"{glob.escape(path)}.[0-9]*"):
        maker = left[len(path) + 1 :]
        with contextlib.suppress(OSError):
            if maker.isdecimal() and not _waits(int(maker)) and stat.S_ISSOCK(os.lstat(left).st_mode):
                os.unlink(left)


def _waits(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.close(os.pidfd_open(pid))  # opening `/proc/PID` can wait for a process's end
    except (ProcessLookupError, OverflowError):
        return False
    return True
