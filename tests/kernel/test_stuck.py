"""The loop closed: a slot that is right by all we know, and shows 0 for a busy process, is reported."""

from __future__ import annotations

from tests.fakes.container import DEFAULT_RIGHTS
from tests.fakes.node import Node
from tests.kernel.conftest import Start, hostpid_of, never, until

FAST = ("--interval", "50ms", "--nvml-interval", "200ms", "--source", "scan")


def test_a_number_of_the_wrong_namespace_shows(node: Node, start: Start) -> None:
    """Forced against the driver, the watcher never finds it: said once, and of nobody else."""
    container, idle = node.container(), node.container(name="idle")
    free = node.container(name="free", sm_limit=0)
    tenant = container.tenant(load=40, guess="none")
    idle.tenant(load=0, guess="none")
    free.tenant(load=20, guess="none")
    daemon = start(node, "--hostpid-namespace", "container", *FAST)
    until(lambda: hostpid_of(container, tenant) == tenant.ns_pid, "the number that was asked for")
    line = daemon.wait_for("slot_stuck", timeout_s=15)
    assert (line["level"], line["container"]) == ("warning", container.directory.name)
    assert (line["ns_pid"], line["host_pid"]) == (tenant.ns_pid, tenant.host_pid)
    assert line["why"].startswith("no watcher writes: sm_util of every slot of this container is 0")
    assert line["why"].endswith("--hostpid-namespace container is wrong for this driver: try auto")
    never(lambda: len(daemon.said("slot_stuck")) > 1, "a second report", 1.0)
    assert hostpid_of(container, tenant) == tenant.ns_pid  # nothing flips by itself
    daemon.stop()
    assert daemon.counters()["slots_stuck"] == 1


def test_a_driver_that_lies_is_reported_where_it_may_not_be_measured(node: Node, start: Start) -> None:
    """A container that is not entered: the version decides, wrongly, and that comes to light."""
    environment = {**node.environment(), "NVML_STANDIN_SAYS": "570.86.15"}
    container = node.container()  # with every capability
    container.tenant(load=40, guess="none")
    daemon = start(node, *FAST, environment=environment)
    line = daemon.wait_for("slot_stuck", timeout_s=15)
    assert "do not carry container PIDs as its version says" in line["why"]


def test_what_works_is_not_called_stuck(node: Node, start: Start) -> None:
    container = node.container(rights=DEFAULT_RIGHTS)
    tenants = [container.tenant(load=load, guess=guess) for load, guess in ((40, "none"), (30, "self"))]
    daemon = start(node, *FAST)
    daemon.wait_for("policy", origin="measured", timeout_s=15)
    for tenant in tenants:
        until(lambda t=tenant: t.slot()["sm_util"] == [t.load], "the load")  # type: ignore[misc]
    never(lambda: daemon.said("slot_stuck"), "a slot that is called stuck", 4.0)
