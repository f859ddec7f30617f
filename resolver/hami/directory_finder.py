"""Shared regions in containers directories: ``<hook>/containers/<podUID>_<containerName>/*.cache``.

Tenants can put anything into their directories, so every step is bounded: entries looked at per directory,
directories and opened files per refresh, and ever longer pauses before a refused file is tried again. What
does not fit into one refresh is the next one's beginning, so no directory can keep another one waiting for
ever.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from resolver.budget import Budgets
from resolver.errors import RegionRejected, ResolverError
from resolver.hami.discovery import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    Changes,
    FoundRegion,
    Location,
    SharedDirectory,
    Whose,
)
from resolver.hami.region import SharedRegion, open_region
from resolver.linux.safe_open import open_directory, translate
from resolver.reasons import RegionReason
from resolver.retry import longer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resolver.linux.procfs import Procfs
    from resolver.workers.supervisor import Worker

MAX_CONTAINERS = 16384  # directories in a containers directory
MAX_ENTRIES = 64  # entries looked at in one container's directory; upstream makes two or three
MAX_CACHES = 8  # of them, names that end in .cache; upstream's own monitor refuses more than two
MAX_VISITS = 1024  # container directories per refresh
MAX_OPENS = 256  # files opened per refresh, some 40 us each
REFRESH_SECONDS = 0.02  # CPU time of one refresh, but for one directory more

YOUNG = 10.0  # seconds in which a file may still be on its way to being a region
GOOD = 60.0  # seconds a region must have been accepted to be forgiven earlier refusals

#: Changes within this time before a listing may carry the same time stamp as later ones (kernel ticks).
_TICK_NS = 50_000_000
_NOT_YET = (RegionReason.NOT_INITIALIZED, RegionReason.UNKNOWN_SIZE, RegionReason.TRUNCATED)
_NOWHERE = (0, 0)


class _Candidate:
    """A name that ends in .cache."""

    __slots__ = ("accepted_at", "identity", "name", "path", "pause", "region", "retry_at", "seen_at")

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        self.region: SharedRegion | None = None
        self.pause = FIRST_PAUSE
        self.accepted_at = 0.0
        self.start_anew(_NOWHERE, 0.0)

    def start_anew(self, identity: tuple[int, int], now: float) -> None:
        """Another file has this name now."""
        self.identity = identity
        self.seen_at = now
        self.retry_at = 0.0


class _Directory:
    """A container's directory."""

    __slots__ = ("candidates", "ctime_ns", "identity", "name", "path", "root", "whose")

    def __init__(self, root: _Root, name: str) -> None:
        self.root = root
        self.name = name
        self.path = f"{root.path}/{name}"
        # Neither a UID nor a Kubernetes container name can hold an underscore.
        pod_uid, _, container_name = name.partition("_")
        self.whose = Whose(account=name, container=name, pod_uid=pod_uid, container_name=container_name)
        self.identity = _NOWHERE
        self.ctime_ns = -1
        self.candidates: dict[str, _Candidate] = {}


class _Root:
    """A containers directory; ``fd`` is -1 while it is not there."""

    __slots__ = ("ctime_ns", "directories", "fd", "identity", "path")

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/") or "/"
        self.fd = -1
        self.identity = _NOWHERE
        self.ctime_ns = -1
        self.directories: dict[str, _Directory] = {}


def list_caches(dir_fd: int) -> tuple[list[str], bool]:
    """Names that end in .cache in an open directory, and whether all entries were looked at.

    At most `MAX_CACHES` of the first `MAX_ENTRIES`. Raises OSError.
    """
    names: list[str] = []
    with os.scandir(dir_fd) as listing:
        for entry in islice(listing, MAX_ENTRIES):
            if entry.name.endswith(".cache"):
                if len(names) == MAX_CACHES:
                    return names, False
                names.append(entry.name)
        return names, next(listing, None) is None


def shared_directory(procfs: Procfs, directory_fd: int) -> SharedDirectory:
    """How the open directory would show in the mount table of a container that has it bind-mounted.

    The superblock comes from our own mount table, not from ``stat``: on btrfs the two differ. Raises
    ResolverError if the directory is not on any mount that can be seen from here.
    """
    from resolver.linux.mappings import descriptor, place_of  # `resolver slots` pays for every import

    opened = descriptor(procfs, "self", directory_fd)
    place = place_of(opened, procfs.mounts("self"))
    if place is None:
        raise ResolverError(
            f"{opened.path} is on no mount that is visible from here, so containers cannot be told by it"
        )
    return SharedDirectory(*place)


class DirectoryFinder:
    """A `resolver.hami.discovery.Discovery`: ``regions`` is kept equal to what is in the containers directories.

    ``counts`` counts each refusal once, when it is new.
    """

    workers: Sequence[Worker] = ()

    def __init__(
        self,
        containers_dirs: Sequence[str],
        procfs: Procfs,
        clock: Callable[[], float] = time.monotonic,
        budgets: Budgets | None = None,
    ) -> None:
        """``budgets`` are by directory name; files are opened on theirs."""
        self.regions: dict[str, SharedRegion] = {}
        self.rejected: dict[str, RegionReason] = {}
        self.counts: Counter[RegionReason] = Counter()
        self.missing_dirs: set[str] = set()
        self.max_regions = sys.maxsize
        self._procfs = procfs
        self._roots = [_Root(path) for path in dict.fromkeys(containers_dirs)]
        self._order: list[_Directory] = []
        self._accepted: dict[str, _Candidate] = {}
        self._next = 0  # where in _order the next refresh begins
        self._opens_left = 0
        self._full_left = 0  # directories that are still to be listed anew
        self._clock = clock
        self._budgets = budgets or Budgets()
        self._changes = Changes([], [], [])

    @property
    def dirs(self) -> Sequence[str]:
        """The containers directories."""
        return [root.path for root in self._roots]

    def refresh(self, *, full: bool) -> Changes:
        """Look again. Not ``full``: directories whose time stamp changed, and refused files that are due.

        With ``full`` everything is listed anew, which also finds what a coarse time stamp hid. Raises nothing
        that a tenant, or a lack of descriptors, could cause.
        """
        changes = self._changes = Changes([], [], [])
        for root in self._roots:
            self._refresh_root(root, full=full)
        self._opens_left = MAX_OPENS
        now, total, until = self._clock(), len(self._order), time.thread_time() + REFRESH_SECONDS
        if full:
            self._full_left = total
        for _ in range(min(total, MAX_VISITS)):
            self._visit(self._order[self._next % total], now, full=self._full_left > 0)
            if not self._opens_left:
                break  # the same directory first, next time: its other files have not been looked at
            self._full_left = max(0, self._full_left - 1)
            self._next = (self._next + 1) % total
            if time.thread_time() >= until:
                break
        return changes

    async def settle(self) -> bool:
        """Nothing goes on beside the passes."""
        return False

    def locate(self, region: SharedRegion) -> Location:
        """The directory as containers have it mounted. Raises `RegionRejected`."""
        from resolver.linux.mappings import mapped_as

        try:
            dir_fd = open_directory(os.path.dirname(region.path))
            try:
                directory = shared_directory(self._procfs, dir_fd)
            finally:
                os.close(dir_fd)
            return Location(directory, mapped_as(self._procfs, region.fd))
        except (OSError, ResolverError) as error:
            detail = f"its directory cannot be used: {error}"
            raise RegionRejected(RegionReason.IO_ERROR, detail) from None

    def reject(self, region: SharedRegion, why: RegionRejected) -> None:
        """Give up a region: closed now, tried again later."""
        candidate = self._accepted.get(region.path)
        if candidate is not None and candidate.region is region:
            self._changes = Changes([], [], [])  # this is no news to the caller
            self._release(candidate)
            self._refuse(candidate, why, self._clock())

    def close(self) -> None:
        """Close everything; the finder can be used again afterwards."""
        for root in self._roots:
            self._drop_root(root)
        self._order = []

    # -- containers directories ---------------------------------------------------------------------

    def _refresh_root(self, root: _Root, *, full: bool) -> None:
        try:
            info = os.stat(root.path)
            if (info.st_dev, info.st_ino) != root.identity:
                self._drop_root(root)
            if root.fd < 0:
                root.fd = os.open(root.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                info = os.fstat(root.fd)
                root.identity = info.st_dev, info.st_ino
            if full or info.st_ctime_ns != root.ctime_ns:
                root.ctime_ns = _stamp(info)
                self._list_root(root)
                self._order = [entry for each in self._roots for entry in each.directories.values()]
                self._next %= len(self._order) or 1
        except (FileNotFoundError, NotADirectoryError):
            self._drop_root(root)
            self.missing_dirs.add(root.path)
            return
        except OSError as error:
            root.ctime_ns = -1
            self._report(root.path, translate(error))
        self.missing_dirs.discard(root.path)

    def _list_root(self, root: _Root) -> None:
        seen: set[str] = set()
        with os.scandir(root.fd) as listing:
            for entry in islice(listing, MAX_CONTAINERS):
                pod_uid, _, container_name = entry.name.partition("_")
                # A symbolic link is kept as well: the visit refuses it, and so it is counted.
                if pod_uid and container_name and (entry.is_symlink() or entry.is_dir(follow_symlinks=False)):
                    seen.add(entry.name)
            complete = next(listing, None) is None
        self._report_unless(complete, root.path, MAX_CONTAINERS)
        for name in seen - root.directories.keys():
            root.directories[name] = _Directory(root, name)
        if complete:
            for name in root.directories.keys() - seen:
                directory = root.directories.pop(name)
                self._drop_candidates(directory)
                self.rejected.pop(directory.path, None)

    def _drop_root(self, root: _Root) -> None:
        for directory in root.directories.values():
            self._drop_candidates(directory)
            self.rejected.pop(directory.path, None)
        root.directories.clear()
        if root.fd >= 0:
            os.close(root.fd)
            self._order = [entry for entry in self._order if entry.root is not root]
        root.fd, root.identity, root.ctime_ns = -1, _NOWHERE, -1
        self.rejected.pop(root.path, None)

    # -- one container's directory ------------------------------------------------------------------

    def _visit(self, directory: _Directory, now: float, *, full: bool) -> None:
        try:
            info = os.stat(directory.name, dir_fd=directory.root.fd, follow_symlinks=False)
        except OSError as error:
            self._directory_failed(directory, translate(error))
            return
        if (info.st_dev, info.st_ino) != directory.identity:
            self._drop_candidates(directory)
            directory.identity, directory.ctime_ns = (info.st_dev, info.st_ino), -1
        changed = full or info.st_ctime_ns != directory.ctime_ns
        if not changed and not any(_due(candidate, now) for candidate in directory.candidates.values()):
            return
        try:
            dir_fd = open_directory(directory.name, directory.root.fd)
        except RegionRejected as why:
            self._directory_failed(directory, why)
            return
        try:
            for candidate in list(directory.candidates.values()):
                self._check(directory, candidate, dir_fd, now)
            if changed:
                directory.ctime_ns = _stamp(info)
                for candidate in self._list(directory, dir_fd):
                    self._check(directory, candidate, dir_fd, now)
        except OSError as error:
            directory.ctime_ns = -1
            self._report(directory.path, translate(error))
        finally:
            os.close(dir_fd)

    def _directory_failed(self, directory: _Directory, why: RegionRejected) -> None:
        directory.ctime_ns = -1
        if why.reason is not RegionReason.IO_ERROR:  # a lack of descriptors says nothing about the regions
            self._drop_candidates(directory)
        if why.reason is not RegionReason.GONE:
            self._report(directory.path, why)

    def _list(self, directory: _Directory, dir_fd: int) -> list[_Candidate]:
        """Names that were not known; those that are gone were taken off before."""
        names, complete = list_caches(dir_fd)
        new = [name for name in names if name not in directory.candidates]
        room = MAX_CACHES - len(directory.candidates)
        self._report_unless(complete and len(new) <= room, directory.path, MAX_ENTRIES)
        added = [_Candidate(name, f"{directory.path}/{name}") for name in new[:room]]
        directory.candidates.update({candidate.name: candidate for candidate in added})
        return added

    def _check(self, directory: _Directory, candidate: _Candidate, dir_fd: int, now: float) -> None:
        """Hold a name against the file that has it now; what is in a region, `SharedRegion.read` looks at."""
        try:
            info = os.stat(candidate.name, dir_fd=dir_fd, follow_symlinks=False)
        except OSError:
            self._drop(directory, candidate)
            return
        if (info.st_dev, info.st_ino) != candidate.identity:
            self._release(candidate)
            candidate.start_anew((info.st_dev, info.st_ino), now)
        if _due(candidate, now) and self._opens_left and not self._budgets.over(directory.name):
            self._opens_left -= 1
            with self._budgets.charge(directory.name):
                self._try(directory.whose, candidate, dir_fd, now)

    def _try(self, whose: Whose, candidate: _Candidate, dir_fd: int, now: float) -> None:
        try:
            if len(self.regions) >= self.max_regions:
                detail = "there are not enough descriptors for more regions: raise the limit (ulimit -n)"
                raise RegionRejected(RegionReason.IO_ERROR, detail)
            region = open_region(dir_fd, candidate.name, candidate.path)
            try:
                region.read()
            except RegionRejected:
                region.close()
                raise
        except RegionRejected as why:
            self._refuse(candidate, why, now)
            return
        candidate.region, candidate.identity, candidate.accepted_at = region, region.identity, now
        self.rejected.pop(candidate.path, None)
        self.regions[candidate.path] = region
        self._accepted[candidate.path] = candidate
        self._changes.added.append(FoundRegion(region, whose))

    # -- refusals -----------------------------------------------------------------------------------

    def _refuse(self, candidate: _Candidate, why: RegionRejected, now: float) -> None:
        if why.reason is RegionReason.GONE:
            candidate.start_anew(_NOWHERE, now)  # the next listing takes it off, or finds its successor
            return
        self._report(candidate.path, why)
        if why.reason in _NOT_YET and now - candidate.seen_at < YOUNG:
            candidate.retry_at = now
            return
        if candidate.accepted_at and now - candidate.accepted_at > GOOD:
            candidate.pause = FIRST_PAUSE
        candidate.retry_at = now + candidate.pause
        candidate.pause = longer(candidate.pause, FIRST_PAUSE, LONGEST_PAUSE)

    def _report(self, path: str, why: RegionRejected) -> None:
        if self.rejected.get(path) is not why.reason:
            self.rejected[path] = why.reason
            self.counts[why.reason] += 1
            self._changes.rejected.append((path, why))

    def _report_unless(self, complete: bool, path: str, limit: int) -> None:  # noqa: FBT001
        if complete:
            self.rejected.pop(path, None)
            return
        detail = (
            f"it has more entries than the {limit} that are looked at, or more than {MAX_CACHES} .cache files"
        )
        self._report(path, RegionRejected(RegionReason.TOO_MANY_ENTRIES, detail))

    # -- letting go ---------------------------------------------------------------------------------

    def _release(self, candidate: _Candidate) -> None:
        region, candidate.region = candidate.region, None
        if region is not None:
            region.close()
            self._accepted.pop(candidate.path, None)
            if self.regions.pop(candidate.path, None) is not None:
                self._changes.removed.append(region)

    def _drop(self, directory: _Directory, candidate: _Candidate) -> None:
        self._release(candidate)
        self.rejected.pop(candidate.path, None)
        directory.candidates.pop(candidate.name, None)

    def _drop_candidates(self, directory: _Directory) -> None:
        for candidate in list(directory.candidates.values()):
            self._drop(directory, candidate)


def _due(candidate: _Candidate, now: float) -> bool:
    return candidate.region is None and now >= candidate.retry_at


def _stamp(info: os.stat_result) -> int:
    """A directory's change time (which no tenant can set), or -1 while later changes could carry the same."""
    return info.st_ctime_ns if time.time_ns() - info.st_ctime_ns > _TICK_NS else -1
