"""A listening Unix socket in the file system: made under another name, with mode and group, then renamed into place."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import NamedTuple

from resolver.errors import UsageError
from resolver.linux.peers import Listener

BACKLOG = 512


def group_of(name: str) -> int | None:
    """The number of the group that may ask everything; None for an empty name. `UsageError` if there is none such."""
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


class Listening(NamedTuple):
    """Words for error messages: who listens there, the option that names the place, and what else one can do."""

    who: str
    option: str
    fix: str


class UnixSocket:
    """A listening socket at ``path``, which nobody can reach before `open`.

    Making it may take rights that the daemon gives up soon; opening it takes none. Raises UsageError and OSError.
    """

    def __init__(
        self,
        path: str,
        listening: Listening,
        *,
        mode: int = 0o660,
        group: int | None = None,
        backlog: int = BACKLOG,
    ) -> None:
        self.path = path
        self._listening = listening
        self._backlog = backlog
        self.listener = Listener()
        self._temporary = f"{path}.{os.getpid()}"
        self._inode = 0
        try:
            os.makedirs(os.path.dirname(path) or ".", mode=0o755, exist_ok=True)
            _remove_abandoned(path)
            self.listener.bind(self._temporary)
            if group is not None:
                _give_to_group(self._temporary, group)
            os.chmod(
                self._temporary, mode
            )  # nobody listens yet: until then nobody gets in, whatever the mode
        except BaseException:
            self.close()
            raise

    def open(self) -> None:
        """Listen, at the place where one asks.

        A socket there that nobody listens on is replaced; one that somebody listens on, or another kind of file, is a
        `UsageError`.
        """
        self._require_free()
        self.listener.listen(self._backlog)
        os.rename(self._temporary, self.path)
        self._inode = os.lstat(self.path).st_ino

    def close(self) -> None:
        """Remove it, unless there is another's by now, and what killed ones left."""
        with contextlib.suppress(FileNotFoundError):
            if self._inode and os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        _remove_abandoned(self.path)
        self.listener.close()

    def _require_free(self) -> None:
        who, option, fix = self._listening
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise UsageError(
                    f"{self.path} is there and is no socket: remove it, or name another with {option}"
                )
            if listens(self.path):
                raise UsageError(f"another {who} listens at {self.path}: stop it, {fix}")


def listens(path: str) -> bool:
    """Whether anybody listens on the socket, however slow to answer. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            pass  # its queue is full
    return True


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _remove_abandoned(path: str) -> None:
    """Remove sockets of killed daemons that were never opened: the PID in their names is nobody's, or ours."""
    directory, name = os.path.split(path)
    with contextlib.suppress(OSError):
        for entry in os.listdir(directory or "."):
            maker = entry.removeprefix(f"{name}.")
            if maker == entry or not maker.isdecimal():
                continue
            if maker != str(os.getpid()) and os.path.exists(f"/proc/{maker}"):
                continue  # it waits for its turn
            left = os.path.join(directory, entry)
            if stat.S_ISSOCK(os.lstat(left).st_mode):
                _remove(left)


def _give_to_group(path: str, group: int) -> None:
    try:
        os.chown(path, -1, group)
    except PermissionError:
        raise UsageError(
            f"the socket cannot be given to group {group}: this takes CAP_CHOWN, or a daemon that is in that group "
            "(setpriv --groups; in Kubernetes: supplementalGroups)"
        ) from None
