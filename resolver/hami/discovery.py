"""Facts about a shared region, found by `resolver.hami.directory_finder` or `resolver.hami.mapping_finder`.

Schedulers differ only in data: the region's container (`Ownership`), and the proof that a process is in it (`Proof`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from resolver.base.errors import RegionRejected
    from resolver.hami.region import SharedRegion
    from resolver.linux.mappings import SuperblockPath

FIRST_PAUSE = 0.25  # seconds until a refused file is tried again, doubled each time
LONGEST_PAUSE = 30.0


class SharedDirectory(NamedTuple):
    """A process with this directory mounted belongs to the region: superblock and path inside it."""

    device: str
    root: str


class MappedFile(NamedTuple):
    """A process of the container that holds and maps this very file belongs to the region.

    ``device`` and ``inode`` are those in ``maps``. ``container_id`` is empty if the cgroup has none.
    """

    file: SuperblockPath
    device: str
    inode: int
    container_id: str


class ClaimDirectory(SharedDirectory):
    """A `SharedDirectory` that any number of containers, also of different pods, may have."""

    __slots__ = ()


class PodFile(NamedTuple):
    """A process of pod and container that holds and maps this very file belongs to the region.

    For a ``tree`` that every container has as a whole: the pod is the cgroup's, the container's name is kubelet's.
    ``opened`` is the inode that descriptors show.
    """

    file: SuperblockPath
    device: str
    inode: int
    opened: int
    tree: SuperblockPath
    pod_uid: str
    container_name: str


#: What proves that a process belongs to a region.
Proof = SharedDirectory | MappedFile | PodFile
#: Device (``major:minor``) and inode of a file in ``maps``: on some kernels neither those of ``stat`` nor of its mount.
Shown = tuple[str, int]


class Ownership(NamedTuple):
    """Container, pod and placement of a region, empty where unknown.

    Regions with one ``account`` share a budget and the blame for a dead writer. ``container`` is the name in the log,
    ``claim`` the UID of a ResourceClaim, ``placement`` a row of `placements.PLACEMENTS`.
    """

    account: str
    container: str
    pod_uid: str = ""
    container_name: str = ""
    claim: str = ""
    placement: str = ""


class Location(NamedTuple):
    """Proof that a process belongs to a region, and the file's numbers in its ``maps``."""

    proof: Proof
    shown: Shown


class FoundRegion(NamedTuple):
    """A region, open, with its ownership and location."""

    region: SharedRegion
    ownership: Ownership
    location: Location

    @property
    def path(self) -> str:
        """Return the region's path, which identifies it."""
        return self.region.path


class RegionChanges(NamedTuple):
    """Changes of a refresh. ``removed`` are already closed; ``rejected`` has new ``(path, why)``."""

    added: list[FoundRegion]
    removed: list[SharedRegion]
    rejected: list[tuple[str, RegionRejected]]
