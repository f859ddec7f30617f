"""Shared regions in directories of the host, one below for each container or claim: ``<directory>/<entry>/*.cache``.

Which directories, and what the names of entries say, is in `resolver.hami.placements`. Tenants can put anything into
their directories, so every step is bounded: entries read per directory, directories and opened files per refresh,
and ever longer pauses before a refused file is tried again. What does not fit into one refresh is the next one's
beginning, so no directory can keep another one waiting for ever.

Where containers make the entries themselves, beside each other's, anybody can fill a listing and take any name. There
the entries of kubelet's containers are opened by their names, and the rest is only reported.
"""

from __future__ import annotations

import math
import os
import stat
import sys
import time
from itertools import islice
from typing import TYPE_CHECKING

from resolver.budget import Budgets, Slices
from resolver.containers.log_names import ContainerNames
from resolver.errors import RegionRejected
from resolver.hami.directory_listing import (
    MAX_CACHES,
    MAX_CONTAINERS,
    MAX_ENTRIES,
    change_stamp,
    list_caches,
)
from resolver.hami.placements import AUTO, KAI, KNOWN_DIRS, is_entry
from resolver.hami.region import open_region
from resolver.hami.region_location import locate
from resolver.hami.region_register import RegionRegister
from resolver.hami.searched_directories import NOWHERE, Candidate, Directory, Root
from resolver.linux.inotify import OF_A_DIRECTORY
from resolver.linux.safe_open import open_directory, translate
from resolver.reasons import RegionReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resolver.hami.discovery import Location, RegionChanges
    from resolver.hami.region import SharedRegion
    from resolver.hami.watches import Watches
    from resolver.linux.procfs import Procfs
    from resolver.workers.supervisor import WorkerProcess

MAX_VISITS = 1024  # container directories per refresh
MAX_STRAYS = 64  # entries of a shared directory that are reported and not opened
MAX_OPENS = 256  # files opened per refresh, some 40 us each
REFRESH_SECONDS = 0.02  # CPU time of one refresh for directories of which there is news, but for one more
#: And for all others, which are listed anew every 30 s: what is new elsewhere would wait for them, and for the rest
#: that a long pass is followed by.
RELIST_SECONDS = 0.005


#: Seconds between two listings of a directory of which the kernel reports what is new in it.
WATCHED_LOOK = 15.0
#: Until a file that is on its way to being a region is tried again.
_SOON, _LATER = 0.005, 0.25

_STRAY = "kubelet has no such container here: its pod is gone, or another one's process made the directory"


class DirectoryFinder:
    """A `resolver.hami.discovery.Discovery`: ``regions`` is kept equal to what is in the containers directories.

    ``counts`` counts each refusal once, when it is new.
    """

    workers: Sequence[WorkerProcess] = ()

    def __init__(
        self,
        containers_dirs: Sequence[str],
        procfs: Procfs,
        clock: Callable[[], float] = time.monotonic,
        budgets: Budgets | None = None,
        watches: Watches | None = None,
        names: ContainerNames | None = None,
    ) -> None:
        """``budgets`` are by the directory's path; files are opened on theirs. ``watches`` report what is new.

        ``containers_dirs`` may have `AUTO` for all those that are known, of which none need be there. ``names`` are
        kubelet's.
        """
        self._register = RegionRegister()
        self.regions, self.rejected = self._register.regions, self._register.rejected
        self.counts = self._register.counts
        self.missing_dirs: set[str] = set()
        self.max_regions = sys.maxsize
        self._procfs = procfs
        self._names = names or ContainerNames("", "")
        roots = [Root(path) for path in dict.fromkeys(containers_dirs) if path != AUTO]
        self._auto = AUTO in containers_dirs
        if self._auto:
            given = {root.path for root in roots}
            roots += [Root(path, known=True) for path in KNOWN_DIRS if path not in given]
        self._roots = roots
        self._order: list[Directory] = []
        self._next = 0  # where in _order the next refresh begins
        self._opens_left = 0
        self._full_left = 0  # directories that are still to be listed anew
        self._clock = clock
        self._budgets = budgets or Budgets()
        self._watches = watches
        self._wants = 0.0

    @property
    def dirs(self) -> Sequence[str]:
        """The directories that are expected; `AUTO` stands for those of which any will do."""
        return [root.path for root in self._roots if not root.known] + [AUTO] * self._auto

    def searched(self) -> list[str]:
        """The directories that are there now."""
        return [root.path for root in self._roots if root.fd >= 0]

    @property
    def watched(self) -> bool:
        """Whether every containers directory and every container's is watched: none that waits for kubelet."""
        watches = self._watches
        return (
            watches is not None
            and AUTO not in self.missing_dirs
            and all(
                _key(root) in watches
                and not root.shared
                and all(each.path in watches for each in root.directories.values())
                for root in self._roots
                if root.fd >= 0 or not root.known
            )
        )

    def wants(self) -> float:
        """At once if there is news of a directory; when a refused file is to be tried again."""
        return self._wants

    def _watch(self, key: str, account: str, fd: int, on_event: Callable[[int], None]) -> None:
        if self._watches is not None:
            self._watches.watch(key, account, fd, OF_A_DIRECTORY, on_event)

    def _forget(self, key: str) -> None:
        if self._watches is not None:
            self._watches.forget(key)

    def refresh(self, *, full: bool) -> RegionChanges:
        """Look again. Not ``full``: directories whose time stamp changed, and refused files that are due.

        With ``full`` everything is listed anew, which also finds what a coarse time stamp hid. Raises nothing
        that a tenant, or a lack of descriptors, could cause.
        """
        changes = self._register.begin()
        if full:
            self._names.refresh()
        for root in self._roots:
            self._refresh_root(root, full=full)
        if self._auto:
            there = any(root.known and root.fd >= 0 for root in self._roots)
            (self.missing_dirs.discard if there else self.missing_dirs.add)(AUTO)
        self._opens_left = MAX_OPENS
        now, total = self._clock(), len(self._order)
        if full:
            self._full_left = total
        self._wants = math.inf
        visited = self._visit_news(now)
        slices = Slices(RELIST_SECONDS)
        for _ in range(min(total, MAX_VISITS)):
            directory = self._order[self._next % total]
            if directory not in visited:
                self._visit(directory, now, full=self._full_left > 0)
            if not self._opens_left:
                self._wants = now
                break  # the same directory first, next time: its other files have not been checked
            self._full_left = max(0, self._full_left - 1)
            self._next = (self._next + 1) % total
            if slices.over():
                self._wants = now
                break
        if self._full_left:
            self._wants = now
        return changes

    def _visit_news(self, now: float) -> set[Directory]:
        """New directories, and those in which something happened, before all that are only looked at by the clock."""
        visited = set[Directory]()
        until = time.thread_time() + REFRESH_SECONDS
        for directory in [each for each in self._order if each.news][:MAX_VISITS]:
            if not self._opens_left or time.thread_time() >= until:
                self._wants = now
                break
            self._visit(directory, now, full=False)
            visited.add(directory)
        return visited

    async def settle(self) -> bool:
        """Nothing goes on beside the passes."""
        return False

    def locate(self, region: SharedRegion) -> Location:
        """The directory as containers have it mounted. Raises `RegionRejected`."""
        return locate(self._procfs, region, self._register.candidate(region))

    def reject(self, region: SharedRegion, why: RegionRejected) -> None:
        """Give up a region: closed now, tried again later."""
        candidate = self._register.candidate(region)
        if candidate is not None and candidate.region is region:
            self._register.begin()  # this is no news to the caller
            self._register.release(candidate)
            self._register.refuse(candidate, why, self._clock())

    def close(self) -> None:
        """Close everything; the finder can be used again afterwards."""
        for root in self._roots:
            self._drop_root(root)
        self._order = []

    # -- containers directories ---------------------------------------------------------------------

    def _refresh_root(self, root: Root, *, full: bool) -> None:
        try:
            info = os.stat(root.path)
            if root.known and not self._may_be_searched(root, info):
                raise FileNotFoundError(root.path)
            if (info.st_dev, info.st_ino) != root.identity:
                self._drop_root(root)
            if root.fd < 0:
                root.fd = os.open(root.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                info = os.fstat(root.fd)
                root.identity = info.st_dev, info.st_ino
            self._watch(_key(root), root.path, root.fd, lambda _: self._news_of(root))
            if full or info.st_ctime_ns != root.ctime_ns:
                root.ctime_ns = change_stamp(info)
                # The device plugins make theirs for root alone. Once seen, it stays so: a tenant can change the mode.
                if info.st_mode & 0o002 and not root.shared:
                    root.shared = True
                    self._forget_directories(root)
                self._list_root(root)
                self._order = [entry for each in self._roots for entry in each.directories.values()]
                self._next %= len(self._order) or 1
        except (FileNotFoundError, NotADirectoryError):
            self._drop_root(root)
            if not root.known:
                self.missing_dirs.add(root.path)
            return
        except OSError as error:
            root.ctime_ns = -1
            self._register.report(root.path, translate(error))
        self.missing_dirs.discard(root.path)

    def _may_be_searched(self, root: Root, info: os.stat_result) -> bool:
        """Whether a directory that nobody asked for is one to search: not another one's again, nor made by a user."""
        others = (each for each in self._roots if each is not root and each.fd >= 0)
        if any(each.identity == (info.st_dev, info.st_ino) for each in others):
            return False
        parts = root.path.split("/")
        if parts[1] != "tmp":
            return True
        above = [os.lstat("/".join(parts[:end])) for end in range(3, len(parts) + 1)]
        return all(stat.S_ISDIR(each.st_mode) and each.st_uid == 0 for each in above)

    def _list_root(self, root: Root) -> None:
        seen: set[str] = set()
        with os.scandir(root.fd) as listing:
            for entry in islice(listing, MAX_CONTAINERS):
                # A symbolic link is kept as well: the visit refuses it, and so it is counted.
                if (entry.name in root.directories or is_entry(root.path, entry.name)) and (
                    entry.is_symlink() or entry.is_dir(follow_symlinks=False)
                ):
                    seen.add(entry.name)
            complete = next(listing, None) is None
        if root.shared:
            seen, complete = self._of_kubelet(root, seen, complete=complete), True
        else:
            self._register.report_unless(complete, root.path, MAX_CONTAINERS)
        for name in seen - root.directories.keys():
            root.directories[name] = Directory(root, name)
        if complete:
            for name in root.directories.keys() - seen:
                directory = root.directories.pop(name)
                self._forget(directory.path)
                self._register.drop_candidates(directory)
                self.rejected.pop(directory.path, None)

    def _of_kubelet(self, root: Root, listed: set[str], *, complete: bool) -> set[str]:
        """The entries of containers that kubelet has here, listed or not; of the others some are reported."""
        if self._names.trouble:
            why = f"{self._names.trouble}, and only kubelet knows which containers its entries are of"
            self._register.report(root.path, RegionRejected(RegionReason.UNPROVEN, why))
            return set()
        self.rejected.pop(root.path, None)
        wanted = {f"{pod_uid}_{name}" for pod_uid, name in self._names.pairs()}
        strays = set(sorted(listed - wanted)[:MAX_STRAYS])
        for name in root.strays - strays:
            self.rejected.pop(f"{root.path}/{name}", None)
        root.strays = strays
        for name in sorted(strays):
            self._register.report(f"{root.path}/{name}", RegionRejected(RegionReason.NOT_ON_NODE, _STRAY))
        return {
            name
            for name in wanted
            if name in listed
            or (not complete and os.access(name, os.F_OK, dir_fd=root.fd, follow_symlinks=False))
        }

    def _drop_root(self, root: Root) -> None:
        for name in root.strays:
            self.rejected.pop(f"{root.path}/{name}", None)
        root.strays.clear()
        self._forget_directories(root)
        self._forget(_key(root))
        if root.fd >= 0:
            os.close(root.fd)
            self._order = [entry for entry in self._order if entry.root is not root]
        root.fd, root.identity, root.ctime_ns = -1, NOWHERE, -1
        self.rejected.pop(root.path, None)

    def _forget_directories(self, root: Root) -> None:
        for directory in root.directories.values():
            self._forget(directory.path)
            self._register.drop_candidates(directory)
            self.rejected.pop(directory.path, None)
        root.directories.clear()

    # -- one container's directory ------------------------------------------------------------------

    def _visit(self, directory: Directory, now: float, *, full: bool) -> None:
        retry_at = _retry_at(directory)
        if not (full or directory.news or now >= directory.look_at or now >= retry_at):
            self._wants = min(self._wants, retry_at)
            return
        directory.news = False
        self._visit_it(directory, now, full=full)
        watched = self._watches is not None and directory.path in self._watches
        directory.look_at = now + WATCHED_LOOK if watched else now
        for candidate in directory.candidates.values():
            if candidate.region is None:
                # One that is due still is on its way to being a region, or over its budget.
                soon = now + min(max(_SOON, now - candidate.seen_at), _LATER)
                self._wants = min(self._wants, candidate.retry_at if candidate.retry_at > now else soon)

    def _visit_it(self, directory: Directory, now: float, *, full: bool) -> None:
        try:
            info = os.stat(directory.name, dir_fd=directory.root.fd, follow_symlinks=False)
        except OSError as error:
            self._directory_failed(directory, translate(error))
            return
        if (info.st_dev, info.st_ino) != directory.identity:
            self._register.drop_candidates(directory)
            self._forget(directory.path)
            directory.identity, directory.ctime_ns = (info.st_dev, info.st_ino), -1
        changed = full or info.st_ctime_ns != directory.ctime_ns
        if not changed and now < _retry_at(directory):
            return
        try:
            dir_fd = open_directory(directory.name, directory.root.fd)
        except RegionRejected as why:
            self._directory_failed(directory, why)
            return
        try:
            self._watch(directory.path, directory.path, dir_fd, lambda _: self._news_in(directory))
            for candidate in list(directory.candidates.values()):
                self._check(directory, candidate, dir_fd, now)
            if changed:
                directory.ctime_ns = change_stamp(info)
                for candidate in self._list(directory, dir_fd):
                    self._check(directory, candidate, dir_fd, now)
        except OSError as error:
            directory.ctime_ns = -1
            self._register.report(directory.path, translate(error))
        finally:
            os.close(dir_fd)

    def _news_in(self, directory: Directory) -> None:
        directory.news, directory.ctime_ns = True, -1  # a coarse time stamp may hide it
        self._wants = 0.0

    def _news_of(self, root: Root) -> None:
        root.ctime_ns = -1
        self._wants = 0.0

    def _directory_failed(self, directory: Directory, why: RegionRejected) -> None:
        directory.ctime_ns = -1
        if why.reason is not RegionReason.IO_ERROR:  # a lack of descriptors says nothing about the regions
            self._register.drop_candidates(directory)
        if why.reason is not RegionReason.GONE:
            self._register.report(directory.path, why)

    def _list(self, directory: Directory, dir_fd: int) -> list[Candidate]:
        """Names that were not known; those that are gone were taken off before."""
        names, complete = list_caches(dir_fd)
        if directory.root.shared and KAI.file not in names:  # anybody may have put others before it
            names.insert(0, KAI.file)
        new = [name for name in names if name not in directory.candidates]
        room = MAX_CACHES - len(directory.candidates)
        self._register.report_unless(complete and len(new) <= room, directory.path, MAX_ENTRIES)
        added = [Candidate(directory, name) for name in new[:room]]
        directory.candidates.update({candidate.name: candidate for candidate in added})
        return added

    def _check(self, directory: Directory, candidate: Candidate, dir_fd: int, now: float) -> None:
        """Hold a name against the file that has it now; what is in a region, `SharedRegion.read` checks."""
        try:
            info = os.stat(candidate.name, dir_fd=dir_fd, follow_symlinks=False)
        except OSError:
            self._register.drop(directory, candidate)
            return
        if (info.st_dev, info.st_ino) != candidate.identity:
            self._register.release(candidate)
            candidate.start_anew((info.st_dev, info.st_ino), now)
        if _due(candidate, now) and self._opens_left and not self._budgets.over(directory.path):
            self._opens_left -= 1
            with self._budgets.charge(directory.path):
                self._try(candidate, dir_fd, now)

    def _try(self, candidate: Candidate, dir_fd: int, now: float) -> None:
        whose = candidate.directory.whose(candidate)
        try:
            if candidate.shared and not self._names.has(whose.pod_uid, whose.container_name):
                raise RegionRejected(RegionReason.NOT_ON_NODE, self._names.trouble or _STRAY)
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
            self._register.refuse(candidate, why, now)
            return
        self._register.accept(candidate, region, now)


def _key(root: Root) -> str:
    return f"{root.path}/"  # another than that of a container's directory


def _retry_at(directory: Directory) -> float:
    """When the first of its refused files is to be tried again; never, if there is none."""
    first = math.inf
    for candidate in directory.candidates.values():  # not by `min`: this is asked of each with every refresh
        if candidate.region is None and candidate.retry_at < first:
            first = candidate.retry_at
    return first


def _due(candidate: Candidate, now: float) -> bool:
    return candidate.region is None and now >= candidate.retry_at
