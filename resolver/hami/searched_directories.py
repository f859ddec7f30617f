"""What `resolver.hami.directory_finder` knows of the directories that it searches, and of the files in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from resolver.hami.discovery import FIRST_PAUSE, Whose
from resolver.hami.placements import KAI, ContainerProof, placement_of

if TYPE_CHECKING:
    from resolver.hami.region import SharedRegion

NOWHERE: Final = (0, 0)  # the device and inode of what is not there


class Candidate:
    """A name that ends in .cache."""

    __slots__ = (
        "accepted_at",
        "directory",
        "identity",
        "name",
        "path",
        "pause",
        "region",
        "retry_at",
        "seen_at",
        "shared",
    )

    def __init__(self, directory: Directory, name: str) -> None:
        self.directory = directory
        self.name = name
        self.path = f"{directory.path}/{name}"
        #: Whether a file of this name is one of those that every container can reach.
        self.shared = directory.root.shared or name == KAI.file
        self.region: SharedRegion | None = None
        self.pause = FIRST_PAUSE
        self.accepted_at = 0.0
        self.start_anew(NOWHERE, 0.0)

    def start_anew(self, identity: tuple[int, int], now: float) -> None:
        """Another file has this name now."""
        self.identity = identity
        self.seen_at = now
        self.retry_at = 0.0


class Directory:
    """The directory of a container, or of a claim."""

    __slots__ = ("candidates", "ctime_ns", "identity", "look_at", "name", "news", "path", "root")

    def __init__(self, root: Root, name: str) -> None:
        self.root = root
        self.name = name
        self.path = f"{root.path}/{name}"
        self.identity = NOWHERE
        self.ctime_ns = -1
        self.look_at = 0.0  # not before, unless there is news of it
        self.news = True
        self.candidates: dict[str, Candidate] = {}

    def whose(self, candidate: Candidate) -> Whose:
        """Whose a file in it is, by its name; of one that all can reach it is known that there is such a container."""
        row = placement_of(candidate.path, shared=candidate.shared)
        placement = row.name if row else ""
        if row is not None and row.proof is ContainerProof.CLAIM:
            return Whose(self.path, self.name, claim=self.name.partition("_")[0], placement=placement)
        # Neither a UID nor a Kubernetes container name can hold an underscore.
        pod_uid, _, name = self.name.partition("_")
        return Whose(self.path, self.name, pod_uid=pod_uid, container_name=name, placement=placement)


class Root:
    """A directory that is searched; ``fd`` is -1 while it is not there.

    ``known``: it is one of those that are only tried. ``shared``: containers make the entries themselves.
    """

    __slots__ = ("ctime_ns", "directories", "fd", "identity", "known", "path", "shared", "strays")

    def __init__(self, path: str, *, known: bool = False) -> None:
        self.path = path.rstrip("/") or "/"
        self.known = known
        self.shared = False
        self.fd = -1
        self.identity = NOWHERE
        self.ctime_ns = -1
        self.directories: dict[str, Directory] = {}
        self.strays: set[str] = set()
