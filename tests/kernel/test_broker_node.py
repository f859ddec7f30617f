"""The broker on a whole node: tenants that ask it have the right PID from the start, with every driver."""

import os
import signal
from pathlib import Path

import pytest

from tests.fakes.broker_client import ask
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.kernel.conftest import ROWS, Start, right_number, slot_of
from tests.kernel.rights import UNPRIVILEGED, patched
from tests.patience import until

#: A broker that waits for tenants without a CPU.
PATIENT = patched("from resolver.daemon import broker; broker.EXCHANGE_SECONDS = 600.0")
#: Options for one pass only, so later right values are not repairs.
LAZY = ("--interval", "60s", "--nvml-interval", "200ms")


def start_with_broker(start: Start, node: Node) -> tuple[Daemon, Path]:
    """Start a daemon, and wait until it knows the driver; return it and the broker's directory."""
    path = node.root / "hostpid" / "broker.sock"
    daemon = start(node, *LAZY, "--broker", str(path), wrapper=PATIENT)
    daemon.wait_for("broker_on", socket=str(path))
    until(lambda: any(line["hostpid_namespace"] != "unknown" for line in daemon.said("policy")), "the driver")
    return daemon, path.parent


def pass_now(daemon: Daemon) -> None:
    before = len(daemon.said("settings_reloaded"))
    daemon.signal(signal.SIGHUP)
    daemon.wait_for("settings_reloaded", count=before + 1)


@pytest.mark.parametrize(("version", "namespace"), ROWS)
def test_every_slot_is_right_from_the_beginning(
    tmp_path: Path, start: Start, version: str, namespace: str
) -> None:
    with Node(tmp_path, version) as node:
        daemon, place = start_with_broker(start, node)
        container = node.container(broker_dir=place)
        tenants = [container.tenant(load=load, guess=guess) for load, guess in ((30, "list"), (47, "wrong"))]
        nested = node.container(broker_dir=place).tenant(load=12, guess="none", nested=True)
        for tenant in (*tenants, nested):
            assert tenant.hostpid == right_number(tenant, namespace)
            tenant.until_load(tenant.load)
        child = tenants[0].fork()
        host_pid = node.gpu.host_pid(container.pidns, child)
        assert slot_of(container, child).hostpid == (host_pid if namespace == "host" else child)
        pass_now(daemon)
        daemon.stop()
        # A read between the slot's claim and the broker's answer finds no PID, never a wrong one.
        assert {line["reason"] for line in daemon.said("repair")} <= {"missing"}
        assert daemon.counters()["broker_answers"] == 4


def test_a_container_lives_through_a_restart_of_the_daemon(node: Node, start: Start) -> None:
    daemon, place = start_with_broker(start, node)
    container = node.container(broker_dir=place)
    first = container.tenant(load=10)
    daemon.kill()
    with pytest.raises(ConnectionRefusedError):
        ask(str(place / "broker.sock"))
    lonely = container.tenant(load=10, guess="wrong")  # without an answer, the tenant guesses
    assert lonely.hostpid == 999999
    start_with_broker(start, node)
    second = container.tenant(load=10)
    for tenant in (first, second):
        assert tenant.hostpid == tenant.host_pid


#: Runs as an unprivileged user that may read everything.
READER = (
    *UNPRIVILEGED,
    *("--inh-caps", "+sys_ptrace,+dac_override", "--ambient-caps", "+sys_ptrace,+dac_override"),
)


def test_without_root_it_is_off_and_the_daemon_works(node: Node, start: Start, open_place: Path) -> None:
    path, run_dir = open_place / "hostpid" / "broker.sock", open_place / "run of the reader"
    run_dir.mkdir()
    os.chown(run_dir, 65534, 65534)
    daemon = start(node, *LAZY, "--source", "scan", "--broker", str(path), run_dir=run_dir, wrapper=READER)
    line = daemon.wait_for("broker_off", socket=str(path))
    assert "must run as root" in line["why"]
    pass_now(daemon)
    assert not path.parent.exists()
    assert daemon.stop() == 0
