"""Facts about a shared region from `resolver.hami.directory_finder` or `resolver.hami.mapping_finder`.

Schedulers differ only in how a region's container is named (`Ownership`) and a process in it is proven (`Proof`).
"""

import asyncio
import math
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from msgspec import Struct

from resolver.base.errors import AccessDenied, RegionRejected, TooSlow, WorkerFailed
from resolver.base.reasons import RegionReason
from resolver.hami.region import SharedRegion
from resolver.linux.mappings import Shown, SuperblockPath
from resolver.linux.procfs import TooLarge
from resolver.linux.safe_open import translate

FIRST_PAUSE = 0.25  # seconds until a refused file is tried again, doubled each time
LONGEST_PAUSE = 30.0
NOWHERE: Final = (0, 0)  # device and inode of a missing directory


class SharedDirectory(SuperblockPath):
    """Superblock, and path inside it, of a directory that a region's processes have mounted."""

    __slots__ = ()
    alone, open, container_id = True, False, None

    @property
    def mount(self) -> tuple[str, str]:
        return self


class MappedFile(Struct, frozen=True):
    """File that a region's processes, in one container, hold and map.

    ``shown`` is as in ``maps``. ``container_id`` is empty if the cgroup has none.
    """

    file: SuperblockPath
    shown: Shown
    container_id: str
    alone: ClassVar = False
    open: ClassVar = False
    mount: ClassVar = None


class ClaimDirectory(SharedDirectory):
    """A `SharedDirectory` for any number of containers, even of different pods."""

    __slots__ = ()
    alone = False


class PodFile(Struct, frozen=True):
    """File that a region's processes, in one pod and container, hold and map.

    All containers have the whole tree, ``mount``, so the cgroup proves the pod, and kubelet's name the container.
    ``opened`` is the inode in ``fdinfo``.
    """

    file: SuperblockPath
    shown: Shown
    opened: int
    mount: SuperblockPath
    pod_uid: str
    container_name: str
    alone: ClassVar = False
    open: ClassVar = True


#: Proof that a process belongs to a region. ``alone``: the file certainly belongs to a single container; ``open``: all
#: containers reach the file; ``mount`` and ``container_id``: its processes' mount and container, None if unknown.
Proof = SharedDirectory | MappedFile | PodFile


class Ownership(NamedTuple):
    """Container, pod and placement of a region, empty where unknown.

    Regions with one ``account`` share a budget and the blame for a dead writer. ``container`` is the log's name,
    ``claim`` a ResourceClaim's UID, ``placement`` a row of `placements.PLACEMENTS`.
    """

    account: str
    container: str
    pod_uid: str = ""
    container_name: str = ""
    claim: str = ""
    placement: str = ""


class Location(NamedTuple):
    """A region's proof, and its file's numbers in ``maps``."""

    proof: Proof
    shown: Shown


class FoundRegion(NamedTuple):
    """An open region with its ownership and location."""

    region: SharedRegion
    ownership: Ownership
    location: Location

    @property
    def path(self) -> str:
        return self.region.path


class RegionChanges(NamedTuple):
    """Changes of a refresh: ``removed`` are closed; new ``rejected`` are ``(path, why)``."""

    added: list[FoundRegion]
    removed: list[SharedRegion]
    rejected: list[tuple[str, RegionRejected]]


class Place:
    """A directory or process that is searched when ``due``, by ``work`` that waits for lanes."""

    def __init__(self) -> None:
        self.due = 0.0
        self.work: asyncio.Task[None] | None = None

    def rest(self, until: float, soon: float) -> None:
        """End the work. The next search is due at ``until``, or ``soon`` if an event came meanwhile."""
        self.due = until if self.due == math.inf else soon

    def cancel(self) -> None:
        if self.work is not None:
            self.work.cancel()
            self.work = None


P = TypeVar("P", bound=Place)


class Discovery:
    """A way to find regions: ``regions`` and ``rejected`` by path, and their changes since the last refresh.

    One coroutine searches each place; when it ends, a refresh is due, and ``wake`` is called.
    """

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self.regions: dict[str, SharedRegion] = {}
        self.rejected: dict[str, RegionReason] = {}
        self.missing_dirs: set[str] = set()
        self.max_regions = sys.maxsize
        self._clock, self._wake, self._wants = clock, wake, 0.0
        self._changes = RegionChanges([], [], [])
        self._failures: list[BaseException] = []  # of places, until the end of a refresh

    def wants(self) -> float:
        """Return when the next refresh is due, in seconds on its clock."""
        return self._wants

    async def settle(self) -> bool:
        """Wait for the searches in progress; return True if there were any."""
        work = [place.work for place in self._places() if place.work is not None]
        if work:
            await asyncio.wait(work)
        return bool(work)

    def _places(self) -> Iterable[Place]:
        raise NotImplementedError

    def _due(self, places: Iterable[P]) -> list[P]:
        """Return the places to search now, the longest waiting first."""
        now = self._clock()
        due = (place for place in places if self._is_idle(place) and place.due <= now)
        return sorted(due, key=lambda place: place.due)

    def _is_idle(self, place: Place) -> bool:
        """Check that no search is in progress. `_end_refresh` raises its error, after other places were searched."""
        if place.work is not None and place.work.done():
            if error := place.work.exception():
                self._failures.append(error)
            place.work = None
        return place.work is None

    def _begin(self, place: Place, work: Coroutine[Any, Any, None]) -> None:
        place.due, place.work = math.inf, asyncio.create_task(work)
        place.work.add_done_callback(self._answered)

    def _answered(self, _: object) -> None:
        self._wants = 0.0
        self._wake()

    def _refuse(self, path: str, why: RegionRejected) -> None:
        """Close a region, and schedule a retry."""
        raise NotImplementedError

    def reject(self, region: SharedRegion, why: RegionRejected) -> None:
        """Close a region and retry later; ignore an unknown region."""
        if self.regions.get(region.path) is region:
            changes, self._changes = self._changes, RegionChanges([], [], [])  # the caller knows of this one
            self._refuse(region.path, why)
            self._changes = changes

    def accept(self, found: FoundRegion) -> None:
        self.regions[found.path] = found.region
        self.rejected.pop(found.path, None)
        self._changes.added.append(found)

    def release(self, path: str) -> None:
        region = self.regions.pop(path)
        region.close()
        self._changes.removed.append(region)

    def report(self, path: str, why: RegionRejected) -> None:
        """Note a new refusal."""
        if self.rejected.get(path) is not why.reason:
            self.rejected[path] = why.reason
            self._changes.rejected.append((path, why))

    def shed(self) -> list[SharedRegion]:
        """Close half of the regions to free descriptors, and return them; `allow_more` doubles the limit again."""
        self.max_regions = max(1, len(self.regions) // 2)
        given_up = list(self.regions.values())[self.max_regions :]
        for region in given_up:
            self.reject(
                region, RegionRejected(RegionReason.IO_ERROR, "it was given up, all descriptors are in use")
            )
        return given_up

    def allow_more(self) -> None:
        self.max_regions = min(sys.maxsize, 2 * self.max_regions)

    def check_room(self, most: int = sys.maxsize) -> None:
        """Raise `RegionRejected` if the limit of regions is reached."""
        if len(self.regions) >= min(most, self.max_regions):
            detail = "there are not enough descriptors for more regions: raise the limit (ulimit -n)"
            raise RegionRejected(RegionReason.IO_ERROR, detail)

    def _end_refresh(self) -> RegionChanges:
        """Return the changes, and note when the next place is due. Raises the errors of places' work."""
        self._wants = min((place.due for place in self._places() if place.work is None), default=math.inf)
        failures, self._failures = self._failures, []
        if failures:
            raise (
                failures[0] if len(failures) == 1 else BaseExceptionGroup("several searches failed", failures)
            )
        changes, self._changes = self._changes, RegionChanges([], [], [])
        return changes._replace(added=[new for new in changes.added if new.region.fd >= 0])


def refusal(error: Exception) -> RegionRejected:
    """Translate the error that keeps a file or directory from being used now."""
    if isinstance(error, RegionRejected):
        return error
    if isinstance(error, OSError):
        return translate(error)
    reason = RegionReason.IO_ERROR
    if isinstance(error, WorkerFailed | TooSlow):
        reason = RegionReason.OVERLOADED
    elif isinstance(error, AccessDenied | TooLarge):
        reason = RegionReason.ACCESS_DENIED
    return RegionRejected(reason, f"it cannot be read now: {error}")
