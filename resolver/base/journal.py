"""Logging by structlog: one event, one line on standard error, never waiting for its reader."""

import os
import sys
from collections import Counter
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

from resolver.base.budget import Bucket
from resolver.base.errors import UsageError
from resolver.base.event_log import KINDS, EventLog
from resolver.base.lean import lean
from resolver.base.output import Output
from resolver.base.text import printable

with lean():
    import structlog

T = TypeVar("T")

#: Lines about one container, and about one directory: per second, and at once.
_CONTAINER_QUOTA, _DIRECTORY_QUOTA = (1.0, 64.0), (0.25, 4.0)

_MOST_CAUSES = 8  # logged per trouble

_outputs: dict[int, Output] = {}  # by descriptor

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def setup_logging(log_format: str, level: str = "info") -> None:
    """Configure logging; ``log_format`` is ``auto``, ``json`` or ``console``."""
    terminal = sys.stderr.isatty()
    shape: list[Any] = [_event_first, structlog.processors.JSONRenderer()]
    if log_format == "console" or (log_format == "auto" and terminal):
        colors, plain = terminal and "NO_COLOR" not in os.environ, structlog.dev.plain_traceback
        shape = [_printable, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,  # a traceback as text: JSON would have "exc_info": true
            *shape,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=_output()),
        cache_logger_on_first_use=True,
    )


def _output() -> Any:
    """Return standard error's `Output`, the same after a reload."""
    try:
        fd = sys.stderr.fileno()
    except (OSError, ValueError):  # it has no descriptor
        return sys.stderr
    return _outputs.setdefault(fd, Output(fd))


def _printable(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape control characters, because tenants choose names."""
    for name, value in event.items():
        if not isinstance(value, bool | int | float | None):
            event[name] = "\n".join(map(printable, str(value).split("\n")))
    return event


def _event_first(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    head = {name: event.pop(name) for name in ("timestamp", "level", "event") if name in event}
    return head | dict(event)


class Journal:
    """Logs events, and publishes those of a kind in `KINDS`; logs a trouble when it begins and when it ends.

    Lines about one container are limited; those above its quota are counted.
    """

    def __init__(self, events: EventLog | None = None) -> None:
        #: By trouble: the event that began it, and its causes, the current one last.
        self._troubles: dict[str, tuple[str, tuple[str, ...]]] = {}
        #: Quota and counts of the events above it, by name and True for a directory's name.
        self._quotas: dict[tuple[str, bool], tuple[Bucket, Counter[str]]] = {}
        self._events = events

    @property
    def log(self) -> Any:
        """Return the logger: ``debug``, ``info``, ``warning``, ``error``, ``exception``, each with key=value pairs."""
        return structlog.get_logger()

    def record(self, event: str, *, level: str = "info", about: str = "", **fields: Any) -> None:
        """Log and publish an event, within the quota of the ``container`` among its fields.

        ``about`` is a directory to charge instead.
        """
        subject = about or fields.get("container")
        if subject:
            rates = _DIRECTORY_QUOTA if about else _CONTAINER_QUOTA
            new = Bucket(*rates), Counter[str]()
            quota, left_out = self._quotas.setdefault((subject, bool(about)), new)
            if left_out or quota.take(1):
                left_out[event] += 1
                return
        self._say(event, level, fields)

    def catch_up(self) -> None:
        """Log the counts of lost and held-back lines; call it regularly."""
        for output in _outputs.values():
            if lost := output.take_lost():
                self._say("log_lines_lost", "warning", {"lines": lost})
        for (name, directory), (quota, left_out) in list(self._quotas.items()):
            if not left_out:
                if quota.full():
                    del self._quotas[name, directory]
            elif not quota.take(1):
                subject = {"directory" if directory else "container": name}
                self._say("events_left_out", "info", {**subject, "kinds": dict(left_out)})
                left_out.clear()

    def _say(self, event: str, level: str, fields: dict[str, Any]) -> None:
        if self._events is not None and event in KINDS:
            self._events.publish(event, fields)
        getattr(self.log, level)(event, **fields)

    def trouble(self, what: str, why: str, begins: str, ends: str, *, about: str = "", **where: str) -> None:
        """Log the event ``begins`` with a new cause ``why``, and ``ends`` once the cause is empty.

        A cause that returns while the trouble lasts is not logged again. ``about`` is that of `record`.
        """
        _, causes = self._troubles.pop(what, ("", ()))
        if why:
            if why not in causes and len(causes) < _MOST_CAUSES:
                self.record(begins, level="warning", about=about, why=why, **where)
            others = (cause for cause in causes if cause != why)
            self._troubles[what] = begins, (*others, why)[-_MOST_CAUSES:]
        elif causes and ends:
            self.record(ends, about=about, **where)

    async def tried_again(self, make: Callable[[], T], what: str, begins: str, **where: str) -> T:
        """Return the result of ``make()`` once it raises no OSError or UsageError; retry each second.

        Until then the error is a trouble.
        """
        import asyncio

        while True:
            try:
                made = make()
            except (OSError, UsageError) as error:
                self.trouble(what, str(error), begins, "", **where)
            else:
                self.forget(what)
                return made
            await asyncio.sleep(1.0)

    def standing(self) -> dict[str, str]:
        """Return the cause of each current trouble by its first event."""
        return {begins: causes[-1] for begins, causes in self._troubles.values()}

    def forget(self, what: str) -> None:
        self._troubles.pop(what, None)
