"""Logging by structlog: one event, one line, on standard error.

``json`` for machines, ``console`` for people, ``auto`` takes the one that fits where standard error goes.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from resolver.lean import lean
from resolver.log.event_names import KINDS

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from resolver.log.event_log import EventLog

with lean("structlog"):
    import structlog

#: Lines that one container may cause at once, and how many more a second; and the files in its directory.
_OF_A_CONTAINER, _OF_A_DIRECTORY = (64.0, 1.0), (4.0, 0.25)

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def setup_logging(log_format: str, level: str = "info") -> None:
    """Configure the process's logging. ``log_format`` is ``auto``, ``json`` or ``console``."""
    terminal = sys.stderr.isatty()
    if log_format == "auto":
        log_format = "console" if terminal else "json"
    shape: list[Any]
    if log_format == "json":
        # A traceback as text, in one field: the renderer alone would say no more than "exc_info": true.
        shape = [structlog.processors.format_exc_info, _event_first, structlog.processors.JSONRenderer()]
    else:
        shape = [structlog.dev.ConsoleRenderer(colors=terminal and "NO_COLOR" not in os.environ)]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *shape,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def _event_first(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    head = {name: event.pop(name) for name in ("timestamp", "level", "event") if name in event}
    return head | dict(event)


class _Quota:
    """What one container may still cause to be said, and what was left out of it since the last line."""

    __slots__ = ("_at_once", "_per_second", "at", "left", "left_out")

    def __init__(self, now: float, at_once: float, per_second: float) -> None:
        self._at_once, self._per_second = at_once, per_second
        self.left, self.at = at_once, now
        self.left_out: Counter[str] = Counter()

    def take(self, now: float) -> bool:
        """Take a line, if there is one left."""
        self.left, self.at = self._now(now), now
        if self.left < 1:
            return False
        self.left -= 1
        return True

    def full(self, now: float) -> bool:
        """Whether nothing need be remembered of it."""
        return self._now(now) >= self._at_once

    def _now(self, now: float) -> float:
        return min(self._at_once, self.left + (now - self.at) * self._per_second)


class Journal:
    """The logger, and a memory of what is wrong, so that each trouble is said when it begins and when it ends.

    What is one of the ``KINDS`` in `resolver.log.event_names` is published as well. Of what is about one container
    only so much is said one by one; the rest is counted.
    """

    def __init__(self, events: EventLog | None = None) -> None:
        self._troubles: dict[str, str] = {}
        self._quotas: dict[tuple[str, bool], _Quota] = {}  # by whom, and whether that is a directory
        self._events = events

    @property
    def log(self) -> Any:
        """The logger; ``debug``, ``info``, ``warning``, ``error``, ``exception``, each with key=value pairs."""
        return structlog.get_logger()

    def record(self, event: str, *, level: str = "info", about: str = "", **fields: Any) -> None:
        """Log something that is also an event. With a ``container`` among the fields it is counted against that one.

        ``about`` is a directory, which it is counted against instead: files come and go as fast as a tenant likes.
        """
        whom = about or fields.get("container")
        if whom:
            now, key = time.monotonic(), (whom, bool(about))
            quota = self._quotas.get(key)
            if quota is None:
                quota = self._quotas[key] = _Quota(now, *(_OF_A_DIRECTORY if about else _OF_A_CONTAINER))
            if quota.left_out or not quota.take(now):
                quota.left_out[event] += 1
                return
        self._say(event, level, fields)

    def catch_up(self) -> None:
        """Say of each container what was left out, as soon as it may say something again; call it now and then."""
        now = time.monotonic()
        for key, quota in list(self._quotas.items()):
            if quota.left_out:
                if quota.take(now):
                    left_out, quota.left_out = dict(quota.left_out), Counter()
                    self._say("events_left_out", "info", {"container": key[0], "kinds": left_out})
            elif quota.full(now):
                del self._quotas[key]

    def _say(self, event: str, level: str, fields: dict[str, Any]) -> None:
        self._also(event, fields)
        getattr(self.log, level)(event, **fields)

    def trouble(self, what: str, why: str, begins: str, ends: str, *, about: str = "", **where: str) -> None:
        """Log ``begins`` when ``why`` is new, ``ends`` when it has become empty, nothing while it stays.

        ``about`` is as in `record`.
        """
        before = self._troubles.pop(what, "")
        if why:
            self._troubles[what] = why
        if why and why != before:
            self.record(begins, level="warning", about=about, why=why, **where)
        elif before and not why:
            self.record(ends, about=about, **where)

    def forget(self, what: str) -> None:
        """What this trouble was about is gone."""
        self._troubles.pop(what, None)

    def _also(self, event: str, fields: dict[str, Any]) -> None:
        if self._events is not None and event in KINDS:
            self._events.publish(event, fields)
