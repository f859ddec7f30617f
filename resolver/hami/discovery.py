"""Facts about a shared region from `resolver.hami.directory_finder` or `resolver.hami.mapping_finder`.

Schedulers differ only in a region's container (`Ownership`), and the proof that a process is in it (`Proof`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from resolver.base.errors import AccessDenied, RegionRejected, TooSlow, WorkerFailed
from resolver.base.reasons import RegionReason
from resolver.linux.procfs import TooLarge
from resolver.linux.safe_open import translate

if TYPE_CHECKING:
    from resolver.hami.region import SharedRegion
    from resolver.linux.mappings import SuperblockPath

FIRST_PAUSE = 0.25  # seconds until a refused file is tried again, doubled each time
LONGEST_PAUSE = 30.0


class _Directory(NamedTuple):
    device: str
    path: str


class SharedDirectory(_Directory):
    """Superblock, and path inside it, of a directory that a region's processes have mounted."""

    __slots__ = ()
    alone, open, container_id = True, False, None

    @property
    def mount(self) -> tuple[str, str]:
        """The directory."""
        return self


class _MappedFile(NamedTuple):
    file: SuperblockPath
    shown: Shown
    container_id: str


class MappedFile(_MappedFile):
    """File that a region's processes, in one container, hold and map.

    ``shown`` is as in ``maps``. ``container_id`` is empty if the cgroup has none.
    """

    __slots__ = ()
    alone, open, mount = False, False, None


class ClaimDirectory(SharedDirectory):
    """A `SharedDirectory` for any number of containers, even of different pods."""

    __slots__ = ()
    alone = False


class _PodFile(NamedTuple):
    file: SuperblockPath
    shown: Shown
    opened: int
    tree: SuperblockPath
    pod_uid: str
    container_name: str


class PodFile(_PodFile):
    """File that a region's processes, in one pod and container, hold and map.

    All containers have the whole ``tree``: the pod is the cgroup's, the container's name kubelet's. ``opened`` is the
    inode in descriptors.
    """

    __slots__ = ()
    alone, open = False, True

    @property
    def mount(self) -> SuperblockPath:
        """The tree."""
        return self.tree


#: Proof that a process belongs to a region. ``alone``: the file is certainly a single container's; ``open``: all
#: containers reach it; ``mount`` and ``container_id``: its processes' mount and container, None if unknown.
Proof = SharedDirectory | MappedFile | PodFile
#: Device (``major:minor``) and inode of a file in ``maps``: on some kernels neither those of ``stat`` nor of its mount.
Shown = tuple[str, int]


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
        """The region's path and key."""
        return self.region.path


class RegionChanges(NamedTuple):
    """Changes of a refresh: ``removed`` are closed; new ``rejected`` are ``(path, why)``."""

    added: list[FoundRegion]
    removed: list[SharedRegion]
    rejected: list[tuple[str, RegionRejected]]


class Discovery:
    """A way to find regions: ``regions`` and ``rejected`` by path, and their changes since the last refresh."""

    def __init__(self) -> None:
        self.regions: dict[str, SharedRegion] = {}
        self.rejected: dict[str, RegionReason] = {}
        self.missing_dirs: set[str] = set()
        self.max_regions = sys.maxsize
        self._changes = RegionChanges([], [], [])

    def _refuse(self, path: str, why: RegionRejected) -> None:
        """Close a region, and schedule a retry."""
        raise NotImplementedError

    def reject(self, region: SharedRegion, why: RegionRejected) -> None:
        """Close a region and retry later; unknown ones are ignored."""
        if self.regions.get(region.path) is region:
            changes, self._changes = self._changes, RegionChanges([], [], [])  # this is no news to the caller
            self._refuse(region.path, why)
            self._changes = changes

    def accept(self, found: FoundRegion) -> None:
        """Add a region."""
        self.regions[found.path] = found.region
        self.rejected.pop(found.path, None)
        self._changes.added.append(found)

    def release(self, path: str) -> None:
        """Close and remove a region."""
        region = self.regions.pop(path)
        region.close()
        self._changes.removed.append(region)

    def report(self, path: str, why: RegionRejected) -> None:
        """Note a new refusal."""
        if self.rejected.get(path) is not why.reason:
            self.rejected[path] = why.reason
            self._changes.rejected.append((path, why))

    def check_room(self, most: int = sys.maxsize) -> None:
        """Raise `RegionRejected` if there may be no more regions."""
        if len(self.regions) >= min(most, self.max_regions):
            detail = "there are not enough descriptors for more regions: raise the limit (ulimit -n)"
            raise RegionRejected(RegionReason.IO_ERROR, detail)

    def _take_changes(self) -> RegionChanges:
        changes, self._changes = self._changes, RegionChanges([], [], [])
        return changes._replace(added=[found for found in changes.added if found.region.fd >= 0])


def refusal(error: Exception) -> RegionRejected:
    """Translate the error that keeps a file or directory from being used now."""
    if isinstance(error, RegionRejected):
        return error
    if isinstance(error, OSError):
        return translate(error)
    reason = (
        RegionReason.ACCESS_DENIED if isinstance(error, AccessDenied | TooLarge) else RegionReason.IO_ERROR
    )
    if isinstance(error, WorkerFailed | TooSlow):
        reason = RegionReason.OVERLOADED
    return RegionRejected(reason, f"it cannot be read now: {error}")
