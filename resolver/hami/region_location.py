"""Location of a region's file in the kernel's terms."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from resolver.base.errors import CannotKnow, RegionRejected, WorkerFailed
from resolver.base.reasons import RegionReason
from resolver.hami.discovery import ClaimDirectory, Location, PodFile, SharedDirectory, refusal
from resolver.linux.mappings import SuperblockPath, descriptor, mapped_as, superblock_path
from resolver.linux.safe_open import open_directory, open_offered
from resolver.workers.lane import ALL

if TYPE_CHECKING:
    from resolver.hami.discovery import Shown
    from resolver.hami.region import SharedRegion
    from resolver.hami.searched_directories import Candidate
    from resolver.linux.procfs import Procfs
    from resolver.workers.lanes import TenantReader


def shared_directory(procfs: Procfs, directory_fd: int) -> SharedDirectory:
    """Return how mount tables of containers with the open directory show it.

    Not from ``stat``: on btrfs superblocks differ. Raises CannotKnow if no visible mount has it.
    """
    opened = descriptor(procfs, "self", directory_fd)
    path = superblock_path(opened, procfs.mounts("self"))
    if path is None:
        raise CannotKnow(
            f"{opened.path} is on no mount that is visible from here, so a container cannot be recognized by it"
        )
    return SharedDirectory(*path)


async def locate(reader: TenantReader, region: SharedRegion, candidate: Candidate) -> Location:
    """Return the directory as mounted by containers. Raises `RegionRejected`."""
    held, directory = f"/proc/{os.getpid()}/fd", candidate.directory
    tree = [f"{held}/{directory.root.fd}", directory.name] if candidate.shared else None
    try:
        superblock, shown, opened, of_tree = await reader.ask(
            directory.path, ALL, locate_open, f"{held}/{region.fd}", region.path, tree
        )
    except (OSError, CannotKnow, WorkerFailed) as error:
        raise refusal(error) from None
    shown = shown[0], shown[1]
    if tree is not None:
        pod_uid, _, name = directory.name.partition("_")
        place, above = SuperblockPath(*superblock), SuperblockPath(*of_tree)
        proof = PodFile(place, shown, opened=opened, tree=above, pod_uid=pod_uid, container_name=name)
        return Location(proof, shown)
    kind = ClaimDirectory if directory.ownership(candidate).claim else SharedDirectory
    return Location(kind(*superblock), shown)


def locate_open(
    procfs: Procfs, where: str, path: str, tree: tuple[str, str] | None
) -> tuple[tuple[str, str], Shown, int, tuple[str, str]]:
    """Locate a region's directory or, in a ``tree`` of all containers, the file itself.

    Also how ``maps`` shows it, its inode in descriptors, and the tree's place.
    """
    fd = open_offered(where)
    try:
        shown = mapped_as(procfs, fd)
        if tree is not None:
            return _in_tree(procfs, fd, path, *tree, shown)
        dir_fd = open_directory(os.path.dirname(path))
        try:
            return shared_directory(procfs, dir_fd), shown, 0, ("", "")
        finally:
            os.close(dir_fd)
    finally:
        os.close(fd)


def _in_tree(
    procfs: Procfs, fd: int, path: str, where: str, directory: str, shown: Shown
) -> tuple[tuple[str, str], Shown, int, tuple[str, str]]:
    root_fd = open_offered(where)
    try:
        mounts = procfs.mounts("self")
        opened = descriptor(procfs, "self", fd)
        file = superblock_path(opened, mounts)
        tree = superblock_path(descriptor(procfs, "self", root_fd), mounts)
    finally:
        os.close(root_fd)
    if file is None or tree is None:
        raise CannotKnow(f"{path} is on no mount that is visible from here")
    expected = os.path.join(tree.path, directory, os.path.basename(path))
    if (file.device, file.path) != (tree.device, expected):
        raise RegionRejected(RegionReason.GONE, "it was moved while it was opened")
    return file, shown, opened.inode, tree
