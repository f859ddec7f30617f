"""The daemon and its children are killed at work, repeatedly: no tenant is harmed, and slots become right."""

import fcntl
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.fakes.container import Container
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.regions import LAYOUTS
from tests.kernel.conftest import NVML, WRITER, Start, lock_words, without_children, write_hostpid
from tests.kernel.rights import patched
from tests.patience import until

KILLS = pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.long)])


class Locked:
    """A container whose lock a tenant always holds, to detect a daemon that waits for it or takes it."""

    def __init__(self, node: Node) -> None:
        self.container = node.container(name="locked", layout="v1.2", watcher=False)
        self.tenants = [self.container.tenant(load=0, guess="none") for _ in range(3)]
        self.holder = self.tenants[0]
        assert self.holder.command("lock") == {"locked": True}
        self.before = self.container.cache.read_bytes()
        assert self.container.region().owner_pid == self.holder.ns_pid

    def spoil(self) -> None:
        for index, tenant in enumerate(self.tenants):
            write_hostpid(self.container, tenant, (0, tenant.ns_pid, 4711)[index])

    def right(self) -> bool:
        return all(tenant.hostpid == tenant.host_pid for tenant in self.tenants)

    def check(self) -> None:
        now = self.container.cache.read_bytes()
        assert masked(now, self.container.layout) == masked(self.before, self.container.layout)


def masked(data: bytes, name: str) -> bytes:
    layout, image = LAYOUTS[name], bytearray(data)
    for index in range(1024):
        at = layout.procs + index * layout.slot_size
        image[at + 4 : at + 8] = bytes(4)
        if layout.device_util is not None:
            size = layout.device_util_size * 16
            image[at + layout.device_util : at + layout.device_util + size] = bytes(size)
    return bytes(image)


class Forker:
    """A tenant that forks: each child takes a wrong slot, and is killed once that was checked."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.container: Container = node.container(name="forker")
        self.parent: Tenant = self.container.tenant(load=9, guess="none")
        self.children: dict[int, int] = {}
        self.lock = lock_words(self.container)

    def fork(self) -> None:
        ns_pid = self.parent.fork()
        host_pid = self.node.gpu.host_pid(self.container.pidns, ns_pid)
        assert host_pid is not None
        self.children[ns_pid] = host_pid

    def right(self) -> bool:
        region = self.container.region()
        slots = {slot.pid: slot.hostpid for slot in region.slots if slot.status}
        wanted = {**self.children, self.parent.ns_pid: self.parent.host_pid}
        return all(slots.get(ns_pid) == host_pid for ns_pid, host_pid in wanted.items())

    def bury(self) -> None:
        for host_pid in self.children.values():
            os.kill(host_pid, signal.SIGKILL)
        self.children.clear()

    def check(self) -> None:
        assert lock_words(self.container) == self.lock  # value 1, no owner, no waiter


@pytest.fixture
def locked(node: Node) -> Iterator[Locked]:
    locked = Locked(node)
    yield locked
    locked.check()


@KILLS
def test_slots_are_right_after_kills_of_the_daemon(
    node: Node, start: Start, locked: Locked, tmp_path: Path, kills: int
) -> None:
    chance, forker = random.Random(4), Forker(node)
    run_dir = tmp_path / "run"
    arguments = ("--interval", "250ms", "--nvml-interval", "250ms", "--hostpid-namespace", "host")
    for _ in range(kills // 2):
        # Somewhere between its start and its first passes.
        locked.spoil()
        forker.fork()
        early = start(node, *arguments)
        time.sleep(chance.uniform(0.06, 0.16))
        kill_and_check(early, run_dir)
        locked.check()
        forker.check()
        # A new daemon corrects all slots, even after the last daemon's half-done writes.
        daemon = start(node, *arguments)
        daemon.wait_for("started")
        until(lambda: locked.right() and forker.right(), "everything right")
        forker.bury()
        forker.fork()
        time.sleep(chance.uniform(0.0, 0.05))
        kill_and_check(daemon, run_dir)
        locked.check()
        forker.check()
        forker.bury()
    assert len(start.started) == kills


def kill_and_check(daemon: Daemon, run_dir: Path) -> None:
    childless = without_children(daemon)
    daemon.kill()
    until(childless, "the end of the orphans")
    if (run_dir / "lock").exists():
        with (run_dir / "lock").open("rb") as lock:
            until(lambda: free(lock), "a free lock")  # a child just started may hold it, too


def free(lock: BinaryIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


#: Every container counts as slow, so the second reader answers all questions.
ALL_SLOW = patched("""
    from resolver.workers import lanes
    class Everybody(set):
        __contains__ = lambda self, about: about != lanes.ALL
        __sub__ = lambda self, others: {"everybody"}
        __iand__ = lambda self, others: self
    begin = lanes.Lanes.__init__
    def init(self, *arguments, **more):
        begin(self, *arguments, **more)
        self._slow = Everybody()
    lanes.Lanes.__init__ = init
    lanes.Lanes._lane = lambda self, payer, about: self._apart.get(about, self._second)
    """)


@KILLS
@pytest.mark.parametrize("child", [WRITER, "reader", "second reader"])
def test_slots_are_right_after_kills_of_a_child(
    node: Node, start: Start, locked: Locked, kills: int, child: str
) -> None:
    chance, forker = random.Random(5), Forker(node)
    wrapper = ALL_SLOW if child == "second reader" else ()
    daemon = start(node, "--interval", "100ms", wrapper=wrapper, anew=False)
    until(lambda: locked.right() and forker.right(), "the beginning")
    killed = 0
    for _ in range(kills):
        forker.fork()
        # The next pass begins within 100 ms and writes for under 1 ms: kills come before, in and after it.
        time.sleep(chance.choice((0.0, chance.uniform(0.0, 0.11))))
        host_pid = daemon.children().get(child)
        if host_pid is not None:
            os.kill(host_pid, signal.SIGKILL)
            killed += 1
        until(lambda: forker.right() and locked.right(), "everything right")
        forker.check()
        forker.bury()
    assert killed > kills // 2
    assert daemon.process.poll() is None
    assert daemon.said("region_quarantined") == []  # a killed writer is not the file's fault


@KILLS
def test_values_are_right_after_kills_of_the_nvml_worker(
    node: Node, start: Start, locked: Locked, kills: int
) -> None:
    chance = random.Random(6)
    free = node.container(name="free", watcher=False)
    tenant = free.tenant(load=1, guess="none")
    daemon = start(node, "--interval", "50ms", "--nvml-interval", "150ms")
    tenant.until_load(1)
    until(locked.right, "the beginning")
    for turn in range(kills):
        before, load = tenant.load, 2 + turn % 99
        tenant.set_load(load)
        time.sleep(chance.choice((0.0, chance.uniform(0.0, 0.15))))
        worker = daemon.children().get(NVML)
        if worker is not None:
            os.kill(worker, signal.SIGKILL)

        def right(before: int = before, load: int = load) -> bool:
            (sm_util,) = tenant.sm_util
            # The mean of the last second, which may have both loads in it.
            assert min(before, load) <= sm_util <= max(before, load), "unknown is not 0"
            return sm_util == load

        until(right, "the new load")
        assert locked.right()
    assert daemon.process.poll() is None
    assert tenant.hostpid == tenant.host_pid
