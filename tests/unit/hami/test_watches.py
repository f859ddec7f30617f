"""Events of tenants' files: real inotify on real files; only the kernel's refusals are faked."""

import errno
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.base.budget import BURST_SECONDS, EVENT_BURST, Budgets
from resolver.hami.watches import Watches
from resolver.linux.inotify import (
    CREATE,
    DELETE,
    MODIFY,
    OF_A_DIRECTORY,
    Inotify,
)
from tests.fakes.clock import Clock
from tests.patience import until

QUEUE = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


#: Writes and closes: two kinds alternate, because the kernel merges equal events.
OF_A_FILE = MODIFY | 0x8


class Scene:
    """Watches, and files in one directory per container."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.budgets = Budgets(self.clock)
        self.counters: Counter[str] = Counter()
        self.watches = Watches(self.budgets, self.counters, self.clock)
        self.told: dict[str, list[int]] = {}
        self.open: list[int] = []

    def watch(self, path: Path, account: str = "a", mask: int = OF_A_FILE) -> bool:
        fd = os.open(path, os.O_RDONLY)
        self.open.append(fd)
        return self.again(path, account, fd, mask)

    def again(self, path: Path, account: str, fd: int, mask: int = OF_A_FILE) -> bool:
        seen = self.told.setdefault(str(path), [])
        return self.watches.watch(str(path), account, fd, mask, seen.append)

    def file(self, name: str) -> Path:
        path = self.root / name
        path.write_bytes(b"region")
        return path

    def drain(self) -> bool:
        """Take all queued events; return True if any were lost."""
        lost = False
        while True:
            before = self.counters["watch_events"]
            lost |= self.watches.take()
            if self.counters["watch_events"] == before:
                return lost


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.watches.close()
    for fd in scene.open:
        os.close(fd)


def test_names_that_come_and_go_in_a_directory_are_told(scene: Scene, tmp_path: Path) -> None:
    directory = tmp_path / "container"
    directory.mkdir()
    assert scene.watch(directory, mask=OF_A_DIRECTORY)
    for name in ("x", "a-name-of-any-length.cache"):  # read at once: each event holds its name's length
        (directory / name).touch()
    scene.drain()
    assert [mask & CREATE for mask in scene.told[str(directory)]] == [CREATE]
    assert scene.counters["watch_events"] == 2
    (directory / "a-name-of-any-length.cache").unlink()
    scene.drain()
    assert scene.told[str(directory)][-1] & DELETE


def test_the_same_inode_under_two_keys_is_told_to_both(scene: Scene) -> None:
    path = scene.file("region")
    scene.watch(path)
    seen: list[int] = []
    assert scene.watches.watch("container:/tmp/cudevshr.cache", "b", scene.open[0], MODIFY, seen.append)
    path.write_bytes(b"more")
    scene.drain()
    assert seen == scene.told[str(path)]
    assert seen
    scene.watches.forget(str(path))
    path.write_bytes(b"and more")
    scene.drain()
    assert len(seen) == 2  # the other watch on the file remains
    assert len(scene.told[str(path)]) == 1


def test_forgotten_file_wakes_nothing(scene: Scene) -> None:
    kept, gone = scene.file("kept"), scene.file("gone")
    scene.watch(kept)
    scene.watch(gone)
    scene.watches.forget(str(kept))
    scene.watches.forget("never known")
    kept.write_bytes(b"x")
    gone.unlink()
    for fd in scene.open:
        os.close(fd)
    scene.open.clear()
    scene.drain()
    assert scene.told[str(kept)] == []
    assert not any(path in scene.watches for path in scene.told)


def test_flood_is_merged_charged_and_muted(scene: Scene) -> None:
    bad, good = scene.file("bad"), scene.file("good")
    scene.watch(bad, "bad")
    scene.watch(good, "good")
    flood(bad, 2000)
    good.write_bytes(b"x")
    assert not scene.drain()
    assert len(scene.told[str(bad)]) <= 3  # events are merged, then suppressed
    assert scene.told[str(good)]
    assert scene.budgets.left("bad") < scene.budgets.left("good") <= BURST_SECONDS
    assert scene.counters["watch_floods"] == 1
    assert (str(bad) in scene.watches, str(good) in scene.watches) == (False, True)

    assert not scene.again(bad, "bad", scene.open[0])  # not yet
    described = Path(f"/proc/self/fdinfo/{scene.watches.fd}")
    until(lambda: described.read_text().count("inotify wd") == 1, "the end of its watch")
    scene.drain()
    flood(bad, 2000)
    before = scene.counters["watch_events"]
    scene.drain()
    assert scene.counters["watch_events"] == before
    scene.clock.now += 32.0
    assert scene.again(bad, "bad", scene.open[0])


def test_short_lived_processes_are_no_flood(scene: Scene) -> None:
    path = scene.file("busy")
    scene.watch(path)
    for _ in range(60):
        for _ in range(12):
            path.write_bytes(b"x")
        scene.drain()
        scene.clock.now += 1.0
    assert scene.counters["watch_floods"] == 0


def test_a_queue_that_ran_over_says_that_something_was_lost(scene: Scene) -> None:
    paths = [scene.file(f"region-{number}") for number in range(3)]
    for path in paths:
        scene.watch(path, path.name)
    flood(paths[0], QUEUE)
    assert scene.drain()
    assert scene.counters["watch_overflows"] == 1
    assert str(paths[1]) in scene.watches
    paths[1].write_bytes(b"x")
    assert not scene.drain()
    assert scene.told[str(paths[1])]


def test_one_read_takes_no_more_than_some_thousand_events(scene: Scene) -> None:
    path = scene.file("bad")
    scene.watch(path)
    flood(path, QUEUE)
    scene.watches.take()
    assert EVENT_BURST < scene.counters["watch_events"] <= 1024


class Refusing(Inotify):
    """An inotify whose limit is exhausted: calls fail with the kernel's error code."""

    def __init__(self, code: int, room: int) -> None:
        super().__init__()
        self.code, self.room = code, room

    def add(self, fd: int, mask: int) -> int:
        if not self.room:
            raise OSError(self.code, os.strerror(self.code))
        self.room -= 1
        return super().add(fd, mask)


def test_without_watches_left_it_says_so_and_tries_again(scene: Scene) -> None:
    kernel = Refusing(errno.ENOSPC, 1)
    watches = Watches(scene.budgets, scene.counters, scene.clock, lambda: kernel)
    first, second = scene.file("first"), scene.file("second")
    fds = [os.open(path, os.O_RDONLY) for path in (first, second)]
    scene.open += fds
    assert watches.watch("first", "a", fds[0], MODIFY, lambda _: None)
    assert not watches.watch("second", "b", fds[1], MODIFY, lambda _: None)
    assert "max_user_watches" in watches.why_not
    kernel.room = 1
    assert not watches.watch("second", "b", fds[1], MODIFY, lambda _: None)
    scene.clock.now += 30.0
    assert watches.watch("second", "b", fds[1], MODIFY, lambda _: None)
    assert watches.why_not == ""
    watches.close()


def test_an_instance_that_was_refused_is_asked_for_again(scene: Scene, tmp_path: Path) -> None:
    refusals = [errno.EMFILE, errno.EMFILE]

    def make() -> Inotify:
        if refusals:
            raise OSError(code := refusals.pop(), os.strerror(code))
        return Inotify()

    watches = Watches(scene.budgets, scene.counters, scene.clock, make)
    fd = os.open(tmp_path, os.O_RDONLY)
    assert not watches.watch("x", "a", 0, MODIFY, lambda _: None)
    assert not watches.take()
    watches.forget("x")
    for _ in range(2):
        watches.tidy()
        assert (watches.fd, len(refusals)) == (-1, 1), "not again at once"
    scene.clock.now += 30.0
    watches.tidy()
    assert "max_user_instances" in watches.why_not
    scene.clock.now += 30.0
    watches.tidy()
    assert watches.why_not == ""
    assert watches.fd >= 0
    assert watches.watch("x", "a", fd, MODIFY, lambda _: None)
    watches.close()
    os.close(fd)


def flood(path: Path, count: int) -> None:
    """Cause at least ``count`` events; they alternate, because the kernel merges equal ones."""
    for _ in range(count // 2 + 1):
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, b"x")
        os.close(fd)
