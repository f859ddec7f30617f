"""Repeated reads of one region, and discovery of regions, on real files."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from resolver.base.budget import Budgets
from resolver.base.errors import RegionRejected
from resolver.base.reasons import RegionReason
from resolver.hami import directory_reads, placements
from resolver.hami.directory_finder import DirectoryFinder
from resolver.hami.discovery import Ownership
from resolver.hami.layout import LAYOUTS, parse_used
from resolver.hami.region import SharedRegion, open_region
from resolver.hami.watches import Watches
from resolver.linux.procfs import Procfs
from resolver.linux.safe_open import cached, let_go, open_plain
from resolver.workers.lanes import TenantReader
from tests.descriptors import is_open
from tests.fakes.cachefiles import (
    NAMES,
    POD_UID,
    AtOnce,
    container,
    expected,
    poke,
    recorded,
    write,
)
from tests.fakes.clock import Clock, burn
from tests.fakes.direct import Refusing, at_once
from tests.patience import until

V1_2 = LAYOUTS["v1.2"]
HOSTILE = "bad-uid_tenant"


def opened(path: Path) -> SharedRegion:
    dir_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return open_region(dir_fd, path.name, str(path))
    finally:
        os.close(dir_fd)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return container(tmp_path)


@pytest.fixture
def region(file: Path) -> Iterator[SharedRegion]:
    with opened(file) as shared_region:
        yield shared_region


def refused(region: SharedRegion) -> RegionReason:
    with pytest.raises(RegionRejected) as caught:
        region.read()
    return caught.value.reason


# -- one region -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_read_and_dump_equal_the_json(name: str, tmp_path: Path) -> None:
    content = expected(name)
    path = container(tmp_path, layout=name)
    with opened(path) as region:
        view, dump = region.read(), region.dump()
        assert not os.get_inheritable(region.fd)
        start, length = region.layout.slot_offset(0), view.proc_num * region.layout.slot_size
        slots = at_once(region.pieces(TenantReader(Procfs()), "", [(start, length)]))[start]
        os.truncate(path, 100)
        assert at_once(region.pieces(TenantReader(Procfs()), "", [(start, length)])) == {}

    assert region.layout.name == name
    assert {key: dump[key] for key in content} == content
    absent = {"major_version", "minor_version", "last_kernel_time"} - content.keys()
    assert dump.keys() - content.keys() == {"path", "owner_pid"} | absent
    assert [dump[key] for key in sorted(absent)] == [None] * len(absent)
    assert (dump["path"], dump["owner_pid"]) == (str(path), 0)
    assert region.identity == (path.stat().st_dev, path.stat().st_ino)
    kinds = ("context_size", "module_size", "data_size", "total")
    assert view.device_num == content["device_num"]
    assert list(view.uuids) == content["uuids"]
    assert list(view.sm_limit) == content["sm_limit"]
    assert view.proc_num == content["proc_num"]
    assert view.utilization_switch == content["utilization_switch"]
    for slot, wanted in zip(view.slots, content["slots"], strict=True):
        assert slot[:4] == tuple(wanted[key] for key in ("index", "pid", "hostpid", "status"))
        assert list(slot.sm_util) == [util["sm_util"] for util in wanted.get("device_util", [])]
        used = parse_used(region.layout, slots[slot.index * region.layout.slot_size :], view.device_num)
        assert used == tuple(tuple(device[kind] for kind in kinds) for device in wanted["used"])


def test_unchanged_region_is_the_same_object(region: SharedRegion, file: Path) -> None:
    view = region.read()
    assert region.read() is view
    poke(file, V1_2.slot_offset(0) + V1_2.used, "Q", 12345)  # the view does not show memory use
    poke(file, V1_2.proc_num + 8, "i", 77)  # nor is recent_kernel
    poke(file, V1_2.owner_pid, "Q", 23)  # current lock owner
    assert region.read() is view


@pytest.mark.parametrize(
    ("offset", "code", "value", "field"),
    [
        (V1_2.slot_offset(0) + 4, "i", 4711, "slots"),
        (V1_2.slot_offset(3), "i", 9, "slots"),
        (V1_2.slot_offset(1) + V1_2.status, "i", 0, "slots"),
        (V1_2.sm_util_offset(2, 1), "Q", 99, "slots"),
        (V1_2.sm_limit + 8, "Q", 55, "sm_limit"),
        (V1_2.uuids, "3s", b"MIG", "uuids"),
        (V1_2.proc_num + 4, "i", 0, "utilization_switch"),
        (V1_2.proc_num, "i", 2, "proc_num"),
    ],
)
def test_change_shows_in_the_next_read(
    region: SharedRegion, file: Path, offset: int, code: str, value: int | bytes, field: str
) -> None:
    before = region.read()
    poke(file, offset, code, value)
    after = region.read()
    changed = {name for name in before._fields if getattr(before, name) != getattr(after, name)}
    assert changed == ({field, "slots"} if field == "proc_num" else {field})


def test_missing_pages_are_read_by_a_lane(region: SharedRegion) -> None:
    """A read with RWF_NOWAIT starts readahead, which waits for the lock of a process that punches holes."""
    region.read()
    os.fsync(region.fd)
    os.posix_fadvise(region.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert not cached(region.fd, 0, 1)
    assert region.read_at_once() is None
    time.sleep(0.1)
    assert not cached(region.fd, region.layout.proc_num, 1), "it was read ahead"
    region.read()
    assert cached(region.fd, 0, 1)
    assert region.read_at_once() is not None


def test_slowly_freed_blocks_are_left_to_a_lane(region: SharedRegion, file: Path) -> None:
    """Readahead waits for the lock of the process that frees them, even for reads of the page cache only."""
    subprocess.run(["fallocate", "--keep-size", "--offset", "4M", "--length", "4M", file], check=True)
    assert region.read_at_once() is None
    reader = Refusing(Procfs())
    assert at_once(region.pieces(reader, "", [(0, 8)]))[0] == file.read_bytes()[:8]
    assert reader.asked == [("", "pieces_of_open")]


def test_changed_device_count_changes_the_lists(region: SharedRegion, file: Path) -> None:
    region.read()
    poke(file, V1_2.device_num, "Q", 1)
    view = region.read()
    assert (len(view.uuids), len(view.sm_limit), len(view.slots[0].sm_util)) == (1, 1, 1)
    poke(file, V1_2.device_num, "Q", 0)
    assert region.read().slots[2] == (2, 23, 41234, 1, ())


def sm_util(slot: int, value: int) -> tuple[int, str, int]:
    offset = V1_2.sm_util_offset(slot, 0)
    assert offset is not None
    return offset, "Q", value


@pytest.mark.parametrize("left", [1, 30, 900])
def test_slots_above_proc_num_are_read_while_they_have_a_load(
    region: SharedRegion, file: Path, left: int
) -> None:
    """A moved slot's old copy is noticed if proc_num changes, or when all slots are read."""
    in_use = region.read().proc_num
    poke(file, *sm_util(in_use + left, 58))
    poke(file, V1_2.slot_offset(in_use + left), "i", 77)
    assert len(region.read().slots) == in_use, "nothing above proc_num is read unless it is asked for"
    region.start_with()
    view = region.read()
    assert (len(view.slots), view.proc_num) == (in_use + left + 1, in_use)
    assert view.slots[in_use + left][1] == 77
    assert view.slots[in_use + left].sm_util[0] == 58
    assert view.slots.vacant(in_use)
    assert 77 not in [ns_pid for _, ns_pid in view.slots.in_use()]
    assert region.read() is view
    poke(file, *sm_util(in_use + left, 0))
    assert len(region.read().slots) == in_use


def test_proc_num_reveals_the_copy_of_a_moved_slot(region: SharedRegion, file: Path) -> None:
    in_use = region.read().proc_num
    poke(file, *sm_util(in_use - 1, 41))
    poke(file, V1_2.proc_num, "i", in_use - 1)
    view = region.read()
    assert (len(view.slots), view.proc_num) == (in_use, in_use - 1)
    poke(file, V1_2.proc_num, "i", in_use)
    assert region.read() is not view, "the same bytes, and one more in use"
    assert region.read().proc_num == in_use


def poked(offset: int, code: str, value: int) -> Callable[[Path], None]:
    return lambda file: poke(file, offset, code, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *(
            (lambda file, size=size: os.truncate(file, size), RegionReason.TRUNCATED)
            for size in (0, 100, V1_2.slot_offset(2), V1_2.size)
        ),
        (lambda file: os.truncate(file, V1_2.file_bytes + 1), RegionReason.UNKNOWN_SIZE),
        (Path.unlink, RegionReason.GONE),
        (lambda file: (file.parent / "second").hardlink_to(file), RegionReason.HARD_LINK),
        (poked(0, "i", 0), RegionReason.NOT_INITIALIZED),
        (poked(8, "I", 1), RegionReason.UNKNOWN_VERSION),  # not the layout that the file was opened with
        (poked(8, "I", 9), RegionReason.UNKNOWN_VERSION),
        (poked(V1_2.device_num, "Q", 17), RegionReason.BAD_HEADER),
        (poked(V1_2.device_num, "Q", 2**64 - 1), RegionReason.BAD_HEADER),
        (poked(V1_2.uuids + 96, "B", 7), RegionReason.BAD_HEADER),
        *((poked(V1_2.proc_num, "i", count), RegionReason.BAD_HEADER) for count in (-1, 1025, 2**31 - 1)),
    ],
)
def test_changed_file_is_refused_every_time(
    region: SharedRegion, file: Path, change: Callable[[Path], None], reason: RegionReason
) -> None:
    region.read()
    change(file)
    assert refused(region) is reason
    assert refused(region) is reason


def test_region_can_be_closed_twice(region: SharedRegion) -> None:
    region.close()
    region.close()
    assert refused(region) is RegionReason.IO_ERROR


@pytest.mark.parametrize("name", ["", ".", "..", "../main", "a/b.cache"])
def test_only_a_plain_file_name_is_opened(tmp_path: Path, name: str) -> None:
    dir_fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(RegionRejected, match="is not the name of a file"):
            open_plain(dir_fd, name)
    finally:
        os.close(dir_fd)


# -- finding ----------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def find(tmp_path: Path, clock: Clock) -> Iterator[AtOnce]:
    before = set(os.listdir("/proc/self/fd"))
    finder = AtOnce([str(tmp_path)], Procfs(), clock)
    yield finder
    finder.close()
    # Other code may close descriptors meanwhile; a new one would be the finder's. A thread closes those.
    until(lambda: set(os.listdir("/proc/self/fd")) <= before, "all descriptors to be closed")


def test_regions_come_and_go_with_their_files(find: AtOnce, tmp_path: Path) -> None:
    assert find.refresh(full=True) == ([], [], [])
    first, second = container(tmp_path, "main"), container(tmp_path, "side")

    added = [
        found for _ in range(2) for found in find.refresh(full=True).added
    ]  # the second refresh finds only the second directory, if time ran out
    assert {found.path: found.ownership for found in added} == {
        str(path): Ownership(
            account=str(path.parent),
            container=f"{POD_UID}_{name}",
            pod_uid=POD_UID,
            container_name=name,
            placement="hami",
        )
        for path, name in ((first, "main"), (second, "side"))
    }
    assert find.regions.keys() == {str(first), str(second)}
    assert find.refresh(full=True) == find.refresh(full=True) == ([], [], [])

    first.unlink()
    gone = find.regions[str(first)]
    assert find.refresh(full=True).removed == [gone]
    assert gone.fd == -1

    second.unlink()
    second.parent.rmdir()
    assert [region.path for region in find.refresh(full=True).removed] == [str(second)]
    assert not find.regions
    assert not find.rejected


def test_bad_files_under_one_name_are_reported_once(find: AtOnce, tmp_path: Path) -> None:
    """They keep the place of the name, and leave nothing behind with it."""
    directory, reports = tmp_path / "uid_main", list[str]()
    directory.mkdir()
    names = [directory / f"{number}.cache" for number in range(placements.MAX_CACHES)]
    for times in range(3):
        for path in names:
            (tmp_path / "new").symlink_to("/")
            (tmp_path / "new").rename(path)
        reports += [path for path, _ in find.refresh(full=True).rejected]
        (directory / f"0{times}.cache").symlink_to("/")
    assert sorted(reports) == sorted([*map(str, names), str(directory)])
    shutil.rmtree(directory)
    find.refresh(full=True)
    assert not find.rejected


def test_new_directory_precedes_relisted_ones(
    find: DirectoryFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    for number in range(40):
        (tmp_path / f"uid{number}_old").mkdir()
    find.refresh(full=True)
    listed = list[int]()

    def slowly(dir_fd: int) -> tuple[list[str], bool]:
        listed.append(dir_fd)
        burn(0.002)
        return finder_list(dir_fd)

    finder_list = placements.list_caches
    monkeypatch.setattr(directory_reads, "list_caches", slowly)
    new = container(tmp_path)
    assert [region.path for region in find.refresh(full=True).added] == [str(new)]
    assert 2 <= len(listed) <= 12
    while find.wants() <= clock():
        find.refresh(full=False)
    assert len(listed) >= 41  # the other directories have had their turn


def test_removed_file_is_closed_in_a_thread(
    find: DirectoryFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last close frees the file's blocks: 17 s for 20,000 extents on a disk with discard."""
    closed = dict[int, int]()
    close = os.close

    def noted(fd: int) -> None:
        close(fd)
        closed[fd] = threading.get_ident()

    container(tmp_path)
    region = find.refresh(full=True).added[0].region
    fd = region.fd
    monkeypatch.setattr(os, "close", noted)
    Path(region.path).unlink()
    assert find.refresh(full=True).removed == [region]
    until(lambda: fd in closed, "the descriptor is closed")
    assert closed[fd] != threading.get_ident()


def test_replaced_file_is_another_region(find: DirectoryFinder, tmp_path: Path) -> None:
    path = container(tmp_path)
    ((old, *_),) = find.refresh(full=True).added
    write(path.parent / "new", recorded("v1.1")).rename(path)
    changes = find.refresh(full=True)
    assert changes.removed == [old]
    assert [found.region.layout.name for found in changes.added] == ["v1.1"]


@pytest.fixture
def watches(find: DirectoryFinder) -> Iterator[Watches]:
    find._watches = Watches(Budgets(), Counter())
    yield find._watches
    find._watches.close()


def test_other_events_do_not_delay_a_retry(
    find: DirectoryFinder, watches: Watches, tmp_path: Path, clock: Clock
) -> None:
    path, other = container(tmp_path, "broken"), container(tmp_path, "other")
    poke(path, V1_2.proc_num, "i", -1)
    (_,) = find.refresh(full=True).added
    find.refresh(full=False)
    again = find.wants()
    assert clock.now < again < clock.now + 60
    (other.parent / "more").touch()
    watches.take()
    find.refresh(full=False)
    assert find.wants() == again


def test_exchanged_directory_drops_its_regions(
    find: DirectoryFinder, watches: Watches, tmp_path: Path
) -> None:
    path, other = container(tmp_path), container(tmp_path / "elsewhere")
    ((old, *_),) = find.refresh(full=True).added
    path.parent.rename(tmp_path / "moved")
    other.parent.rename(path.parent)
    watches.take()
    assert find.wants() == 0.0
    changes = find.refresh(full=False)
    assert changes.removed == [old]
    assert [found.path for found in changes.added] == [str(path)]


def test_broken_file_is_retried_ever_more_rarely(
    find: AtOnce, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = container(tmp_path)
    poke(path, V1_2.proc_num, "i", -1)
    tries, refusals = [], []

    def noted(dir_fd: int, name: str) -> tuple[int, os.stat_result]:
        tries.append(clock.now)
        return open_plain(dir_fd, name)

    monkeypatch.setattr(directory_reads, "open_plain", noted)
    for _ in range(4 * 120):
        refusals += [why.reason for _, why in find.refresh(full=False).rejected]
        clock.now += 0.25
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert refusals == [RegionReason.BAD_HEADER]

    poke(path, V1_2.proc_num, "i", 4)
    clock.now += 30
    assert find.refresh(full=False).added
    assert find.rejected == {}


def test_refused_region_is_closed_and_retried(find: DirectoryFinder, tmp_path: Path, clock: Clock) -> None:
    path = container(tmp_path)
    ((region, *_),) = find.refresh(full=True).added
    poke(path, V1_2.device_num, "Q", 99)
    with pytest.raises(RegionRejected) as caught:
        region.read()
    find.reject(region, caught.value)
    assert (region.fd, find.regions, find.rejected) == (-1, {}, {str(path): RegionReason.BAD_HEADER})
    assert find.refresh(full=True) == ([], [], [])

    poke(path, V1_2.device_num, "Q", 2)
    clock.now += 0.25
    assert [again.path for again in find.refresh(full=False).added] == [str(path)]
    find.reject(region, caught.value)  # about a region that was closed long ago
    assert find.regions.keys() == {str(path)}


def test_missing_containers_directory_is_waited_for(tmp_path: Path, clock: Clock) -> None:
    late = tmp_path / "hook" / "containers"
    find = AtOnce([str(late), str(tmp_path / "other")], Procfs(), clock)
    assert find.refresh(full=True) == ([], [], [])
    assert find.missing_dirs == {str(late), str(tmp_path / "other")}
    path = container(late)
    assert [region.path for region in find.refresh(full=False).added] == [str(path)]
    assert find.missing_dirs == {str(tmp_path / "other")}

    late.rename(tmp_path / "away")
    assert len(find.refresh(full=False).removed) == 1
    assert str(late) in find.missing_dirs
    container(late)
    assert len(find.refresh(full=False).added) == 1
    find.close()
    assert find.regions == {}


def test_fifo_and_device_are_never_opened(find: AtOnce, tmp_path: Path) -> None:
    (tmp_path / HOSTILE).mkdir()
    os.mkfifo(tmp_path / HOSTILE / "pipe.cache")
    waiting = "import os, sys; os.open(sys.argv[1], os.O_WRONLY)"  # blocks until the other end is opened
    writer = subprocess.Popen([sys.executable, "-c", waiting, tmp_path / HOSTILE / "pipe.cache"])
    try:
        for _ in range(10):
            find.refresh(full=True)
            time.sleep(0.05)
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()


def test_region_stays_when_its_directory_is_flooded(find: AtOnce, tmp_path: Path) -> None:
    path = write(tmp_path / HOSTILE / "first.cache", recorded("v1.2"))
    ((region, *_),) = find.refresh(full=True).added
    for number in range(1000):
        (tmp_path / HOSTILE / f"flood{number}").touch()
    assert find.refresh(full=True).removed == []
    assert find.regions == {str(path): region}
    assert find.rejected == {str(tmp_path / HOSTILE): RegionReason.TOO_MANY_ENTRIES}


def test_broken_files_use_their_share_and_refresh_goes_on(find: AtOnce, tmp_path: Path, clock: Clock) -> None:
    for number in range(64):
        for file in range(8):
            path = tmp_path / f"uid{number}_bad" / f"{file}.cache"
            path.parent.mkdir(exist_ok=True)
            path.touch()
    good = container(tmp_path, "good")
    added = [region.path for region in find.refresh(full=False).added]
    while not added or len(find.rejected) < 512:
        assert find.wants() <= clock()
        added += [region.path for region in find.refresh(full=False).added]
    assert added == [str(good)]
    assert len(find.rejected) == 512


def test_directory_swapped_for_link_drops_its_regions(find: AtOnce, tmp_path: Path) -> None:
    good, other = container(tmp_path, "good"), container(tmp_path, "other")
    find.refresh(full=True)
    other.parent.rename(tmp_path / "moved")
    other.parent.symlink_to(good.parent)
    assert [region.path for region in find.refresh(full=True).removed] == [str(other)]
    assert find.rejected == {str(other.parent): RegionReason.SYMLINK}


@pytest.mark.parametrize("spare", range(1, 6))
def test_opening_with_few_descriptors_leaks_nothing(
    find: DirectoryFinder, tmp_path: Path, clock: Clock, spare: int
) -> None:
    path = container(tmp_path)
    os.close(os.open(tmp_path, os.O_RDONLY))
    before = set(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, before))
    fillers = [os.dup(0) for _ in range(highest + 1 - len(before))]
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + spare, limits[1]))
    try:
        find.refresh(full=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in fillers:
            os.close(fd)
    clock.now += 1
    find.refresh(full=True)
    assert find.regions.keys() == {str(path)}
    find.close()
    until(lambda: set(os.listdir("/proc/self/fd")) <= before, "the end of every descriptor")


def test_file_that_the_lane_cannot_open_is_rejected_alone(region: SharedRegion) -> None:
    reader = Refusing(Procfs(), read_open=OSError(errno.EIO, os.strerror(errno.EIO)))
    with pytest.raises(RegionRejected) as refusal:
        at_once(region.read_by(reader, ""))
    assert refusal.value.reason is RegionReason.IO_ERROR


def test_file_is_closed_later_if_no_thread_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last close of a removed file can take seconds, so no caller does it."""

    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", refuse)
        let_go(first)
    os.fstat(first)
    let_go(second)
    until(lambda: not is_open(tmp_path), "both to be closed")
