"""Pods in containerd, as a kubelet asks for them."""

import uuid

import pytest

from tests.fakes.node import Node
from tests.kernel.conftest import Start
from tests.patience import until
from tests.runtime.engines.checks import answer, looked_up, repaired, whole
from tests.runtime.engines.conftest import Tell
from tests.runtime.engines.cri import CONTAINER, NODE, POD, Cri
from tests.runtime.engines.engine import Tenants
from tests.runtime.engines.machine import Machine


def of_pod(machine: Machine, node: Node, pid: int) -> Tenants:
    pod_uid = str(uuid.uuid4())
    return Tenants(node, Cri(machine, pod_uid, pid), name="train", pod_uid=pod_uid)


@pytest.mark.parametrize(("pid", "how"), [(POD, "`shareProcessNamespace`"), (NODE, "`hostPID`")])
def test_shared_pid_namespaces(
    machine: Machine, node: Node, start: Start, tell: Tell, pid: int, how: str
) -> None:
    tenants = of_pod(machine, node, pid)
    other = Tenants(node, tenants.engine, name="serve", container="serve", pod_uid=tenants.pod_uid)
    for each in (tenants, other):
        assert each.main().ns_pid != 1
        each.another()
    assert tenants.found[0].pidns == other.found[0].pidns
    looked_up(other)
    tell("containerd, CRI", how, whole(tenants, start))
    tenants.stop()
    other.stop()


def test_a_restart_with_the_same_directory(machine: Machine, node: Node, start: Start, tell: Tell) -> None:
    """The killed container leaves its slots, and the new container's first process has the PID of the old one's."""
    tenants = of_pod(machine, node, CONTAINER)
    old, _ = tenants.main(), tenants.another()
    daemon = repaired(tenants, start)
    daemon.wait_for("source", timeout_s=20)
    assert isinstance(tenants.engine, Cri)
    tenants.engine.kill("train")
    socket = ("--socket", daemon.socket)
    until(lambda: answer("status", *socket)["totals"]["slots_dead"] == 2, "the end of both", 15)
    tenants.found.clear()
    assert tenants.main().ns_pid == old.ns_pid
    tenants.another()
    daemon.stop()
    tell("containerd, CRI", "a restarted container, the same directory", whole(tenants, start))
    tenants.stop()
