"""Regions accepted by `resolver.hami.directory_finder`, and rejected files with reasons."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from resolver.base.errors import CannotKnow, RegionRejected, WorkerFailed
from resolver.base.reasons import RegionReason
from resolver.base.retry import longer
from resolver.hami.directory_reads import hold_file, take
from resolver.hami.discovery import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    FoundRegion,
    RegionChanges,
    refusal,
)
from resolver.hami.region import adopt_by
from resolver.hami.region_location import locate
from resolver.hami.searched_directories import MAX_CACHES, NOWHERE
from resolver.linux.safe_open import let_go
from resolver.workers.lanes import begin

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.base.budget import Budgets
    from resolver.containers.log_names import ContainerNames
    from resolver.hami.discovery import Location
    from resolver.hami.region import SharedRegion
    from resolver.hami.searched_directories import Candidate, Directory
    from resolver.workers.lanes import TenantReader

GOOD = 60.0  # seconds a region must have been accepted to be forgiven earlier refusals
STRAY = "kubelet has no such container here: its pod is gone, or another one's process made the directory"
_NOT_YET = (
    RegionReason.NOT_INITIALIZED,
    RegionReason.UNKNOWN_SIZE,
    RegionReason.TRUNCATED,
    RegionReason.NOT_ON_NODE,  # kubelet makes the name of a log when the container runs
)


class RegionRegister:
    """``regions`` and ``rejected`` by path, with ``changes`` since the last refresh."""

    def __init__(
        self,
        names: ContainerNames,
        reader: TenantReader,
        budgets: Budgets,
        on_read: Callable[[], None],
    ) -> None:
        """Call ``on_read`` when a lane has read a file."""
        self.regions: dict[str, SharedRegion] = {}
        self.rejected: dict[str, RegionReason] = {}
        self.changes = RegionChanges([], [], [])
        self._max_regions = sys.maxsize
        self._names, self._reader, self._budgets, self._on_read = names, reader, budgets, on_read
        self._candidates: dict[str, Candidate] = {}  # the names under which regions were accepted

    def begin(self, max_regions: int) -> RegionChanges:
        """Start a new set of changes."""
        self.changes, self._max_regions = RegionChanges([], [], []), max_regions
        return self.changes

    def reject(self, region: SharedRegion, why: RegionRejected, now: float) -> None:
        """Close an accepted region and retry later."""
        candidate = self._candidates.get(region.path)
        if candidate is not None and candidate.region is region:
            self.changes = RegionChanges([], [], [])  # this is no news to the caller
            self.release(candidate)
            self.refuse(candidate, why, now)

    def check(
        self,
        directory: Directory,
        candidate: Candidate,
        file: tuple[tuple[int, int], float] | None,
        now: float,
    ) -> None:
        """Compare a name with its present file: identity and change time, None if missing.

        `SharedRegion.read` checks the content.
        """
        if file is None:
            self.drop(directory, candidate)
            return
        identity, changed = file
        if identity != candidate.identity:
            self.release(candidate)
            candidate.start_anew(identity, now, time.time() - changed)
        due = candidate.region is None and candidate.reading is None and now >= candidate.retry_at
        if due and not self._budgets.over(directory.path):
            try:
                self._begin(candidate)
            except RegionRejected as why:
                self.refuse(candidate, why, now)
            self.finish(candidate, now)

    def _begin(self, candidate: Candidate) -> None:
        """Let a lane open and read the file. Raises `RegionRejected`."""
        if not candidate.name.isprintable():
            raise RegionRejected(RegionReason.BAD_NAME, "its name has characters that cannot be printed")
        self._check_owner(candidate)
        if len(self.regions) >= self._max_regions:
            detail = "there are not enough descriptors for more regions: raise the limit (ulimit -n)"
            raise RegionRejected(RegionReason.IO_ERROR, detail)
        candidate.reading = begin(self._read(candidate), self._on_read)

    async def _read(self, candidate: Candidate) -> tuple[SharedRegion, Location]:
        directory = candidate.directory
        account, where = directory.path, f"/proc/{os.getpid()}/fd/{directory.root.fd}"
        held = await self._reader.ask(account, account, hold_file, where, directory.name, candidate.name)
        fd = take(*held)
        try:
            region = await adopt_by(self._reader, account, fd, candidate.path)
            return region, await locate(self._reader, region, candidate)
        except BaseException:
            let_go(fd)
            raise

    def finish(self, candidate: Candidate, now: float) -> None:
        """Accept or refuse a file read by a lane."""
        reading = candidate.reading
        if reading is None or not reading.done():
            return
        candidate.reading = None
        try:
            region, location = reading.result()
        except (RegionRejected, OSError, CannotKnow, WorkerFailed) as error:
            if isinstance(error, WorkerFailed) and error.waiting:
                candidate.retry_at = now + FIRST_PAUSE
            else:
                self.refuse(candidate, refusal(error), now)
            return
        candidate.region, candidate.identity, candidate.accepted_at = region, region.identity, now
        self.rejected.pop(candidate.path, None)
        self.regions[candidate.path] = region
        self._candidates[candidate.path] = candidate
        self.changes.added.append(FoundRegion(region, candidate.directory.ownership(candidate), location))

    def _check_owner(self, candidate: Candidate) -> None:
        """Raise `RegionRejected` for a file that all containers reach, unless kubelet has its container."""
        if candidate.shared:
            ownership = candidate.directory.ownership(candidate)
            if not self._names.has(ownership.pod_uid, ownership.container_name):
                self._names.refresh()
            if not self._names.has(ownership.pod_uid, ownership.container_name):
                raise RegionRejected(RegionReason.NOT_ON_NODE, self._names.trouble or STRAY)

    def refuse(self, candidate: Candidate, why: RegionRejected, now: float) -> None:
        """Reject a file for now and schedule a retry."""
        if why.reason is RegionReason.GONE:
            candidate.start_anew(NOWHERE, now)  # the next listing takes it off, or finds its successor
            return
        if candidate.is_news:
            self.rejected.pop(candidate.path, None)
        candidate.is_news = why.reason in _NOT_YET and now < candidate.half_made_until
        if candidate.is_news:
            self.rejected[candidate.path], candidate.retry_at = why.reason, now
            return
        self.report(candidate.path, why)
        if candidate.accepted_at and now - candidate.accepted_at > GOOD:
            candidate.pause = FIRST_PAUSE
        candidate.retry_at = now + candidate.pause
        candidate.pause = longer(candidate.pause, FIRST_PAUSE, LONGEST_PAUSE)

    def report(self, path: str, why: RegionRejected) -> None:
        """Note a new refusal."""
        if self.rejected.get(path) is not why.reason:
            self.rejected[path] = why.reason
            self.changes.rejected.append((path, why))

    def report_unless(self, complete: bool, path: str, limit: int) -> None:  # noqa: FBT001
        """Reject an incompletely read directory."""
        if complete:
            self.rejected.pop(path, None)
            return
        detail = f"it has more entries than the {limit} that are read, or more than {MAX_CACHES} .cache files"
        self.report(path, RegionRejected(RegionReason.TOO_MANY_ENTRIES, detail))

    def release(self, candidate: Candidate) -> None:
        """Close its region, if any."""
        reading, candidate.reading = candidate.reading, None
        if reading is not None and not (reading.cancel() or reading.cancelled() or reading.exception()):
            reading.result()[0].close()
        region, candidate.region = candidate.region, None
        if region is not None:
            region.close()
            self._candidates.pop(candidate.path, None)
            if self.regions.pop(candidate.path, None) is not None:
                self.changes.removed.append(region)

    def drop(self, directory: Directory, candidate: Candidate) -> None:
        """Drop a vanished name."""
        self.release(candidate)
        self.rejected.pop(candidate.path, None)
        directory.candidates.pop(candidate.name, None)

    def drop_candidates(self, directory: Directory) -> None:
        """Drop everything about the directory."""
        for candidate in list(directory.candidates.values()):
            self.drop(directory, candidate)
