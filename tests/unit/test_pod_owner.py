"""Who owns a slot in a tree that every container has, by a /proc of files."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from resolver.containers.log_names import ContainerNames
from resolver.errors import AccessDenied
from resolver.hami import pod_owner
from resolver.hami.discovery import PodFile
from resolver.hami.pod_owner import PodOwner
from resolver.linux.mappings import FilePlace, maps_file
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.reasons import UnresolvedReason
from tests.unit.test_slot_owner import FakeProc, maps, mountinfo

DEVICE, INODE, TREE = "8:1", 4242, "/usr/local/vgpu/containers"
POD, OTHER = "0f6f2c70-8f5e-4d0c-9b1d-2f7c0d9a4e01", "1a2b3c4d-8f5e-4d0c-9b1d-2f7c0d9a4e01"
A, B = "a" * 64, "b" * 64
PATH = f"{TREE}/{POD}_main/usage.cache"
PLACE = PodFile(FilePlace(DEVICE, PATH), DEVICE, INODE, 77, FilePlace(DEVICE, TREE), POD, "main")


class Room:
    """Processes in containers that have the whole tree."""

    def __init__(self, root: Path) -> None:
        self.proc = FakeProc(root / "proc")
        self.links = root / "log"
        self.links.mkdir()
        self.names = ContainerNames(str(self.links), str(root / "pods"))
        self.kubelet(A, "main")
        self.owner = PodOwner(self.proc.procfs, self.names)

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
        mounts = mountinfo((DEVICE, TREE, TREE))
        place = self.proc.put(host_pid, 7, mounts=mounts, mapped=maps())
        slice_ = f"kubepods-pod{pod.replace('-', '_')}.slice"
        cgroup = (
            f"0::/kubepods.slice/{slice_}/cri-containerd-{container}.scope\n" if pod else "0::/init.scope\n"
        )
        (place / "cgroup").write_text(cgroup)
        for name in ("fd", "fdinfo"):
            (place / name).mkdir(exist_ok=True)
        if opened:
            (place / "fd/4").symlink_to(opened)
            (place / "fdinfo/4").write_text(f"pos:\t0\nflags:\t0100002\nmnt_id:\t{mount}\nino:\t{inode}\n")
        return place

    def find(self, *host_pids: int, until: float = math.inf) -> int | UnresolvedReason:
        self.names.refresh()
        asked = {host_pid: (1, host_pid) for host_pid in host_pids}
        found = self.owner.find(asked, (PLACE, 7, 0), until)
        if isinstance(found, ProcessHandle):
            with found:
                return found.process.host_pid
        return found


@pytest.fixture
def room(tmp_path: Path) -> Room:
    (tmp_path / "proc").mkdir()
    return Room(tmp_path)


def test_the_owner_is_in_the_pod_and_holds_the_file(room: Room) -> None:
    room.put(100)
    assert room.find(100) == 100


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"pod": OTHER, "container": B}, UnresolvedReason.OTHER_POD),
        ({"pod": "", "container": B}, UnresolvedReason.OTHER_POD),  # of the host
        ({"container": B}, UnresolvedReason.UNPROVEN),  # kubelet has no log of it
        ({}, UnresolvedReason.AMBIGUOUS),  # in a PID namespace below
        ({"pod": OTHER, "container": B, "opened": ""}, 100),  # a monitor
        ({"pod": OTHER, "container": B, "opened": "/tmp/log", "inode": 5, "mount": 99}, 100),  # noqa: S108
        # The file itself, whatever it is called by now, or through a mount that is gone.
        ({"pod": OTHER, "container": B, "opened": "/moved", "mount": 99}, UnresolvedReason.OTHER_POD),
        (
            {"pod": OTHER, "container": B, "opened": "/old", "inode": 0, "mount": 99},
            UnresolvedReason.OTHER_POD,
        ),
        ({"pod": OTHER, "container": B, "opened": f"{TREE}/x/usage.cache"}, UnresolvedReason.OTHER_POD),
    ],
)
def test_another_one_that_could_be_meant(
    room: Room, second: dict[str, str | int], expected: int | UnresolvedReason
) -> None:
    room.put(100)
    room.put(200, **second)  # type: ignore[arg-type]
    assert room.find(100, 200) == expected
    assert room.find(200, 100) == expected


def test_a_container_beside_with_a_name_of_its_own(room: Room) -> None:
    room.kubelet(B, "side")
    room.put(200, container=B)
    assert room.find(200) is UnresolvedReason.OTHER_CONTAINER
    room.put(100)
    assert room.find(100, 200) is UnresolvedReason.AMBIGUOUS


def test_one_that_holds_another_file_of_the_tree_is_not_proven(room: Room) -> None:
    room.put(100, opened=f"{TREE}/{POD}_other/usage.cache", inode=78)
    assert room.find(100) is UnresolvedReason.UNPROVEN


def test_who_can_not_be_read_hides_only_its_own(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the host's first process, under some security modules: it has the number of very many slots."""
    room.put(100)
    for host_pid, pod in ((200, ""), (300, OTHER), (400, POD)):
        room.put(host_pid, pod, B)
    real = maps_file

    def closed(procfs: Procfs, host_pid: int, *rest: object, **more: object) -> bool:
        if host_pid != 100:
            raise AccessDenied("closed")
        return real(procfs, host_pid, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(pod_owner, "maps_file", closed)
    assert room.find(100, 200, 300) == 100
    assert room.find(100, 400) is UnresolvedReason.ACCESS_DENIED


def test_a_search_that_was_cut_goes_on_where_it_ended(room: Room) -> None:
    room.put(100)
    for host_pid in range(200, 240):
        room.put(host_pid, OTHER, B, opened="")
    everybody = (*range(200, 240), 100)
    assert room.find(*everybody, until=-1.0) is UnresolvedReason.OVER_BUDGET
    asked: list[int] = []
    judge = room.owner._judge

    def counting(host_pid: int, place: PodFile, ns_pid: int) -> ProcessHandle | UnresolvedReason | None:
        asked.append(host_pid)
        return judge(host_pid, place, ns_pid)

    room.owner._judge = counting  # type: ignore[method-assign]
    for _ in range(1000):
        found = room.find(*everybody, until=time.thread_time() + 0.002)
        if found is not UnresolvedReason.OVER_BUDGET:
            break
    assert found == 100
    assert len([host_pid for host_pid in asked if host_pid != 100]) == 40  # each once
