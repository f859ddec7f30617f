"""The scan, on a fake /proc and on the real one."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.base.errors import AccessDenied
from resolver.linux.procfs import Procfs
from resolver.pids.scan import ScanSource
from tests.fakes.procs import FakeProc, changes, numbers


class Noted(Procfs):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.reads: list[int] = []
        self.listings = 0
        self.forbidden: frozenset[int] = frozenset()

    def ns_pids(self, host_pid: int) -> tuple[int, ...]:
        if host_pid in self.forbidden:
            raise AccessDenied("no")
        self.reads.append(host_pid)
        return super().ns_pids(host_pid)

    def each_entry(self) -> Iterator[tuple[int, int]]:
        self.listings += 1
        return super().each_entry()


@pytest.fixture
def noted(tmp_path: Path) -> Noted:
    return Noted(str(tmp_path))


@pytest.fixture
def source(noted: Noted) -> ScanSource:
    return ScanSource(noted)


def put(root: Path, host_pid: int, *ns_pids: int) -> None:
    """Put a process under ``root``; an existing one is replaced by another process with another inode."""
    place = root / str(host_pid)
    if place.exists():
        place.rename(root / "gone")  # kept until the new one exists, or the inode could be reused
    FakeProc(root).put(host_pid, *ns_pids)
    shutil.rmtree(root / "gone", ignore_errors=True)


def test_first_scan_is_whole_and_later_ones_new_only(tmp_path: Path, source: ScanSource) -> None:
    put(tmp_path, 100, 1)
    put(tmp_path, 101, 7, 1)
    for name in ("self", "sys"):
        (tmp_path / name).write_text("")
    (tmp_path / "103").mkdir()  # ended before the scan reads it
    assert changes(source) == ([100, 101], [])
    assert numbers(source) == {100: (100, 1), 101: (101, 7, 1)}
    put(tmp_path, 102, 2)
    shutil.rmtree(tmp_path / "100")
    assert changes(source) == ([102], [100])
    (tmp_path / "101" / "status").unlink()  # known processes are not read again
    assert changes(source) == ([], [])
    assert numbers(source) == {101: (101, 7, 1), 102: (102, 2)}


def test_one_that_may_not_be_read_is_counted_and_tried_again(
    tmp_path: Path, noted: Noted, source: ScanSource
) -> None:
    noted.forbidden = frozenset({100})
    put(tmp_path, 100, 1)
    put(tmp_path, 101, 2)
    for _ in range(2):
        source.refresh()
        assert source.incomplete() == "1 processes could not be read"
        assert numbers(source) == {101: (101, 2)}
    noted.forbidden = frozenset()
    assert changes(source) == ([100], [])
    assert source.incomplete() == ""


def test_one_process_is_looked_at_without_a_listing(tmp_path: Path, source: ScanSource) -> None:
    put(tmp_path, 100, 1)
    put(tmp_path, 101, 2)
    assert changes(source, look=100) == ([100], [])
    assert numbers(source) == {100: (100, 1)}
    for host_pid in (100, 999):
        assert changes(source, look=host_pid) == ([], [])
    put(tmp_path, 100, 9)
    assert changes(source, look=100) == ([100], [100])
    assert (source.candidates(1), source.candidates(9)) == ([], [100])
    assert changes(source) == ([101], [])
    assert numbers(source) == {100: (100, 9), 101: (101, 2)}
    shutil.rmtree(tmp_path / "100")
    assert changes(source, look=100) == ([], [100])


def test_listed_process_is_read_again_only_if_reused(
    tmp_path: Path, noted: Noted, source: ScanSource
) -> None:
    for host_pid in (100, 101, 102):
        put(tmp_path, host_pid, host_pid - 99)
    steps = source.refreshing()
    next(steps)
    next(steps)  # pause after two of the three processes
    first, second = (int(each) for each in noted.reads)
    put(tmp_path, first, 55)  # the PID is reused
    source.refresh()
    assert numbers(source) == {first: (first, 55), second: (second, second - 99)} | {
        each: (each, each - 99) for each in {100, 101, 102} - {first, second}
    }
    assert noted.reads.count(second) == 1
    assert noted.reads.count(first) == 2
    assert source.candidates(55) == [first]


def test_a_refresh_gives_way_and_lists_once(tmp_path: Path, noted: Noted, source: ScanSource) -> None:
    for host_pid in range(100, 300):
        put(tmp_path, host_pid, host_pid - 99)
    for refreshes in (1, 2):
        assert len(list(source.refreshing())) >= 3  # it yields to other tasks
        assert (len(source), noted.listings, len(noted.reads)) == (200, refreshes, 200)
    shutil.rmtree(tmp_path / "150")
    source.refresh()
    assert 150 not in source


@pytest.mark.parametrize("learn", ["look", "refresh"])
def test_process_learned_during_a_listing_is_kept(tmp_path: Path, source: ScanSource, learn: str) -> None:
    for host_pid in range(100, 200):
        put(tmp_path, host_pid, host_pid - 99)
    steps = source.refreshing()
    next(steps)
    put(tmp_path, 900, 7)  # the listing may be past this PID
    source.read(900) if learn == "look" else source.refresh()
    for _ in steps:
        pass
    assert 900 in source
