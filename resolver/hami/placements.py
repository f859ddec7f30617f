"""Places of the cache files of each scheduler that slices GPUs with HAMi-core, and limits for reading them.

Only place, mount and proof of the container differ. A new kind of proof adds a `ContainerProof`, a `Proof` in
`resolver.hami.discovery`, and its check in `resolver.hami.slot_owner`.
"""

import os
import re
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

#: The value of ``containers_dir`` that stands for every directory in the table.
AUTO = "auto"
MAX_CONTAINERS = 16384  # directories in a containers directory
MAX_ENTRIES = 64  # entries read in one container's directory; upstream makes two or three
MAX_CACHES = 8  # entries that end in .cache; upstream's own monitor refuses more than two

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class ContainerProof(StrEnum):
    """Kinds of proof of a process's container."""

    MOUNT = "mount"  # its directory is bind-mounted into that container alone
    CLAIM = "claim"  # its directory is bind-mounted into every container that has the claim
    POD = "pod"  # every container has all directories: the pod in the cgroup, and kubelet's name of the container
    MAPPING = "mapping"  # the file is in the container's file system: found by the processes that map it


class Placement(NamedTuple):
    """One placement: ``auto`` searches ``dirs`` of the host; ``path`` matches ``<directory>/<entry>/<file>``.

    ``file``: the only accepted name, if any.
    """

    name: str
    project: str
    proof: ContainerProof
    dirs: tuple[str, ...]
    path: re.Pattern[str]
    file: str = ""


#: The first matching row wins.
PLACEMENTS = (
    Placement(
        name="kai",
        project="KAI scheduler with KAI-resource-isolator",
        proof=ContainerProof.POD,
        dirs=("/usr/local/vgpu/containers",),
        path=re.compile(r"/containers/[^/_]+_[^/]+/usage\.cache$"),
        file="usage.cache",
    ),
    Placement(
        name="dra",
        project="HAMi DRA driver (ResourceClaims)",
        proof=ContainerProof.CLAIM,
        dirs=("/usr/local/vgpu/claims", "/var/lib/hami/vgpu/claims"),
        path=re.compile(rf"/claims/{_UUID}(?:_[^/]+)?/[^/]+\.cache$"),
    ),
    Placement(
        name="koordinator",
        project="Koordinator's koordlet (HamiCoreVGPUMonitor)",
        proof=ContainerProof.MOUNT,
        dirs=("/usr/local/vgpu/containers",),
        path=re.compile(r"/containers/([^/_]+_[^/]+)/\1\.cache$"),
    ),
    Placement(
        name="volcano",
        project="Volcano vGPU device plugin",
        proof=ContainerProof.MOUNT,
        dirs=(
            "/usr/local/vgpu/vgpu/containers",
            "/tmp/vgpu/vgpu/containers",  # noqa: S108 - searched only if root made it
            "/tmp/vgpu/containers",  # noqa: S108
        ),
        path=re.compile(r"/vgpu/vgpu/containers/[^/_]+_[^/]+/[^/]+\.cache$|^/tmp/vgpu/containers/.*\.cache$"),
    ),
    Placement(
        name="hami",
        project="HAMi device plugin",
        proof=ContainerProof.MOUNT,
        dirs=("/usr/local/vgpu/containers", "/var/lib/hami/vgpu/containers"),
        path=re.compile(r"/[^/_]+_[^/]+/[^/]+\.cache$"),
    ),
    Placement(
        name="bare",
        project="no scheduler: Docker, or HAMi-core without its environment",
        proof=ContainerProof.MAPPING,
        dirs=(),
        path=re.compile(r"/cudevshr\.cache$"),
        file="cudevshr.cache",
    ),
)

BY_NAME = {row.name: row for row in PLACEMENTS}
KAI, BARE = BY_NAME["kai"], BY_NAME["bare"]
#: Every directory that ``auto`` searches, each once.
KNOWN_DIRS = tuple(dict.fromkeys(directory for row in reversed(PLACEMENTS) for directory in row.dirs))

_CLAIM = re.compile(rf"{_UUID}(?:_.+)?")


def placement_of(path: str) -> Placement | None:
    """Return the placement of a file with this host path, if any."""
    rows = (row for row in PLACEMENTS if row.proof is not ContainerProof.MAPPING)
    return next((row for row in rows if row.path.search(path)), None)


def is_entry(directory: str, name: str) -> bool:
    """Check by name if a searched directory's entry can have cache files."""
    if os.path.basename(directory) == "claims":
        return _CLAIM.fullmatch(name) is not None
    pod_uid, _, container_name = name.partition("_")
    return bool(pod_uid and container_name)


def list_caches(dir_fd: int) -> tuple[list[str], bool]:
    """Return the names that end in .cache, and True if the listing is complete. Raises OSError."""
    names: list[str] = []
    with os.scandir(dir_fd) as listing:
        for entry in islice(listing, MAX_ENTRIES):
            if entry.name.endswith(".cache"):
                if len(names) == MAX_CACHES:
                    return names, False
                names.append(entry.name)
        return names, next(listing, None) is None


def may_be_mounted(root: bytes) -> bool:
    """Check cheaply if a mount's root may be an entry of a searched directory."""
    above, _, name = root.rpartition(b"/")
    return b"_" in name or above.endswith(b"/claims")


def searched(containers_dir: tuple[str, ...]) -> tuple[str, ...]:
    """Return directories to search with this setting."""
    return tuple(
        dict.fromkeys(
            directory for path in containers_dir for directory in (KNOWN_DIRS if path == AUTO else (path,))
        )
    )
