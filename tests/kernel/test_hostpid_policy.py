"""The driver decides which PID a slot must hold; a value that NVML lacks is unknown, never 0."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.node import Node
from tests.fakes.process import watched
from tests.fakes.state import Hang
from tests.kernel.conftest import FAST, NVML, ROWS, Start, right_number, write_hostpid
from tests.patience import never, until


@pytest.mark.parametrize("version", ["560.35.03", "565.57.01"])
def test_wrong_guess_shows_no_load_until_it_is_corrected(tmp_path: Path, version: str) -> None:
    """No daemon runs here: the test shows the fault that other tests repair."""
    with Node(tmp_path, version) as node:
        container = node.container()
        tenant = container.tenant(load=87)
        assert tenant.hostpid == tenant.ns_pid != tenant.host_pid
        never(lambda: tenant.sm_util != (0,), "utilization with a wrong hostpid")
        write_hostpid(container, tenant, tenant.host_pid)
        tenant.until_load(87)
        until(lambda: set(container.monitor_view().values()) == {87}, "the same, in the monitor")


@pytest.mark.parametrize(("version", "namespace"), ROWS)
def test_tenants_own_watcher_reports_its_load(
    tmp_path: Path, start: Start, version: str, namespace: str
) -> None:
    """The watcher runs in the tenant's namespace, and uses only its NVML and the slot's number."""
    with Node(tmp_path, version) as node:
        container, free = node.container(name="watched"), node.container(name="free", watcher=False)
        tenants = {
            guess: container.tenant(load=load, guess=guess) for guess, load in (("none", 30), ("wrong", 47))
        }
        nested = node.container(name="nesting").tenant(load=12, guess="none", nested=True)
        idle = free.tenant(load=0, guess="self")
        busy = free.tenant(load=23, guess="none")
        daemon = start(node, *FAST)
        for tenant in tenants.values():
            until(lambda t=tenant: t.hostpid == right_number(t, namespace), "the right number")  # type: ignore[misc]
            tenant.until_load(tenant.load)
        until(lambda: sum(container.monitor_view().values()) == 77, "the sum, in the monitor")
        nested.until_load(12)
        assert nested.hostpid == right_number(nested, namespace)
        busy.until_load(23)
        assert idle.hostpid == right_number(idle, namespace)
        assert idle.slot()["sm_util"] == [0]
        assert daemon.said("policy")[-1]["hostpid_namespace"] == namespace


@pytest.mark.parametrize("version", ["566.03", "570.86.10"])
def test_driver_between_listed_ones_gets_no_write(tmp_path: Path, start: Start, version: str) -> None:
    remedy = "set --hostpid-namespace (make gpu-check measures which)"
    why = f"driver {version} lies between those known to differ; {remedy}"
    with Node(tmp_path, version) as node:
        container = node.container(watcher=False)
        container.tenant(load=50, guess="none")
        container.tenant(load=30, guess="self")
        before = container.cache.read_bytes()
        daemon = start(node, *FAST)
        daemon.wait_for("policy", hostpid_namespace="unknown", why=why)
        never(lambda: container.cache.read_bytes() != before, "a write", 0.4)
        daemon.stop()
        once = start(node, "--once")
        assert once.wait() == 1
        assert container.cache.read_bytes() == before


def test_hanging_call_costs_a_worker_and_no_repair(node: Node, start: Start) -> None:
    tenant = node.container(name="free", watcher=False).tenant(load=50, guess="none")
    daemon = start(node, *FAST)
    tenant.until_load(50)
    first = daemon.child(NVML)
    with watched(first) as gone:
        node.gpu.set_faults(hang=Hang.UTILIZATION)
        tenant.set_load(0)
        began = daemon.lines[-1]["at"]
        # At once, not after the call's time-out of five seconds.
        node.container(name="while-it-hangs").tenant(guess="none").until_repaired()
        line = daemon.wait_for("nvml_unavailable")
        assert line["why"] == "the driver did not answer within 1 s"  # the driver's older answers don't count
        line = daemon.wait_for("nvml_unavailable", why="the nvml worker did not answer within 5 s")
        assert line["at"] - began > 4.5
        until(gone, "the end of the first")
    # The process is idle for five seconds without evidence: its last value stays, and no 0 is written.
    assert tenant.slot()["sm_util"] == [50]
    node.container(name="after-the-kill").tenant(guess="none").until_repaired()
    assert tenant.slot()["sm_util"] == [50]
    node.gpu.set_faults()
    daemon.wait_for("nvml_available")
    tenant.until_load(0)
    assert daemon.child(NVML) != first


def test_mig_is_unsupported_and_not_idle(tmp_path: Path, start: Start) -> None:
    devices = [replace(DEFAULT_DEVICES[0], mig_enabled=True)]
    with Node(tmp_path, "550.54.15", devices) as node:
        tenant = node.container(watcher=False).tenant(load=50, guess="none")
        daemon = start(node, "--write-utilization", "always", *FAST)
        daemon.wait_for("device_without_samples", device=devices[0].uuid)
        tenant.until_repaired()
        never(lambda: tenant.slot()["sm_util"] != [0], "a utilization that NVML cannot tell", 0.6)
        daemon.stop()
        assert "utilization_writes" not in daemon.counters()
