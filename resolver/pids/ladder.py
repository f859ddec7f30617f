"""Sources in order: use the best one that works here, a lower one when it fails, and return to it later.

``auto`` starts on the scan: no repair may wait for a compiler. A source works if it finds the canary.
"""

import asyncio
import time
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from resolver.base.budget import Slices
from resolver.base.errors import CannotKnow, ResolverError, WorkerFailed
from resolver.base.journal import Journal
from resolver.base.retry import in_a_thread, longer
from resolver.base.source_records import SOURCE_RECORDS, steps
from resolver.linux.procfs import EVENT_SECONDS, Procfs
from resolver.pids.source import PidSource, close
from resolver.workers.canary import is_first
from resolver.workers.supervisor import WorkerProcess

#: Seconds between two canaries, 20 ms of CPU each.
_CHECK_EVERY, _UNMADE_EVERY = 300.0, 60.0
FIRST_CLIMB, LONGEST_CLIMB = 5.0, 3600.0
_FIRST_GROWTH = 60.0
_CANARY_SECONDS = 5.0
LEAST_ROOM = 32_768
#: To make a PID namespace, and to see all processes under ``hidepid``.
_CANARY_RIGHTS = frozenset({"SYS_ADMIN", "SYS_PTRACE"})


def open_source(name: str, procfs: Procfs, map_size: int, run_dir: str = "") -> PidSource:
    """Start a source; ``bpf`` compiles for up to 60 s, and keeps the program in ``run_dir``. Raises `CannotKnow`."""
    module = import_module(SOURCE_RECORDS[name].module)
    source: PidSource = module.open_source(procfs, room(procfs, map_size), run_dir)
    return source


def room(procfs: Procfs, map_size: int) -> int:
    """Return a new map's size: ``map_size``, or 1.5 times the processes, at most ``kernel.pid_max``."""
    if map_size:
        return map_size
    wanted = max(LEAST_ROOM, len(procfs.entries()) * 3 // 2)
    try:
        with open(f"{procfs.root}/sys/kernel/pid_max", encoding="ascii") as file:
            return min(wanted, int(file.read()))
    except (OSError, ValueError):
        return wanted


class Canary(NamedTuple):
    """Search for a canary; ``unmade``: why none was made."""

    trouble: str
    unmade: str


async def find_canary(source: PidSource) -> Canary:
    """Make a process (`resolver.workers.canary`) and search for it, if need be twice."""
    canary = WorkerProcess(
        "canary", "resolver.workers.canary", timeout=_CANARY_SECONDS, rights=_CANARY_RIGHTS
    )
    try:
        try:
            host_pid, ns_pid, *other = map(int, (await canary.request(b"sing")).split())
        except (WorkerFailed, OSError, ValueError) as error:
            return Canary("", str(error))
        try:
            slices, trouble = Slices(), ""
            for wait in (0.0, EVENT_SECONDS):
                await asyncio.sleep(wait)
                for _ in source.refreshing():
                    await slices.yield_if_due()
                trouble = _missed(source, host_pid, ns_pid, other)
                if not trouble:
                    break
            return Canary(trouble, "")
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing was found through this source
            return Canary(_explanation(error), "")
    finally:
        await canary.end()


def _missed(source: PidSource, host_pid: int, ns_pid: int, other: list[int]) -> str:
    if host_pid not in source.candidates(ns_pid):
        where = " in a new PID namespace" if ns_pid == 1 else ""
        return f"it did not see process {host_pid}, which was just made{where}"
    if other and other[0] not in source.candidates(1) and is_first(other[0]):
        return f"it did not see process {other[0]}, which is the first one in its PID namespace"
    return ""


def _explanation(error: Exception) -> str:
    if isinstance(error, ResolverError | OSError):
        return str(error)
    return f"it failed unexpectedly ({type(error).__name__}: {error}); please report it"


class Ladder:
    """Keeps the best working source; ``use`` takes the source over, ``say`` logs."""

    def __init__(
        self,
        wanted: str,
        procfs: Procfs,
        map_size: int,
        use: Callable[[PidSource], None],
        say: Callable[..., None],
        opener: Callable[[str, Procfs, int], PidSource] = open_source,
    ) -> None:
        self.wanted = wanted
        self.why_not: dict[str, str] = {}  # by source: why it is not in use
        self._procfs, self._map_size = procfs, map_size
        self._use, self._say, self._open = use, say, opener
        self.present = "scan"
        self._no_canary = "the self-test has not run yet"
        #: Why the source in use failed, if it raised an error instead of reporting a trouble.
        self._broken = ""
        self.failed = asyncio.Event()  # makes `tend` due at once
        self._known_failed: PidSource | None = None
        self.next_check = 0.0
        self._missed = 0  # processes that comparisons found missing in the source in use
        self.next_climb = self._wait = 0.0
        self.used_at = 0.0  # when the source in use was taken
        self.next_growth, self.growth_wait = 0.0, _FIRST_GROWTH  # time 0: the source in use has room

    @property
    def steps(self) -> tuple[str, ...]:
        return steps(self.wanted)

    def not_ready(self, source: PidSource) -> str:
        """Explain why the source isn't trusted yet; empty after a canary."""
        return self.trouble(source) or self._no_canary

    def trouble(self, source: PidSource) -> str:
        try:
            return self._broken or source.trouble()
        except Exception as error:  # noqa: BLE001 - no error of a failed source may stop the fall
            return _explanation(error)

    def keep_up(self, source: PidSource) -> str:
        try:
            source.tend()
        except Exception as error:  # noqa: BLE001 - as above
            self._broken = _explanation(error)
        trouble = self.trouble(source)
        if trouble and source is not self._known_failed:
            # Once for each source: later attempts to replace it keep the usual pace.
            self._known_failed = source
            self.failed.set()
        return trouble

    async def start(self) -> None:
        """Use the best that works. Raises `CannotKnow` without any."""
        await self._climb()
        if self.wanted == "auto" and self.present == "scan":
            self._say("source", source="scan", not_used=dict(self.why_not))  # nothing better works: it stays
        if self.present not in self.steps:
            raise CannotKnow(
                f"--source {self.wanted} does not work here: {self.why_not[self.wanted]}. "
                "With --source auto the next best source is taken"
            )
        # With auto the scan ran from the beginning, and has not been checked by a canary yet.
        self.next_check = time.monotonic() + (_CHECK_EVERY if not self._no_canary else 0.0)

    async def tend(self, source: PidSource) -> None:
        now = time.monotonic()
        trouble = self.trouble(source)
        if not trouble and self._missed_more(source):
            self.next_check = now
        if not trouble and now >= self.next_check:
            canary = await find_canary(source)
            trouble = canary.trouble
            if not (canary.unmade and not self._no_canary):
                # An earlier canary counts if no new one can be made: the daemon may have dropped the rights for it.
                self._no_canary = trouble or canary.unmade
            self.next_check = now + (_UNMADE_EVERY if canary.unmade else _CHECK_EVERY)
        if trouble and (self.wanted == "auto" or now >= self.next_climb):
            self._say("source_failed", source=source.name, why=trouble)
            self.why_not[source.name] = trouble
            if now - self.used_at > _CHECK_EVERY:
                self._wait = 0.0  # a source that fails again and again is tried less often
            await self._try(self.steps[-1])  # the scan; a source requested by name is restarted
            self._climb_later()
        elif now >= self.next_climb and self.present != self.steps[0]:
            await self._climb()
        elif not self._map_size:
            await self._grow(source, now)

    def _missed_more(self, source: PidSource) -> bool:
        """Check if comparisons found missing processes; a full map always lacks some."""
        try:
            before, self._missed = self._missed, source.counters().get("drift_missing", 0)
            return self._missed > before and not source.shortage()
        except Exception:  # noqa: BLE001 - as above; the canary names the fault
            return True

    async def _climb(self) -> None:
        for name in self.steps:
            if name == self.present and self.wanted == "auto":
                break
            if await self._try(name):
                break
        self._climb_later()

    def _climb_later(self) -> None:
        self._wait = longer(self._wait, FIRST_CLIMB, LONGEST_CLIMB)
        self.next_climb = time.monotonic() + self._wait

    async def _grow(self, source: PidSource, now: float) -> None:
        """Reopen a full source with more room, after a wait, because a peak may pass."""
        if not source.shortage():
            self.next_growth, self.growth_wait = 0.0, _FIRST_GROWTH
        elif not self.next_growth:
            self.next_growth = now + self.growth_wait
        elif now >= self.next_growth:
            self.growth_wait = longer(self.growth_wait, _FIRST_GROWTH, LONGEST_CLIMB)
            self.next_growth = now + self.growth_wait
            await self._try(source.name)

    async def _try(self, name: str) -> bool:
        try:
            source = await in_a_thread(
                lambda: self._open(name, self._procfs, self._map_size), name=f"opens {name}", unwanted=close
            )
        except Exception as error:  # noqa: BLE001 - a defect in one source must not end the repairs by another
            self._refused(name, _explanation(error))
            detail = getattr(error, "detail", "")  # output of the compiler or the kernel's verifier
            if detail:
                Journal().log.debug("source_detail", source=name, detail=detail)
            return False
        canary = await find_canary(source)
        trouble = canary.trouble or source.trouble()
        if trouble:
            close(source)
            self._refused(name, trouble)
            return False
        self._no_canary, self._broken, self._missed = canary.unmade, "", 0
        self.why_not.pop(name, None)
        self.present, self.used_at = name, time.monotonic()
        self._use(source)
        self._say("source", source=name, not_used=dict(self.why_not))
        return True

    def _refused(self, name: str, why: str) -> None:
        if self.why_not.get(name) != why:
            self.why_not[name] = why
            self._say("source_unavailable", source=name, why=why)
