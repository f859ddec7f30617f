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
    from resolver.linux.mappings import Descriptor
    from resolver.linux.procfs import Procfs
    from resolver.workers.lanes import TenantReader


def place_of(procfs: Procfs, fd: int) -> tuple[SuperblockPath, Descriptor]:
    """Return how mount tables of containers show an open file or directory.

    Not from ``stat``: on btrfs superblocks differ. Raises CannotKnow if no visible mount has it.
    """
    opened = descriptor(procfs, "self", fd)
    path = superblock_path(opened, procfs.mounts("self"))
    if path is None:
        raise CannotKnow(
            f"{opened.path} is on no mount that is visible from here, so a container cannot be recognized by it"
        )
    return path, opened


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
    fds = [open_offered(where)]
    try:
        shown = mapped_as(procfs, fds[0])
        fds.append(open_offered(tree[0]) if tree else open_directory(os.path.dirname(path)))
        above, _ = place_of(procfs, fds[1])
        if tree is None:
            return above, shown, 0, ("", "")
        file, opened = place_of(procfs, fds[0])
        if file != (above.device, os.path.join(above.path, tree[1], os.path.basename(path))):
            raise RegionRejected(RegionReason.GONE, "it was moved while it was opened")
        return file, shown, opened.inode, above
    finally:
        for fd in fds:
            os.close(fd)
