"""Two daemons on one node: the second is ready, and takes over when the first ends."""

import signal

import pytest

from tests.fakes.daemon import Daemon, children_of
from tests.fakes.node import Node
from tests.kernel.conftest import Start, write_hostpid
from tests.patience import never, until

INTERVAL = 0.1
FAST = ("--interval", f"{INTERVAL}s", "--nvml-interval", "200ms", "--source", "scan")


def first_and_second(node: Node, start: Start) -> tuple[Daemon, Daemon]:
    first = start(node, *FAST)
    first.wait_for("policy", hostpid_namespace="host")
    second = start(node, *FAST, "--wait")
    assert second.wait_for("waiting")["holder"] == str(first.process.pid)
    second.wait_for("policy", hostpid_namespace="host")
    return first, second


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_waiting_daemon_takes_over(node: Node, start: Start, end: signal.Signals) -> None:
    container = node.container()
    tenant = container.tenant(load=40)
    first, second = first_and_second(node, start)
    first.wait_for("repair")
    tenant.until_repaired()
    never(
        lambda: second.said("repair") or "slot writer" in children_of(second.process.pid),
        "a write of the second's",
    )
    assert (first.run_dir / "resolver.sock").exists()
    first.signal(end)
    first.process.wait()
    assert tenant.hostpid == tenant.host_pid
    write_hostpid(container, tenant, 1)  # a wrong guess during an upgrade must be repaired
    second.wait_for("took_over")
    repaired = second.wait_for("repair")
    tenant.until_repaired()
    assert (repaired["ns_pid"], repaired["before"], repaired["after"]) == (tenant.ns_pid, 1, tenant.host_pid)
    until((second.run_dir / "resolver.sock").exists, "its socket")


def test_waiting_daemons_take_turns(node: Node, start: Start) -> None:
    container = node.container()
    tenants = [container.tenant() for _ in range(2)]
    first, second = first_and_second(node, start)
    for tenant in tenants:
        tenant.until_repaired()
    impatient = start(node, *FAST)
    assert impatient.wait() == 2
    assert any("--wait" in text for text in impatient.other_output)
    ended, again = (start(node, *FAST, "--wait") for _ in range(2))
    for daemon in (ended, again):
        daemon.wait_for("waiting")
    assert ended.stop() == 0
    assert first.process.poll() is None
    assert (first.run_dir / "lock").exists()
    assert first.stop() == 0
    until(lambda: second.said("took_over") or again.said("took_over"), "one of those that wait")
    writes, waits = (second, again) if second.said("took_over") else (again, second)
    never(lambda: waits.said("took_over"), "two that write")
    assert writes.stop() == 0
    waits.wait_for("took_over")
    assert waits.stop() == 0
    repairs = [line for daemon in (first, second, again) for line in daemon.said("repair")]
    assert len(repairs) == len(tenants)
    assert list(first.run_dir.iterdir()) == []


def test_lock_that_fails_ends_the_one_that_waits(node: Node, start: Start) -> None:
    """Such a daemon once stayed a standby for ever, without a log line."""
    first, second = first_and_second(node, start)
    run_dir = first.run_dir
    run_dir.rename(run_dir.with_name("moved"))
    run_dir.touch()
    first.kill()
    assert second.wait() != 0
    assert any("cannot be used" in text for text in second.other_output), second.tail()
    second.other_output.clear()
    run_dir.unlink()


def test_a_dry_run_gets_the_socket_when_another_one_leaves_it(node: Node, start: Start) -> None:
    """Dry runs take no lock, so both run for a while during an upgrade."""
    first = start(node, *FAST, "--dry-run")
    socket = first.run_dir / "resolver.sock"
    until(socket.exists, "its socket")
    second = start(node, *FAST, "--dry-run")
    assert "another process listens" in second.wait_for("api_off")["why"]
    assert first.stop() == 0
    until(socket.exists, "the other one's socket")
    assert len(second.said("api_off")) == 1
