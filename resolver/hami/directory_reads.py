"""Lane reads (`resolver.workers.lanes`) of directories that tenants fill.

The kernel can delay them: a directory never shrinks, and is locked while a large one inside it is removed.
"""

import errno
import os
from contextlib import suppress
from itertools import islice
from typing import Any

from resolver.base.errors import CannotKnow, RegionRejected
from resolver.base.reasons import RegionReason
from resolver.hami.placements import is_entry, list_caches
from resolver.linux.mappings import Descriptor, Shown, SuperblockPath, descriptor, mapped_as, superblock_path
from resolver.linux.procfs import Procfs
from resolver.linux.safe_open import closing, let_go, open_directory, open_offered, open_plain, take_offered
from resolver.workers.lane import OpenFile

_PAGE_BYTES = 100_000  # of names in one answer


def list_entries(
    _procfs: Procfs, where: str, path: str, most: int, after: str
) -> tuple[list[str], bool, bool]:
    """Return the sorted names after ``after`` of possible container directories. Raises OSError.

    The first bool is True if these are the last names, the second if there are at most ``most`` entries.
    """
    names = []
    with (
        closing(os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd,
        os.scandir(fd) as listing,
    ):
        for entry in islice(listing, most):
            # A symbolic link is kept, too: opening it is refused and reported. Kubelet and device plugins make
            # printable names only.
            is_name = entry.name > after and entry.name.isprintable() and is_entry(path, entry.name)
            if is_name and (entry.is_symlink() or entry.is_dir(follow_symlinks=False)):
                names.append(entry.name)
        complete = next(listing, None) is None
    names.sort()
    page, room = [], _PAGE_BYTES
    for name in names:
        room -= 6 * len(name)  # the most that JSON takes
        if room < 0:
            break
        page.append(name)
    return page, len(page) == len(names), complete


def look_into(_procfs: Procfs, where: str, name: str, known: list[str]) -> tuple[Any, ...]:
    """Return a directory's device, inode, cache files, and True if it was read completely.

    A file is ``[name, device, inode, change time]``; ``known`` names are included. Raises `RegionRejected`, OSError.
    """
    with closing(_open_below(where, name)) as fd:
        info = os.fstat(fd)
        names, complete = list_caches(fd)
        files = []
        for candidate in dict.fromkeys(known + names):
            with suppress(OSError):
                file = os.stat(candidate, dir_fd=fd, follow_symlinks=False)
                files.append([candidate, file.st_dev, file.st_ino, file.st_ctime])
        return info.st_dev, info.st_ino, files, complete


def hold_directory(_procfs: Procfs, where: str, name: str) -> tuple[OpenFile, int, int]:
    """Open a directory for the daemon, with device and inode. Raises `RegionRejected` and OSError."""
    return _held(_open_below(where, name))


def hold_file(_procfs: Procfs, where: str, directory: str, name: str) -> tuple[OpenFile, int, int]:
    """Open a plain file for the daemon, with device and inode. Raises `RegionRejected` and OSError."""
    with closing(_open_below(where, directory)) as fd:
        return _held(open_plain(fd, name)[0])


def open_held(_procfs: Procfs, where: str) -> tuple[OpenFile, int, int]:
    """Open a file for the daemon, which holds it by O_PATH."""
    return _held(open_offered(where))


def _held(fd: int) -> tuple[OpenFile, int, int]:
    info = os.fstat(fd)
    return OpenFile(fd), info.st_dev, info.st_ino


def receive(held: OpenFile | str, flags: int = 0) -> int:
    """Return a descriptor of a lane's open file. Raises `RegionRejected` and OSError."""
    try:
        return held.fd if isinstance(held, OpenFile) else take_offered(held, flags)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EBADF, errno.ENOENT):
            raise
        raise RegionRejected(RegionReason.GONE, "the lane has closed it") from None


def take(held: OpenFile | str, device: int, inode: int) -> int:
    """Return a held file's descriptor. Raises `RegionRejected` and OSError."""
    fd = receive(held)
    info = os.fstat(fd)
    if (info.st_dev, info.st_ino) != (device, inode):
        let_go(fd)
        raise RegionRejected(RegionReason.GONE, "the lane has closed it")
    return fd


def _open_below(where: str, name: str) -> int:
    with closing(os.open(where, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as above:
        return open_directory(name, above)


def place_of(procfs: Procfs, fd: int) -> tuple[SuperblockPath, Descriptor]:
    """Return how mount tables of containers show an open file or directory.

    Not from ``stat``: on btrfs its device differs. Raises CannotKnow if no visible mount has the file.
    """
    opened = descriptor(procfs, "self", fd)
    path = superblock_path(opened, procfs.mounts("self"))
    if path is None:
        raise CannotKnow(
            f"{opened.path} is on no mount that is visible from here, so a container cannot be recognized by it"
        )
    return path, opened


def locate_open(
    procfs: Procfs, where: str, path: str, tree: tuple[str, str] | None
) -> tuple[tuple[str, str], Shown, int, tuple[str, str]]:
    """Locate a region's directory or, in a ``tree`` of all containers, the file itself.

    Also return how ``maps`` shows the file, its inode in ``fdinfo``, and the tree's place.
    """
    with closing(open_offered(where)) as fd:
        shown = mapped_as(procfs, fd)
        with closing(open_offered(tree[0]) if tree else open_directory(os.path.dirname(path))) as directory:
            above, _ = place_of(procfs, directory)
        if tree is None:
            return above, shown, 0, ("", "")
        file, opened = place_of(procfs, fd)
        if file != (above.device, os.path.join(above.path, tree[1], os.path.basename(path))):
            raise RegionRejected(RegionReason.GONE, "it was moved while it was opened")
        return file, shown, opened.inode, above
