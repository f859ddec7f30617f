"""The broker on a whole node: tenants that ask it have the right number from the beginning, on every driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.broker_client import ask
from tests.fakes.container import Container
from tests.fakes.daemon import Daemon, Line
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.kernel.conftest import EVERY_SOURCE, ROOT, ROWS, Start, driver, hostpid_of, right_number, slot_of
from tests.patience import until

#: After its first pass it makes none: what is right then was right without a repair.
LAZY = ("--interval", "60s", "--nvml-interval", "200ms")


def start_with_broker(start: Start, node: Node, *arguments: str) -> tuple[Daemon, Path]:
    """A daemon that knows its driver and has made the pass that this brings; and the broker's directory."""
    path = node.root / "hostpid" / "broker.sock"
    daemon = start(node, *LAZY, "--broker", str(path), *arguments)
    daemon.wait_for("broker_on", socket=str(path))
    until(lambda: any(line["hostpid_namespace"] != "unknown" for line in daemon.said("policy")), "the driver")
    return daemon, path.parent


def pass_now(daemon: Daemon) -> None:
    """Make it look at every slot."""
    before = len(daemon.said("settings_reloaded"))
    daemon.signal(signal.SIGHUP)
    daemon.wait_for("settings_reloaded", count=before + 1)


def repair_of(daemon: Daemon, ns_pid: int) -> Line:
    """Passes until there is one: it looks for owners no more often than it may."""

    def said() -> bool:
        pass_now(daemon)
        return bool(daemon.said("repair", ns_pid=ns_pid))

    until(said, "a repair")
    return daemon.said("repair", ns_pid=ns_pid)[0]


@pytest.mark.parametrize(("version", "namespace"), ROWS)
def test_every_slot_is_right_from_the_beginning(
    tmp_path: Path, start: Start, version: str, namespace: str
) -> None:
    with driver(tmp_path, version) as node:
        daemon, place = start_with_broker(start, node)
        container = node.container(broker_dir=place)
        tenants = [container.tenant(load=load, guess=guess) for load, guess in ((30, "list"), (47, "wrong"))]
        nested = node.container(broker_dir=place).tenant(load=12, guess="none", nested=True)
        for tenant in (*tenants, nested):
            assert tenant.slot()["hostpid"] == right_number(tenant, namespace)
            until(lambda t=tenant: t.slot()["sm_util"] == [t.load], "the true load, by its own watcher")  # type: ignore[misc]
        child = tenants[0].fork()
        host_pid = node.gpu.host_pid(container.pidns, child)
        assert slot_of(container, child).hostpid == (host_pid if namespace == "host" else child)
        pass_now(daemon)
        daemon.stop()
        # A look may come between taking a slot and storing the answer: that finds none, never a wrong one.
        assert {line["reason"] for line in daemon.said("repair")} <= {"missing"}
        assert daemon.counters()["broker_answers"] == 4


def test_hamis_own_answer_is_repaired_where_the_driver_wants_another(tmp_path: Path, start: Start) -> None:
    """What HAMi's own broker would say on a 570: the host PID, which that driver's samples do not carry."""
    with driver(tmp_path, "570.86.15") as node:
        daemon, place = start_with_broker(start, node, "--broker-answer", "host")
        container = node.container(broker_dir=place)
        tenant = container.tenant(load=40)
        assert hostpid_of(container, tenant) == tenant.host_pid != tenant.ns_pid
        line = repair_of(daemon, tenant.ns_pid)
        assert (line["before"], line["after"], line["reason"]) == (
            tenant.host_pid,
            tenant.ns_pid,
            "wrong_namespace",
        )
        until(lambda: tenant.slot()["sm_util"] == [40], "the true load, by its own watcher")


@EVERY_SOURCE
def test_a_slot_that_is_spoiled_after_the_answer_is_repaired(node: Node, start: Start, source: str) -> None:
    """With each source, though the broker has put the process into the map before its own word of it came."""
    daemon, place = start_with_broker(start, node)
    container: Container = node.container(broker_dir=place)
    tenant: Tenant = container.tenant(load=20)
    assert hostpid_of(container, tenant) == tenant.host_pid
    tenant.command("hostpid 1")  # it spoils its own slot
    assert repair_of(daemon, tenant.ns_pid)["after"] == tenant.host_pid


def test_a_container_lives_through_a_restart_of_the_daemon(node: Node, start: Start) -> None:
    daemon, place = start_with_broker(start, node)
    container = node.container(broker_dir=place)
    first = container.tenant(load=10)
    daemon.kill()
    with pytest.raises(ConnectionRefusedError):
        ask(str(place / "broker.sock"))
    lonely = container.tenant(load=10, guess="wrong")  # nobody answers: it guesses
    assert hostpid_of(container, lonely) == 999999
    start_with_broker(start, node)
    second = container.tenant(load=10)
    for tenant in (first, second):
        assert hostpid_of(container, tenant) == tenant.host_pid


#: Nobody, who may look at everything all the same.
NOBODY = (
    *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
    *("--inh-caps", "+sys_ptrace,+dac_override", "--ambient-caps", "+sys_ptrace,+dac_override"),
)


def test_without_root_it_is_off_and_the_daemon_works(node: Node, start: Start, tmp_path: Path) -> None:
    path, run_dir = node.root / "hostpid" / "broker.sock", tmp_path / "run of nobody"
    run_dir.mkdir()
    os.chown(run_dir, 65534, 65534)
    daemon = start(node, *LAZY, "--source", "scan", "--broker", str(path), run_dir=run_dir, wrapper=NOBODY)
    line = daemon.wait_for("broker_off", socket=str(path))
    assert "must run as root" in line["why"]
    pass_now(daemon)
    assert not path.parent.exists()
    assert daemon.stop() == 0


def test_by_default_there_is_none(node: Node, start: Start) -> None:
    daemon = start(node, *LAZY)
    daemon.wait_for("policy", hostpid_namespace="host")
    script = "import sys, resolver.cli; print('resolver.daemon.broker' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], cwd=ROOT) == b"False\n"
    assert daemon.said("broker_on") == daemon.said("broker_off") == []
