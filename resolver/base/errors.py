"""All errors that this project raises on purpose. Code that makes system calls translates OSError to these."""

from __future__ import annotations

TYPE_CHECKING = False  # typing is slow to import, and every command imports this module
if TYPE_CHECKING:
    from resolver.base.reasons import RegionReason


class ResolverError(Exception):
    """Base of all errors; ``str()`` gives the event, its cause, and the fix."""


class UsageError(ResolverError):
    """A wrong command line, environment or settings file."""


class CannotKnow(ResolverError):
    """The answer isn't visible from here; the message names the missing prerequisite and its fix."""


class AccessDenied(CannotKnow):
    """The kernel refused to read a file in ``/proc``, or a daemon refused this user."""


class TooSlow(CannotKnow):
    """The kernel is late because a tenant holds a lock."""


class NoDaemon(CannotKnow):
    """No daemon answers at its socket."""


class ProcessGone(ResolverError):
    """The process ended (ENOENT at open, ESRCH at read)."""


class NotFound(ResolverError):
    """Everything was read, and nothing matches. ``what`` is missing: ``container``, ``pidns`` or ``process``."""

    def __init__(self, message: str, what: str = "process") -> None:
        super().__init__(message)
        self.what = what


class Ambiguous(ResolverError):
    """Several things fit. ``candidates`` has a unique name for each."""

    def __init__(self, message: str, candidates: tuple[str, ...]) -> None:
        super().__init__(message)
        self.candidates = candidates


class RegionRejected(ResolverError):
    """A file must not be used as a shared region. ``detail`` is for people."""

    def __init__(self, reason: RegionReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class ApiServerFailed(ResolverError):
    """The Kubernetes API server refused a request, failed, or was not reached.

    ``status`` is HTTP's, 0 without an answer; ``retry_after`` is in seconds.
    """

    def __init__(self, message: str, *, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class WorkerFailed(ResolverError):
    """A child process died, was late, or gave a malformed answer.

    ``waiting``: its next start is delayed, or it lacks resources, so nothing was done. ``own_fault``: it died of a
    signal that its input can cause (SIGBUS, SIGSEGV). ``late``: no answer in time. Only the last two say something
    about the input.
    """

    def __init__(
        self, message: str, *, waiting: bool = False, own_fault: bool = False, late: bool = False
    ) -> None:
        super().__init__(message)
        self.waiting = waiting
        self.own_fault = own_fault
        self.late = late
