"""Directories that tenants fill, and their cache files: opened by a lane, then accepted or refused for a while."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence

from resolver.base.errors import CannotKnow, RegionRejected, WorkerFailed
from resolver.base.reasons import RegionReason
from resolver.base.retry import longer
from resolver.base.text import printable
from resolver.containers.log_names import ContainerNames
from resolver.hami.directory_reads import hold_file, locate_open, take
from resolver.hami.discovery import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    NOWHERE,
    ClaimDirectory,
    Discovery,
    FoundRegion,
    Location,
    Ownership,
    Place,
    PodFile,
    SharedDirectory,
    refusal,
)
from resolver.hami.placements import ContainerProof, placement_of
from resolver.hami.region import SharedRegion, adopt_by
from resolver.linux.mappings import SuperblockPath
from resolver.workers.lane import ALL
from resolver.workers.lanes import TenantReader

GOOD = 60.0  # seconds of acceptance after which a region's earlier refusals are forgiven
#: Shortest and longest pause in seconds before a half-made file is tried again.
SOON, LATER = 0.005, 0.25
STRAY = "kubelet has no such container here: its pod is gone, or another one's process made the directory"
_NOT_YET = (
    RegionReason.NOT_INITIALIZED,
    RegionReason.UNKNOWN_SIZE,
    RegionReason.TRUNCATED,
    RegionReason.NOT_ON_NODE,  # kubelet creates a container's log name when it starts
)
HALF_MADE_SECONDS = 2.0  # after a file's last change in which HAMi may still write size and header


class Candidate:
    """A file whose name ends in .cache; ``path`` is printable. ``shared``: any container may reach the file."""

    def __init__(
        self, directory: Directory, name: str, identity: tuple[int, int], now: float, age: float
    ) -> None:
        """Create a candidate for a directory's file, seen at ``now`` and changed ``age`` seconds before."""
        self.directory, self.name, self.identity = directory, name, identity
        self.path = f"{directory.path}/{printable(name)}"
        self.region: SharedRegion | None = None
        self.seen_at, self.half_made_until = now, now + HALF_MADE_SECONDS - max(0.0, age)
        self.half_made = False  # a file that stays half-made is reported
        self.pause, self.retry_at, self.accepted_at = FIRST_PAUSE, 0.0, 0.0
        row = placement_of(self.path)
        self.shared = directory.root.shared or (row is not None and row.proof is ContainerProof.POD)
        #: From the directory's name; kubelet confirms it if all containers reach the directory.
        self.ownership = Ownership(directory.path, directory.name, placement=row.name if row else "")
        # Neither a UID nor a Kubernetes container name can hold an underscore.
        uid, _, container = directory.name.partition("_")
        if row is not None and row.proof is ContainerProof.CLAIM:
            self.ownership = self.ownership._replace(claim=uid)
        else:
            self.ownership = self.ownership._replace(pod_uid=uid, container_name=container)


class Directory(Place):
    """Directory of a container or claim."""

    def __init__(self, root: Root, name: str) -> None:
        super().__init__()
        self.path = self.key = f"{root.path}/{name}"
        self.identity = NOWHERE
        self.root = root
        self.name = name
        self.candidates: dict[str, Candidate] = {}


class Root(Place):
    """A directory to search; ``fd`` is -1 while it is missing.

    ``known``: one of the default directories. ``shared``: containers create the entries.
    """

    def __init__(self, path: str, *, known: bool = False) -> None:
        super().__init__()
        self.path = path.rstrip("/") or "/"
        self.key = f"{self.path}/"  # the watch's key; keys of containers' directories lack the slash
        self.identity = NOWHERE
        self.known = known
        self.shared = False
        self.fd = -1
        self.directories: dict[str, Directory] = {}
        self.strays: set[str] = set()

    @property
    def link(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"


def may_be_searched(root: Root, info: os.stat_result, roots: Sequence[Root]) -> bool:
    """Check that a default directory duplicates no other root, and that no user made it."""
    others = (tree for tree in roots if tree is not root and tree.fd >= 0)
    if any(other.identity == (info.st_dev, info.st_ino) for other in others):
        return False
    parts = root.path.split("/")
    if parts[1] != "tmp":
        return True
    above = [os.lstat("/".join(parts[:end])) for end in range(3, len(parts) + 1)]
    return all(stat.S_ISDIR(directory.st_mode) and directory.st_uid == 0 for directory in above)


class Candidates:
    """Accepts or refuses candidates for the regions of a ``discovery``."""

    def __init__(
        self,
        discovery: Discovery,
        names: ContainerNames,
        reader: TenantReader,
        clock: Callable[[], float],
    ) -> None:
        self._discovery, self._clock = discovery, clock
        self._names, self._reader = names, reader

    async def check(self, candidate: Candidate) -> None:
        """Open the file if it is new or its retry is due. `SharedRegion.read` checks the content."""
        now = self._clock()
        if candidate.region is not None or (now < candidate.retry_at and not candidate.half_made):
            return
        try:
            region, location = await self._open(candidate)
        except (RegionRejected, OSError, CannotKnow, WorkerFailed) as error:
            if isinstance(error, WorkerFailed) and error.waiting:
                candidate.retry_at = now + FIRST_PAUSE
            else:
                self.refuse(candidate, refusal(error))
            return
        candidate.region, candidate.identity, candidate.accepted_at = region, region.identity, now
        self._discovery.accept(FoundRegion(region, candidate.ownership, location))

    async def _open(self, candidate: Candidate) -> tuple[SharedRegion, Location]:
        if not candidate.name.isprintable():
            raise RegionRejected(RegionReason.BAD_NAME, "its name has characters that cannot be printed")
        directory, ownership = candidate.directory, candidate.ownership
        if candidate.shared:
            self._names.refresh()
            if not self._names.has(ownership.pod_uid, ownership.container_name):
                raise RegionRejected(RegionReason.NOT_ON_NODE, self._names.trouble or STRAY)
        self._discovery.check_room()
        payer = directory.path
        held = await self._reader.ask(
            payer, payer, hold_file, directory.root.link, directory.name, candidate.name
        )
        region = await adopt_by(self._reader, payer, take(*held), candidate.path)
        try:
            return region, await self.locate(candidate, region)
        except BaseException:
            region.close()
            raise

    async def locate(self, candidate: Candidate, region: SharedRegion) -> Location:
        """Return the directory as containers mount it, or the file if all share a tree. Raises `RegionRejected`."""
        directory, owner = candidate.directory, candidate.ownership
        tree = (directory.root.link, directory.name) if candidate.shared else None
        place, (device, inode), opened, above = await self._reader.ask(
            directory.path, ALL, locate_open, region.link, region.path, tree
        )
        if not candidate.shared:
            kind = ClaimDirectory if owner.claim else SharedDirectory
            return Location(kind(*place), (device, inode))
        file, mount = SuperblockPath(*place), SuperblockPath(*above)
        proof = PodFile(file, (device, inode), opened, mount, owner.pod_uid, owner.container_name)
        return Location(proof, proof.shown)

    def refuse(self, candidate: Candidate, why: RegionRejected) -> None:
        """Reject a file for now and schedule a retry."""
        now, rejected = self._clock(), self._discovery.rejected
        if why.reason is RegionReason.GONE:
            # The next listing drops or replaces the candidate.
            candidate.identity, candidate.retry_at = NOWHERE, now + SOON
            return
        if candidate.half_made:
            rejected.pop(candidate.path, None)
        candidate.half_made = why.reason in _NOT_YET and now < candidate.half_made_until
        if candidate.half_made:
            rejected[candidate.path] = why.reason
            candidate.retry_at = now + min(max(SOON, now - candidate.seen_at), LATER)
            return
        self._discovery.report(candidate.path, why)
        if candidate.accepted_at and now - candidate.accepted_at > GOOD:
            candidate.pause = FIRST_PAUSE
        candidate.retry_at = now + candidate.pause
        candidate.pause = longer(candidate.pause, FIRST_PAUSE, LONGEST_PAUSE)

    def release(self, candidate: Candidate) -> None:
        if candidate.region is not None:
            candidate.region = None
            self._discovery.release(candidate.path)

    def drop(self, directory: Directory, listed: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Drop all files of a directory but those ``listed`` by name and identity."""
        for name, candidate in list(directory.candidates.items()):
            if (listed or {}).get(name) != candidate.identity:
                self.release(candidate)
                if name not in (listed or {}):  # a tenant's bad files under one name are reported once
                    self._discovery.rejected.pop(candidate.path, None)
                del directory.candidates[name]
