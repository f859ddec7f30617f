"""Directories that tenants fill, and their files, as the search knows them."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence

from resolver.base.text import printable
from resolver.hami.discovery import FIRST_PAUSE, NOWHERE, Ownership, Place
from resolver.hami.placements import ContainerProof, placement_of
from resolver.hami.region import SharedRegion

HALF_MADE_SECONDS = 2.0  # after a file was made, HAMi may not have written its size and header yet


class Candidate:
    """A name ending in .cache; ``path`` is printable."""

    def __init__(self, directory: Directory, name: str) -> None:
        self.directory = directory
        self.name = name
        self.path = f"{directory.path}/{printable(name)}"
        self.placement = placement_of(self.path)
        self.region: SharedRegion | None = None
        self.pause = FIRST_PAUSE
        self.accepted_at = 0.0
        self.half_made = False  # if this lasts, the refusal is reported
        self.start_anew(NOWHERE, 0.0)

    @property
    def shared(self) -> bool:
        """True if every container may reach the file."""
        kai = self.placement is not None and self.placement.proof is ContainerProof.POD
        return kai or self.directory.root.shared

    def start_anew(self, identity: tuple[int, int], now: float, age: float = HALF_MADE_SECONDS) -> None:
        """Start over with another file, made ``age`` seconds ago."""
        self.identity = identity
        self.seen_at = now
        self.half_made_until = now + HALF_MADE_SECONDS - max(0.0, age)
        self.retry_at = 0.0


class Directory(Place):
    """Directory of a container or claim."""

    def __init__(self, root: Root, name: str) -> None:
        super().__init__()
        self.path = self.key = f"{root.path}/{name}"
        self.identity = NOWHERE
        self.root = root
        self.name = name
        self.candidates: dict[str, Candidate] = {}

    def retry_at(self) -> float:
        """Return when a refused file is next due, or infinity."""
        candidates = self.candidates.values()
        return min((file.retry_at for file in candidates if file.region is None), default=math.inf)

    def ownership(self, candidate: Candidate) -> Ownership:
        """Return a file's owner by its directory's name, confirmed by kubelet where all containers reach it."""
        row = candidate.placement
        placement = row.name if row else ""
        if row is not None and row.proof is ContainerProof.CLAIM:
            return Ownership(self.path, self.name, claim=self.name.partition("_")[0], placement=placement)
        # Neither a UID nor a Kubernetes container name can hold an underscore.
        pod_uid, _, name = self.name.partition("_")
        return Ownership(self.path, self.name, pod_uid=pod_uid, container_name=name, placement=placement)


class Root(Place):
    """Searched directory; ``fd`` is -1 while missing.

    ``known``: one of the usual places. ``shared``: containers create the entries.
    """

    def __init__(self, path: str, *, known: bool = False) -> None:
        super().__init__()
        self.path = path.rstrip("/") or "/"
        self.key = f"{self.path}/"  # of its watch; containers' directories have keys without the slash
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
    """Accept an automatic directory that is no duplicate and not made by users."""
    others = (tree for tree in roots if tree is not root and tree.fd >= 0)
    if any(other.identity == (info.st_dev, info.st_ino) for other in others):
        return False
    parts = root.path.split("/")
    if parts[1] != "tmp":
        return True
    above = [os.lstat("/".join(parts[:end])) for end in range(3, len(parts) + 1)]
    return all(stat.S_ISDIR(directory.st_mode) and directory.st_uid == 0 for directory in above)
