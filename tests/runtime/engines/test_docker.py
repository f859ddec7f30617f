"""Docker."""

from __future__ import annotations

from tests.fakes.node import Node
from tests.kernel.conftest import Start
from tests.runtime.engines.checks import whole
from tests.runtime.engines.conftest import EVERY_VIEW, Tell
from tests.runtime.engines.docker import Docker
from tests.runtime.engines.engine import Tenants
from tests.runtime.engines.machine import Machine


@EVERY_VIEW
def test_with_hamis_directory(machine: Machine, node: Node, start: Start, tell: Tell) -> None:
    tenants = Tenants(node, Docker(machine))
    tenants.main()
    tenants.another()
    tell("Docker", "HAMi's environment and mounts", whole(tenants, start))
    tenants.stop()


def test_in_the_host_pid_namespace(machine: Machine, node: Node, start: Start, tell: Tell) -> None:
    tenants = Tenants(node, Docker(machine), "--pid=host")
    assert tenants.main().host_pid == tenants.found[0].ns_pid
    tenants.another()
    tell("Docker", "`--pid=host`", whole(tenants, start))
    tenants.stop()
