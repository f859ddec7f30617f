"""Slots that move as fast as a tenant can move them, and a writer that never writes a wrong one.

Two movers. The C one (`tests/fakes/tenant/mover.c`) moves slots of invented processes and judges every byte after
every move; the slot writer is driven against it with orders as the daemon makes them, as fast as it can, while a
daemon at its shortest interval works beside it. The second moves slots of real processes, so the daemon
itself, from search to write, is the one that races.
"""

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator

import pytest

from resolver.base.budget import Budgets
from resolver.config import WriteUtilization
from resolver.gpu.attribution import NOTHING
from resolver.hami.discovery import Location, Ownership, SharedDirectory
from resolver.hami.hostpid_policy import HostpidPolicy
from resolver.hami.region import open_region
from resolver.repair.plan import Inputs, encode
from resolver.repair.region import RegionRepairs
from resolver.workers import slot_writer
from resolver.workers.supervisor import WorkerProcess
from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.fakes.process import Process, readable
from tests.fakes.regions import LAYOUTS
from tests.kernel.conftest import EVERY_SOURCE, Start
from tests.patience import PATIENCE_S

INVENTED = 1000  # the first PID that the mover invents
WITH_UTILIZATION = [name for name, layout in LAYOUTS.items() if layout.device_util is not None]
#: The others differ from these in offsets alone.
USUAL = ("v0-no-util", "v0", "v1.2")
RIGHT = 1_000_000  # the mover checks the PID and this


def layouts(names: Iterable[str]) -> pytest.MarkDecorator:
    marks = {True: (), False: (pytest.mark.long,)}
    return pytest.mark.parametrize(
        "layout", [pytest.param(each, marks=marks[each in USUAL]) for each in names]
    )


def right_values(fd: int, container: Container, slots: int) -> Iterator[tuple[bytes, list[int]]]:
    """Yield a daemon's orders for each slot in its current state: the right hostpid, and a utilization."""
    layout = LAYOUTS[container.layout]
    for index in itertools.cycle(range(slots)):
        at = layout.procs + index * layout.slot_size
        word = int.from_bytes(os.pread(fd, 8, at), "little")
        ns_pid, hostpid = word & 0xFFFFFFFF, word >> 32
        right = ns_pid | (ns_pid + RIGHT) << 32
        orders = b""
        if ns_pid >= INVENTED and hostpid != ns_pid + RIGHT:
            orders += slot_writer.ORDER.pack(-1, 0, at, word, at, word, right)
        if ns_pid >= INVENTED and layout.device_util is not None:
            sm_util = at + layout.device_util + 16
            orders += slot_writer.ORDER.pack(-1, 0, at, word, sm_util, 0, ns_pid)
        count = len(orders) // slot_writer.ORDER.size
        yield (slot_writer.HEAD.pack(layout.size + 1, count) + orders if orders else b""), [fd]


async def send(mover: Process, messages: Iterable[tuple[bytes, list[int]]]) -> Counter[int]:
    """Send the messages to the slot writer until the mover is done; return the number of each outcome."""
    outcomes: Counter[int] = Counter()
    child = WorkerProcess("slot writer", "resolver.workers.writer_child", timeout=60)
    try:
        for message, handles in messages:
            if readable(mover.stdout, 0):
                break
            if message:
                answer = await child.request(message, handles)
                outcomes.update(outcome for outcome, _ in slot_writer.RESULT.iter_unpack(answer))
    finally:
        child.stop(PATIENCE_S)
    assert child.failures == 0
    return outcomes


@pytest.mark.parametrize("moves", [100_000, pytest.param(1_000_000, marks=pytest.mark.long)])
@layouts(LAYOUTS)
def test_no_write_lands_on_another_owner(node: Node, start: Start, layout: str, moves: int) -> None:
    bystander = node.container(name="bystander")
    first = bystander.tenant(guess="none")
    start(node, "--interval", "10ms", "--nvml-interval", "100ms", "--write-utilization", "always")
    first.until_repaired()
    slots, landed, moved_away, seen = 20, 0, 0, 0
    # Repeat until some writes landed and others met a moved slot: one mover isn't enough on a busy machine.
    for number in itertools.count():
        container = node.container(name=f"moving{number}", layout=layout, watcher=False)
        mover = container.mover(moves, slots=slots)
        mover.read_line()
        mover.write_line("go")
        with container.cache.open("rb") as cache:
            outcomes = asyncio.run(send(mover, right_values(cache.fileno(), container, slots)))
        verdict: dict[str, int] = json.loads(mover.read_line())
        print(f"{layout}: outcomes {dict(outcomes)}, {verdict}")
        assert verdict["moves"] == moves
        assert verdict["wrong_hostpid"] == 0
        assert verdict["changed_bytes_elsewhere"] == 0
        assert verdict["owner_pid_violations"] == 0
        if LAYOUTS[layout].device_util is None:
            assert verdict["wrong_util"] == verdict["right_util_seen"] == 0
        # A wrong utilization is undone, so it can be seen, or moved along, for a moment. A wrong `hostpid` can't.
        assert verdict["wrong_util"] <= max(5, outcomes[slot_writer.DONE] // 50)
        landed += outcomes[slot_writer.DONE]
        moved_away += outcomes[slot_writer.DIFFERENT]
        seen += verdict["right_hostpid_seen"]
        if min(landed, moved_away) > 50 and seen > 0:
            break
    assert first.hostpid == first.host_pid


def zeroes(container: Container, stack: contextlib.ExitStack) -> Iterator[tuple[bytes, list[int]]]:
    """Yield the daemon's orders for slots without a process, without a pause between two."""
    directory = os.open(container.directory, os.O_RDONLY | os.O_DIRECTORY)
    stack.callback(os.close, directory)
    region = open_region(directory, container.cache_name, str(container.cache))
    whose = Ownership(account="a", container="a", pod_uid="uid", container_name="a")
    location = Location(SharedDirectory("8:1", "/a"), ("8:1", region.identity[1]))
    repairs = RegionRepairs(region, whose, location, Budgets().of("uid"))
    stack.callback(repairs.close)
    for looks in itertools.count():
        if not looks % 64:
            region.start_with()
        repairs.observe(region.read())
        plan = repairs.plan(Inputs(float(looks), HostpidPolicy(None, ""), NOTHING, WriteUtilization.AUTO))
        orders = [order for planned in plan for order in planned]
        message, handles = encode(orders[: slot_writer.MAX_ORDERS], region.layout) if orders else (b"", [])
        yield message, [region.fd, *handles]


@pytest.mark.parametrize("lives", [100_000, pytest.param(2_000_000, marks=pytest.mark.long)])
@layouts(WITH_UTILIZATION)
def test_process_taking_a_slot_loses_no_value(node: Node, layout: str, lives: int) -> None:
    """Slots of ended processes, and copies above proc_num, are set to 0 while processes start, end and are moved."""
    zeroed = undone = 0
    for number in itertools.count():
        container = node.container(name=f"ending{number}", layout=layout, watcher=False)
        mover = container.mover(lives, slots=24, ends=True)
        mover.read_line()
        mover.write_line("go")
        with contextlib.ExitStack() as stack:
            outcomes = asyncio.run(send(mover, zeroes(container, stack)))
        verdict: dict[str, int] = json.loads(mover.read_line())
        print(f"{layout}: outcomes {dict(outcomes)}, {verdict}")
        assert verdict["moves"] == lives
        assert verdict["wrong_util"] == verdict["owner_pid_violations"] == 0
        zeroed += outcomes[slot_writer.DONE]
        undone += outcomes[slot_writer.MOVED]
        if zeroed > 50 and undone:
            break
    assert verdict["momentary"] <= max(5, undone)


@EVERY_SOURCE
def test_compacting_tenants_are_repaired(node: Node, start: Start, source: str) -> None:
    """Real tenants with their lock fork, die and compact slots, while the daemon repairs every 10 ms."""
    container = node.container()
    elders = [container.tenant(load=1 + n, guess="none") for n in range(3)]
    daemon = start(node, "--interval", "10ms", "--nvml-interval", "100ms", "--write-utilization", "always")
    for tenant in elders:
        tenant.until_repaired()
    deadline, truth = time.monotonic() + 2, {t.ns_pid: t.host_pid for t in elders}
    births, living = 0, deque[int]()
    while births <= 30 or time.monotonic() < deadline:
        for elder in elders:
            ns_pid = elder.fork()
            host_pid = node.gpu.host_pid(container.pidns, ns_pid)
            assert host_pid is not None
            truth[ns_pid] = host_pid
            living.append(host_pid)
            births += 1
        while len(living) > 3 + births % 9:
            os.kill(living.popleft(), 9)
        elders[0].command("compact")
        for slot in container.region().slots:
            if slot.status:
                assert slot.hostpid in (0, truth[slot.pid]), slot
    assert container.region().owner_pid == 0
    for elder in elders:
        elder.until_load(elder.load)
    assert daemon.said("conflict") == []
