"""The miniature node itself: containers that are real, tenants that keep HAMi's protocol, a race that is seen.

Everything else is tested against these, so they are tested first.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.node import Node
from tests.fakes.regions import LAYOUTS, read_region
from tests.kernel.conftest import driver, write_hostpid
from tests.patience import never, until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path, "550.54.15") as node:
        yield node


@pytest.mark.parametrize("version", ["560.35.03", "565.57.01"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "v0-no-util"])
def test_the_tenant_guesses_wrong_and_the_true_host_pid_heals_it(
    tmp_path: Path, version: str, layout: str
) -> None:
    with driver(tmp_path, version) as node:
        container = node.container(layout=layout)
        tenant = container.tenant(load=87)
        assert tenant.hostpid == tenant.ns_pid != tenant.host_pid
        never(lambda: tenant.slot()["sm_util"] != [0], "utilization with a wrong hostpid")
        write_hostpid(container, tenant, tenant.host_pid)
        tenant.until_load(87)
        until(lambda: set(container.monitor_view().values()) == {87}, "the same, in the monitor")


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


def test_nothing_is_left_of_a_node(tmp_path: Path) -> None:
    with Node(tmp_path, "550.54.15") as node:
        tenants = [node.container(pid_namespace=where).tenant() for where in ("own", "host")]
        tenants[1].fork()
        root = node.cgroups.root
    assert [t.host_pid for t in tenants if Path(f"/proc/{t.host_pid}").exists()] == []
    assert not root.exists()
    assert not node.containers_dir.exists()
