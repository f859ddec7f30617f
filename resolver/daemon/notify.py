"""Notifies systemd (sd_notify(3)): READY, STATUS, and WATCHDOG while well."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, MutableMapping

from resolver.api.status import troubles
from resolver.base.text import several
from resolver.state import Snapshot

#: Seconds between two checks: until the daemon is ready, and at most after that (systemd's watchdog may need less).
_UNTIL_READY, _AFTER = 0.05, 10.0
_LONGEST = 100  # characters of the status
#: Seconds that READY waits for the API's socket.
_API_SECONDS = 5.0


class Systemd:
    """The service manager that started this process."""

    def __init__(self, path: str, watchdog_seconds: float | None) -> None:
        self._path = f"\0{path[1:]}" if path.startswith("@") else path
        self._every = min(_AFTER, (watchdog_seconds or 2 * _AFTER) / 3)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Systemd | None:
        """Return the notifier, None without a service manager; hide its variables from children."""
        path = environment.pop("NOTIFY_SOCKET", "")
        micros, watchdog_pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        if not path.startswith(("/", "@")):
            return None
        ours = micros.isdecimal() and watchdog_pid in ("", str(os.getpid()))
        return cls(path, int(micros) / 1e6 if ours else None)

    def send(self, **fields: str | int) -> None:
        """Send one message, unless the manager does not take it."""
        text = "\n".join(f"{name}={value}" for name, value in fields.items())
        with contextlib.suppress(OSError):
            self._socket.sendto(text.encode(), self._path)

    async def keep_informed(self, snapshot: Callable[[], Snapshot], api: str) -> None:
        """Send READY after the first pass and the API's start, or while another daemon runs; WATCHDOG while well."""
        give_up = time.monotonic() + _API_SECONDS  # the API may be off if a right is missing

        def ready() -> bool:
            now = snapshot()
            answers = os.path.exists(api) or time.monotonic() > give_up
            return bool(now.holder or (now.passes and answers))

        while not ready():  # noqa: ASYNC110 - a second at the start, once
            await asyncio.sleep(_UNTIL_READY)
        self.send(READY=1)
        try:
            while True:
                self.send(STATUS=summary(snapshot()))
                if not snapshot().standstill():
                    self.send(WATCHDOG=1)
                await asyncio.sleep(self._every)
        finally:
            self.send(STOPPING=1)


def summary(snapshot: Snapshot) -> str:
    """Summarize the daemon's state in one line for people, which `systemctl` doesn't cut."""
    if snapshot.holder:
        return f"waits for the end of the daemon with PID {snapshot.holder}; source {snapshot.source.name}"
    slots = f"{snapshot.slot_counts().in_use} slots in use"
    parts = [f"source {snapshot.source.name}", f"{len(snapshot.regions)} cache files", slots]
    state, causes = ", ".join(parts), list(map(str, troubles(snapshot)))
    whole = "; ".join((state, *causes))
    return (
        whole
        if len(whole) <= _LONGEST
        else f"{state}; {several(len(causes), 'trouble')}: see resolver status"
    )
