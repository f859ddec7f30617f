"""A tenant may put anything into its directory: nothing crashes, nothing hangs, nobody else waits."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.base.reasons import RegionReason
from resolver.hami import searched_directories
from resolver.hami.layout import LAYOUTS
from resolver.linux.procfs import Procfs
from tests.fakes.cachefiles import CountingFinder, container, recorded, write
from tests.patience import PATIENCE_S, until

V1_2 = LAYOUTS["v1.2"]
HOSTILE = "bad-uid_tenant"
#: Far more than any of this takes on a busy machine, far less than a hang.
SECONDS = PATIENCE_S


@pytest.fixture
def containers(tmp_path: Path) -> Path:
    path = tmp_path / "containers"
    (path / HOSTILE).mkdir(parents=True)
    return path


@pytest.fixture
def find(containers: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingFinder]:
    monkeypatch.setattr(searched_directories, "HALF_MADE_SECONDS", 0.0)  # new files are reported at once
    before = set(os.listdir("/proc/self/fd"))
    finder = CountingFinder([str(containers)], Procfs())
    yield finder
    finder.close()
    # Others may be collected meanwhile; new ones would be the finder's. A thread closes them.
    until(lambda: set(os.listdir("/proc/self/fd")) <= before, "all descriptors to be closed")


def test_a_fifo_with_a_writer_and_a_device_are_never_even_opened(
    find: CountingFinder, containers: Path
) -> None:
    os.mkfifo(containers / HOSTILE / "pipe.cache")
    waiting = "import os, sys; os.open(sys.argv[1], os.O_WRONLY)"  # until the other end is opened
    writer = subprocess.Popen([sys.executable, "-c", waiting, containers / HOSTILE / "pipe.cache"])
    try:
        for _ in range(10):
            find.refresh(full=True)
            time.sleep(0.05)
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()


def test_a_region_stays_when_its_directory_is_flooded(find: CountingFinder, containers: Path) -> None:
    path = write(containers / HOSTILE / "first.cache", recorded("v1.2"))
    ((region, *_),) = find.refresh(full=True).added
    for number in range(1000):
        (containers / HOSTILE / f"flood{number}").touch()
    assert find.refresh(full=True).removed == []
    assert find.regions == {str(path): region}
    assert find.rejected == {str(containers / HOSTILE): RegionReason.TOO_MANY_ENTRIES}


def test_broken_files_use_their_share_and_refresh_goes_on(find: CountingFinder, containers: Path) -> None:
    for number in range(64):
        for file in range(8):
            path = containers / f"uid{number}_bad" / f"{file}.cache"
            path.parent.mkdir(exist_ok=True)
            path.touch()
    good = container(containers, "good")
    added = [region.path for region in find.refresh(full=False).added]
    started = time.monotonic()
    while not added or len(find.rejected) < 512:
        assert time.monotonic() - started < SECONDS
        added += [region.path for region in find.refresh(full=False).added]
    assert added == [str(good)]
    assert len(find.rejected) == 512


def test_directory_swapped_for_link_drops_its_regions(find: CountingFinder, containers: Path) -> None:
    good, other = container(containers, "good"), container(containers, "other")
    find.refresh(full=True)
    other.parent.rename(containers.parent / "moved")
    other.parent.symlink_to(good.parent)
    assert [region.path for region in find.refresh(full=True).removed] == [str(other)]
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
