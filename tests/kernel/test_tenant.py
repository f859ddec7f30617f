"""The miniature node itself: containers that are real, tenants that keep HAMi's protocol, a race that is seen.

Everything else is tested against these, so they are tested first.
"""

from __future__ import annotations

import gzip
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resolver.linux.inotify import MODIFY, Inotify
from tests.fakes.cgroups import FORMATS, cgroup_path
from tests.fakes.container import Container
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.node import Node
from tests.fakes.nvml_probe import Probe, device
from tests.fakes.process import NodeError, Tenant
from tests.fakes.regions import LAYOUTS, monitor_view, read_region
from tests.fakes.releases import BEHAVIOURS
from tests.kernel.conftest import never, until

REGIONS = Path(__file__).parent.parent / "fixtures" / "regions"
ROWS = {1: "535.104.05", 2: "560.35.03", 3: "565.57.01", 4: "570.86.15"}
SHORT_LOCK = ("--lock-timeout-ms", "100", "--lock-tries", "3")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path, "550.54.15") as node:
        assert node.left_out == []
        yield node


@contextmanager
def driver(root: Path, row: int) -> Iterator[Node]:
    with Node(root, ROWS[row]) as node:
        yield node


def write_hostpid(container: Container, tenant: Tenant, hostpid: int) -> None:
    """As an operator with a hex editor would: the slot stands still in these tests."""
    layout = LAYOUTS[container.layout]
    index = tenant.slot()["index"]
    with container.cache.open("r+b") as file:
        file.seek(layout.procs + index * layout.slot_size + 4)
        file.write(struct.pack("<i", hostpid))


# ---- the famous failure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [2, 3])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "v0-no-util"])
def test_the_tenant_guesses_wrong_and_the_true_host_pid_heals_it(
    tmp_path: Path, row: int, layout: str
) -> None:
    with driver(tmp_path, row) as node:
        container = node.container(layout=layout)
        tenant = container.tenant(load=87)
        assert tenant.slot()["hostpid"] == tenant.ns_pid != tenant.host_pid
        never(lambda: tenant.slot()["sm_util"] != [0], "utilization with a wrong hostpid")
        write_hostpid(container, tenant, tenant.host_pid)
        until(lambda: tenant.slot()["sm_util"] == [87], "the true utilization")
        until(lambda: set(container.monitor_view().values()) == {87}, "the same, in the monitor")


def test_on_the_oldest_drivers_the_guess_is_right(tmp_path: Path) -> None:
    with driver(tmp_path, 1) as node:
        tenant = node.container().tenant(load=87, memory=123 << 20)
        assert tenant.slot()["hostpid"] == tenant.host_pid
        until(lambda: tenant.slot()["sm_util"] == [87], "the true utilization")
        assert tenant.slot()["monitorused"] in ([123 << 20], [0])  # 0 in the moment of a tick


def test_on_the_newest_drivers_the_container_pid_is_the_right_one(tmp_path: Path) -> None:
    with driver(tmp_path, 4) as node:
        container = node.container()
        tenant = container.tenant(load=87, guess="wrong")
        never(lambda: tenant.slot()["sm_util"] != [0], "utilization with nobody's hostpid")
        write_hostpid(container, tenant, tenant.host_pid)
        never(lambda: tenant.slot()["sm_util"] != [0], "utilization with the host PID")
        write_hostpid(container, tenant, tenant.ns_pid)
        until(lambda: tenant.slot()["sm_util"] == [87], "the true utilization")


@pytest.mark.parametrize(
    ("row", "listed", "sampled", "memory"),
    [
        (1, "host", "host", 77 << 20),
        (2, "container", "host", 0),
        (3, "container", "host", 77 << 20),
        (4, "container", "container", 77 << 20),
    ],
)
def test_what_a_container_sees(tmp_path: Path, row: int, listed: str, sampled: str, memory: int) -> None:
    with driver(tmp_path, row) as node:
        container = node.container()
        tenant = container.tenant(load=10, memory=77 << 20)
        other = node.container(name="other").tenant(load=20)
        pids = {"host": tenant.host_pid, "container": tenant.ns_pid}
        with Probe(node.environment(), ["nsenter", "-t", str(container.init_host_pid), "-p"]) as nvml:
            nvml("nvmlInit")
            entries = {
                entry["pid"]: entry["usedGpuMemory"]
                for entry in nvml("nvmlDeviceGetComputeRunningProcesses_v2", device(0))
            }
            samples = {
                entry["pid"]: entry["smUtil"]
                for entry in nvml("nvmlDeviceGetProcessUtilization", device(0), 0)
            }
        assert entries[pids[listed]] == memory
        assert samples == {pids[sampled]: 10, other.host_pid: 20}  # a stranger keeps its host number
        with Probe(node.environment()) as nvml:
            nvml("nvmlInit")
            seen = nvml("nvmlDeviceGetComputeRunningProcesses_v2", device(0))
            assert {entry["pid"] for entry in seen} == {tenant.host_pid, other.host_pid}


# ---- layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_our_offsets_read_the_files_that_upstream_wrote(layout: str) -> None:
    data = gzip.decompress((REGIONS / f"{layout}.cache.gz").read_bytes())
    told: dict[str, Any] = json.loads((REGIONS / f"{layout}.json").read_text())
    region = read_region(data)
    assert (len(data), region.layout.name) == (told["file_bytes"], told["layout"])
    assert list(region.uuids) == told["uuids"]
    for slot, expected in zip(region.slots, told["slots"], strict=True):
        assert (slot.pid, slot.hostpid, slot.status) == tuple(
            expected[k] for k in ("pid", "hostpid", "status")
        )
        assert list(slot.monitorused) == expected["monitorused"]
        utils = [entry["sm_util"] for entry in expected.get("device_util", [])]
        assert list(slot.sm_util) == (utils or [0, 0])
    live = [s for s in told["slots"] if s["status"] != 0]
    sums = [sum(s["device_util"][i]["sm_util"] for s in live if "device_util" in s) for i in range(2)]
    assert list(monitor_view(region).values()) == sums


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


@pytest.mark.parametrize("layout", ["v1.1-shifted", "v1.2"])
def test_the_seqlock_is_even_when_nobody_writes(node: Node, layout: str) -> None:
    container = node.container(layout=layout)
    container.tenant(load=1)
    table = LAYOUTS[layout]
    assert table.seqlock is not None
    (seqlock,) = struct.unpack_from("<Q", container.cache.read_bytes(), table.procs + table.seqlock)
    assert seqlock > 0
    assert seqlock % 2 == 0


# ---- slots ----------------------------------------------------------------------------------------------------


def test_a_clean_exit_leaves_pid_0_and_status_0(node: Node) -> None:
    container = node.container()
    tenant = container.tenant(guess=4711)
    tenant.stop()
    (slot,) = container.region().slots
    assert (slot.pid, slot.hostpid, slot.status) == (0, 4711, 0)


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


def test_a_dead_slot_is_filled_with_the_last_one(node: Node) -> None:
    container = node.container()
    first, second, third = (container.tenant(guess=hostpid) for hostpid in (111, 222, 333))
    first.kill()  # the slot counts as dead once the container's first process has reaped it
    until(lambda: second.command("compact") == {"proc_num": 2}, "the dead slot is removed")
    slots = container.region().slots
    assert [(slot.pid, slot.hostpid) for slot in slots] == [(third.ns_pid, 333), (second.ns_pid, 222)]


def test_a_stale_hostpid_survives_a_restart(node: Node) -> None:
    container = node.container()
    before = container.tenant(guess=4711)
    old_id = container.container_id
    container.restart()
    after = container.tenant(guess="none")
    assert (after.ns_pid, after.slot()["hostpid"]) == (before.ns_pid, 4711)
    assert after.host_pid != before.host_pid
    assert container.container_id != old_id


def test_every_way_to_guess(node: Node) -> None:
    container = node.container()
    guessed = {guess: container.tenant(guess=guess) for guess in ("none", "self", "wrong", 42, "list")}
    hostpids = {guess: tenant.slot()["hostpid"] for guess, tenant in guessed.items()}
    assert hostpids == {
        "none": 0,
        "self": guessed["self"].ns_pid,
        "wrong": 999999,
        42: 42,
        "list": guessed["list"].ns_pid,  # this driver lists container PIDs
    }


def test_a_listed_thread_is_a_wrong_guess(node: Node) -> None:
    node.gpu.set_list_threads(on=True)
    tenant = node.container().tenant()
    hostpid = tenant.slot()["hostpid"]
    assert hostpid not in (0, tenant.ns_pid, tenant.host_pid)
    assert hostpid in _thread_ids_inside(tenant)


@pytest.mark.parametrize("release", [release.name for release in BEHAVIOURS if release.fills != "nothing"])
def test_a_missing_core_limit_is_stored_as_100_and_the_watcher_runs(node: Node, release: str) -> None:
    container = node.container(release=release, sm_limit=0)
    tenant = container.tenant(load=60)
    table = LAYOUTS[container.layout]
    assert struct.unpack_from("<Q", container.cache.read_bytes(), table.sm_limit) == (100,)
    write_hostpid(container, tenant, tenant.host_pid)
    until(lambda: tenant.slot()["sm_util"] == [60], "utilization")


def test_a_limit_above_100_starts_no_watcher(node: Node) -> None:
    container = node.container(watcher=False)
    tenant = container.tenant(load=60)
    write_hostpid(container, tenant, tenant.host_pid)
    never(lambda: tenant.slot()["sm_util"] != [0], "utilization without a watcher")


def test_the_watcher_does_nothing_while_its_own_hostpid_is_0(node: Node) -> None:
    container = node.container()
    busy = container.tenant(load=60, guess="none")
    write_hostpid(container, busy, busy.host_pid)
    until(lambda: busy.slot()["sm_util"] == [60], "the load")
    container.tenant(load=0, guess="none")
    busy.kill()
    never(lambda: sum(container.monitor_view().values()) != 60, "zeroing by a watcher that has no hostpid")


def test_a_load_can_be_changed(node: Node) -> None:
    container = node.container()
    tenant = container.tenant(load=60)
    write_hostpid(container, tenant, tenant.host_pid)
    until(lambda: tenant.slot()["sm_util"] == [60], "the first load")
    tenant.set_load(15)
    until(lambda: tenant.slot()["sm_util"] == [15], "the second load")
    tenant.set_load(0)
    until(lambda: tenant.slot()["sm_util"] == [0], "idleness")


@contextmanager
def watching(path: Path) -> Iterator[Callable[[], bool]]:
    """Says whether somebody has written into the file by a system call since."""
    inotify, fd = Inotify(), os.open(path, os.O_RDONLY)
    try:
        inotify.add(fd, MODIFY)
        yield lambda: any(mask & MODIFY for _, mask in inotify.read())
    finally:
        os.close(fd)
        inotify.close()


def test_a_forked_child_takes_its_own_slot_and_goes_with_its_parent(node: Node) -> None:
    container = node.container()
    parent = container.tenant(load=25)
    with watching(container.cache) as written:
        child_ns_pid = parent.fork()
        assert written(), "it attaches as any process does: it writes a byte"
    assert sorted(slot.pid for slot in container.region().slots) == [parent.ns_pid, child_ns_pid]
    child = node.gpu.host_pid(container.pidns, child_ns_pid)
    assert child is not None
    assert child not in (parent.host_pid, container.init_host_pid)
    parent.kill()
    until(lambda: not Path(f"/proc/{child}").exists(), "the child's end")


# ---- the lock ---------------------------------------------------------------------------------------------------


def test_the_lock_of_a_dead_owner_is_taken_over(node: Node) -> None:
    container = node.container()
    holder = container.tenant()
    assert holder.command("lock") == {"locked": True}
    assert container.region().owner_pid == holder.ns_pid
    holder.kill()
    heir = container.tenant(options=SHORT_LOCK)
    assert [slot.pid for slot in container.region().slots] == [heir.ns_pid]
    assert container.region().owner_pid == 0


def test_the_lock_of_a_living_owner_is_waited_for(node: Node) -> None:
    container = node.container()
    holder = container.tenant()
    holder.command("lock")
    with pytest.raises(NodeError, match="has ended"):
        container.tenant(options=SHORT_LOCK)
    assert holder.command("unlock") == {"locked": False}
    container.tenant(options=SHORT_LOCK)


# ---- containers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cgroup_format", FORMATS)
@pytest.mark.parametrize("qos", ["guaranteed", "besteffort"])
def test_the_cgroup_path_is_in_the_chosen_format(node: Node, cgroup_format: str, qos: str) -> None:
    container = node.container(cgroup_format=cgroup_format, qos=qos)
    tail = cgroup_path(cgroup_format, qos, container.pod_uid, container.container_id)
    lines = Path(f"/proc/{container.init_host_pid}/cgroup").read_text().splitlines()
    assert any(line.endswith("/" + tail) for line in lines)


def test_a_container_has_namespaces_of_its_own_and_the_host_sees_no_mount(node: Node) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    container = node.container(name="train")
    tenant = container.tenant()
    for namespace in ("pid", "mnt", "cgroup"):
        theirs = os.readlink(f"/proc/{tenant.host_pid}/ns/{namespace}")
        assert theirs != os.readlink(f"/proc/self/ns/{namespace}")
    assert tenant.ns_pid < 10
    vgpu = [
        line.split()
        for line in Path(f"/proc/{tenant.host_pid}/mountinfo").read_text().splitlines()
        if line.split()[4] == "/usr/local/vgpu"
    ]
    assert [words[3].endswith(f"/containers/{container.pod_uid}_train") for words in vgpu] == [True]
    assert f"/usr/local/vgpu/{container.cache_name}" in Path(f"/proc/{tenant.host_pid}/maps").read_text()
    assert container.directory.stat().st_mode & 0o777 == 0o777
    assert Path("/proc/self/mountinfo").read_text() == mounts


def test_a_tenant_in_a_nested_pid_namespace(node: Node) -> None:
    container = node.container()
    tenant = container.tenant(nested=True, guess="none")
    assert tenant.ns_pid == 1
    assert tenant.pidns not in (container.pidns, os.stat("/proc/self/ns/pid").st_ino)
    assert len(_nspid(tenant.host_pid)) == len(_nspid(container.init_host_pid)) + 1
    assert node.gpu.host_pid(tenant.pidns, 1) == tenant.host_pid


def test_two_containers_of_a_pod_can_share_a_pid_namespace(node: Node) -> None:
    first = node.container(name="a")
    second = node.container(first.pod_uid, "b", pid_namespace=first)
    one, two = first.tenant(), second.tenant()
    assert first.pidns == second.pidns == one.pidns == two.pidns
    assert one.ns_pid != two.ns_pid
    assert first.cgroup != second.cgroup


def test_a_container_in_the_hosts_pid_namespace(node: Node) -> None:
    tenant = node.container(pid_namespace="host").tenant(load=33)
    assert tenant.ns_pid == tenant.host_pid
    until(lambda: tenant.slot()["sm_util"] == [33], "utilization: here every guess is right")


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
    pids = done.stdout.split()
    assert len(pids) == 6
    until(lambda: not any(_runs(pid) for pid in pids), "the end of every process")


# ---- the race meter -------------------------------------------------------------------------------------------------


class Writer(threading.Thread):
    """A thread that repairs slots while they are being moved, in a way that a test chooses."""

    def __init__(self, container: Container, write: Callable[[mmap.mmap, int], None]) -> None:
        super().__init__()
        self.container, self.write = container, write
        self.stopped = threading.Event()

    def run(self) -> None:
        table = LAYOUTS[self.container.layout]
        with self.container.cache.open("r+b") as file, mmap.mmap(file.fileno(), table.size + 1) as view:
            while not self.stopped.is_set():
                for index in range(8):
                    self.write(view, table.procs + index * table.slot_size)


def race(container: Container, write: Callable[[mmap.mmap, int], None] | None, moves: int) -> dict[str, int]:
    """Moves slots while `write` is at work on them; the verdict of the mover."""
    mover = container.mover(moves)
    mover.read_line()
    writer = Writer(container, write) if write else None
    if writer:
        writer.start()
    mover.write_line("go")
    verdict: dict[str, int] = json.loads(mover.read_line())
    if writer:
        writer.stopped.set()
        writer.join()
    return verdict


CLEAN = ("wrong_hostpid", "wrong_util", "changed_bytes_elsewhere", "owner_pid_violations")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves_that_nobody_disturbs_are_clean(node: Node, layout: str) -> None:
    verdict = race(node.container(layout=layout), None, 20_000)
    assert verdict["moves"] == 20_000
    assert [verdict[name] for name in CLEAN] == [0, 0, 0, 0]


def test_a_plain_writer_lands_on_others_and_is_seen(node: Node) -> None:
    def plain(view: mmap.mmap, slot: int) -> None:
        (pid,) = struct.unpack_from("<i", view, slot)
        view[slot + 4 : slot + 8] = struct.pack("<i", pid + 1_000_000)

    for _ in range(10):  # on a busy machine the two may hardly meet
        verdict = race(node.container(), plain, 300_000)
        if verdict["wrong_hostpid"]:
            break
    assert verdict["right_hostpid_seen"] > 0
    assert verdict["wrong_hostpid"] > 0
    assert [verdict[name] for name in CLEAN[1:]] == [0, 0, 0]


def test_utilization_on_another_owner_is_seen(node: Node) -> None:
    table = LAYOUTS["v1.2"]
    assert table.device_util is not None
    sm_util = table.device_util + 16

    def plain(view: mmap.mmap, slot: int) -> None:
        (pid,) = struct.unpack_from("<i", view, slot)
        view[slot + sm_util : slot + sm_util + 8] = struct.pack("<Q", pid)

    for _ in range(10):
        verdict = race(node.container(), plain, 300_000)
        if verdict["wrong_util"]:
            break
    assert verdict["right_util_seen"] > 0
    assert verdict["wrong_util"] > 0
    assert (verdict["wrong_hostpid"], verdict["changed_bytes_elsewhere"]) == (0, 0)


def test_a_byte_elsewhere_and_a_foreign_owner_are_seen(node: Node) -> None:
    table = LAYOUTS["v1.2"]

    def vandal(view: mmap.mmap, slot: int) -> None:
        view[slot + table.used] ^= 1

    def usurper(view: mmap.mmap, slot: int) -> None:
        view[table.owner_pid] = 200

    assert race(node.container(), vandal, 100_000)["changed_bytes_elsewhere"] > 0
    assert race(node.container(), usurper, 100_000)["owner_pid_violations"] > 0


def _runs(host_pid: str) -> bool:
    """Whether it exists and is not just waiting for an init that is slow to reap."""
    try:
        return "State:\tZ" not in Path(f"/proc/{host_pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _nspid(host_pid: int) -> list[int]:
    status = Path(f"/proc/{host_pid}/status").read_text()
    return [int(n) for line in status.splitlines() if line.startswith("NSpid:") for n in line.split()[1:]]


def _thread_ids_inside(tenant: Tenant) -> set[int]:
    tasks = os.listdir(f"/proc/{tenant.host_pid}/task")
    return {_nspid(int(tid))[-1] for tid in tasks}


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
    for device_ in range(2):
        at = layout.procs + layout.device_util + device_ * layout.device_util_size + 16
        with container.cache.open("r+b") as file:
            file.seek(at)
            file.write(struct.pack("<Q", 77))
    until(lambda: tenant.slot()["sm_util"] == [0, 77], "the first zeroed")
    never(lambda: tenant.slot()["sm_util"] != [0, 77], "utilization")


def test_the_slot_comes_first_and_the_guess_long_after(node: Node) -> None:
    container = node.container()
    tenant = container.tenant(load=10, init_waits=True)
    (slot,) = container.region().slots
    assert (slot.pid, slot.hostpid, slot.status) == (tenant.ns_pid, 0, 1)
    layout = LAYOUTS[container.layout]
    with container.cache.open("r+b") as file:
        file.seek(layout.procs + 4)
        file.write(struct.pack("<i", tenant.host_pid))  # who is quick
    tenant.init()
    assert tenant.slot()["hostpid"] == tenant.ns_pid  # is overwritten
    late = container.tenant(init_s=0.3)
    assert late.slot()["hostpid"] == late.ns_pid


def test_main_goes_on_writing_used_where_its_slot_was(node: Node) -> None:
    for release, moved in (("main", False), ("2.9.0", True)):
        container = node.container(name=release.replace(".", "-"), release=release)
        first, second = container.tenant(), container.tenant(memory=1 << 20)
        first.kill()
        container.tenant(
            memory=2 << 20
        )  # moves the second's slot over the first's, and takes the place of that
        assert second.slot()["index"] == 0
        second.command("memory 12345")
        layout, data = LAYOUTS[container.layout], container.cache.read_bytes()
        used = [
            struct.unpack_from("<Q", data, layout.procs + i * layout.slot_size + layout.used + 32)[0]
            for i in (0, 1)
        ]
        assert used == ([12345, 2 << 20] if moved else [1 << 20, 12345])


def test_attaching_is_seen_by_its_byte_and_the_open_descriptor(node: Node) -> None:
    container = node.container()
    first = container.tenant()
    os.utime(container.cache, ns=(0, 0))
    second = container.tenant(init_waits=True)  # has touched nothing but the byte, and its slot
    assert container.cache.stat().st_mtime_ns > 0
    for tenant in (first, second):
        opened = [os.readlink(link.path) for link in os.scandir(f"/proc/{tenant.host_pid}/fd")]
        assert f"/usr/local/vgpu/{container.cache_name}" in opened
