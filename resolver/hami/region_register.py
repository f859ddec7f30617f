"""The regions that `resolver.hami.directory_finder` has accepted, and what it has refused and why."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from resolver.errors import RegionRejected
from resolver.hami.directory_listing import MAX_CACHES
from resolver.hami.discovery import FIRST_PAUSE, LONGEST_PAUSE, FoundRegion, RegionChanges
from resolver.hami.searched_directories import NOWHERE
from resolver.reasons import RegionReason
from resolver.retry import longer

if TYPE_CHECKING:
    from resolver.hami.region import SharedRegion
    from resolver.hami.searched_directories import Candidate, Directory

YOUNG = 10.0  # seconds in which a file may still be on its way to being a region
GOOD = 60.0  # seconds a region must have been accepted to be forgiven earlier refusals
_NOT_YET = (RegionReason.NOT_INITIALIZED, RegionReason.UNKNOWN_SIZE, RegionReason.TRUNCATED)


class RegionRegister:
    """``regions`` and ``rejected`` by path, and in ``changes`` what is new of both since the last refresh.

    ``counts`` counts each refusal once, when it is new.
    """

    def __init__(self) -> None:
        self.regions: dict[str, SharedRegion] = {}
        self.rejected: dict[str, RegionReason] = {}
        self.counts: Counter[RegionReason] = Counter()
        self.changes = RegionChanges([], [], [])
        self._candidates: dict[str, Candidate] = {}  # the names under which regions were accepted

    def begin(self) -> RegionChanges:
        """What is new from now on."""
        self.changes = RegionChanges([], [], [])
        return self.changes

    def candidate(self, region: SharedRegion) -> Candidate | None:
        """The name under which this region was accepted; None of one that was given up."""
        return self._candidates.get(region.path)

    def accept(self, candidate: Candidate, region: SharedRegion, now: float) -> None:
        """Keep an open region until it is released."""
        candidate.region, candidate.identity, candidate.accepted_at = region, region.identity, now
        self.rejected.pop(candidate.path, None)
        self.regions[candidate.path] = region
        self._candidates[candidate.path] = candidate
        self.changes.added.append(FoundRegion(region, candidate.directory.whose(candidate)))

    def refuse(self, candidate: Candidate, why: RegionRejected, now: float) -> None:
        """Not a region now: count it once, and say when it is tried again."""
        if why.reason is RegionReason.GONE:
            candidate.start_anew(NOWHERE, now)  # the next listing takes it off, or finds its successor
            return
        self.report(candidate.path, why)
        if why.reason in _NOT_YET and now - candidate.seen_at < YOUNG:
            candidate.retry_at = now
            return
        if candidate.accepted_at and now - candidate.accepted_at > GOOD:
            candidate.pause = FIRST_PAUSE
        candidate.retry_at = now + candidate.pause
        candidate.pause = longer(candidate.pause, FIRST_PAUSE, LONGEST_PAUSE)

    def report(self, path: str, why: RegionRejected) -> None:
        """Note a refusal, and count it if it is new."""
        if self.rejected.get(path) is not why.reason:
            self.rejected[path] = why.reason
            self.counts[why.reason] += 1
            self.changes.rejected.append((path, why))

    def report_unless(self, complete: bool, path: str, limit: int) -> None:  # noqa: FBT001
        """Refuse a directory of which not everything is read."""
        if complete:
            self.rejected.pop(path, None)
            return
        detail = f"it has more entries than the {limit} that are read, or more than {MAX_CACHES} .cache files"
        self.report(path, RegionRejected(RegionReason.TOO_MANY_ENTRIES, detail))

    def release(self, candidate: Candidate) -> None:
        """Close its region, if it has one."""
        region, candidate.region = candidate.region, None
        if region is not None:
            region.close()
            self._candidates.pop(candidate.path, None)
            if self.regions.pop(candidate.path, None) is not None:
                self.changes.removed.append(region)

    def drop(self, directory: Directory, candidate: Candidate) -> None:
        """The directory has no such name any more."""
        self.release(candidate)
        self.rejected.pop(candidate.path, None)
        directory.candidates.pop(candidate.name, None)

    def drop_candidates(self, directory: Directory) -> None:
        """Nothing in the directory is known any more."""
        for candidate in list(directory.candidates.values()):
            self.drop(directory, candidate)
