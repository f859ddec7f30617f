"""Where a region's file is, as the kernel names it: by what a process that has it is recognized."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from resolver.errors import RegionRejected, ResolverError
from resolver.hami.discovery import ClaimDirectory, Location, PodFile, SharedDirectory
from resolver.linux.mappings import descriptor, mapped_as, place_of
from resolver.linux.safe_open import open_directory
from resolver.reasons import RegionReason

if TYPE_CHECKING:
    from resolver.hami.discovery import Shown
    from resolver.hami.region import SharedRegion
    from resolver.hami.searched_directories import Candidate, Directory
    from resolver.linux.procfs import Procfs


def shared_directory(procfs: Procfs, directory_fd: int) -> SharedDirectory:
    """How the open directory would show in the mount table of a container that has it bind-mounted.

    The superblock comes from our own mount table, not from ``stat``: on btrfs the two differ. Raises
    ResolverError if the directory is not on any mount that can be seen from here.
    """
    opened = descriptor(procfs, "self", directory_fd)
    place = place_of(opened, procfs.mounts("self"))
    if place is None:
        raise ResolverError(
            f"{opened.path} is on no mount that is visible from here, so a container cannot be recognized by it"
        )
    return SharedDirectory(*place)


def locate(procfs: Procfs, region: SharedRegion, candidate: Candidate | None) -> Location:
    """The directory as containers have it mounted; ``candidate`` is the name that the region was accepted under.

    Raises `RegionRejected`.
    """
    try:
        shown = mapped_as(procfs, region.fd)
        if candidate is not None and candidate.shared:
            return Location(_pod_file(procfs, region, candidate.directory, shown), shown)
        dir_fd = open_directory(os.path.dirname(region.path))
        try:
            directory = shared_directory(procfs, dir_fd)
        finally:
            os.close(dir_fd)
        if candidate is not None and candidate.directory.whose(candidate).claim:
            directory = ClaimDirectory(*directory)
        return Location(directory, shown)
    except RegionRejected:
        raise
    except (OSError, ResolverError) as error:
        detail = f"its directory cannot be used: {error}"
        raise RegionRejected(RegionReason.IO_ERROR, detail) from None


def _pod_file(procfs: Procfs, region: SharedRegion, directory: Directory, shown: Shown) -> PodFile:
    """The very file that is open, and the tree that it is in, as every container has it."""
    mounts = procfs.mounts("self")
    opened = descriptor(procfs, "self", region.fd)
    file = place_of(opened, mounts)
    tree = place_of(descriptor(procfs, "self", directory.root.fd), mounts)
    if file is None or tree is None:
        raise ResolverError(f"{directory.root.path} is on no mount that is visible from here")
    expected = os.path.join(tree.path, directory.name, os.path.basename(region.path))
    if (file.device, file.path) != (tree.device, expected):
        raise RegionRejected(RegionReason.GONE, "it was moved while it was opened")
    pod_uid, _, name = directory.name.partition("_")
    return PodFile(file, *shown, opened=opened.inode, tree=tree, pod_uid=pod_uid, container_name=name)
