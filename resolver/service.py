"""The daemon: passes over the slots, collections from NVML, and what both need to live side by side.

One thread, one event loop. A pass reads every region (some microseconds each), looks up owners that are not
known yet, and sends what has to change to the slot writer. NVML is asked beside it; a driver that hangs delays
no repair.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from resolver import __version__, capabilities, log
from resolver.config import FIXED_AT_START, Settings, SourceName
from resolver.errors import UsageError
from resolver.gpu.sampler import Sampler
from resolver.hami.policy import Policy, decide
from resolver.join import NOTHING, Joined, join
from resolver.lookup.live import LiveLookup
from resolver.pidmap import PidMap
from resolver.procfs import Procfs
from resolver.repairer import Repairer
from resolver.snapshot import Snapshot
from resolver.sources.choose import Ladder
from resolver.sources.listing import Listing
from resolver.sources.scan import ScanSource

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from resolver.sources import Source

_ERRORS_BEFORE_END = 10


class Service:
    """Everything the daemon holds. ``snapshot`` is replaced whole after each pass."""

    def __init__(self, settings: Settings, procfs: Procfs | None = None, *, in_charge: bool = False) -> None:
        """``in_charge``: the whole process is this daemon's, so drop its capabilities, and serve the API."""
        _raise_descriptor_limit()
        self.settings = settings
        self.journal = log.Journal()
        self.counters: Counter[str] = Counter()
        self.procfs = procfs or Procfs()
        self.pidmap = PidMap(Listing(ScanSource(self.procfs)))
        self.ladder = Ladder(
            settings.source, self.procfs, settings.map_size, self.pidmap.use, self.journal.log.info
        )
        self.repairer = Repairer(settings, self.procfs, self.pidmap, self.counters, self.journal)
        self.sampler = Sampler()
        self.policy: Policy = decide(settings.hostpid_namespace, None)
        self.joined: Joined = NOTHING
        self.passes = 0
        self.snapshot: Snapshot | None = None
        self._in_charge = in_charge
        self._policy_said: Policy | None = None
        self._new_settings: Settings | None = None
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._trouble = asyncio.Event()  # a source has failed
        self._failed_source: Source | None = None

    # -- life ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `stop` is called. `CannotKnow` if the source that was asked for does not work here."""
        if self.settings.source != SourceName.AUTO:
            try:
                await self._unless_stopped(self.start_source())
            except BaseException:
                self.close()
                raise
        self.journal.log.info(
            "started",
            version=__version__,
            source=self.settings.source,
            containers_dir=list(self.settings.containers_dir),
            dry_run=self.settings.dry_run,
        )
        tasks = [
            asyncio.create_task(self._every("nvml_interval", self.collect_once, asyncio.Event())),
            asyncio.create_task(self._every("interval", self.pass_once, self._hurry)),
        ]
        if self.settings.source == SourceName.AUTO:
            tasks.append(asyncio.create_task(self._climb()))
        else:
            tasks.append(asyncio.create_task(self._every("nvml_interval", self._tend, self._trouble)))
        if self._in_charge:
            tasks.append(asyncio.create_task(self._serve()))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()  # a loop ends only by an error that nobody foresaw: let it be seen
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            source, counted = self.pidmap.source.name, dict(self.pidmap.counters())
            self.close()
        self.journal.log.info(
            "stopped", passes=self.passes, source=source, source_counters=counted, **dict(self.counters)
        )

    async def _every(self, setting: str, step: Callable[[], Awaitable[None]], hurry: asyncio.Event) -> None:
        """Repeat at a fixed pace, sooner in a hurry. A step that took long delays the next, it does not double it."""
        due, errors = time.monotonic(), 0
        while not self._stopping.is_set():
            try:
                await step()
                errors = 0
            except Exception as error:
                if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                    self._out_of_descriptors()
                else:
                    # A defect of ours, or a file system that fails in a new way: shown, counted, and survived.
                    errors += 1
                    self.counters["internal_errors"] += 1
                    self.journal.log.exception("internal_error", step=setting)
                    if errors >= _ERRORS_BEFORE_END:
                        raise
            due = max(due + getattr(self.settings, setting), time.monotonic())
            # Not wait_for: before Python 3.12 it can swallow a cancellation, and the daemon would not end.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due - time.monotonic()):
                    await hurry.wait()
            hurry.clear()

    async def start_source(self) -> None:
        """Find the best source, then give up every right that it took to start it."""
        await self.ladder.start()
        if not self._in_charge:
            return
        steps = self.ladder.steps
        optional = frozenset({"DAC_OVERRIDE"})  # tenants' files are 0666, unless one has a umask
        release = os.uname().release
        running = frozenset().union(*(capabilities.while_running(name, release) for name in steps), optional)
        children = frozenset().union(*(capabilities.TO_START[name] for name in steps), optional)
        try:
            capabilities.limit(running, children)
        except OSError as error:
            self.journal.log.warning("capabilities_kept", why=str(error))

    async def _climb(self) -> None:
        """With ``auto`` nothing waits for the best source: the scan does until it is there."""
        await self.start_source()
        await self._every("nvml_interval", self._tend, self._trouble)

    async def _serve(self) -> None:
        """The API. Imported late: without it the daemon weighs a third less."""
        from resolver import api

        path = self.settings.socket_path
        try:
            listener = api.bind(path)
        except (OSError, UsageError) as error:
            self.journal.log.warning("api_off", socket=path, why=str(error))
            await self._stopping.wait()
            return
        await api.serve(LiveLookup(self.procfs, self.pidmap), listener, path)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for the work, which may take a compiler's time, or for `stop`."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    def _look_after_source(self) -> None:
        source, trouble = self.pidmap.source, self.journal.trouble
        source.tend()
        trouble("source", self.pidmap.shortage(), "source_incomplete", "source_complete", source=source.name)
        if source.trouble() and source is not self._failed_source:
            self._failed_source = source  # once each: the next try to replace it comes at the usual pace
            self._trouble.set()

    async def _tend(self) -> None:
        await self.ladder.tend(self.pidmap.source)

    def _out_of_descriptors(self) -> None:
        self.counters["out_of_descriptors"] += 1
        self.repairer.shed()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        why = f"all {limit} descriptors are in use, so some regions are not looked after: raise the limit (ulimit -n)"
        self.journal.trouble("descriptors", why, "out_of_descriptors", "")

    def stop(self) -> None:
        """End `run` now."""
        self._stopping.set()

    def reload(self, settings: Settings) -> None:
        """Take over new settings at the next pass."""
        self._new_settings = settings
        self._hurry.set()

    def _use(self, wanted: Settings) -> None:
        """Those settings that cannot change while running keep their value, and that is said."""
        fixed = {name: getattr(self.settings, name) for name in FIXED_AT_START}
        ignored = [name for name, value in fixed.items() if getattr(wanted, name) != value]
        new = {name: getattr(wanted, name) for name in Settings.__struct_fields__} | fixed
        changed = [name for name, value in new.items() if value != getattr(self.settings, name)]
        self.settings = Settings(**new)
        self.repairer.use(self.settings)
        log.setup(self.settings.log_format, self.settings.log_level)
        self._decide()
        self.journal.log.info("settings_reloaded", changed=changed, need_a_restart=ignored)

    def close(self) -> None:
        """Give everything back: children, handles, files."""
        self.sampler.worker.stop()
        self.repairer.close()
        self.pidmap.close()

    # -- the two steps ------------------------------------------------------------------------------

    async def collect_once(self) -> None:
        """Ask NVML, join what it says, and see what the driver's version means for ``hostpid``."""
        collection = await self.sampler.collect()
        trouble = self.journal.trouble
        self.counters["implausible_samples"] = self.sampler.implausible
        trouble("nvml", collection.error, "nvml_unavailable", "nvml_available")
        for uuid, device in collection.devices.items():
            trouble(f"device {uuid}", device.why, "device_without_samples", "device_samples", device=uuid)
        owners = self.repairer.owners
        self.joined = join(collection, owners, owners.container_ids(), self.procfs, self.pidmap)
        self._decide()

    async def pass_once(self, *, patient: bool = True) -> None:
        """One pass over the slots, and a new snapshot."""
        if self._new_settings is not None:
            wanted, self._new_settings = self._new_settings, None
            self._use(wanted)
        self._look_after_source()
        await self.repairer.pass_once(self.policy, self.joined, patient=patient)
        self.passes += 1
        self.snapshot = self.picture()

    def _decide(self) -> None:
        self.policy = decide(self.settings.hostpid_namespace, self.sampler.driver_version)
        if self.policy != self._policy_said:
            self._policy_said = self.policy
            self._hurry.set()
            self.journal.log.info(
                "policy", hostpid_namespace=self.policy.namespace or "unknown", why=self.policy.why
            )

    def picture(self) -> Snapshot:
        """What is known now, as one immutable value."""
        finder = self.repairer.finder
        return Snapshot(
            at=time.time(),
            passes=self.passes,
            source=self.pidmap.source.name,
            sources_not_used=dict(self.ladder.why_not),
            source_counters=self.pidmap.counters(),
            incomplete=self.pidmap.shortage() or self.pidmap.incomplete(),
            processes=len(self.pidmap),
            policy=self.policy.namespace or "unknown",
            policy_why=self.policy.why,
            driver_version=self.sampler.driver_version,
            regions=self.repairer.reports(self.joined),
            rejected=dict(finder.rejected),
            missing_dirs=tuple(sorted(finder.missing_dirs)),
            joined=self.joined,
            counters=dict(self.counters),
        )


def _raise_descriptor_limit() -> None:
    """A descriptor per region and per process: take what the system allows."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
