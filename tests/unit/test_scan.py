"""The scan: on a directory that looks like /proc, and on the real one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.errors import AccessDenied, ProcessGone
from resolver.linux.procfs import Procfs
from resolver.pids.listing import Listing
from resolver.pids.scan import ScanSource
from resolver.pids.source import Lister


def put(root: Path, host_pid: int, *ns_pids: int, status: str | None = None) -> None:
    """A process under ``root``; one that is there already is replaced by another, with another inode."""
    place = root / str(host_pid)
    if place.exists():
        place.rename(root / "gone")  # kept until the new one exists, so that their inodes differ
    place.mkdir()
    numbers = "\t".join(map(str, (host_pid, *ns_pids)))
    (place / "status").write_text(
        status or f"Name:\tx\nState:\tS\nTgid:\t{host_pid}\nPPid:\t1\nNSpid:\t{numbers}\n"
    )
    shutil.rmtree(root / "gone", ignore_errors=True)


def test_first_everything_then_what_is_new(tmp_path: Path) -> None:
    source = ScanSource(Procfs(str(tmp_path)))
    put(tmp_path, 100, 1)
    put(tmp_path, 101, 7, 1)
    for name in ("self", "sys", "1x"):
        (tmp_path / name).write_text("")
    shutil.rmtree(tmp_path / "1x", ignore_errors=True)
    (tmp_path / "1x").unlink()
    changes = source.refresh()
    assert (sorted(changes.came), changes.went, changes.unreadable) == ([100, 101], [], 0)
    assert source.ns_pids() == {100: (100, 1), 101: (101, 7, 1)}
    put(tmp_path, 102, 2)
    shutil.rmtree(tmp_path / "100")
    changes = source.refresh()
    assert (changes.came, changes.went) == ([102], [100])
    assert source.ns_pids() == {101: (101, 7, 1), 102: (102, 2)}
    changes = source.refresh()
    assert (changes.came, changes.went, changes.unreadable) == ([], [], 0)


def test_what_is_known_is_not_read_again(tmp_path: Path) -> None:
    source = ScanSource(Procfs(str(tmp_path)))
    put(tmp_path, 100, 1)
    source.refresh()
    (tmp_path / "100" / "status").unlink()
    assert source.refresh().went == []
    assert source.ns_pids() == {100: (100, 1)}


def test_a_number_that_is_used_again_is_noticed_by_the_inode(tmp_path: Path) -> None:
    source = ScanSource(Procfs(str(tmp_path)))
    put(tmp_path, 100, 1)
    source.refresh()
    put(tmp_path, 100, 9)
    changes = source.refresh()
    assert (changes.came, changes.went) == ([100], [100])
    assert source.ns_pids() == {100: (100, 9)}


def test_a_process_that_ends_before_it_is_read_was_never_there(tmp_path: Path) -> None:
    source = ScanSource(Procfs(str(tmp_path)))
    (tmp_path / "100").mkdir()
    changes = source.refresh()
    assert (changes.came, changes.went, changes.unreadable) == ([], [], 0)
    put(tmp_path, 100, 1)
    assert source.refresh().came == [100]


def test_one_that_may_not_be_read_is_counted_and_tried_again(tmp_path: Path) -> None:
    class Forbidding(Procfs):
        forbidden: frozenset[int] = frozenset({100})

        def ns_pids(self, host_pid: int | str) -> tuple[int, ...]:
            if host_pid in self.forbidden:
                raise AccessDenied("no")
            return super().ns_pids(host_pid)

    procfs = Forbidding(str(tmp_path))
    source = ScanSource(procfs)
    put(tmp_path, 100, 1)
    put(tmp_path, 101, 2)
    for _ in range(2):
        assert source.refresh().unreadable == 1
        assert source.ns_pids() == {101: (101, 2)}
    procfs.forbidden = frozenset()
    changes = source.refresh()
    assert (changes.came, changes.unreadable) == ([100], 0)


def test_a_kernel_without_nspid_tells_nothing(tmp_path: Path) -> None:
    source = ScanSource(Procfs(str(tmp_path)))
    put(tmp_path, 100, status="Name:\tx\nTgid:\t100\n")
    source.refresh()
    assert source.ns_pids() == {100: ()}


def test_one_process_is_looked_at_without_a_listing(tmp_path: Path) -> None:
    source = ScanSource(Procfs(str(tmp_path)))
    put(tmp_path, 100, 1)
    put(tmp_path, 101, 2)
    changes = source.look(100)
    assert (changes.came, changes.went) == ([100], [])
    assert source.ns_pids() == {100: (100, 1)}
    for host_pid in (100, 999):
        changes = source.look(host_pid)
        assert (changes.came, changes.went) == ([], [])
    put(tmp_path, 100, 9)
    changes = source.look(100)
    assert (changes.came, changes.went) == ([100], [100])
    assert source.refresh().came == [101]
    assert source.ns_pids() == {100: (100, 9), 101: (101, 2)}


def test_real_processes_come_and_go() -> None:
    source: Lister = ScanSource(Procfs())
    source.refresh()
    assert source.ns_pids()[os.getpid()][0] == os.getpid()
    with subprocess.Popen(["sleep", "60"]) as process:
        assert process.pid in source.refresh().came
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process.pid not in source.refresh().went  # unreaped: its number is not free yet
    assert process.pid in source.refresh().went
    with pytest.raises(ProcessGone):
        Procfs().ns_pids(process.pid)


def test_what_is_read_ahead_is_not_read_again_unless_it_is_another_process(tmp_path: Path) -> None:
    noted = Noted(str(tmp_path))
    for host_pid in (100, 101, 102):
        put(tmp_path, host_pid, host_pid - 99)
    source = ScanSource(noted)
    listing = Listing(source)
    steps = listing.ahead()
    next(steps)
    next(steps)  # and left there: two of the three
    assert len(noted.read) == 2
    first, second = (int(each) for each in noted.read)
    put(tmp_path, first, 55)  # used again
    listing.refresh()
    assert source.ns_pids() == {first: (first, 55), second: (second, second - 99)} | {
        each: (each, each - 99) for each in {100, 101, 102} - {first, second}
    }
    assert noted.read.count(second) == 1
    assert noted.read.count(first) == 2
    assert listing.candidates(55) == [first]


def test_one_refresh_needs_no_second_listing_after_that_ahead(tmp_path: Path) -> None:
    noted = Noted(str(tmp_path))
    for host_pid in range(100, 300):
        put(tmp_path, host_pid, host_pid - 99)
    listing = Listing(ScanSource(noted))
    for refreshes in (1, 2):
        steps = listing.ahead()
        assert sum(1 for _ in steps) >= 3  # others get their turns
        listing.refresh()
        assert (len(listing), noted.listings, len(noted.read)) == (200, refreshes, 200)
    listing.refresh()
    assert noted.listings == 3  # what is not right after it lists anew
    shutil.rmtree(tmp_path / "150")
    for _ in listing.ahead():
        pass
    listing.refresh()
    assert 150 not in listing
    assert listing.ended(150)


def test_what_is_looked_at_during_a_listing_stays_known(tmp_path: Path) -> None:
    for host_pid in range(100, 200):
        put(tmp_path, host_pid, host_pid - 99)
    listing = Listing(ScanSource(Procfs(str(tmp_path))))
    steps = listing.ahead()
    next(steps)
    put(tmp_path, 900, 7)  # where the listing may have passed
    listing.look(900)
    for _ in steps:
        pass
    listing.refresh()
    assert 900 in listing


def test_a_refresh_in_between_makes_a_listing_worthless(tmp_path: Path) -> None:
    """What came since would be taken for gone."""
    for host_pid in range(100, 200):
        put(tmp_path, host_pid, host_pid - 99)
    listing = Listing(ScanSource(Procfs(str(tmp_path))))
    steps = listing.ahead()
    next(steps)
    put(tmp_path, 900, 7)
    listing.refresh()
    for _ in steps:
        pass
    listing.refresh()
    assert 900 in listing


class Noted(Procfs):
    """Counts what is read."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.read: list[int | str] = []
        self.listings = 0

    def ns_pids(self, host_pid: int | str) -> tuple[int, ...]:
        self.read.append(host_pid)
        return super().ns_pids(host_pid)

    def each_entry(self) -> Iterator[tuple[int, int]]:
        self.listings += 1
        return super().each_entry()
