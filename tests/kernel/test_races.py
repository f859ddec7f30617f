"""Slots that move as fast as a tenant can move them, and a writer that never hits the wrong one.

Two movers. The C one (`tests/fakes/tenant/mover.c`) moves slots of invented processes and judges every byte after
every move; the slot writer is driven against it with orders as the daemon makes them, as fast as it can, while a
daemon at its shortest interval works beside it. The other one moves slots of real processes, so that the daemon
itself, from search to write, is the one that races.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import textwrap
import time
from collections import Counter, deque

import pytest

from resolver.workers import slot_writer
from resolver.workers.supervisor import WorkerProcess
from tests.fakes.chain import read_chain
from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.fakes.process import Process, readable
from tests.fakes.regions import LAYOUTS
from tests.kernel.conftest import EVERY_SOURCE, Start, hostpid_of, never, until

INVENTED = 1000  # the first PID that the mover invents
RIGHT = 1_000_000  # what the mover takes for right is the PID and this


def orders_for(fd: int, container: Container, index: int) -> bytes:
    """What a daemon would order for a slot as it is now: the right hostpid, and a utilization."""
    layout = LAYOUTS[container.layout]
    at = layout.procs + index * layout.slot_size
    word = int.from_bytes(os.pread(fd, 8, at), "little")
    ns_pid, hostpid = word & 0xFFFFFFFF, word >> 32
    if ns_pid < INVENTED:
        return b""
    right = ns_pid | (ns_pid + RIGHT) << 32
    orders = b""
    if hostpid != ns_pid + RIGHT:
        orders += slot_writer.ORDER.pack(-1, 0, at, word, at, word, right)
    if layout.device_util is not None:
        sm_util = at + layout.device_util + 16
        orders += slot_writer.ORDER.pack(-1, 0, at, word, sm_util, 0, ns_pid)
    return orders


async def hammer(container: Container, mover: Process, slots: int) -> Counter[int]:
    """Orders for every slot, over and over until the mover is done; how often each outcome came."""
    outcomes: Counter[int] = Counter()
    child = WorkerProcess("slot writer", "resolver.workers.slot_writer", timeout=60)
    fd = os.open(container.cache, os.O_RDONLY)
    try:
        while not readable(mover._stdout, 0):
            for index in range(slots):
                orders = orders_for(fd, container, index)
                if orders:
                    count = len(orders) // slot_writer.ORDER.size
                    head = slot_writer.HEAD.pack(LAYOUTS[container.layout].size + 1, count)
                    answer = await child.request(head + orders, [fd])
                    outcomes.update(outcome for outcome, _ in slot_writer.RESULT.iter_unpack(answer))
    finally:
        child.stop()
        os.close(fd)
    assert child.failures == 0
    return outcomes


@pytest.mark.parametrize("moves", [200_000, pytest.param(1_000_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_write_lands_on_another_owner(node: Node, start: Start, layout: str, moves: int) -> None:
    bystander = node.container(name="bystander")
    first = bystander.tenant(guess="none")
    start(node, "--interval", "10ms", "--nvml-interval", "100ms", "--write-utilization", "always")
    until(lambda: hostpid_of(bystander, first) == first.host_pid, "the daemon at work")
    slots, landed, moved_away, seen = 20, 0, 0, 0
    # Until it was a race: writes landed, and slots moved away under others. One isn't enough on a busy machine.
    for number in itertools.count():
        container = node.container(name=f"moving{number}", layout=layout, watcher=False)
        mover = container.mover(moves, slots=slots)
        mover.read_line()
        mover.write_line("go")
        outcomes = asyncio.run(hammer(container, mover, slots))
        verdict: dict[str, int] = json.loads(mover.read_line())
        print(f"{layout}: outcomes {dict(outcomes)}, {verdict}")
        assert verdict["moves"] == moves
        assert verdict["wrong_hostpid"] == 0
        assert verdict["changed_bytes_elsewhere"] == 0
        assert verdict["owner_pid_violations"] == 0
        if LAYOUTS[layout].device_util is None:
            assert verdict["wrong_util"] == verdict["right_util_seen"] == 0
        # A utilization has no owner's number in its own word. It is guarded and taken back, which leaves a moment in
        # which it can be seen, or be carried along by the next move; `hostpid` has no such moment.
        assert verdict["wrong_util"] <= max(5, outcomes[slot_writer.DONE] // 50)
        landed += outcomes[slot_writer.DONE]
        moved_away += outcomes[slot_writer.DIFFERENT]
        seen += verdict["right_hostpid_seen"]
        if min(landed, moved_away) > 50 and seen > 0:
            break
    assert hostpid_of(bystander, first) == first.host_pid


REAL_MOVER = """
    import json, mmap, os, random, signal, struct, sys, time
    path, procs, size, proc_num, status, sm, members, seconds = sys.argv[1], *map(int, sys.argv[2:])
    region = mmap.mmap(os.open(path, os.O_RDWR), 0)
    children = []
    for _ in range(members):
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
    chance, slots, width = random.Random(3), [], 10
    moves, strange, seen = 0, set(), 0
    words = memoryview(region)

    def original(child):
        return (0, child, 4711)[child % 3]

    def append(child):
        at = procs + len(slots) * size
        struct.pack_into("<ii", region, at, child, original(child))
        region[at + 8 : at + size] = bytes(size - 8)
        struct.pack_into("<i", region, at + status, 1)
        slots.append(child)
        struct.pack_into("<i", region, proc_num, len(slots))

    def remove(hole):
        last = len(slots) - 1
        if hole != last:
            to, of = procs + hole * size, procs + last * size
            region[to : to + 4] = region[of : of + 4]      # pid before hostpid, as upstream does it
            region[to + 4 : to + 8] = region[of + 4 : of + 8]
            region[to + 8 : to + size] = region[of + 8 : of + size]
            slots[hole] = slots[last]
        slots.pop()
        struct.pack_into("<i", region, proc_num, len(slots))

    def check():
        global seen
        for index, child in enumerate(slots):
            pid, hostpid = struct.unpack_from("<ii", region, procs + index * size)
            if pid != child:
                strange.add(("pid", child, pid))
            if hostpid != original(child):
                strange.add(("hostpid", child, hostpid))
                seen += 1

    for child in children[:width]:
        append(child)
    outside = bytes(words[:16]), bytes(words[56:procs])
    print(json.dumps(children), flush=True)
    sys.stdin.readline()
    until = time.monotonic() + seconds
    at_last = until + 120
    free = children[width:]

    def met():
        return len({child for kind, child, _ in strange if kind == "hostpid"})

    # Until the daemon, which may have to wait for a CPU, has written into a good many of them.
    while time.monotonic() < until or (met() <= 10 and time.monotonic() < at_last):
        for _ in range(chance.choice((1, 5, 50))):
            hole = chance.randrange(len(slots))
            free.append(slots[hole])
            remove(hole)
            append(free.pop(chance.randrange(len(free))))
            moves += 1
            check()
        # Now and then it stands still for a moment, so that there are writes to be hit by the next burst.
        time.sleep(chance.choice((0, 0.001, 0.004, 0.02)))
    check()
    print(json.dumps([moves, seen, sorted(strange)]), flush=True)
    sys.stdin.readline()
"""


def test_the_daemon_itself_races_with_slots_of_real_processes(node: Node, start: Start) -> None:
    container = node.container(name="real", layout="v1.1", watcher=False)
    container.tenant(guess="none").stop()  # it makes the file
    layout = LAYOUTS["v1.1"]
    numbers = [layout.procs, layout.slot_size, layout.proc_num, layout.status, layout.device_util, 40, 4]
    script = textwrap.dedent(REAL_MOVER)
    path = f"/usr/local/vgpu/{container.cache_name}"
    mover = container.spawn([sys.executable, "-I", "-c", script, path, *map(str, numbers)])
    children: list[int] = json.loads(mover.read_line())
    truth = {}
    for host_pid in _children(mover.host_pid):
        chain = read_chain(host_pid)
        truth[chain.ns_pid] = host_pid
    assert set(truth) == set(children)
    before = container.cache.read_bytes()
    options = ("--nvml-interval", "50ms", "--write-utilization", "always")
    daemon = start(node, "--interval", "10ms", *options)
    mover.write_line("go")
    moves, seen, strange = json.loads(mover.read_line())
    written = {(child, hostpid) for kind, child, hostpid in strange if kind == "hostpid"}
    print(
        f"{moves} moves, {len(daemon.said('repair'))} repairs, {seen} right slots seen, {len(written)} processes"
    )
    assert [entry for entry in strange if entry[0] == "pid"] == []
    assert [(child, hostpid) for child, hostpid in written if truth[child] != hostpid] == []
    assert moves > 800
    assert len(written) > 10
    # It stands still now: everything gets right, but for those whose moves looked like another writer's work.
    until(lambda: sum(slot.hostpid == truth[slot.pid] for slot in container.region().slots) >= 8, "peace")
    after = container.cache.read_bytes()
    assert after[:16] + after[24 : layout.procs] == before[:16] + before[24 : layout.procs]
    assert after[layout.proc_num :] == before[layout.proc_num :]
    never(
        lambda: any(
            slot.hostpid not in (0, 4711, slot.pid, truth[slot.pid]) for slot in container.region().slots
        ),
        "another's number",
        0.2,
    )


def _children(host_pid: int) -> list[int]:
    with open(f"/proc/{host_pid}/task/{host_pid}/children", encoding="ascii") as children:
        return list(map(int, children.read().split()))


@EVERY_SOURCE
def test_tenants_that_compact_while_the_daemon_repairs(node: Node, start: Start, source: str) -> None:
    """Real tenants, their real lock: born, killed, compacted, while the daemon repairs every 10 ms."""
    container = node.container()
    elders = [container.tenant(load=1 + n, guess="none") for n in range(3)]
    daemon = start(node, "--interval", "10ms", "--nvml-interval", "100ms", "--write-utilization", "always")
    until(lambda: all(hostpid_of(container, t) == t.host_pid for t in elders), "the elders")
    deadline, truth = time.monotonic() + 2, {t.ns_pid: t.host_pid for t in elders}
    births, living = 0, deque[int]()
    while time.monotonic() < deadline:
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
    assert births > 30
    assert container.region().owner_pid == 0
    for elder in elders:
        until(lambda t=elder: t.slot()["sm_util"] == [t.load], "the elders' true load")  # type: ignore[misc]
    assert daemon.said("conflict") == []
