"""Look-ups in the daemon's map, with a false source and processes that end at the worst moment."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resolver.base.errors import AccessDenied
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.lookup import cached
from resolver.lookup.cached import LiveLookup
from resolver.lookup.forward import ContainerProcess, lookup
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from tests.fakes.container import Container
from tests.fakes.node import Node

SLEEP = ("/bin/sleep", "1000")


class Hooked(Procfs):
    """The real /proc with a hook that runs just before a process is held."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[int], object] = lambda _host_pid: None

    def open_handle(self, host_pid: int) -> ProcessHandle:
        self.before(host_pid)
        return super().open_handle(host_pid)


class Liar(ScanSource):
    """A source that returns every process of the node for any PID."""

    def candidates(self, _ns_pid: int, _pidns: int | None = None) -> list[int]:
        everybody = sorted(self.known)
        random.Random(5).shuffle(everybody)
        return everybody


class Room:
    def __init__(self, node: Node, kind: type[ScanSource] = ScanSource) -> None:
        self.node = node
        self.procfs = Hooked()
        self.pidmap = PidMap(kind(self.procfs))
        self.live = LiveLookup(self.procfs, self.pidmap)

    def find(self, container: Container | str, ns_pid: int) -> ContainerProcess | None:
        self.pidmap.next_refresh = 0.0
        cid = container if isinstance(container, str) else container.container_id
        asyncio.run(self.live.look_for((cid,)))
        return self.live.find(cid, ns_pid)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    # The machine may have thousands of other namespaces.
    monkeypatch.setattr(cached, "LOOK_SECONDS", 30.0)
    with Node(tmp_path, "535.183.01") as node:
        yield node


@pytest.fixture
def room(node: Node) -> Room:
    return Room(node)


def host_pid(found: ContainerProcess | None) -> int | None:
    return found.host_pid if found else None


def test_only_full_ids_and_numbers_that_can_be(room: Room) -> None:
    container = room.node.container()
    cid = container.container_id
    for text in (cid, f"containerd://{cid}", f" {cid} "):
        assert host_pid(room.find(text, 1)) == container.init_host_pid
    for text in (cid[:12], cid[:63], cid + "0", "", f"{container.pod_uid}/main", cid[::-1]):
        assert room.find(text, 1) is None
    for ns_pid in (0, -1, 2**31, 4000):
        assert room.find(container, ns_pid) is None


def test_lying_source_misleads_no_lookup(node: Node) -> None:
    room = Room(node, Liar)
    containers = [node.container(name=f"c{number}") for number in range(3)]
    truth: dict[tuple[str, int], int] = {}
    for container in containers:
        truth[container.container_id, 1] = container.init_host_pid
        for _ in range(4):
            process = container.spawn(SLEEP)
            truth[container.container_id, process.ns_pid] = process.host_pid
        container.spawn(SLEEP, nested=True)
    for container in containers:
        for ns_pid in range(1, 12):
            found = room.find(container, ns_pid)
            known = truth.get((container.container_id, ns_pid))
            assert known in (None, host_pid(found))
            assert (
                found is None or found.host_pid == lookup(Procfs(), container.container_id, ns_pid).host_pid
            )


def test_process_moved_to_another_container_is_dropped(room: Room) -> None:
    container, other = room.node.container(), room.node.container(name="other")
    process = container.spawn(SLEEP)
    procs = other.cgroup / "cgroup.procs"
    room.procfs.before = lambda host_pid: procs.write_text(str(host_pid))
    assert room.find(container, process.ns_pid) is None


def test_unreadable_process_is_dropped(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    container = room.node.container()
    process = container.spawn(SLEEP)
    real = Procfs.pidns

    def refused(self: Procfs, host_pid: int | str) -> int:
        if host_pid == process.host_pid:
            raise AccessDenied("not shown")
        return real(self, host_pid)

    monkeypatch.setattr(Procfs, "pidns", refused)
    assert room.find(container, process.ns_pid) is None
    assert host_pid(room.find(container, 1)) == container.init_host_pid
