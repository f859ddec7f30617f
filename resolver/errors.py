"""Every error this project raises on purpose.

::

    ResolverError                 something a person can act on; str() is a whole sentence
      +-- UsageError              the command line or the settings are wrong           (exit 2)
      +-- CannotKnow              this process lacks what it takes to know the answer  (exit 4)
      |     +-- AccessDenied      the kernel refused a read in /proc, or a daemon an answer
      |     +-- NoDaemon          no daemon answers where one was asked
      +-- ProcessGone             the process ended while it was checked               (exit 1)
      +-- NotFound                everything was seen, and what was asked for is not there (exit 1)
      +-- Ambiguous               what was asked for fits several things; carries them (exit 3)
      +-- RegionRejected          a file is no shared region that may be touched; carries a reason
      +-- ApiServerFailed         the Kubernetes API server refused, failed, or was not reached
      +-- WorkerFailed            a child died, hung or spoke nonsense

Errors of the operating system are translated where the system is called (``procfs``, ``hami.region``,
``workers``) and not further in.
"""

from __future__ import annotations

import errno

TYPE_CHECKING = False  # as typing's: every command pays for this module
if TYPE_CHECKING:
    from resolver.reasons import RegionReason


class ResolverError(Exception):
    """Base of all; ``str()`` says what happened, why, and what to do next."""


class UsageError(ResolverError):
    """The command line, the environment or the settings file is wrong."""


class CannotKnow(ResolverError):
    """The answer exists but cannot be seen from here: what is missing, and how to give it."""


class AccessDenied(CannotKnow):
    """The kernel refused to show a file in ``/proc`` (EACCES, EPERM, ENAMETOOLONG), or a daemon to answer this user."""


class NoDaemon(CannotKnow):
    """No daemon answers at its socket, or what answers there is none."""


class ProcessGone(ResolverError):
    """The process ended: ENOENT between list and open, ESRCH between open and read."""


class NotFound(ResolverError):
    """Everything that could hold the answer was read, and it is not there.

    ``what`` is missing: a ``container``, a ``pidns``, or the ``process``.
    """

    def __init__(self, message: str, what: str = "process") -> None:
        super().__init__(message)
        self.what = what


class Ambiguous(ResolverError):
    """Several things fit. ``candidates`` has a line for each, with what to ask for instead."""

    def __init__(self, message: str, candidates: tuple[str, ...]) -> None:
        super().__init__(message)
        self.candidates = candidates


class RegionRejected(ResolverError):
    """A file that must not be read or written as a shared region.

    ``reason`` is one of the fixed list, and what is counted; ``detail`` is for people.
    """

    def __init__(self, reason: RegionReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class ApiServerFailed(ResolverError):
    """The Kubernetes API server refused a request, failed, or was not reached.

    ``status`` is HTTP's, 0 if there was no answer; ``retry_after`` the seconds it asks to wait, None if it does not.
    """

    def __init__(self, message: str, *, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class WorkerFailed(ResolverError):
    """A child process died, did not answer in time, or answered something malformed.

    ``waiting``: no child was asked, the next start is put off. ``own_fault``: it died by a signal that what it worked
    on can cause (SIGBUS, SIGSEGV). One that is late says nothing about that: the machine may be slow.
    """

    def __init__(self, message: str, *, waiting: bool = False, own_fault: bool = False) -> None:
        super().__init__(message)
        self.waiting = waiting
        self.own_fault = own_fault


def no_descriptors(error: BaseException) -> bool:
    """Whether it says that this process, or the machine, has no descriptor left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
