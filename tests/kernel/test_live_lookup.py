"""Look-ups as the daemon answers them, from each source, of real processes in real namespaces."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.errors import ProcessGone
from resolver.linux.procfs import Procfs
from resolver.lookup.cached import LiveLookup
from resolver.lookup.verify import ContainerProcess
from resolver.pids.ladder import open_source
from resolver.pids.pidmap import PidMap
from tests.bench.usage import children
from tests.fakes.cgroups import CgroupTree
from tests.fakes.node import Node
from tests.kernel.conftest import until

POD = "11111111-2222-3333-4444-555555555555"


@pytest.fixture(params=["bpf", "netlink", "scan"])
def pidmap(request: pytest.FixtureRequest, kept_in: str) -> Iterator[PidMap]:
    pidmap = PidMap(open_source(request.param, Procfs(), 0, kept_in))
    yield pidmap
    pidmap.source.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "node", "550.54.15") as node:
        yield node


def renewed(pidmap: PidMap) -> LiveLookup:
    """A look-up that does not wait until the map may be refreshed again."""
    pidmap.refresh(unhurried=False)
    return LiveLookup(Procfs(), pidmap)


def find(live: LiveLookup, container_id: str, ns_pid: int) -> ContainerProcess | None:
    """As the API does."""
    asyncio.run(live.look_for((container_id,)))
    return live.find(container_id, ns_pid)


def found_in(live: LiveLookup, container_id: str, ns_pid: int) -> ContainerProcess:
    """Asked until it is found: one question searches for 20 ms of CPU, and others may run hundreds of containers."""
    answers: list[ContainerProcess] = []

    def known() -> bool:
        answer = find(live, container_id, ns_pid)
        if answer is not None:
            answers.append(answer)
        return bool(answers)

    until(known, f"process {ns_pid} of container {container_id}")
    return answers[0]


def test_each_container_has_its_own_process_with_the_same_number(node: Node, pidmap: PidMap) -> None:
    tenants = [(container, container.tenant()) for container in (node.container(), node.container())]
    assert len({tenant.ns_pid for _, tenant in tenants}) == 1
    live = renewed(pidmap)
    for _ in range(2):  # the second time by what it remembers
        for container, tenant in tenants:
            found = found_in(live, container.container_id, tenant.ns_pid)
            assert (found.host_pid, found.pidns) == (tenant.host_pid, tenant.pidns)
            assert (found.pod_uid, found.container_name) == (container.pod_uid, container.name)
            assert found.source == pidmap.source.name


def test_one_that_ended_is_not_found(node: Node, pidmap: PidMap) -> None:
    container = node.container()
    tenant = container.tenant()
    live = renewed(pidmap)
    assert found_in(live, container.container_id, tenant.ns_pid).host_pid == tenant.host_pid
    tenant.stop()
    assert find(live, container.container_id, tenant.ns_pid) is None


def _pidns(procfs: Procfs, host_pid: int) -> int:
    """0 if it has ended: the map may still have processes of the test before."""
    try:
        return procfs.pidns(host_pid)
    except ProcessGone:
        return 0


def test_first_processes_and_one_namespace(node: Node, pidmap: PidMap) -> None:
    containers = [node.container(), node.container()]
    tenants = [container.tenant() for container in containers]
    pidmap.refresh(unhurried=False)
    inits, procfs = pidmap.inits(), Procfs()
    for tenant in tenants:
        init = next(each for each in inits if each != 1 and _pidns(procfs, each) == tenant.pidns)
        assert procfs.ns_pids(init)[-1] == 1
        assert inits[init] == pidmap.arrival(init)
        everywhere = pidmap.source.candidates(tenant.ns_pid)
        here = pidmap.source.candidates(tenant.ns_pid, tenant.pidns)
        assert {each.host_pid for each in tenants} <= set(everywhere)
        assert here == ([tenant.host_pid] if pidmap.source.name == "bpf" else everywhere)


def test_a_process_that_is_moved_into_its_container_later(pidmap: PidMap) -> None:
    tree, container_id = CgroupTree(), secrets.token_hex(32)
    cgroup = tree.make("containerd-systemd", "burstable", POD, container_id)
    assert cgroup is not None, tree.why_not
    argv = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo; exec sleep 1000"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as starter:
        try:
            assert starter.stdout is not None
            starter.stdout.readline()
            (host_pid,) = children(starter.pid)
            live = renewed(pidmap)
            assert find(live, container_id, 1) is None
            (cgroup / "cgroup.procs").write_text(str(host_pid))
            found = find(live, container_id, 1)
            assert found is not None
            assert found.host_pid == host_pid
        finally:
            starter.kill()
            while os.path.exists(f"/proc/{host_pid}"):
                os.sched_yield()
            tree.close()
