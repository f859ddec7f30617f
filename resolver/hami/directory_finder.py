"""Shared regions in host directories: ``<directory>/<entry>/*.cache``, one entry per container or claim.

Tenants fill them, so steps are bounded, lanes do those that the kernel can delay, and refreshes resume. Where
containers make the entries, tenants can flood the listing and take any name: only entries of kubelet's containers are
opened, by name; others are reported.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from resolver.base.budget import Budgets
from resolver.base.errors import CannotKnow, RegionRejected, WorkerFailed
from resolver.base.reasons import RegionReason
from resolver.containers.log_names import ContainerNames
from resolver.hami.directory_reads import hold_directory, list_entries, look_into, take
from resolver.hami.discovery import refusal
from resolver.hami.placements import AUTO, KAI, KNOWN_DIRS
from resolver.hami.region_register import STRAY, RegionRegister
from resolver.hami.searched_directories import (
    MAX_CACHES,
    MAX_CONTAINERS,
    MAX_ENTRIES,
    NOWHERE,
    Candidate,
    Directory,
    Root,
    may_be_searched,
)
from resolver.linux.inotify import OF_A_DIRECTORY
from resolver.linux.safe_open import let_go
from resolver.workers.lanes import Direct, begin

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from resolver.hami.discovery import RegionChanges
    from resolver.hami.region import SharedRegion
    from resolver.hami.watches import Watches
    from resolver.linux.procfs import Procfs
    from resolver.workers.lanes import TenantReader

MAX_STRAYS = 64  # entries of a shared directory that are reported and not opened
REFRESH_SECONDS = 0.015  # CPU time of one refresh, but for one directory: news of others waits for it
#: Seconds until a directory is read again that failed.
_NEXT_LOOK = 1.0
#: Until a file that is on its way to being a region is tried again.
_SOON, _LATER = 0.005, 0.25


class DirectoryFinder:
    """Finder of the ``regions`` in the containers directories."""

    def __init__(
        self,
        containers_dirs: Sequence[str],
        procfs: Procfs,
        clock: Callable[[], float] = time.monotonic,
        budgets: Budgets | None = None,
        watches: Watches | None = None,
        names: ContainerNames | None = None,
        reader: TenantReader | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Take ``budgets`` for opening files, by directory path, and ``watches`` for changes.

        ``wake`` is called when a lane has answered: a refresh is due.

        `AUTO` in ``containers_dirs`` means all known ones. ``names`` are kubelet's.
        """
        self._names = names or ContainerNames("", "")
        self._reader, self._budgets = reader or Direct(procfs), budgets or Budgets()
        self._register = RegionRegister(self._names, self._reader, self._budgets, self._answered)
        self.regions, self.rejected = self._register.regions, self._register.rejected
        self.missing_dirs: set[str] = set()
        self.max_regions = sys.maxsize
        self._auto, self._roots = AUTO in containers_dirs, _roots(containers_dirs)
        self._order: list[Directory] = []  # the next refresh begins with the first one
        self._clock = clock
        self._watches = watches
        self._wants = 0.0
        self._wake = wake

    @property
    def dirs(self) -> Sequence[str]:
        """Expected directories; `AUTO` stands for any known one."""
        return [root.path for root in self._roots if not root.known] + [AUTO] * self._auto

    @property
    def watched(self) -> bool:
        """True if every directory is watched and none waits for kubelet."""
        watches = self._watches
        expected = [root for root in self._roots if root.fd >= 0 or not root.known]
        if watches is None or AUTO in self.missing_dirs or any(root.shared for root in expected):
            return False
        below = (directory for root in expected for directory in root.directories.values())
        return all(_key(root) in watches for root in expected) and all(
            directory.path in watches for directory in below
        )

    def wants(self) -> float:
        """Return the next refresh's time."""
        return self._wants

    def _watch(self, place: Directory | Root, key: str, fd: int) -> None:
        def on_event(_: int) -> None:
            place.news, self._wants = True, 0.0

        if self._watches is not None:
            self._watches.watch(key, place.path, fd, OF_A_DIRECTORY, on_event)

    def _answered(self) -> None:
        self._wants = 0.0
        self._wake()

    def _forget(self, key: str) -> None:
        if self._watches is not None:
            self._watches.forget(key)

    def refresh(self, *, full: bool) -> RegionChanges:
        """Check changed directories, or all if ``full``, and retry refused files when due.

        Raises nothing that tenants or a lack of descriptors could cause.
        """
        changes, now = self._register.begin(self.max_regions), self._clock()
        self._wants = math.inf
        for root in self._roots:
            self._refresh_root(root, now, full=full)
        if self._auto:
            any_open = any(root.known and root.fd >= 0 for root in self._roots)
            (self.missing_dirs.discard if any_open else self.missing_dirs.add)(AUTO)
        until, visited = time.thread_time() + REFRESH_SECONDS, 0
        for directory in self._order:
            # Where containers make the entries everything is listed often, for kubelet's sake.
            directory.full |= full and not (directory.root.shared and self._watches_it(directory))
        self._order.sort(key=lambda each: not each.news)
        for directory in self._order:
            self._visit(directory, now)
            visited += 1
            if time.thread_time() >= until:
                self._wants = now
                break
        self._order = self._order[visited:] + self._order[:visited]
        return changes

    async def settle(self) -> bool:
        """Wait for lanes; True if any answered."""
        asked: list[object] = [root.listing for root in self._roots]
        for directory in self._order:
            asked += (directory.look, *(candidate.reading for candidate in directory.candidates.values()))
        if tasks := [directory for directory in asked if isinstance(directory, asyncio.Task)]:
            await asyncio.wait(tasks)
        return any(asked)

    def reject(self, region: SharedRegion, why: RegionRejected) -> None:
        """Close a region and retry later."""
        self._register.reject(region, why, self._clock())

    def close(self) -> None:
        """Close everything; the finder stays usable."""
        for root in self._roots:
            self._drop_root(root)
        self._order = []

    def _refresh_root(self, root: Root, now: float, *, full: bool) -> None:
        try:
            info = os.stat(root.path)
            if root.known and not may_be_searched(root, info, self._roots):
                raise FileNotFoundError(root.path)
            if (info.st_dev, info.st_ino) != root.identity:
                self._drop_root(root)
            if root.fd < 0:
                root.fd = os.open(root.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                info = os.fstat(root.fd)
                root.identity = info.st_dev, info.st_ino
            self._watch(root, _key(root), root.fd)
            # The device plugins make theirs for root alone. Once seen, it stays so: a tenant can change the mode.
            if info.st_mode & 0o002 and not root.shared:
                root.shared = root.news = True
                self._drop_directories(root, root.directories.keys())
            if root.listing is None and (full or root.news):
                root.news = False
                root.listing = begin(_list_root(self._reader, root), self._answered)
            if root.listing is not None:
                self._apply_listing(root, now)
        except (FileNotFoundError, NotADirectoryError):
            self._drop_root(root)
            if not root.known:
                self.missing_dirs.add(root.path)
            return
        except (OSError, RegionRejected) as error:
            root.news = True
            self._register.report(root.path, refusal(error))
        self.missing_dirs.discard(root.path)

    def _apply_listing(self, root: Root, now: float) -> None:
        if root.listing is None or not root.listing.done():
            return
        listing, root.listing = root.listing, None
        if root.news:  # since it was listed
            self._list_again(now, now)
        seen, complete = listing.result()
        if root.shared:
            seen, complete = self._of_kubelet(root, seen, complete=complete), True
        else:
            self._register.report_unless(complete, root.path, MAX_CONTAINERS)
        for name in seen - root.directories.keys():
            root.directories[name] = Directory(root, name)
            self._order.append(root.directories[name])
        if complete:
            self._drop_directories(root, root.directories.keys() - seen)

    def _of_kubelet(self, root: Root, listed: set[str], *, complete: bool) -> set[str]:
        """Return kubelet's containers' entries, listed or not; report some others."""
        self._names.refresh()
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
            self._register.report(f"{root.path}/{name}", RegionRejected(RegionReason.NOT_ON_NODE, STRAY))
        return {name for name in wanted if name in listed or not complete}

    def _drop_root(self, root: Root) -> None:
        for name in root.strays:
            self.rejected.pop(f"{root.path}/{name}", None)
        root.strays.clear()
        self._drop_directories(root, root.directories.keys())
        self._forget(_key(root))
        if root.fd >= 0:
            os.close(root.fd)
        if root.listing is not None:
            root.listing.cancel()
            root.listing = None
        root.fd, root.identity, root.news = -1, NOWHERE, True
        self.rejected.pop(root.path, None)

    def _drop_directories(self, root: Root, names: Collection[str]) -> None:
        if names:
            for name in list(names):
                directory = root.directories.pop(name)
                if directory.look is not None:
                    directory.look.cancel()
                self._forget(directory.path)
                self._register.drop_candidates(directory)
                self.rejected.pop(directory.path, None)
            self._order = [name for name in self._order if name.root.directories.get(name.name) is name]

    def _visit(self, directory: Directory, now: float) -> None:
        for candidate in list(directory.candidates.values()):
            self._register.finish(candidate, now)
        if directory.look is not None or self._begin_look(directory, now):
            self._apply_directory(directory, now)
            if directory.news:  # since it was listed
                self._list_again(now, now)
        for candidate in directory.candidates.values():
            if candidate.reading is not None or candidate.region is not None:
                continue
            if candidate.retry_at <= now:  # on its way to being a region, or over its budget
                self._list_again(candidate.seen_at, now)
            else:
                self._wants = min(self._wants, candidate.retry_at)

    def _list_again(self, since: float, now: float) -> None:
        self._wants = min(self._wants, now + min(max(_SOON, now - since), _LATER))

    def _begin_look(self, directory: Directory, now: float) -> bool:
        """Request a directory's files from a lane if due."""
        if not (directory.full or directory.news or now >= min(directory.look_at, directory.retry_at())):
            return False
        if self._budgets.over(directory.path):
            self._wants = min(self._wants, now + _LATER)
            return False
        directory.full, directory.news, directory.look_at = False, False, math.inf
        directory.look = begin(self._list_directory(directory), self._answered)
        return True

    async def _list_directory(self, directory: Directory) -> tuple[Any, ...]:
        """Return its content from a lane, and watch it. Raises `RegionRejected`."""
        root, payer = directory.root, directory.path
        where, name, names = _link(root), directory.name, list(directory.candidates)
        if root.shared:  # anybody may have put other files before it
            names = list(dict.fromkeys((KAI.file, *names)))
        try:
            held = -1, -1
            if self._watches is not None and not self._watches_it(directory):
                offered, *held = await self._reader.ask(payer, payer, hold_directory, where, name)
                fd = take(offered, *held)
                self._watch(directory, payer, fd)
                let_go(fd)
            listing: tuple[Any, ...] = await self._reader.ask(payer, payer, look_into, where, name, names)
        except (OSError, CannotKnow, WorkerFailed) as error:
            raise refusal(error) from None
        if held[0] >= 0 and tuple(held) != tuple(listing[:2]):
            self._forget(payer)
        return listing

    def _apply_directory(self, directory: Directory, now: float) -> None:
        if directory.look is None or not directory.look.done():
            return
        look, directory.look = directory.look, None
        try:
            device, inode, files, complete = look.result()
        except RegionRejected as why:
            directory.look_at = now + _NEXT_LOOK
            # A lack of descriptors, or of time, says nothing about the regions.
            if why.reason not in (RegionReason.IO_ERROR, RegionReason.OVERLOADED):
                self._register.drop_candidates(directory)
            if why.reason is not RegionReason.GONE:
                self._register.report(directory.path, why)
            return
        if (device, inode) != directory.identity:
            self._register.drop_candidates(directory)
            if directory.identity != NOWHERE:
                self._forget(directory.path)
                directory.news = True  # to be watched, too
            directory.identity = device, inode
        listed = {name: (tuple(identity), changed) for name, *identity, changed in files}
        for candidate in list(directory.candidates.values()):
            self._register.check(directory, candidate, listed.pop(candidate.name, None), now)
        room = MAX_CACHES - len(directory.candidates)
        self._register.report_unless(complete and len(listed) <= room, directory.path, MAX_ENTRIES)
        for name in list(listed)[:room]:
            candidate = directory.candidates[name] = Candidate(directory, name)
            self._register.check(directory, candidate, listed[name], now)

    def _watches_it(self, directory: Directory) -> bool:
        return self._watches is not None and directory.path in self._watches


def _roots(containers_dirs: Sequence[str]) -> list[Root]:
    given = [Root(path) for path in dict.fromkeys(containers_dirs) if path != AUTO]
    usual = set(KNOWN_DIRS) - {root.path for root in given} if AUTO in containers_dirs else ()
    return given + [Root(path, known=True) for path in KNOWN_DIRS if path in usual]


async def _list_root(reader: TenantReader, root: Root) -> tuple[set[str], bool]:
    """Return possible entries, and True if these are all. Raises `RegionRejected`."""
    names, after, last, complete = set[str](), "", False, False
    try:
        while not last:
            page, last, complete = await reader.ask(
                root.path, root.path, list_entries, _link(root), root.path, MAX_CONTAINERS, after
            )
            names.update(page)
            after = page[-1] if page else ""
    except (OSError, CannotKnow, WorkerFailed) as error:
        if not root.shared:  # there kubelet's are opened by name, until the next full refresh
            raise refusal(error) from None
    return names, complete and last


def _link(root: Root) -> str:
    """Return a path by which a lane can open it."""
    return f"/proc/{os.getpid()}/fd/{root.fd}"


def _key(root: Root) -> str:
    return f"{root.path}/"  # another than that of a container's directory
