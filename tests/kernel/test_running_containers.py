"""Which containers run, and who they are: real ones, from each source."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.base.event_log import EventLog
from resolver.base.journal import Journal
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.containers.log_names import ContainerNames
from resolver.linux.procfs import Procfs
from resolver.pids.ladder import open_source
from resolver.pids.pidmap import PidMap
from resolver.state import Container as RunningContainer
from resolver.usage.running_containers import Census
from tests.fakes.container import Container
from tests.fakes.direct import catch_up
from tests.fakes.node import Node
from tests.kernel.serving import SLEEP
from tests.patience import until


class Room:
    def __init__(self, source: str, pods: Path, kept_in: str) -> None:
        self.pidmap = PidMap(open_source(source, Procfs(), 0, kept_in))
        self.events = EventLog()
        namespaces, names = KnownNamespaces(Procfs(), self.pidmap), ContainerNames("", str(pods))
        self.census = Census(Procfs(), self.pidmap, namespaces, names, Journal(self.events))

    def look(self, **known: dict[str, int]) -> dict[str, RunningContainer]:
        catch_up(self.pidmap)
        asyncio.run(self.census.refresh(known.get("users", {}), {}))
        return {report.container_id: report for report in self.census.containers()}

    def said(self, container: Container) -> list[str]:
        return [
            event.kind
            for event in self.events.after(0)
            if event.fields["container_id"] == container.container_id
        ]


@pytest.fixture(params=["bpf", "netlink", "scan"])
def room(request: pytest.FixtureRequest, tmp_path: Path, kept_in: str) -> Iterator[Room]:
    room = Room(request.param, tmp_path / "pods", kept_in)
    yield room
    room.pidmap.source.close()


def test_containers_come_are_named_and_go(node: Node, room: Room, tmp_path: Path) -> None:
    before = time.time()
    container = node.container()
    until(lambda: container.container_id in room.look(), "the container")
    found = room.look()[container.container_id]
    began = found.since
    assert before - 1 < began < time.time() + 1
    assert found.pod_uid == container.pod_uid
    assert found.container_name == container.name
    assert (found.namespace, found.pod) == (None, None)
    assert found.init_host_pid == container.init_host_pid
    assert found.pidns == Procfs().pidns(container.init_host_pid)
    (tmp_path / "pods" / f"ml_train-0_{container.pod_uid}").mkdir(parents=True)
    found = room.look()[container.container_id]
    assert (found.namespace, found.pod, found.since) == ("ml", "train-0", began)
    container.stop()
    until(lambda: container.container_id not in room.look(), "its end")
    assert room.said(container) == ["container_started", "container_ended"]

    # One that shares a namespace is known by its mount's users.
    first = node.container()
    sharing = node.container(first.pod_uid, "sharing", pid_namespace=first)
    process = sharing.spawn(SLEEP)
    until(lambda: first.container_id in room.look(), "the first")
    assert sharing.container_id not in room.look()
    found = room.look(users={sharing.container_id: process.host_pid})[sharing.container_id]
    assert (found.pidns, found.init_host_pid, found.pod_uid) == (None, None, first.pod_uid)
    assert sharing.container_id not in room.look()  # it does not use anything any more
