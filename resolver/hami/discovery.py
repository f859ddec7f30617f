"""What finds shared regions on a node, and what each way of finding them says of a region.

A `Discovery` is one way: through directories that a device plugin mounts into containers
(`resolver.hami.directory_finder`), or through the processes that map a file of the container's own
(`resolver.hami.mapping_finder`). The repairer treats any number of them alike. What differs from one scheduler's
placement to another's is data here: whose a region is (`Whose`), and what proves that a process belongs to it
(`Place`), which `resolver.hami.slot_owner` goes by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resolver.errors import RegionRejected
    from resolver.hami.region import SharedRegion
    from resolver.linux.mappings import FilePlace
    from resolver.reasons import RegionReason
    from resolver.workers.supervisor import WorkerProcess

FIRST_PAUSE = 0.25  # seconds until a refused file is tried again, doubled each time
LONGEST_PAUSE = 30.0


class SharedDirectory(NamedTuple):
    """A process belongs to the region if it has this directory in its mount table.

    As the kernel names it: superblock (``major:minor``) and path inside it.
    """

    device: str
    root: str


class MappedFile(NamedTuple):
    """A process belongs to the region if it holds and maps this very file, and is in the container.

    ``file`` is which one it is, ``device`` and ``inode`` how it shows in ``maps``. ``container_id`` is that of the
    process it was found through; empty if its cgroup has none.
    """

    file: FilePlace
    device: str
    inode: int
    container_id: str


class ClaimDirectory(SharedDirectory):
    """A `SharedDirectory` that any number of containers, also of different pods, may have."""

    __slots__ = ()


class PodFile(NamedTuple):
    """A process belongs to the region if it is in the pod and in the container, and holds and maps this very file.

    For a tree that every container has as a whole, so that neither a mount nor an open file proves anything: the pod is
    the one in the process's cgroup, the container's name is kubelet's. ``tree`` is where the tree is, ``opened`` the
    number of the file that descriptors show (`mappings.Descriptor`).
    """

    file: FilePlace
    device: str
    inode: int
    opened: int
    tree: FilePlace
    pod_uid: str
    container_name: str


#: What proves that a process belongs to a region.
Place = SharedDirectory | MappedFile | PodFile
#: Device (``major:minor``) and inode of a file in ``maps``: on some kernels neither those of ``stat`` nor of its mount.
Shown = tuple[str, int]


class Whose(NamedTuple):
    """Whose a region is, as far as its discovery knows; what it does not know is empty.

    ``account`` is never empty: all regions with the same one share a budget, and the blame for a dead writer.
    ``container`` is how log events name the container: by its directory, or by its id. ``claim`` is the UID of the
    ResourceClaim that the file belongs to, in place of a container. ``placement`` is a row of `placements.PLACEMENTS`.
    """

    account: str
    container: str
    pod_uid: str = ""
    container_name: str = ""
    claim: str = ""
    placement: str = ""


class FoundRegion(NamedTuple):
    """A region, open, and whose it is."""

    region: SharedRegion
    whose: Whose

    @property
    def path(self) -> str:
        """The region's, by which it is known."""
        return self.region.path


class Location(NamedTuple):
    """By what the processes of a region are known, and how its file shows in their ``maps``."""

    place: Place
    shown: Shown


class RegionChanges(NamedTuple):
    """What a refresh changed. ``removed`` are closed already; ``rejected`` has ``(path, why)`` if new."""

    added: list[FoundRegion]
    removed: list[SharedRegion]
    rejected: list[tuple[str, RegionRejected]]


class Discovery(Protocol):
    """One way of finding regions. No call raises anything that a tenant, or a lack of descriptors, could cause."""

    rejected: dict[str, RegionReason]  # by path: what is refused now, and why
    missing_dirs: set[str]  # those of `dirs` that do not exist: that is no error, they may come
    max_regions: int  # lowered by whoever finds that descriptors have run out

    @property
    def dirs(self) -> Sequence[str]:
        """The directories of the host that it searches."""

    @property
    def regions(self) -> Mapping[str, SharedRegion]:
        """What is found now, by path."""

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        """Its child processes."""

    @property
    def watched(self) -> bool:
        """Whether the kernel reports everything new in its directories, so that they are rarely listed."""

    def wants(self) -> float:
        """When it wants `refresh` to be called at the latest, on the monotonic clock; infinity: by the clock alone."""

    def refresh(self, *, full: bool) -> RegionChanges:
        """What changed since the last call. Called when it `wants`, and by the clock.

        With ``full`` everything is checked again; without, only what is cheap, or already known to be new.
        """

    async def settle(self) -> bool:
        """Wait for what goes on beside the passes; whether anything did, so that another refresh may bring news."""

    def locate(self, region: SharedRegion) -> Location:
        """By what its processes are known. Raises `RegionRejected`; the region is to be given to `reject` then."""

    def reject(self, region: SharedRegion, why: RegionRejected) -> None:
        """Give up a region that turned out to be refused: closed now, tried again later. Another's is none of its."""

    def close(self) -> None:
        """Close everything; it can be used again afterwards."""
