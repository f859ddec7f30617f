"""containerd by ``ctr``, with the cgroup paths of its own and of both of Kubernetes' drivers."""

import secrets
import uuid

import pytest

from tests.fakes.cgroups import cgroup_path
from tests.fakes.node import Node
from tests.kernel.conftest import Start
from tests.runtime.engines.checks import alone
from tests.runtime.engines.conftest import EVERY_VIEW, Tell
from tests.runtime.engines.containerd import Containerd
from tests.runtime.engines.engine import Tenants
from tests.runtime.engines.machine import Machine


@EVERY_VIEW
def test_by_name(machine: Machine, node: Node, start: Start, tell: Tell) -> None:
    """Its cgroup is called as the container is, and that is no id."""
    tell("containerd", "`ctr run`", alone(Tenants(node, Containerd(machine)), start, known="name"))


@EVERY_VIEW
@pytest.mark.parametrize("driver", ["cgroupfs", "systemd"])
def test_in_a_cgroup_of_kubernetes(
    machine: Machine, node: Node, start: Start, tell: Tell, driver: str
) -> None:
    container_id, pod_uid = secrets.token_hex(32), str(uuid.uuid4())
    path = cgroup_path(f"containerd-{driver}", "burstable", pod_uid, container_id)
    tenants = Tenants(node, Containerd(machine), f"--cgroup=/{path}", name=container_id, pod_uid=pod_uid)
    how = f"`ctr run` in a pod's cgroup, as the {driver} driver calls it"
    tell("containerd", how, alone(tenants, start))
