"""A tenant may put anything into its directory: nothing crashes, nothing hangs, nobody else waits."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resolver.errors import RegionRejected
from resolver.hami.directory_finder import MAX_OPENS, DirectoryFinder
from resolver.hami.layout import LAYOUTS
from resolver.linux.procfs import Procfs
from resolver.reasons import RegionReason
from tests.fakes.cachefiles import container, poke, recorded, write
from tests.patience import PATIENCE_S

V1_2 = LAYOUTS["v1.2"]
HOSTILE = "bad-uid_tenant"
#: Far more than any of this takes on a busy machine, far less than a hang.
SECONDS = PATIENCE_S


def symlink_to_a_file(place: Path, other: Path) -> None:
    place.symlink_to(other)


def symlink_to_a_directory(place: Path, other: Path) -> None:
    place.symlink_to(other.parent)


def dangling_symlink(place: Path, other: Path) -> None:
    place.symlink_to("/nowhere")


def fifo(place: Path, other: Path) -> None:
    os.mkfifo(place)


def unix_socket(place: Path, other: Path) -> None:
    here = os.open(place.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/{place.name}")  # a socket's path may have 107 bytes only
    os.close(here)


def character_device(place: Path, other: Path) -> None:
    os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(5, 0))


def block_device(place: Path, other: Path) -> None:
    os.mknod(place, stat.S_IFBLK | 0o666, os.makedev(7, 0))


def directory(place: Path, other: Path) -> None:
    place.mkdir()


def hard_link(place: Path, other: Path) -> None:
    place.hardlink_to(write(other.parent.parent / "elsewhere", recorded("v1.2")))


def empty(place: Path, other: Path) -> None:
    place.touch()


def a_tebibyte_of_nothing(place: Path, other: Path) -> None:
    place.touch()
    os.truncate(place, 1 << 40)


def a_tebibyte_that_begins_well(place: Path, other: Path) -> None:
    os.truncate(write(place, recorded("v1.2")), 1 << 40)


def changed(offset: int, code: str, value: int | bytes) -> Callable[[Path, Path], None]:
    def make(place: Path, other: Path) -> None:
        poke(write(place, recorded("v1.2")), offset, code, value)

    return make


@pytest.fixture
def containers(tmp_path: Path) -> Path:
    path = tmp_path / "containers"
    (path / HOSTILE).mkdir(parents=True)
    return path


@pytest.fixture
def find(containers: Path) -> Iterator[DirectoryFinder]:
    before = set(os.listdir("/proc/self/fd"))
    finder = DirectoryFinder([str(containers)], Procfs())
    yield finder
    finder.close()
    # Others may be collected meanwhile; new ones would be the finder's.
    assert set(os.listdir("/proc/self/fd")) <= before, "descriptors were left open"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (symlink_to_a_file, "symlink"),
        (symlink_to_a_directory, "symlink"),
        (dangling_symlink, "symlink"),
        (fifo, "not_regular"),
        (unix_socket, "not_regular"),
        (character_device, "not_regular"),
        (block_device, "not_regular"),
        (directory, "not_regular"),
        (hard_link, "hard_link"),
        (empty, "unknown_size"),
        (a_tebibyte_of_nothing, "unknown_size"),
        (a_tebibyte_that_begins_well, "unknown_size"),
        pytest.param(changed(0, "i", 0), "not_initialized", id="no magic number"),
        pytest.param(changed(8, "I", 3), "unknown_version", id="version 1.3"),
        pytest.param(changed(V1_2.proc_num, "i", -1), "bad_header", id="proc_num -1"),
        pytest.param(changed(V1_2.proc_num, "i", 2**31 - 1), "bad_header", id="proc_num INT_MAX"),
        pytest.param(changed(V1_2.device_num, "Q", 2**64 - 1), "bad_header", id="device count UINT64_MAX"),
        pytest.param(changed(V1_2.uuids, "4s", b"\xff\x1b[m"), "bad_header", id="UUID that is no text"),
    ],
)
def test_a_hostile_file_is_counted_and_keeps_nobody_waiting(
    find: DirectoryFinder, containers: Path, make: Callable[[Path, Path], None], reason: str
) -> None:
    good = container(containers)
    hostile = containers / HOSTILE / "x.cache"
    make(hostile, good)
    before = hostile.lstat()

    started = time.monotonic()
    changes = find.refresh(full=True)
    assert [region.path for region in changes.added] == [str(good)]
    assert find.regions[str(good)].read().proc_num == 4
    assert find.rejected == {str(hostile): reason}
    for full in (False, True):
        assert find.refresh(full=full) == ([], [], [])
    assert find.counts == {RegionReason(reason): 1}

    done = subprocess.run(
        [sys.executable, "-m", "resolver", "slots", "--json", containers],
        capture_output=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 1
    shown = {file["path"]: file.get("reason") for file in json.loads(done.stdout)}
    assert shown == {str(good): None, str(hostile): reason}
    assert time.monotonic() - started < SECONDS
    after = hostile.lstat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a_fifo_with_a_writer_and_a_device_are_never_even_opened(
    find: DirectoryFinder, containers: Path
) -> None:
    os.mkfifo(containers / HOSTILE / "pipe.cache")
    waiting = "import os, sys; os.open(sys.argv[1], os.O_WRONLY)"  # until somebody opens the other end
    writer = subprocess.Popen([sys.executable, "-c", waiting, containers / HOSTILE / "pipe.cache"])
    try:
        for _ in range(10):
            find.refresh(full=True)
            time.sleep(0.05)
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()


def test_ten_thousand_files_delay_nobody(find: DirectoryFinder, containers: Path) -> None:
    for number in range(10_000):
        (containers / HOSTILE / f"{number}.cache").touch()
    good = container(containers, "good")
    started = time.monotonic()
    assert [region.path for region in find.refresh(full=True).added] == [str(good)]
    assert find.rejected[str(containers / HOSTILE)] is RegionReason.TOO_MANY_ENTRIES
    assert find.counts[RegionReason.TOO_MANY_ENTRIES] == 1
    assert len(find.rejected) == 1 + 8
    assert find.counts[RegionReason.UNKNOWN_SIZE] == 8
    for _ in range(20):
        find.refresh(full=False)
    assert time.monotonic() - started < SECONDS

    for file in (containers / HOSTILE).iterdir():
        file.unlink()
    late = write(containers / HOSTILE / "late.cache", recorded("v1.1"))
    assert [region.path for region in find.refresh(full=True).added] == [str(late)]
    assert find.rejected == {}


def test_a_region_stays_when_its_directory_is_flooded(find: DirectoryFinder, containers: Path) -> None:
    path = write(containers / HOSTILE / "first.cache", recorded("v1.2"))
    ((region, _),) = find.refresh(full=True).added
    for number in range(1000):
        (containers / HOSTILE / f"flood{number}").touch()
    assert find.refresh(full=True).removed == []
    assert find.regions == {str(path): region}
    assert find.rejected == {str(containers / HOSTILE): RegionReason.TOO_MANY_ENTRIES}


def test_ten_thousand_containers_are_found_little_by_little(find: DirectoryFinder, containers: Path) -> None:
    for number in range(10_000):
        (containers / f"uid{number}_name").mkdir()
    good = container(containers, "good")
    started = time.monotonic()
    refreshes = 1
    while not find.refresh(full=refreshes == 1).added:
        refreshes += 1
        assert time.monotonic() - started < SECONDS
    assert find.regions.keys() == {str(good)}
    assert time.monotonic() - started < SECONDS


def test_many_broken_files_use_up_their_share_and_the_next_refresh_goes_on(
    find: DirectoryFinder, containers: Path
) -> None:
    for number in range(2 * MAX_OPENS // 8):
        for file in range(8):
            path = containers / f"uid{number}_bad" / f"{file}.cache"
            path.parent.mkdir(exist_ok=True)
            path.touch()
    good = container(containers, "good")
    added = [region.path for region in find.refresh(full=False).added]
    assert 0 < len(find.rejected) <= MAX_OPENS
    for _ in range(20):  # two are enough, unless the machine is busy: each has so much time
        added += [region.path for region in find.refresh(full=False).added]
    assert added == [str(good)]
    assert len(find.rejected) == 2 * MAX_OPENS


def test_symbolic_links_to_container_directories_are_refused(find: DirectoryFinder, containers: Path) -> None:
    good = container(containers)
    link = containers / "other-uid_other"
    link.symlink_to(good.parent)
    assert len(find.refresh(full=True).added) == 1
    assert find.refresh(full=False) == find.refresh(full=True) == ([], [], [])
    assert find.rejected == {str(link): RegionReason.SYMLINK}
    assert find.counts == {RegionReason.SYMLINK: 1}
    link.unlink()
    find.refresh(full=False)
    assert find.rejected == {}


def test_a_container_directory_swapped_for_a_link_lets_go_of_its_regions(
    find: DirectoryFinder, containers: Path
) -> None:
    good, other = container(containers, "good"), container(containers, "other")
    find.refresh(full=True)
    other.parent.rename(containers.parent / "moved")
    other.parent.symlink_to(good.parent)
    assert [region.path for region in find.refresh(full=False).removed] == [str(other)]
    assert find.rejected == {str(other.parent): RegionReason.SYMLINK}


def test_mounts_below_a_containers_directory_are_refused(tmp_path: Path) -> None:
    """Even of the same file system, where device numbers tell nothing; in a mount namespace of its own."""
    code = """
import json, subprocess, sys
from pathlib import Path
from resolver.hami.directory_finder import DirectoryFinder
from resolver.linux.procfs import Procfs
from tests.fakes.cachefiles import container, recorded, write
here = Path(sys.argv[1])
other = write(here / "elsewhere" / "x.cache", recorded("v1.2"))
good = container(here / "c", "good")
place = container(here / "c", "file")
(here / "c" / "uid_dir").mkdir()
subprocess.run(["mount", "--bind", other, place], check=True)
subprocess.run(["mount", "--bind", other.parent, here / "c" / "uid_dir"], check=True)
find = DirectoryFinder([str(here / "c")], Procfs())
find.refresh(full=True)
assert find.regions.keys() == {str(good)}, find.regions
print(json.dumps({path.rsplit("/", 1)[1]: reason for path, reason in find.rejected.items()}))
"""
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"6f1e2d3c.cache": "other_device", "uid_dir": "other_device"}


TRUNCATOR = """
import os, sys
data = open(sys.argv[1], "rb").read()
fd = os.open(sys.argv[1], os.O_RDWR)
print("going", flush=True)
while True:
    os.ftruncate(fd, 0)
    os.ftruncate(fd, 1000)
    os.ftruncate(fd, len(data))
    os.pwrite(fd, data[:20000], 0)
    os.pwrite(fd, data[-64:], len(data) - 64)
"""


def test_a_file_truncated_and_regrown_all_the_time(find: DirectoryFinder, containers: Path) -> None:
    """Each read gives a view or a reason of the fixed list, never a signal; the neighbour is read every time."""
    good = container(containers)
    path = write(containers / HOSTILE / "x.cache", recorded("v1.2"))
    find.refresh(full=True)
    region, neighbour = find.regions[str(path)], find.regions[str(good)]
    tenant = subprocess.Popen([sys.executable, "-c", TRUNCATOR, path], stdout=subprocess.PIPE)
    try:
        assert tenant.stdout is not None
        assert tenant.stdout.readline() == b"going\n"
        seen: set[str] = set()
        until = time.monotonic() + SECONDS
        reads = 0
        while time.monotonic() < until and not (reads >= 2000 and len(seen) >= 2):
            reads += 1
            try:
                view = region.read()
                assert view.proc_num in (0, 4)  # 0: regrown, the tail not yet written
                seen.add("view")
            except RegionRejected as why:
                seen.add(why.reason)
            assert neighbour.read().proc_num == 4
        assert "truncated" in seen
        assert seen <= {"view", "truncated", "not_initialized", "bad_header", "unknown_version"}
        for _ in range(200):
            find.refresh(full=True)
            current = find.regions.get(str(path))
            if current is not None:
                try:
                    current.read()
                except RegionRejected as why:
                    find.reject(current, why)
            assert find.regions[str(good)] is neighbour
    finally:
        tenant.kill()
        tenant.wait()
        if tenant.stdout:
            tenant.stdout.close()
