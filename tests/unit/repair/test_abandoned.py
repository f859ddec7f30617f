"""Abandoned cache files, which no process has open, on a fake /proc; tests/kernel has real processes."""

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resolver.base.budget import Budgets
from resolver.base.errors import TooSlow
from resolver.base.journal import Journal
from resolver.base.reasons import UnresolvedReason
from resolver.hami.discovery import Location, Ownership, SharedDirectory
from resolver.hami.layout import LAYOUTS
from resolver.hami.packed_slots import SlotRecord
from resolver.hami.process_reads import files_of
from resolver.hami.region import RegionView, SharedRegion, unwritten
from resolver.linux.procfs import Procfs
from resolver.repair.abandoned import FIRST_PAUSE, Abandoned
from resolver.repair.region import RegionRepairs
from resolver.workers.lane import LEASES
from resolver.workers.lanes import TenantReader
from tests.fakes.slots import packed

OURS, ANOTHER = "11111111-2222-3333-4444-555555555555", "99999999-2222-3333-4444-555555555555"
LONG_AGO = 1_000_000_000
MAPPED = "7f1000000000-7f10001eb000 rw-s 00000000 08:01 4242                       /x/a.cache\n"
READ_ONLY = MAPPED.replace("rw-s", "r--p")


class Scene:
    """A claim without a process, in a file that is open for writing, so the kernel refuses a lease."""

    def __init__(self, tmp_path: Path) -> None:
        self.file = tmp_path / f"{OURS}_main" / "a.cache"
        self.file.parent.mkdir()
        self.file.write_bytes(b"x")
        os.utime(self.file, (LONG_AGO, LONG_AGO))
        self.writer = self.file.open("r+b")
        fd = os.open(self.file, os.O_RDONLY)
        region = SharedRegion(fd, os.fstat(fd), LAYOUTS["v1.2"], str(self.file))
        ownership = Ownership(
            account=f"{OURS}_main", container=f"{OURS}_main", pod_uid=OURS, container_name="main"
        )
        location = Location(SharedDirectory("8:1", "/c"), ("8:1", 4242))
        self.repairs = RegionRepairs(region, ownership, location, Budgets().of("uid"))
        slot = SlotRecord(0, 7, 0, 1, (64, 0))
        self.repairs.observe(RegionView(2, ("GPU-a", "GPU-b"), (100, 100), (), 1, 0, packed([slot])))
        self.repairs.slots.not_found(0, UnresolvedReason.NO_SUCH_PROCESS, 0.0)
        self.proc = tmp_path / "proc"
        self.proc.mkdir()
        self.now = 1000.0
        self.read_by(TenantReader)

    def put(self, host_pid: int, pod: str = "", maps: str = "", opened: str = "/dev/null") -> Path:
        place = self.proc / str(host_pid)
        (place / "fd").mkdir(parents=True)
        cgroup = (
            f"0::/kubepods/burstable/pod{pod}/{host_pid:064x}\n" if pod else "0::/system.slice/x.service\n"
        )
        (place / "cgroup").write_text(cgroup)
        (place / "maps").write_text(maps or "55d0a0000000-55d0a0001000 r-xp 00000000 00:1e 77 /bin/train\n")
        (place / "fd" / "3").symlink_to(opened)
        return place

    def judge(self) -> bool:
        """Scan all processes once; return True if the claim is judged dead."""
        self.abandoned.suspect(self.repairs)
        self.repairs.schedule.put_off(math.inf)
        asyncio.run(self.abandoned.judge())
        dead = self.repairs.slots.dead(0)
        assert (self.repairs.schedule.due < math.inf) is dead, "it is read at once"
        return dead

    def read_by(self, reader: type[TenantReader]) -> None:
        procfs = Procfs(str(self.proc))
        self.abandoned = Abandoned(procfs, reader(procfs), Journal(), clock=lambda: self.now)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.writer.close()
    scene.repairs.close()


def test_a_file_that_no_process_has_is_abandoned(scene: Scene) -> None:
    scene.put(10)
    scene.put(11, OURS, maps=READ_ONLY)
    assert scene.judge()


@pytest.mark.parametrize("pod", ["", OURS])
@pytest.mark.parametrize("opened", ["", "/run/kata/shared/a.cache", "/x/a.cache (deleted)"])
def test_one_that_a_process_has_is_not(scene: Scene, pod: str, opened: str) -> None:
    scene.put(10)
    scene.put(11, pod, **({"opened": opened} if opened else {"maps": MAPPED}))
    assert not scene.judge()


def test_a_lease_tells_it_from_another_file_of_that_name(scene: Scene) -> None:
    """All of KAI's cache files have the same name, so a process may have another file of that name open."""
    scene.writer.close()
    scene.put(11, OURS, opened="/other/a.cache")
    assert scene.judge()


def test_another_pods_process_does_not_count(scene: Scene) -> None:
    scene.put(11, ANOTHER, maps=MAPPED, opened="/hook/a.cache")
    assert scene.judge()


class Locked(TenantReader):
    """A reader that waits for the lock of all leases."""

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if about == LEASES:
            raise TooSlow("file_rwsem is held")
        return await super().ask(payer, about, function, *arguments)


@pytest.mark.parametrize("opened", ["/dev/null", "/x/a.cache"])
def test_without_a_lease_the_processes_decide(scene: Scene, opened: str) -> None:
    scene.writer.close()
    scene.put(11, opened=opened)
    scene.read_by(Locked)
    assert scene.judge() == (opened == "/dev/null")


class Late(TenantReader):
    """A reader whose answers about files come too late."""

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if function is files_of:
            raise TooSlow("its container makes the kernel wait")
        return await super().ask(payer, about, function, *arguments)


def test_one_that_answers_too_late_leaves_it_open(scene: Scene) -> None:
    """Even without a mount of the directory, a process of the host can have the file open."""
    (scene.put(11) / "mountinfo").write_text("20 1 0:30 / / rw - overlay overlay rw\n")
    scene.read_by(Late)
    assert not scene.judge()


@pytest.mark.parametrize(
    ("pod", "root", "expected"),
    [
        ("", None, False),  # its mounts are unreadable, too
        ("", "/", True),  # like the host's first process if a security module hides it
        ("", "/elsewhere", True),
        ("", "/c", False),  # the directory itself, served to a virtual machine
        ("", "/c/below", False),
        (OURS, "/", False),
        (ANOTHER, "/c", True),
    ],
)
def test_unreadable_process_is_excluded_by_cgroup_or_mounts(
    scene: Scene,
    pod: str,
    root: str | None,
    expected: bool,  # noqa: FBT001
) -> None:
    place = scene.put(11, pod)
    (place / "maps").unlink()
    (place / "maps").mkdir()  # unreadable as a file
    if root is not None:
        (place / "mountinfo").write_text(f"30 1 8:1 {root} /x rw - ext4 /dev/sda rw\n")
    assert scene.judge() is expected


def test_a_slot_that_was_not_searched_to_the_end_is_dead_as_well(scene: Scene) -> None:
    scene.repairs.slots.not_found(0, UnresolvedReason.OVER_BUDGET, 0.0)
    scene.put(10)
    assert scene.judge()


def test_a_process_that_attaches_meanwhile_leaves_it_open(scene: Scene) -> None:
    class Attached(TenantReader):
        async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
            scene.writer.write(b"y")
            scene.writer.flush()
            return await super().ask(payer, about, function, *arguments)

    scene.put(10)
    scene.read_by(Attached)
    assert not scene.judge()
    assert scene.abandoned.wait() == float("inf")  # its slots are searched again first


def test_young_process_is_judged_after_a_quiet_while(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: LONG_AGO + 0.1)
    scene.put(10)
    assert not scene.judge()
    monkeypatch.setattr(time, "time", lambda: LONG_AGO + 5.1)
    assert not scene.judge()  # not yet
    scene.now += 5
    assert scene.judge()


@pytest.mark.parametrize("hours", [24 * 365, 1, -1])
def test_used_file_is_checked_rarely_by_any_clock(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """The wall clock may step back, so an mtime may lie ahead of it; any further change alters the mtime."""
    place = scene.put(11, maps=MAPPED)
    assert not scene.judge()
    (place / "maps").write_text(READ_ONLY)
    monkeypatch.setattr(time, "time", lambda: LONG_AGO + 3600.0 * hours)
    assert not scene.judge()  # not yet
    scene.now += FIRST_PAUSE
    assert scene.judge()


def test_lease_is_granted_only_without_writers(tmp_path: Path) -> None:
    path = tmp_path / "a.cache"
    path.write_bytes(b"x")
    with path.open("rb") as reader:
        with path.open("r+b"):
            assert not unwritten(Procfs(), f"/proc/self/fd/{reader.fileno()}")
        assert unwritten(Procfs(), f"/proc/self/fd/{reader.fileno()}")
        with path.open("r+b") as again:  # no lease is left that could delay an open
            again.write(b"y")
