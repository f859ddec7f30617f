"""Refusals: ``application/problem+json`` (RFC 9457) with a ``reason`` from a fixed list."""

from collections.abc import Mapping
from enum import StrEnum
from http import HTTPStatus

import msgspec
from msgspec import Struct

from resolver.base.errors import Ambiguous, CannotKnow, NotFound, ProcessGone, ResolverError, UsageError
from resolver.serve.http import HangUp, refusal

PROBLEM = "application/problem+json"


class Reason(StrEnum):
    """Reason why a request, or one pair of a batch, has no answer."""

    NO_SUCH_CONTAINER = "no_such_container"  # no process on this node is in it
    NO_SUCH_PIDNS = "no_such_pidns"  # no process of the container is in that PID namespace
    NO_SUCH_PROCESS = "no_such_process"  # no process has that number
    GONE = "gone"  # the process ended during the check
    AMBIGUOUS = "ambiguous"  # several things match: `candidates` lists them
    CANNOT_KNOW = "cannot_know"  # the daemon can't see it; `detail` names the missing right
    NOT_YOURS = "not_yours"  # only root and the socket's group may ask that
    PEER_UNKNOWN = "peer_unknown"  # the calling process cannot be determined
    BAD_REQUEST = "bad_request"  # `detail` names the error
    NO_SUCH_ROUTE = "no_such_route"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    TOO_SLOW = "too_slow"  # the request came, or the answer was found, too late
    TOO_LARGE = "too_large"  # the request's body
    NO_JSON = "no_json"  # the request's body has another media type than JSON
    HEADERS_TOO_LARGE = "headers_too_large"
    TOO_MANY_REQUESTS = "too_many_requests"  # from this peer; Retry-After says when to try again
    TOO_MANY_CONNECTIONS = "too_many_connections"
    BUSY = "busy"  # with other requests; Retry-After says when to try again
    INTERNAL = "internal"  # a bug in the daemon: its log has the traceback


class Problem(Exception):
    """Refusal of a request. ``detail`` has the cause and fix, for people."""

    def __init__(
        self,
        status: int,
        reason: Reason,
        detail: str,
        *,
        candidates: tuple[str, ...] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.reason = status, reason
        self.headers = dict(headers or {})
        title = HTTPStatus(status).phrase
        self.document = ProblemDocument("about:blank", title, status, detail, reason, list(candidates))

    def hang_up(self) -> HangUp:
        """Return the error that closes the connection with this refusal."""
        return refusal(self.status, PROBLEM, msgspec.json.encode(self.document), self.headers)


class ProblemDocument(Struct, frozen=True, omit_defaults=True):
    """A refusal. ``candidates`` lists everything that matches an ambiguous request."""

    type: str
    title: str
    status: int
    detail: str
    reason: Reason
    candidates: list[str] = []


def problem_of(error: Exception) -> Problem:
    """Translate an error to HTTP; an unexpected one is a defect, without details."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, Ambiguous):
        return Problem(409, Reason.AMBIGUOUS, str(error), candidates=error.candidates)
    status, reason, detail = 500, Reason.INTERNAL, str(error)
    if isinstance(error, UsageError):
        status, reason = 400, Reason.BAD_REQUEST
    elif isinstance(error, ProcessGone):
        status, reason = 404, Reason.GONE
    elif isinstance(error, NotFound):
        status, reason = 404, Reason(f"no_such_{error.what}")
    elif isinstance(error, CannotKnow):
        status, reason = 503, Reason.CANNOT_KNOW
    elif isinstance(error, OSError):  # out of descriptors or memory, which is no proof of absence
        status, reason, detail = 503, Reason.CANNOT_KNOW, f"the kernel refused: {error.strerror or error}"
    elif not isinstance(error, ResolverError):
        detail = "a bug in the daemon; its log has the details"
    return Problem(status, reason, detail)
