"""systemd-nspawn."""

import pytest

from tests.fakes.node import Node
from tests.kernel.conftest import Start
from tests.runtime.engines.checks import whole
from tests.runtime.engines.conftest import Tell
from tests.runtime.engines.engine import Tenants
from tests.runtime.engines.machine import Machine, views
from tests.runtime.engines.nspawn import Nspawn


@pytest.mark.parametrize(
    "view", [view for view in views() if view != "v2"]
)  # there it asks for PID 1's own cgroup
def test_by_name(machine: Machine, node: Node, start: Start, tell: Tell) -> None:
    """Its own process, in the cgroup ``supervisor``, is a process of the host."""
    tenants = Tenants(node, Nspawn(machine))
    tenants.main()
    tell("systemd-nspawn", "as a unit", whole(tenants, start, known="name"))
