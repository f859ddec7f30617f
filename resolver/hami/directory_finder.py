"""Shared regions in host directories: ``<directory>/<entry>/*.cache``, one entry per container or claim.

Tenants fill them, so steps are bounded, and lanes run those that the kernel can delay. One coroutine lists a directory
and opens its files. If containers make the entries, tenants can flood the listing and take any name: then only entries
of kubelet's containers are opened, by name; others are reported.
"""

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from resolver.base.budget import Budgets
from resolver.base.errors import CannotKnow, RegionRejected, WorkerFailed
from resolver.base.reasons import RegionReason
from resolver.containers.log_names import ContainerNames
from resolver.hami.candidates import (
    LATER,
    SOON,
    STRAY,
    Candidate,
    Candidates,
    Directory,
    Root,
    may_be_searched,
)
from resolver.hami.directory_reads import hold_directory, list_entries, look_into, take
from resolver.hami.discovery import NOWHERE, Discovery, Place, RegionChanges, refusal
from resolver.hami.placements import AUTO, KAI, KNOWN_DIRS, MAX_CACHES, MAX_CONTAINERS, MAX_ENTRIES
from resolver.hami.watches import Watches
from resolver.linux.inotify import OF_A_DIRECTORY
from resolver.linux.procfs import Procfs
from resolver.linux.safe_open import let_go
from resolver.workers.lanes import TenantReader

MAX_STRAYS = 64  # entries of a shared directory that are reported and not opened
REFRESH_SECONDS = 0.015  # CPU time after which a refresh leaves the other directories to the next one
#: Seconds until a directory is read again that failed.
_NEXT_LOOK = 1.0


class DirectoryFinder(Discovery):
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

        `AUTO` in ``containers_dirs`` means all known ones. ``names`` are kubelet's.
        """
        super().__init__(clock, wake)
        self._names = names or ContainerNames("", "")
        self._reader, self._budgets = reader or TenantReader(procfs), budgets or Budgets()
        self._candidates = Candidates(self, self._names, self._reader, clock)
        given = {root.path: root for root in map(Root, containers_dirs) if root.path != AUTO}
        self._auto = AUTO in containers_dirs
        usual = (path for path in KNOWN_DIRS if self._auto and path not in given)
        self._roots = [*given.values(), *(Root(path, known=True) for path in usual)]
        self._watches = watches

    @property
    def dirs(self) -> Sequence[str]:
        """Expected directories; `AUTO` stands for any known one."""
        return [root.path for root in self._roots if not root.known] + [AUTO] * self._auto

    @property
    def watched(self) -> bool:
        """True if every directory is watched and none is shared: those are polled for kubelet's names."""
        expected = [root for root in self._roots if root.fd >= 0 or not root.known]
        if AUTO in self.missing_dirs or any(root.shared for root in expected):
            return False
        return all(map(self._is_watched, expected)) and all(map(self._is_watched, self._directories()))

    def _directories(self) -> Iterator[Directory]:
        return (directory for root in self._roots for directory in root.directories.values())

    def _places(self) -> list[Place]:
        return [*(root for root in self._roots if root.fd >= 0), *self._directories()]

    def _is_watched(self, place: Root | Directory) -> bool:
        return self._watches is not None and place.key in self._watches

    def _watch(self, place: Root | Directory, fd: int) -> None:
        def on_event(_: int) -> None:
            place.due = self._wants = 0.0

        if self._watches is not None:
            self._watches.watch(place.key, place.path, fd, OF_A_DIRECTORY, on_event)

    def _forget(self, place: Root | Directory) -> None:
        if self._watches is not None:
            self._watches.forget(place.key)

    def refresh(self, *, full: bool) -> RegionChanges:
        """Begin to read changed directories, or all if ``full``, and retry refused files when due.

        Raises no error that a tenant or a lack of descriptors can cause.
        """
        now = self._clock()
        for root in self._roots:
            self._refresh_root(root, now, full=full)
        if self._auto:
            any_open = any(root.known and root.fd >= 0 for root in self._roots)
            (self.missing_dirs.discard if any_open else self.missing_dirs.add)(AUTO)
        if full:
            for directory in self._directories():
                # A shared root has a full refresh each second, for kubelet's names.
                if not (directory.root.shared and self._is_watched(directory)):
                    directory.due = min(directory.due, now)
        until = time.thread_time() + REFRESH_SECONDS
        for directory in self._due(self._directories()):
            if self._budgets.over(directory.path):
                directory.due = now + LATER
                continue
            self._begin(directory, self._look(directory))
            if time.thread_time() >= until:
                break
        return self._end_refresh()

    def _refuse(self, path: str, why: RegionRejected) -> None:
        candidates = (file for directory in self._directories() for file in directory.candidates.values())
        candidate = next(file for file in candidates if file.region is self.regions[path])
        self._candidates.release(candidate)
        self._candidates.refuse(candidate, why)
        candidate.directory.due = min(candidate.directory.due, candidate.retry_at)

    def close(self) -> None:
        """Close everything; the finder stays usable."""
        for root in self._roots:
            self._drop_root(root)

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
            self._watch(root, root.fd)
            # Device plugins let root alone write. ``shared`` stays set, because a tenant can reset the mode.
            if info.st_mode & 0o002 and not root.shared:
                root.shared, root.due = True, 0.0
                self._drop_directories(root, root.directories.keys())
            if self._is_idle(root) and (full or root.due <= now):
                self._begin(root, self._list(root))
        except (FileNotFoundError, NotADirectoryError):
            self._drop_root(root)
            if not root.known:
                self.missing_dirs.add(root.path)
            return
        except OSError as error:
            root.due = now + _NEXT_LOOK
            self.report(root.path, refusal(error))
        self.missing_dirs.discard(root.path)

    async def _list(self, root: Root) -> None:
        names, after, last, complete = set[str](), "", False, False
        try:
            while not last:
                page, last, complete = await self._reader.ask(
                    root.path, root.path, list_entries, root.link, root.path, MAX_CONTAINERS, after
                )
                names.update(page)
                after = page[-1] if page else ""
        except (OSError, CannotKnow, WorkerFailed) as error:
            complete = False
            if not root.shared:  # if shared, kubelet's entries are opened by name until a full refresh
                self.report(root.path, refusal(error))
                root.due = self._clock() + _NEXT_LOOK
                return
        root.rest(math.inf, self._clock() + SOON)
        if root.shared:
            names, complete = self._of_kubelet(root, names, complete=complete), True
        else:
            self._report_unless(complete, root.path, MAX_CONTAINERS)
        for name in names - root.directories.keys():
            root.directories[name] = Directory(root, name)
        if complete:
            self._drop_directories(root, root.directories.keys() - names)

    def _of_kubelet(self, root: Root, listed: set[str], *, complete: bool) -> set[str]:
        """Return kubelet's containers' entries, unlisted ones too unless ``complete``; report some others."""
        self._names.refresh()
        if self._names.trouble:
            why = f"{self._names.trouble}, and only kubelet knows which containers its entries are of"
            self.report(root.path, RegionRejected(RegionReason.UNPROVEN, why))
            return set()
        self.rejected.pop(root.path, None)
        wanted = {f"{pod_uid}_{name}" for pod_uid, name in self._names.pairs()}
        strays = set(sorted(listed - wanted)[:MAX_STRAYS])
        for name in root.strays - strays:
            self.rejected.pop(f"{root.path}/{name}", None)
        root.strays = strays
        for name in sorted(strays):
            self.report(f"{root.path}/{name}", RegionRejected(RegionReason.NOT_ON_NODE, STRAY))
        return {name for name in wanted if name in listed or not complete}

    def _report_unless(self, complete: bool, path: str, limit: int) -> None:  # noqa: FBT001
        """Report a directory that was not read completely, or clear its report."""
        if complete:
            self.rejected.pop(path, None)
            return
        detail = f"it has more entries than the {limit} that are read, or more than {MAX_CACHES} .cache files"
        self.report(path, RegionRejected(RegionReason.TOO_MANY_ENTRIES, detail))

    def _drop_root(self, root: Root) -> None:
        for name in root.strays:
            self.rejected.pop(f"{root.path}/{name}", None)
        root.strays.clear()
        self._drop_directories(root, root.directories.keys())
        self._forget(root)
        root.cancel()
        if root.fd >= 0:
            os.close(root.fd)
        root.fd, root.identity, root.due = -1, NOWHERE, 0.0
        self.rejected.pop(root.path, None)

    def _drop_directories(self, root: Root, names: Collection[str]) -> None:
        for name in list(names):
            directory = root.directories.pop(name)
            directory.cancel()
            self._forget(directory)
            self._candidates.drop(directory)
            self.rejected.pop(directory.path, None)

    async def _look(self, directory: Directory) -> None:
        """List a directory and open its new files, by lanes."""
        try:
            device, inode, files, complete = await self._read(directory)
        except RegionRejected as why:
            # A lack of descriptors or time is no evidence about the regions.
            if why.reason not in (RegionReason.IO_ERROR, RegionReason.OVERLOADED):
                self._candidates.drop(directory)
            if why.reason is not RegionReason.GONE:
                self.report(directory.path, why)
            now = self._clock()
            directory.rest(now + _NEXT_LOOK, now + SOON)
            return
        if (device, inode) != directory.identity:
            self._candidates.drop(directory)
            if directory.identity != NOWHERE:
                self._forget(directory)
                directory.due = 0.0  # the new directory must be watched, too
            directory.identity = device, inode
        listed = {name: (device, inode) for name, device, inode, _ in files}
        candidates, now = directory.candidates, self._clock()
        files.sort(key=lambda file: file[0] not in candidates)  # a new file under a name takes its place
        self._candidates.drop(directory, listed)
        new, room = listed.keys() - candidates.keys(), MAX_CACHES - len(candidates)
        self._report_unless(complete and len(new) <= room, directory.path, MAX_ENTRIES)
        for name, *_, changed in [file for file in files if file[0] in new][:room]:
            candidates[name] = Candidate(directory, name, listed[name], now, time.time() - changed)
        for candidate in list(candidates.values()):
            await self._candidates.check(candidate)
        retries = (candidate.retry_at for candidate in candidates.values() if candidate.region is None)
        directory.rest(min(retries, default=math.inf), self._clock() + SOON)

    async def _read(self, directory: Directory) -> tuple[Any, ...]:
        """Return a directory's content from a lane, and watch the directory. Raises `RegionRejected`."""
        root, payer = directory.root, directory.path
        names = list(directory.candidates)
        if root.shared:  # other files may crowd KAI's out of the listing
            names = list(dict.fromkeys((KAI.file, *names)))
        try:
            held = -1, -1
            if self._watches is not None and not self._is_watched(directory):
                offered, *held = await self._reader.ask(
                    payer, payer, hold_directory, root.link, directory.name
                )
                fd = take(offered, *held)
                self._watch(directory, fd)
                let_go(fd)
            listing: tuple[Any, ...] = await self._reader.ask(
                payer, payer, look_into, root.link, directory.name, names
            )
        except (OSError, CannotKnow, WorkerFailed) as error:
            raise refusal(error) from None
        if held[0] >= 0 and tuple(held) != tuple(listing[:2]):
            self._forget(directory)
        return listing
