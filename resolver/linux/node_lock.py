"""One writing daemon per node."""

import contextlib
import errno
import fcntl
import os
from typing import Self

from resolver.base.errors import UsageError
from resolver.base.text import cause

#: Next steps, by error.
_REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EROFS: "mount it writable",
    errno.EEXIST: "a file has its name: move that away",
}


class Held(UsageError):
    """Another daemon holds the lock; ``holder`` is the PID written there."""

    def __init__(self, holder: str, path: str) -> None:
        super().__init__(
            f"another resolver (PID {holder}) already writes on this node; it holds {path}. "
            "Stop it first, take over from it when it ends (--wait), or check without writing: --dry-run"
        )
        self.holder = holder


def make_directory(path: str, option: str) -> None:
    """Make one of the daemon's directories, which ``option`` sets. Raises OSError, and `refuse_new_in_root`'s."""
    refuse_new_in_root(path, option)
    os.makedirs(path, mode=0o755, exist_ok=True)


def refuse_new_in_root(path: str, option: str) -> None:
    """Raise `UsageError` if a directory would have to be made in /: its path is misspelt, or a mount is missing."""
    top = "/" + path.split("/")[1] if path.startswith("/") else "/"
    if not os.path.lexists(top):
        why = "and the daemon makes none in /: make it, or name another place with"
        raise UsageError(f"there is no {top}, {why} {option}")


class NodeLock:
    """Right to write on this node: a lock in the run directory.

    ``wait`` blocks until the other daemon ends; without it `Held` is raised. The last holder removes the file.
    """

    def __init__(self, run_dir: str, *, wait: bool = False) -> None:
        self.path = os.path.join(run_dir, "lock")
        while True:
            self.fd = self._open(run_dir)
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                other = os.pread(self.fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(self.fd)
                raise Held(other, self.path) from None
            if self._is_in_place():
                break
            os.close(self.fd)  # the last holder removed this file before it unlocked it
        try:
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            if wait:
                return  # the process that waited has the lock; only its PID is not written down
            self.__exit__()
            raise unusable(f"the run directory {run_dir}", "--run-dir", error) from None

    def _open(self, run_dir: str) -> int:
        try:
            make_directory(run_dir, "--run-dir")
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise unusable(f"the run directory {run_dir}", "--run-dir", error) from None

    def _is_in_place(self) -> bool:
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(status, os.fstat(self.fd))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # while locked: a waiting daemon notices, and makes a new file
        os.close(self.fd)


def unusable(what: str, option: str, error: OSError) -> UsageError:
    """Build the error of a file or directory of the daemon's that ``option`` sets."""
    remedy = "check its file system" if os.geteuid() == 0 else "run as root"
    remedy = _REMEDIES.get(error.errno or 0, remedy)
    return UsageError(f"{what} cannot be used ({cause(error)}): {remedy}, or name another with {option}")
