"""Owners of slots in a directory that every container mounts, found in a fake /proc."""

import asyncio
import math
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from resolver.base.budget import Slices
from resolver.base.errors import AccessDenied, TooSlow
from resolver.base.reasons import UnresolvedReason
from resolver.containers.log_names import ContainerNames
from resolver.hami import pod_owner
from resolver.hami.discovery import PodFile
from resolver.hami.pod_owner import PodOwner
from resolver.linux.mappings import SuperblockPath, shared_files
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.workers.lane import ALL
from resolver.workers.lanes import TenantReader
from tests.fakes.direct import Refusing, Stalling, Waiting, at_once
from tests.fakes.procs import FakeProc, maps, mountinfo
from tests.patience import PATIENCE_S

DEVICE, INODE, TREE = "8:1", 4242, "/usr/local/vgpu/containers"
POD, OTHER = "0f6f2c70-8f5e-4d0c-9b1d-2f7c0d9a4e01", "1a2b3c4d-8f5e-4d0c-9b1d-2f7c0d9a4e01"
A, B = "a" * 64, "b" * 64
PATH = f"{TREE}/{POD}_main/usage.cache"
PROOF = PodFile(SuperblockPath(DEVICE, PATH), (DEVICE, INODE), 77, SuperblockPath(DEVICE, TREE), POD, "main")


class Namesakes:
    """A `PidMap` that returns the same processes for each PID."""

    def __init__(self) -> None:
        self.refreshes = 0
        self.host_pids: list[int] = []
        self.source = self

    def candidates(self, ns_pid: int) -> list[int]:
        assert ns_pid == 7
        return list(self.host_pids)


class Room:
    """Processes in containers that mount the whole tree."""

    def __init__(self, root: Path) -> None:
        self.proc = FakeProc(root / "proc")
        self.links = root / "log"
        self.links.mkdir()
        self.names = ContainerNames(str(self.links), str(root / "pods"))
        self.kubelet(A, "main")
        self.map = Namesakes()
        self.owner = PodOwner(self.proc.procfs, self.map, self.names, TenantReader(self.proc.procfs))  # type: ignore[arg-type]

    def kubelet(self, container_id: str, name: str) -> None:
        (self.links / f"pod_ns_{name}-{container_id}.log").symlink_to("/nowhere")

    def put(
        self,
        host_pid: int,
        pod: str = POD,
        container: str = A,
        opened: str = PATH,
        inode: int = 77,
        mount: int = 30,
    ) -> Path:
        below = f"kubepods-pod{pod.replace('-', '_')}.slice/cri-containerd-{container}.scope"
        cgroup = f"0::/kubepods.slice/{below}" if pod else "0::/init.scope"
        place = self.proc.put(host_pid, 7, mounts=mountinfo((DEVICE, TREE, TREE)), cgroup=cgroup)
        for name in ("fd", "fdinfo"):
            (place / name).mkdir(exist_ok=True)
        if opened:
            (place / "fd/4").symlink_to(opened)
            (place / "fdinfo/4").write_text(f"pos:\t0\nflags:\t0100002\nmnt_id:\t{mount}\nino:\t{inode}\n")
        return place

    def find(self, *host_pids: int, proof: PodFile = PROOF) -> int | UnresolvedReason:
        """Refresh, and return the owner."""
        self.names.refresh()
        self.map.host_pids = list(host_pids)
        self.map.refreshes += 1
        return self.ask(proof)

    def ask(self, proof: PodFile = PROOF) -> int | UnresolvedReason:
        """Return the owner without another refresh."""
        found = at_once(self.owner.owner(proof, 7, "", Slices(math.inf).yield_if_due))
        if isinstance(found, ProcessHandle):
            with found:
                return found.process.host_pid
        return found

    def count_reads(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return a list that grows by the host PID at each read of a process's mappings."""
        read: list[int] = []

        def counting(procfs: Procfs, host_pid: int) -> set[tuple[str, int]]:
            read.append(host_pid)
            return shared_files(procfs, host_pid)

        monkeypatch.setattr(pod_owner, "shared_files", counting)
        return read


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    monkeypatch.setattr(pod_owner, "REST_FACTOR", 0)
    (tmp_path / "proc").mkdir()
    return Room(tmp_path)


def test_many_starts_share_a_reading(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.put(100)
    assert room.find(100) == 100
    monkeypatch.setattr(room.owner, "again_at", time.monotonic() + 60)
    assert room.find(100) is UnresolvedReason.OVER_BUDGET


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"pod": OTHER, "container": B}, UnresolvedReason.OTHER_POD),
        ({"pod": "", "container": B}, UnresolvedReason.OTHER_POD),  # of the host
        ({"container": B}, UnresolvedReason.UNPROVEN),  # kubelet has no log of this container
        ({}, UnresolvedReason.AMBIGUOUS),  # in a child PID namespace
        ({"pod": OTHER, "container": B, "opened": ""}, 100),  # a monitor
        ({"pod": OTHER, "container": B, "opened": "/tmp/log", "inode": 5, "mount": 99}, 100),  # noqa: S108
        # The file itself under another name, or through a mount that is gone.
        ({"pod": OTHER, "container": B, "opened": "/moved", "mount": 99}, UnresolvedReason.OTHER_POD),
        (
            {"pod": OTHER, "container": B, "opened": "/old", "inode": 0, "mount": 99},
            UnresolvedReason.OTHER_POD,
        ),
        ({"pod": OTHER, "container": B, "opened": f"{TREE}/x/usage.cache"}, UnresolvedReason.OTHER_POD),
    ],
)
def test_second_candidate_decides_the_answer(
    room: Room, second: dict[str, str | int], expected: int | UnresolvedReason
) -> None:
    room.put(100)
    room.put(200, **second)  # type: ignore[arg-type]
    assert room.find(100, 200) == expected
    assert room.find(200, 100) == expected


def test_process_holding_another_file_is_not_proven(room: Room) -> None:
    room.put(100, opened=f"{TREE}/{POD}_other/usage.cache", inode=78)
    assert room.find(100) is UnresolvedReason.UNPROVEN


def test_unreadable_process_blocks_only_its_own_pod(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some security modules hide the host's PID 1, a PID that very many slots have."""
    room.put(100)
    for host_pid, pod in ((200, ""), (300, OTHER), (400, POD)):
        room.put(host_pid, pod, B)

    def closed(procfs: Procfs, host_pid: int) -> set[tuple[str, int]]:
        if host_pid != 100:
            raise AccessDenied("closed")
        return shared_files(procfs, host_pid)

    monkeypatch.setattr(pod_owner, "shared_files", closed)
    assert room.find(100, 200, 300) == 100
    assert room.find(100, 400) is UnresolvedReason.ACCESS_DENIED


def test_process_is_read_once_for_all_files(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one PID in each of 100 containers, every slot once caused a read of all 100 processes."""
    pods = [f"{number:08x}-8f5e-4d0c-9b1d-2f7c0d9a4e01" for number in range(50)]
    for number, pod in enumerate(pods):
        path, container = f"{TREE}/{pod}_main/usage.cache", f"{number:064x}"
        room.kubelet(container, "main")
        place = room.put(100 + number, pod, container, opened=path, inode=7000 + number)
        (place / "maps").write_text(maps(inode=5000 + number))
    proofs = [
        replace(
            PROOF,
            file=SuperblockPath(DEVICE, f"{TREE}/{pod}_main/usage.cache"),
            shown=(DEVICE, 5000 + number),
            opened=7000 + number,
            pod_uid=pod,
        )
        for number, pod in enumerate(pods)
    ]
    everybody = range(100, 150)
    assert room.find(*everybody, proof=proofs[0]) == 100
    assert [room.ask(proof) for proof in proofs[1:]] == [UnresolvedReason.OVER_BUDGET] * 49  # for now
    read = room.count_reads(monkeypatch)
    assert room.find(*everybody, proof=proofs[0]) == 100
    assert [room.ask(proof) for proof in proofs[1:]] == list(everybody)[1:]
    assert sorted(read) == list(everybody)
    # The same holds for turns that run concurrently.
    read.clear()
    room.owner._reader = Waiting(room.proc.procfs)
    room.map.refreshes += 1

    async def all_at_once() -> list[ProcessHandle | UnresolvedReason]:
        return await asyncio.gather(
            *(room.owner.owner(each, 7, "", Slices(math.inf).yield_if_due) for each in proofs)
        )

    found = asyncio.run(all_at_once())
    handles = [each for each in found if isinstance(each, ProcessHandle)]
    assert [each.process.host_pid for each in handles] == list(everybody)
    assert sorted(read) == list(everybody)
    for each in handles:
        each.close()


async def test_slow_process_delays_processes_of_its_number(room: Room) -> None:
    room.put(100)
    room.put(200, OTHER, B)
    room.names.refresh()
    room.owner._reader = reader = Stalling(room.proc.procfs, 200)
    processes = {7: [100], 8: [200]}
    room.map.candidates = processes.__getitem__  # type: ignore[assignment, method-assign]
    pause = Slices(math.inf).yield_if_due
    late = asyncio.create_task(room.owner.owner(PROOF, 8, "", pause))
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        owner = await room.owner.owner(PROOF, 7, "", pause)
    assert isinstance(owner, ProcessHandle)
    owner.close()
    assert not late.done()
    reader.go.set()
    assert await late is UnresolvedReason.NO_SUCH_PROCESS


def test_unused_file_is_checked_on_every_refresh(room: Room) -> None:
    """A child can take a slot through a mapping inherited from its parent, without a write to the file."""
    room.put(200, OTHER, B, opened="")
    (room.proc.root / "200/maps").write_text("")
    assert room.find(200) is UnresolvedReason.NO_SUCH_PROCESS
    assert room.ask() is UnresolvedReason.NO_SUCH_PROCESS
    room.put(100)
    room.map.refreshes += 1
    room.map.host_pids.append(100)
    assert room.ask() == 100


def test_file_locks_delay_no_mount_table_question(room: Room) -> None:
    """A descriptor's fdinfo lists its locks and is read first, so slow fdinfo delays only its process."""
    room.put(100)
    reader = room.owner._reader = Refusing(room.proc.procfs, describe_written=TooSlow("its files have locks"))
    assert room.find(100) is UnresolvedReason.TOO_SLOW
    assert (A, "describe_written") in reader.asked
    assert ALL not in {about for about, _ in reader.asked}
