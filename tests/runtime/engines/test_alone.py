"""Each engine's containers with HAMi's directory, and nothing else beside them."""

import secrets
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.fakes.cgroups import cgroup_path
from tests.fakes.node import Node
from tests.kernel.conftest import Start
from tests.runtime.engines.checks import Known, alone
from tests.runtime.engines.conftest import Tell
from tests.runtime.engines.containerd import Containerd
from tests.runtime.engines.cri import Cri
from tests.runtime.engines.docker import Docker
from tests.runtime.engines.engine import Engine, Tenants
from tests.runtime.engines.lxc import Lxc
from tests.runtime.engines.machine import Machine, views, views_with_limits
from tests.runtime.engines.nspawn import Nspawn
from tests.runtime.engines.podman import Podman

#: On version 2 crun raises the limit on locked memory, which not every machine's root may.
_MAY_RAISE_LIMITS = int(Path("/proc/self/status").read_text().split("CapEff:\t")[1].split()[0], 16) >> 24 & 1
WITHOUT_V2 = [view for view in views() if view != "v2"]
EVERY_VIEW = pytest.mark.parametrize("view", views())

Make = Callable[[Machine], Engine]
#: Engine, how its container is started, how its cgroup is called, and the views.
CASES: list[tuple[str, str, Make, Known, Sequence[str]]] = [
    ("containerd", "`ctr run`", Containerd, "name", views()),
    ("Docker", "HAMi's environment and mounts", Docker, "id", views()),
    ("LXC", "privileged", Lxc, "name", views()),
    ("systemd-nspawn", "as a unit", Nspawn, "name", WITHOUT_V2),  # there it asks for PID 1's own cgroup
]
for runtime, shown in (("crun", views() if _MAY_RAISE_LIMITS else WITHOUT_V2), ("runc", views())):
    rootless = partial(Podman, runtime=runtime, rootless=True)
    CASES += [
        ("Podman", runtime, partial(Podman, runtime=runtime), "id", shown),
        ("Podman", f"rootless, {runtime}", rootless, "no cgroup", [view for view in shown if view != "v2"]),
        ("Podman", f"rootless, {runtime}", rootless, "id", [view for view in shown if view == "v2"]),
    ]


@pytest.mark.parametrize(
    ("engine", "how", "make", "known", "view"), [(*case, view) for *case, shown in CASES for view in shown]
)
def test_tenants_of_a_container(
    machine: Machine, node: Node, start: Start, tell: Tell, engine: str, how: str, make: Make, known: Known
) -> None:
    tell(engine, how, alone(Tenants(node, make(machine)), start, known=known))


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


@pytest.mark.parametrize("view", views_with_limits())
def test_a_pod(machine: Machine, node: Node, start: Start, tell: Tell) -> None:
    pod_uid = str(uuid.uuid4())
    tenants = Tenants(node, Cri(machine, pod_uid), name="train", pod_uid=pod_uid)
    tell("containerd, CRI", "a pod", alone(tenants, start))
