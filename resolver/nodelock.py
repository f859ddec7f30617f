"""One writing daemon per node."""

from __future__ import annotations

import fcntl
import os
from typing import Self

from resolver.errors import UsageError


class NodeLock:
    """The right to write on this node: one daemon at a time. A lock in our own run directory, on no tenant's file."""

    def __init__(self, run_dir: str) -> None:
        self.path = os.path.join(run_dir, "lock")
        try:
            os.makedirs(run_dir, mode=0o755, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UsageError(
                f"the run directory {run_dir} cannot be used ({error.strerror}): "
                "run as root, or name another with --run-dir"
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            other = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise UsageError(
                f"another resolver (PID {other}) already writes on this node; it holds {self.path}. "
                "Stop it first, or look without writing: --dry-run"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)
