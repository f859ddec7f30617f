"""Every error this project raises on purpose. Errors of the system are translated where it is called."""

from __future__ import annotations

import errno

TYPE_CHECKING = False  # as typing's: every command pays for this module
if TYPE_CHECKING:
    from resolver.base.reasons import RegionReason


class ResolverError(Exception):
    """Base of all errors; ``str()`` gives the event, its cause, and the fix."""


class UsageError(ResolverError):
    """The command line, the environment or the settings file is wrong."""


class CannotKnow(ResolverError):
    """The answer isn't visible from here; the message names the missing prerequisite and how to grant it."""


class AccessDenied(CannotKnow):
    """The kernel refused to show a file in ``/proc``, or a daemon to answer this user."""


class TooSlow(CannotKnow):
    """The kernel did not answer in time because a tenant holds a lock."""


class NoDaemon(CannotKnow):
    """Raised if no daemon answers at its socket."""


class ProcessGone(ResolverError):
    """The process ended: ENOENT between list and open, ESRCH between open and read."""


class NotFound(ResolverError):
    """Everything was read, without success. ``what`` is missing: a ``container``, a ``pidns``, or the ``process``."""

    def __init__(self, message: str, what: str = "process") -> None:
        super().__init__(message)
        self.what = what


class Ambiguous(ResolverError):
    """Several things fit. ``candidates`` has a line with a unique name for each."""

    def __init__(self, message: str, candidates: tuple[str, ...]) -> None:
        super().__init__(message)
        self.candidates = candidates


class RegionRejected(ResolverError):
    """A file must not be read or written as a shared region. ``detail`` is for people."""

    def __init__(self, reason: RegionReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class ApiServerFailed(ResolverError):
    """The Kubernetes API server refused a request, failed, or was not reached.

    ``status`` is HTTP's, 0 without an answer; ``retry_after`` the seconds it asks to wait.
    """

    def __init__(self, message: str, *, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class WorkerFailed(ResolverError):
    """A child process died, did not answer in time, or gave a malformed answer.

    ``waiting``: no request was sent because the child's next start is delayed. ``own_fault``: it died of a signal that
    its input can cause (SIGBUS, SIGSEGV). ``late``: it did not answer in time. Without the last two it proves nothing
    about the input.
    """

    def __init__(
        self, message: str, *, waiting: bool = False, own_fault: bool = False, late: bool = False
    ) -> None:
        super().__init__(message)
        self.waiting = waiting
        self.own_fault = own_fault
        self.late = late


def no_descriptors(error: BaseException) -> bool:
    """Check if this process, or the machine, has no descriptor left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
