"""Every kind of wrong slot is produced and repaired with every source, and nothing else is changed."""

import time
from typing import Any

import pytest

from tests.fakes.container import Container
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.fakes.process import Process
from tests.fakes.regions import LAYOUTS
from tests.kernel.conftest import EVERY_SOURCE, FAST, Start, lock_words, slot_of, with_every_source
from tests.kernel.serving import claiming
from tests.patience import until

pytestmark = pytest.mark.usefixtures("source")  # the default source, unless a test uses every source

WITH_UTILIZATION = [name for name in LAYOUTS if name != "v0-no-util"]


def repairs_of(
    daemon: Daemon, container: Container, tenant: Process, count: int = 1
) -> list[tuple[str, int, int, int]]:
    which: dict[str, Any] = {"container": container.directory.name, "ns_pid": tenant.ns_pid}
    daemon.wait_for("repair", count=count, **which)
    lines = daemon.said("repair", **which)
    return [(line["reason"], line["before"], line["after"], line["host_pid"]) for line in lines]


def passes(daemon: Daemon, container: Container) -> None:
    container.tenant(guess="none").until_repaired()


@with_every_source("layout", LAYOUTS)
def test_each_reason_is_repaired_once(node: Node, start: Start, layout: str) -> None:
    container = node.container(layout=layout)
    missing = container.tenant(load=11, guess="none")
    wrong_namespace = container.tenant(load=22, guess="self")
    stale = container.tenant(load=5, guess="wrong")
    twins = [container.tenant(load=3, guess=4711), container.tenant(load=4, guess=4711)]
    locked = lock_words(container)
    daemon = start(node, *FAST)
    tenants = (missing, wrong_namespace, stale, *twins)
    for tenant in tenants:
        tenant.until_repaired()
    late = container.tenant(load=6, guess=missing.host_pid)  # the right PID of another process
    late.until_repaired()
    passes(daemon, container)
    assert repairs_of(daemon, container, missing) == [("missing", 0, missing.host_pid, missing.host_pid)]
    assert repairs_of(daemon, container, wrong_namespace) == [
        ("wrong_namespace", wrong_namespace.ns_pid, wrong_namespace.host_pid, wrong_namespace.host_pid)
    ]
    assert repairs_of(daemon, container, stale) == [("stale", 999999, stale.host_pid, stale.host_pid)]
    repaired = [repairs_of(daemon, container, twin) for twin in twins]
    assert [[each[1:] for each in repairs] for repairs in repaired] == [
        [(4711, twin.host_pid, twin.host_pid)] for twin in twins
    ]
    # The second twin is no duplicate if an earlier pass repaired the first.
    assert {repairs[0][0] for repairs in repaired} in ({"duplicate"}, {"duplicate", "stale"})
    # A slot holds 0 (missing) before its process guesses, and the daemon may repair it first.
    ((reason, *_),) = repairs_of(daemon, container, late)[-1:]
    assert reason in ("duplicate", "missing")
    assert [each.hostpid for each in (*tenants, late)] == [each.host_pid for each in (*tenants, late)]
    assert lock_words(container) == locked
    if layout in WITH_UTILIZATION:
        until(lambda: sum(container.monitor_view().values()) == 11 + 22 + 5 + 3 + 4 + 6, "the true load")
        for tenant in (*tenants, late):
            tenant.until_load(tenant.load)


@EVERY_SOURCE
def test_duplicate_pid_in_container_is_not_guessed(node: Node, start: Start) -> None:
    """Two nested processes with PID 1 map the file, so the slot's owner can't be determined."""
    container = node.container()
    container.tenant(guess="none", nested=True)
    other = container.tenant(guess="none", nested=True)
    lone = node.container(name="lone").tenant(guess="none")
    before = container.cache.read_bytes()
    daemon = start(node, "--once", *FAST)
    assert daemon.wait() == 1
    assert container.cache.read_bytes() == before
    assert lone.hostpid == lone.host_pid
    other.kill()
    start(node, *FAST)
    until(lambda: container.region().slots[0].hostpid != 0, "the one that is left")
    assert container.region().slots[0].hostpid == container.processes[0].host_pid


@EVERY_SOURCE
def test_restart_and_exec_keep_slots_right(node: Node, start: Start) -> None:
    container, other = node.container(), node.container(name="other")
    before, first = container.tenant(guess="none"), other.tenant(guess="none")  # these create the files
    process = claiming(other, *other.tenant_arguments(load=35, guess="none"))
    daemon = start(node, *FAST)
    repairs_of(daemon, container, before)  # seen in the file alone, it could be undone as its owner ends
    container.restart()
    after = container.tenant(guess="none")
    assert (after.ns_pid, after.host_pid != before.host_pid) == (before.ns_pid, True)
    after.until_repaired()
    assert repairs_of(daemon, container, after, 2) == [
        ("missing", 0, before.host_pid, before.host_pid),
        ("stale", before.host_pid, after.host_pid, after.host_pid),
    ]
    until(lambda: slot_of(other, process.ns_pid).hostpid == process.host_pid, "the repair")
    process.write_line("now")
    until(lambda: "ready" in process.read_line(), "the tenant that it became")
    until(lambda: slot_of(other, process.ns_pid).sm_util == (35,), "its load, by its own watcher")
    assert slot_of(other, process.ns_pid).hostpid == process.host_pid
    assert first.hostpid == first.host_pid
    assert len(repairs_of(daemon, other, process)) == 1


def test_auto_writes_only_without_another_writer(node: Node, start: Start) -> None:
    free, watched = node.container(name="free", watcher=False), node.container(name="watched")
    tenants = {free: free.tenant(guess="none"), watched: watched.tenant(guess="none")}

    def shown(*loads: int) -> None:
        for container, load in zip(tenants, loads, strict=True):
            until(lambda c=container, v=load: sum(c.monitor_view().values()) == v, f"{load} %")  # type: ignore[misc]

    def writes() -> int:
        for tenant, load in zip(tenants.values(), (70, 30), strict=True):
            tenant.set_load(load)
        time.sleep(1.2)  # NVML's value covers the last second
        daemon = start(node, *FAST)
        shown(70, 30)
        for tenant in tenants.values():
            tenant.set_load(0)
        shown(0, 0)
        daemon.stop()

        return daemon.counters()["utilization_writes"]

    # 70 and 0, in the container without a watcher. A watcher without a CPU may cause more, so try again.
    until(lambda: writes() == 2, "two writes")
