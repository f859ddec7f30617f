"""Podman, with both of its runtimes, of root and of a user."""

from pathlib import Path

import pytest

from tests.fakes.node import Node
from tests.kernel.conftest import Start
from tests.runtime.engines.checks import Known, alone
from tests.runtime.engines.conftest import Tell
from tests.runtime.engines.engine import Tenants
from tests.runtime.engines.machine import Machine, views
from tests.runtime.engines.podman import Podman

#: On version 2 crun raises the limit on locked memory, which not every machine's root may.
_MAY_RAISE_LIMITS = int(Path("/proc/self/status").read_text().split("CapEff:\t")[1].split()[0], 16) >> 24 & 1
RUNTIMES = pytest.mark.parametrize(
    ("runtime", "view"),
    [
        (runtime, view)
        for runtime in ("crun", "runc")
        for view in views()
        if runtime == "runc" or view != "v2" or _MAY_RAISE_LIMITS
    ],
)


@RUNTIMES
def test_of_root(machine: Machine, node: Node, start: Start, tell: Tell, runtime: str) -> None:
    tell("Podman", runtime, alone(Tenants(node, Podman(machine, runtime)), start))


@RUNTIMES
def test_of_a_user(machine: Machine, node: Node, start: Start, tell: Tell, runtime: str) -> None:
    known: Known = "id" if machine.view == "v2" else "no cgroup"
    tenants = Tenants(node, Podman(machine, runtime, rootless=True))
    tell("Podman", f"rootless, {runtime}", alone(tenants, start, known=known))
