"""The miniature node itself: containers that are real, tenants that keep HAMi's protocol, a race that is seen.

Everything else is tested against these, so they are tested first.
"""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.container import Container
from tests.fakes.daemon import runs
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.regions import LAYOUTS, read_region
from tests.fakes.releases import BEHAVIOURS, RELEASES
from tests.kernel.conftest import driver, write_at, write_hostpid, write_sm_util
from tests.patience import never, until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path, "550.54.15") as node:
        assert node.left_out == []
        yield node


# ---- the famous failure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["560.35.03", "565.57.01"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "v0-no-util"])
def test_the_tenant_guesses_wrong_and_the_true_host_pid_heals_it(
    tmp_path: Path, version: str, layout: str
) -> None:
    with driver(tmp_path, version) as node:
        container = node.container(layout=layout)
        tenant = container.tenant(load=87)
        assert tenant.slot()["hostpid"] == tenant.ns_pid != tenant.host_pid
        never(lambda: tenant.slot()["sm_util"] != [0], "utilization with a wrong hostpid")
        write_hostpid(container, tenant, tenant.host_pid)
        until(lambda: tenant.slot()["sm_util"] == [87], "the true utilization")
        until(lambda: set(container.monitor_view().values()) == {87}, "the same, in the monitor")


# ---- layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tenant_lays_the_region_out_as_the_layout_says(node: Node, layout: str) -> None:
    table = LAYOUTS[layout]
    container = node.container(layout=layout, sm_limit=35, devices=DEFAULT_DEVICES, priority=1)
    tenant = container.tenant(load=40, guess=4711, devices=DEFAULT_DEVICES[1:])
    data = container.cache.read_bytes()
    region = read_region(data)
    assert (len(data), region.layout) == (table.size + 1, table)
    assert region.uuids == tuple(d.uuid for d in DEFAULT_DEVICES)
    assert struct.unpack_from("<2Q", data, table.sm_limit) == (35, 35)
    assert struct.unpack_from("<2Q", data, table.limit) == (8 << 30, 8 << 30)
    assert struct.unpack_from("<i", data, table.proc_num + 12)[0] == 1
    assert region.owner_pid == 0
    (slot,) = region.slots
    assert (slot.pid, slot.hostpid, slot.status) == (tenant.ns_pid, 4711, 1)
    write_hostpid(container, tenant, tenant.host_pid)
    if table.device_util is not None:
        until(lambda: container.region().slots[0].sm_util == (0, 40), "the second device's utilization")
    assert container.cache.stat().st_mode & 0o777 == 0o666


# ---- slots ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [release.name for release in BEHAVIOURS])
def test_what_an_ended_process_leaves_behind_is_counted_by_some_monitors(node: Node, release: str) -> None:
    """A clean exit leaves its words in its slot or removes it; a move leaves a copy above proc_num, or clears that."""
    row = RELEASES[release]
    container = node.container(release=release, watcher=False)
    tenants = [container.tenant() for _ in range(3)]
    for tenant, percent in zip(tenants, (10, 20, 40), strict=True):
        write_sm_util(container, tenant.slot()["index"], percent)
    tenants[0].stop()
    if not row.removes_itself:
        assert total(container) == [60, 70, 70]  # as 2.10, as 2.7 to 2.9, as 2.6 and before
        assert tenants[1].command("compact") == {"proc_num": 2}
    assert total(container) == [60, 60, 60 if row.clears_moved else 100]


def total(container: Container) -> list[int]:
    return [sum(view.values()) for view in container.monitor_views().values()]


def test_a_killed_tenant_leaves_its_load_behind_until_the_next_one_comes(node: Node) -> None:
    container = node.container()
    first, second, third = (container.tenant(load=load) for load in (20, 30, 40))
    for tenant in (first, second, third):
        write_hostpid(container, tenant, tenant.host_pid)
    until(lambda: sum(container.monitor_view().values()) == 90, "all three loads")
    for tenant in (second, third):
        tenant.terminate()
    until(lambda: sum(container.monitor_view().values()) == 20, "only the first one's load")
    first.kill()
    never(lambda: sum(container.monitor_view().values()) != 20, "a change, with nobody there to make one")
    last = container.tenant()
    assert [slot.pid for slot in container.region().slots] == [last.ns_pid]


def test_the_watcher_does_nothing_while_its_own_hostpid_is_0(node: Node) -> None:
    container = node.container()
    busy = container.tenant(load=60, guess="none")
    write_hostpid(container, busy, busy.host_pid)
    until(lambda: busy.slot()["sm_util"] == [60], "the load")
    container.tenant(load=0, guess="none")
    busy.kill()
    never(lambda: sum(container.monitor_view().values()) != 60, "zeroing by a watcher that has no hostpid")


# ---- containers ---------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_node(tmp_path: Path) -> None:
    with Node(tmp_path, "550.54.15") as node:
        tenants = [node.container(pid_namespace=where).tenant() for where in ("own", "host")]
        tenants[1].fork()
        root = node.cgroups.root
    assert [t.host_pid for t in tenants if Path(f"/proc/{t.host_pid}").exists()] == []
    assert root is not None
    assert not root.exists()
    assert not node.containers_dir.exists()


def test_nothing_survives_a_killed_node(tmp_path: Path) -> None:
    script = f"""
        import os, signal, sys
        from pathlib import Path
        from tests.fakes.node import Node
        with Node(Path({str(tmp_path)!r}), "550.54.15") as node:
            pids = []
            for where in ("own", "host"):
                container = node.container(pid_namespace=where)
                pids += [container.init_host_pid, container.tenant().host_pid, container.tenant(nested=True).host_pid]
            print(*pids, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    repository = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 6
    until(lambda: not any(map(runs, pids)), "the end of every process")


# ---- what releases do differently ---------------------------------------------------------------------------------


def on_two_devices(node: Node, release: str, load: int) -> tuple[Container, Tenant]:
    """A tenant that knows its host PID, busy on both devices; its watcher runs."""
    container = node.container(release=release, devices=DEFAULT_DEVICES)
    tenant = container.tenant(load=load, guess="none")
    write_hostpid(container, tenant, tenant.host_pid)
    return container, tenant


@pytest.mark.parametrize("release", ["2.8.0", "2.8.1", "2.8.2", "2.9.0"])
def test_its_last_value_stands_for_ever_on_every_device_but_the_first(node: Node, release: str) -> None:
    _, tenant = on_two_devices(node, release, 30)
    until(lambda: tenant.slot()["sm_util"] == [30, 30], "the load on both")
    tenant.set_load(20, 0)
    until(lambda: tenant.slot()["sm_util"][0] == 20, "the new load on the first")
    never(lambda: tenant.slot()["sm_util"][1] != 30, "a second device that is zeroed", 1.5)


def test_main_zeroes_every_device(node: Node) -> None:
    _, tenant = on_two_devices(node, "main", 30)
    until(lambda: tenant.slot()["sm_util"] == [30, 30], "the load on both")
    tenant.set_load(0)
    until(lambda: tenant.slot()["sm_util"] == [0, 0], "none on both")


def test_2_5_adds_on_every_device_but_the_first(node: Node) -> None:
    _, tenant = on_two_devices(node, "2.5.0", 40)
    until(lambda: tenant.slot()["sm_util"][1] > 400, "more than any device can do")
    seen = tenant.slot()["sm_util"]
    assert seen[0] in (0, 40)  # 0 in the moment of a tick
    assert seen[1] % 40 == 0


def test_2_4_1_zeroes_and_fills_nothing_in(node: Node) -> None:
    container, tenant = on_two_devices(node, "2.4.1", 40)
    layout = LAYOUTS[container.layout]
    assert layout.device_util is not None
    for device in range(2):
        at = layout.procs + layout.device_util + device * layout.device_util_size + 16
        write_at(container.cache, at, struct.pack("<Q", 77))
    until(lambda: tenant.slot()["sm_util"] == [0, 77], "the first zeroed")
    never(lambda: tenant.slot()["sm_util"] != [0, 77], "utilization")
