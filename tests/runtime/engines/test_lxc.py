"""LXC."""

from tests.fakes.node import Node
from tests.kernel.conftest import Start
from tests.runtime.engines.checks import alone
from tests.runtime.engines.conftest import EVERY_VIEW, Tell
from tests.runtime.engines.engine import Tenants
from tests.runtime.engines.lxc import Lxc
from tests.runtime.engines.machine import Machine


@EVERY_VIEW
def test_by_name(machine: Machine, node: Node, start: Start, tell: Tell) -> None:
    tell("LXC", "privileged", alone(Tenants(node, Lxc(machine)), start, known="name"))
