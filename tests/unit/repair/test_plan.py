"""Plans for the slots of one region: planning is pure, so each test sets up its state by hand."""

import gc
import tracemalloc
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resolver.base.budget import FORGIVEN_SECONDS, Budgets
from resolver.base.reasons import RepairReason, UnresolvedReason
from resolver.config import WriteUtilization
from resolver.hami.hostpid_policy import HostpidPolicy, WatcherFinding
from resolver.hami.layout import LAYOUTS
from resolver.repair.plan import Inputs, slot_word
from resolver.repair.reported_values import REPORTED_AFTER, TWO_TICKS
from resolver.repair.schedule import STARTED
from tests.fakes.planned import ALWAYS, AUTO, CONTAINER, HOST, NEVER, UNKNOWN, UUIDS, Bench, SlotValues


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("hostpid", "policy", "reason", "after"),
    [
        (0, HOST, RepairReason.MISSING, 4711),
        (7, HOST, RepairReason.WRONG_NAMESPACE, 4711),
        (815, HOST, RepairReason.STALE, 4711),
        (55, HOST, RepairReason.DUPLICATE, 4711),
        (-1, HOST, RepairReason.STALE, 4711),
        (0, CONTAINER, RepairReason.MISSING, 7),
        (4711, CONTAINER, RepairReason.WRONG_NAMESPACE, 7),
        (55, CONTAINER, RepairReason.DUPLICATE, 7),
    ],
)
def test_a_wrong_hostpid_gives_one_exact_order(
    stack: ExitStack, layout: str, hostpid: int, policy: HostpidPolicy, reason: RepairReason, after: int
) -> None:
    bench = Bench(stack, layout)
    bench.see((9, 55), (7, hostpid))
    bench.own(7, 4711)
    (order,) = bench.plan(policy)
    at = bench.layout.procs + bench.layout.slot_size
    assert (order.slot, order.device, order.reason) == (1, None, reason)
    assert (order.guard_offset, order.target_offset) == (at, at)
    assert order.guard == order.expected == 7 | (hostpid & 0xFFFFFFFF) << 32
    assert order.new == 7 | after << 32


@pytest.mark.parametrize(("hostpid", "policy"), [(4711, HOST), (7, CONTAINER)])
def test_a_right_hostpid_gives_none(bench: Bench, hostpid: int, policy: HostpidPolicy) -> None:
    bench.see((9, hostpid), (7, hostpid))  # another slot claims the same number
    bench.own(7, 4711)
    assert bench.plan(policy) == []
    assert bench.reason(7) is None


def test_without_an_owner_nothing_is_written(bench: Bench) -> None:
    bench.see((7, 0, 1, (5, 5)))
    assert bench.plan() == []
    for reason in UnresolvedReason:
        bench.miss(7, reason)
        assert bench.plan() == []
        assert bench.reason(7) is reason


def test_without_a_policy_nothing_is_written(bench: Bench) -> None:
    bench.see((7, 0, 1, (5, 5)))
    bench.own(7, 4711)
    assert bench.plan(UNKNOWN) == []
    assert bench.reason(7) is UnresolvedReason.DRIVER_UNKNOWN
    assert [order.new >> 32 for order in bench.plan(HOST)] == [4711]
    assert bench.reason(7) is None, "what it was told before is no reason any more"


@pytest.mark.parametrize("pid", [0, -1, -(2**31)])
def test_a_pid_that_cannot_be(bench: Bench, pid: int) -> None:
    bench.see((pid, 0), (0, 5, 0), (1, 0))
    assert bench.repairs.slots.searched(2)
    assert bench.odd() == {0: UnresolvedReason.INVALID_PID}
    bench.own(1, 4711)
    assert [order.slot for order in bench.plan()] == [2]


@pytest.mark.parametrize("times", [2, 3, 4])
def test_the_same_pid_more_than_once_is_ambiguous(bench: Bench, times: int) -> None:
    bench.see((7, 0), (9, 0))
    bench.own(7, 4711)
    bench.own(9, 4713)
    gone = bench.see(*([(7, 0)] * times), (9, 0))
    assert gone == []
    assert [order.slot for order in bench.plan()] == [times]
    assert bench.odd() == dict.fromkeys(range(times), UnresolvedReason.AMBIGUOUS)
    assert [state.slot.pid for state in bench.repairs.slots.distinguished()] == [9]
    # the slot's move is over, and its owner is still known
    bench.see((9, 0), (7, 0))
    assert {(order.slot, order.new >> 32) for order in bench.plan()} == {(0, 4713), (1, 4711)}
    assert bench.odd() == {}


def test_a_pid_that_is_another_slots_index_is_no_trouble(bench: Bench) -> None:
    bench.see((0, 0), (-1, 0), (7, 0), (7, 0), (2, 0), (3, 0), (1, 0))
    assert [index for index in range(7) if bench.repairs.slots.searched(index)] == [4, 5, 6]


def test_moved_slot_keeps_its_evidence(bench: Bench) -> None:
    bench.see((9, 0), (8, 0), (7, 0))
    bench.own(7, 4711)
    (order,) = bench.plan()
    assert order.slot == 2
    bench.done(order)
    assert bench.see((7, 4711), (8, 0)) == []
    assert bench.plan() == []
    assert bench.state(7).slot.index == 0
    assert bench.state(7).written == 4711


def test_another_writer_makes_us_wait_ever_longer(bench: Bench) -> None:
    bench.see((7, 0))
    bench.own(7, 4711)
    bench.state(7).guessed = True
    for turn in range(14):
        (order,) = bench.plan()
        bench.done(order)
        bench.see((7, 4711))
        assert bench.plan() == []
        assert bench.reason(7) is None
        bench.see((7, 815))
        bench.state(7).doubted = False  # no process with that number has the PID
        assert bench.plan() == []
        assert bench.reason(7) is UnresolvedReason.CONFLICT
        wait = bench.conflicts[turn][1]
        bench.now += wait * 0.99
        assert bench.plan() == []
        bench.now += wait * 0.02
    waits = [wait for _, wait in bench.conflicts]
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(waits) == waits[-1] == 300.0
    assert len(waits) == 14


def test_own_guess_is_no_conflict_and_is_repaired(bench: Bench) -> None:
    bench.see((7, 0))
    bench.own(7, 4711)
    bench.done(bench.plan()[0])
    bench.see((7, 7))  # the container's number is back, seconds later
    (order,) = bench.plan()
    assert (order.reason, order.new >> 32) == (RepairReason.WRONG_NAMESPACE, 4711)
    bench.done(order)
    assert (bench.conflicts, bench.reason(7)) == ([], None)
    assert bench.state(7).wrong
    bench.see((7, 7))  # a duplicate is no guess
    assert bench.plan() == []
    assert bench.conflicts == [(7, 0.5)]


@pytest.mark.parametrize(
    ("seen", "policy", "after", "conflicts"), [(0, HOST, [], [(7, 0.5)]), (4711, CONTAINER, [7], [])]
)
def test_return_to_0_is_a_conflict_and_a_policy_is_none(
    bench: Bench, seen: int, policy: HostpidPolicy, after: list[int], conflicts: list[tuple[int, float]]
) -> None:
    bench.see((7, 0))
    bench.own(7, 4711)
    bench.done(bench.plan()[0])
    bench.see((7, seen))
    assert [order.new >> 32 for order in bench.plan(policy)] == after
    assert bench.conflicts == conflicts


def test_a_new_process_may_guess_again(bench: Bench) -> None:
    bench.see((7, 0))
    bench.own(7, 4711)
    bench.done(bench.plan()[0])
    bench.see((7, 7))
    bench.done(bench.plan()[0])
    bench.end(7)
    bench.own(7, 4722)
    bench.done(bench.plan()[0])
    bench.see((7, 7))
    assert [order.new >> 32 for order in bench.plan()] == [4722]
    assert bench.conflicts == []


@pytest.mark.parametrize(("hostpid", "asked"), [(0, False), (7, False), (4711, False), (4722, True)])
def test_doubted_hostpid_waits_for_a_new_search(bench: Bench, hostpid: int, *, asked: bool) -> None:
    bench.see((7, 4711), (8, 1))
    bench.own(7, 4711)
    bench.plan()
    for shown in (((7, hostpid), (8, 1)), ((8, 1), (7, hostpid))):  # also in a slot that moves
        bench.see(*shown)
        due = {shown[index][0] for index in bench.repairs.slots.due(bench.now)}
        assert (7 in due) is asked
        assert (bench.plan() == []) is (asked or hostpid == 4711)
        assert (bench.reason(7) is UnresolvedReason.OVER_BUDGET) is asked


@pytest.mark.parametrize("after", [(7, 5), (7, 0, 2)])
def test_attachment_is_read_early_and_a_change_is_not(bench: Bench, after: SlotValues) -> None:
    """A tenant can flip its words at any rate; a process that attaches also changes the file's mtime."""
    bench.see((7, 0))
    for _ in range(10):
        bench.miss(7)
    assert bench.next_look(7) > bench.now
    bench.see(after)
    assert bench.next_look(7) > bench.now
    bench.repairs.region.mtime_ns += 1
    bench.see(after)
    assert bench.next_look(7) <= bench.now
    bench.miss(7)
    assert bench.next_look(7) > bench.now


def test_a_slot_that_went_gives_its_owner_back(bench: Bench) -> None:
    bench.see((7, 0), (9, 0))
    handle = bench.own(7, 4711)
    (state,) = bench.see((7, 0, 0), (9, 0))
    assert state.owner is handle


def test_utilization_is_written_where_no_watcher_puts_it_right(bench: Bench) -> None:
    bench.see((9, 0), (7, 4711, 1, (80, 3)))
    bench.own(7, 4711)
    bench.load = {(4711, "GPU-a"): 42}
    assert bench.plan() == []  # a watcher may still correct the value
    bench.now += TWO_TICKS + 0.01
    first, second = bench.plan()
    word = slot_word(7, 4711)
    assert [(o.slot, o.device, o.reason) for o in (first, second)] == [(1, 0, None), (1, 1, None)]
    assert (first.guard_offset, first.guard) == (bench.layout.slot_offset(1), word)
    assert (first.target_offset, first.expected, first.new) == (bench.layout.sm_util_offset(1, 0), 80, 42)
    assert (second.target_offset, second.expected, second.new) == (bench.layout.sm_util_offset(1, 1), 3, 0)


def test_pending_value_is_checked_after_two_ticks(bench: Bench) -> None:
    bench.see((7, 4711, 1, (80, 0)))
    bench.own(7, 4711)
    bench.load = {(4711, "GPU-a"): 42}
    assert bench.plan() == []
    assert not bench.repairs.has_work(bench.now + TWO_TICKS / 2)
    assert bench.repairs.work_at == bench.now + TWO_TICKS
    bench.now += TWO_TICKS + 0.01
    assert bench.repairs.has_work(bench.now)
    assert len(bench.plan()) == 1


def test_slot_stays_right_until_a_process_attaches(bench: Bench) -> None:
    bench.see((7, 0))
    bench.own(7, 4711)
    (order,) = bench.plan()
    assert not bench.repairs.right
    bench.done(order)
    bench.see((7, 4711))
    assert (bench.plan(), bench.repairs.right) == ([], True)
    bench.end(7)
    assert (bench.plan(), bench.repairs.right) == ([], True), "its slot is dead"
    bench.repairs.attached = True
    bench.see((7, 4711))
    assert (bench.plan(), bench.repairs.right) == ([], False)


def test_process_has_started_when_its_guess_was_seen(bench: Bench) -> None:
    bench.see((8, 4712))
    bench.own(8, 4712)
    bench.plan()
    assert not bench.repairs.started
    bench.now += STARTED
    bench.see((8, 4712), (7, 33))  # old releases keep the number left in a slot that they take
    bench.own(7, 4711)

    def repair(hostpid: int) -> None:
        bench.see((8, 4712), (7, hostpid))
        (order,) = bench.plan()
        bench.done(order)
        bench.see((8, 4712), (7, 4711))
        assert bench.plan() == []

    repair(33)
    assert not bench.repairs.started
    repair(7)
    assert bench.repairs.started


def test_an_unknown_utilization_is_not_written(bench: Bench) -> None:
    bench.see((7, 4711, 1, (80, 3)))
    bench.own(7, 4711)
    bench.known = False
    assert bench.plan(writes=ALWAYS) == []


@pytest.mark.parametrize(
    ("writes", "at_once", "later"), [(AUTO, [], [0, 1]), (ALWAYS, [0, 1], [0, 1]), (NEVER, [], [])]
)
def test_slots_waiting_for_a_watcher(
    bench: Bench, writes: WriteUtilization, at_once: list[int], later: list[int]
) -> None:
    bench.see((7, 4711, 1, (80, 3)))
    bench.own(7, 4711)
    assert [order.device for order in bench.plan(writes=writes)] == at_once
    bench.now += TWO_TICKS + 0.01
    assert [order.device for order in bench.plan(writes=writes)] == later


def test_a_watcher_has_two_ticks_from_when_its_hostpid_is_right(bench: Bench) -> None:
    bench.see((7, 0, 1, (0, 0)))
    bench.own(7, 4711)
    bench.load = {(4711, "GPU-a"): 80}
    (order,) = bench.plan()
    bench.done(order)
    bench.see((7, 4711, 1, (0, 0)))
    bench.now += 10
    assert bench.plan() == []
    bench.now += TWO_TICKS + 0.01
    assert [(order.device, order.new) for order in bench.plan()] == [(0, 80)]
    bench.see((7, 7, 1, (0, 0)))  # the process's own guess, under which no watcher could work
    bench.done(bench.plan()[0])
    bench.see((7, 4711, 1, (0, 0)))
    bench.now += TWO_TICKS + 0.01
    assert bench.plan() == []


def test_contested_values_are_held(stack: ExitStack) -> None:
    bench = Bench(stack)
    bench.see((7, 4711, 1, (500, 500)))
    bench.own(7, 4711)
    bench.load = {(4711, uuid): 10 for uuid in UUIDS}
    bench.plan()
    assert [(order.device, order.new) for order in bench.repairs.held] == [(0, 10), (1, 10)]
    bench.load, bench.idle = {(4711, UUIDS[0]): 10}, ()
    bench.plan()
    assert [order.device for order in bench.repairs.held] == [0], "a 0 needs more than one answer"
    bench.idle = UUIDS
    bench.plan()
    assert [(order.device, order.new) for order in bench.repairs.held] == [(0, 10), (1, 0)]
    bench.repairs.not_held_until = bench.now + 10
    bench.plan()
    assert bench.repairs.held == []
    bench.repairs.not_held_until = 0.0
    bench.repairs._unwritable_until = bench.now + 10
    bench.plan()
    assert bench.repairs.held == []


def test_all_values_are_held_while_two_watchers_add(bench: Bench) -> None:
    """As in 2.5.0: each watcher zeroes the first device and then adds, so two ticks at once add twice."""
    bench.load = {(4711, "GPU-a"): 40, (4712, "GPU-a"): 10, (4711, "GPU-b"): 10}
    bench.see((8, 4712, 1, (20, 0)), (7, 4711, 1, (80, 500)))
    bench.own(8, 4712)
    state = bench.repairs.slots.own(1, bench.hold(7, 4711))
    bench.plan()
    held = [(order.slot, order.device, order.new) for order in bench.repairs.held]
    assert held == [(0, 0, 10), (0, 1, 0), (1, 0, 40), (1, 1, 10)]

    # The slot writer's reports hold values that it read between the zero and the sum.
    word = state.evidence.word(0, 80)
    for device, load in enumerate((40, 10)):
        state.evidence.word(device, 0).hold(load)
        state.evidence.word(device, 0).see(0, bench.now)
        state.evidence.word(device, 0).wrote(load)
    assert not state.evidence.unsure(), "NVML is not asked for each of them"
    bench.now += 2 * REPORTED_AFTER
    bench.see((8, 4712, 1, (10, 0)), (7, 4711, 1, (40, 10)))
    bench.plan()
    assert not word.contested
    assert state.evidence.finding(bench.now) is None

    bench.end(8)
    for held_devices in ([1], []):
        bench.plan()
        assert [order.device for order in bench.repairs.held] == held_devices, (
            "one watcher sets the first device"
        )
        for _ in range(2):
            state.evidence.word(1, 10).undisturbed()
    bench.see((9, 4713, 1, (20, 0)), (7, 4711, 1, (40, 10)))
    bench.own(9, 4713)
    bench.plan()
    assert len(bench.repairs.held) == 4, "the library is the same while a process lives"

    bench.end(7, 9)
    bench.plan()
    bench.see((10, 4714, 1, (0, 0)), (11, 4715, 1, (0, 0)))
    bench.own(10, 4714)
    bench.own(11, 4715)
    bench.plan()
    assert bench.repairs.held == []
    bench.state(10).evidence.word(0, 0).contested = True  # by short bursts
    bench.plan()
    assert [(order.slot, order.device) for order in bench.repairs.held] == [(0, 0)]


def test_hostpid_precedes_utilization_by_a_pass(bench: Bench) -> None:
    bench.see((7, 0, 1, (80, 3)))
    bench.own(7, 4711)
    assert [order.device for order in bench.plan()] == [None]


def test_a_layout_without_utilization_gets_none(stack: ExitStack) -> None:
    bench = Bench(stack, "v0-no-util")
    bench.see((7, 4711, 1, ()))
    bench.own(7, 4711)
    bench.load = {(4711, "GPU-a"): 42}
    assert bench.plan(writes=ALWAYS) == []


def test_a_dead_slots_load_is_zeroed_and_its_hostpid_stays(bench: Bench) -> None:
    bench.see((7, 815, 1, (80, 0)))
    bench.own(7, 4711)
    bench.load = {(4711, "GPU-a"): 42}
    bench.end(7)
    assert bench.plan(writes=NEVER) == []
    (order,) = bench.plan()
    assert (order.device, order.expected, order.new, order.guard) == (0, 80, 0, slot_word(7, 815))
    assert (order.owner, order.state) == (None, None)
    bench.see((7, 815, 1, (0, 0)))
    assert bench.plan() == []


@pytest.mark.parametrize("status", [0, 1])
def test_the_load_of_a_process_that_gave_its_slot_back_is_zeroed(bench: Bench, status: int) -> None:
    """Monitors of HAMi 2.7 to 2.9 count its load for ever: only its ``pid`` has become 0."""
    bench.see((9, 0), (0, 4711, status, (64, 3)))
    orders = bench.plan()
    assert [(order.slot, order.device, order.expected, order.new) for order in orders] == [
        (1, 0, 64, 0),
        (1, 1, 3, 0),
    ]
    at = bench.layout.slot_offset(1)
    assert {(order.guard_offset, order.guard) for order in orders} == {(at, slot_word(0, 4711))}
    assert not any(order.state for order in orders)
    assert bench.plan(writes=NEVER) == []


def test_copy_above_proc_num_is_zeroed_unless_taken(bench: Bench) -> None:
    """Monitors up to HAMi 2.6 add up all 1,024 slots. Taking one raises proc_num, the order's guard."""
    bench.see((9, 0), (7, 4711, 1, (0, 58)), (8, 4712, 1, (1, 0)), proc_num=1)
    orders = bench.plan()
    assert [(order.slot, order.device, order.expected, order.new) for order in orders] == [
        (1, 1, 58, 0),
        (2, 0, 1, 0),
    ]
    assert {(order.guard_offset, order.guard) for order in orders} == {
        (bench.layout.proc_num, slot_word(1, 1))
    }
    assert not bench.repairs.slots.searched(1), "it is no process's"
    bench.see((9, 0), (7, 4711, 1, (0, 58)), (8, 4712, 1, (1, 0)), proc_num=2)
    assert [order.slot for order in bench.plan()] == [2]


def test_region_is_read_after_an_end_until_slot_stays_0(bench: Bench) -> None:
    """Other processes' watchers match the ended process's number in samples from before its end."""
    bench.see((0, 4711, 0, (64, 0)))
    assert len(bench.plan()) == 1
    for _ in range(3):  # watchers fill the slot at each tick; the plan zeroes it less often
        bench.now += 0.12
        bench.see((0, 4711, 0, (64, 0)), (7, 815, 1, (50, 0)))
        bench.call_dead(7)
        assert bench.plan() == []
        assert bench.repairs.work_at <= bench.now + TWO_TICKS
    bench.now += 0.05
    assert sorted(order.slot for order in bench.plan()) == [0, 1]
    bench.see((0, 4711, 0, (0, 0)))
    assert bench.plan() == []
    repairs, interval = bench.repairs, 0.25
    assert repairs.work_at > bench.now + 2.0, "only a value that is filled in again is work"
    repairs.schedule.attached = bench.now - STARTED
    for seconds, soon in ((0.0, True), (1.9, True), (0.2, False)):
        bench.now += seconds
        repairs.schedule.taken(bench.now)
        repairs.rest(interval, watched=True)
        assert (repairs.schedule.due <= bench.now + interval) is soon


def test_a_plan_gives_way_after_every_slot(bench: Bench) -> None:
    """Planning a thousand slots on sixteen devices in one go took 60 ms."""
    bench.see(*((ns_pid, 4711) for ns_pid in range(1, 51)))
    for ns_pid in range(1, 51):
        bench.own(ns_pid, 4711)
    plan = bench.repairs.plan(Inputs(bench.now, HOST, bench.joined(), ALWAYS))
    assert len(list(plan)) >= 50
    bench.see(*((0, 4711, 0, (64, 0)) for _ in range(50)))  # loads that ended processes left behind
    for later in (0.0, 0.1):
        plan = bench.repairs.plan(Inputs(bench.now + later, HOST, bench.joined(), AUTO))
        assert len(list(plan)) >= 50


def test_in_quarantine_nothing_is_written(bench: Bench) -> None:
    bench.see((7, 0), (9, 4713, 1, (80, 0)))
    bench.own(7, 4711)
    bench.own(9, 4713)
    seconds = bench.repairs.record.died(bench.now, guilty=True)
    assert bench.plan(writes=ALWAYS) == []
    assert (bench.reason(7), bench.reason(9)) == (UnresolvedReason.QUARANTINED, None)
    bench.now += seconds
    assert len(bench.plan(writes=ALWAYS)) == 2


def test_quarantines_grow_to_an_hour_and_are_forgiven_in_time() -> None:
    blame, now = Budgets().of("uid_main"), 0.0
    seconds = []
    for _ in range(12):
        seconds.append(blame.died(now, guilty=True))
        assert blame.quarantined(now)
        now += seconds[-1]
        assert not blame.quarantined(now)
    assert seconds[:3] == [10.0, 20.0, 40.0]
    assert seconds == sorted(seconds)
    assert seconds[-1] == 3600.0
    assert not blame.forgiven(now)
    now += FORGIVEN_SECONDS
    assert not blame.forgiven(now)
    now += 1.0
    assert blame.forgiven(now)
    assert blame.died(now, guilty=True) == 10.0


def test_late_writer_blames_only_repeated_lateness() -> None:
    blame = Budgets().of("uid_main")
    assert [blame.died(1.0, guilty=False) for _ in range(2)] == [0.0, 0.0]
    blame.answered()
    assert [blame.died(2.0, guilty=False) for _ in range(2)] == [0.0, 0.0]
    assert blame.died(2.0 + 2 * FORGIVEN_SECONDS, guilty=False) == 0.0  # long after, so not in a row
    assert [blame.died(3.0 + 2 * FORGIVEN_SECONDS, guilty=False) for _ in range(2)] == [0.0, 10.0]


def quiet(bench: Bench) -> bool:
    """Return True if the region has no work left after a plan."""
    assert bench.plan() == []
    return not bench.repairs.has_work(bench.now)


def test_a_region_is_quiet_until_anything_changes(bench: Bench) -> None:
    bench.see((7, 4711))
    bench.own(7, 4711)
    assert quiet(bench)
    assert bench.repairs.work_at > bench.now
    bench.see((7, 4711))  # a new read gives another view
    assert bench.repairs.has_work(bench.now)
    assert quiet(bench)
    bench.repairs.unsettle()
    assert bench.repairs.has_work(bench.now)
    assert quiet(bench)
    bench.repairs.values_changed({4712})
    assert not bench.repairs.has_work(bench.now)
    bench.repairs.values_changed({4711})
    assert bench.repairs.has_work(bench.now)
    assert quiet(bench)
    bench.repairs._unwritable_until = bench.now + 5.0
    assert bench.repairs.has_work(bench.now)
    assert quiet(bench)
    bench.now += 5.0
    assert bench.repairs.has_work(bench.now)
    assert quiet(bench)
    bench.repairs.ended(bench.state(7))
    assert bench.repairs.has_work(bench.now)


def test_process_without_slot_needs_no_work(bench: Bench) -> None:
    bench.see((7, 4711), (0, 0), (8, 0), (8, 0))
    bench.own(7, 4711)
    assert quiet(bench)
    assert bench.repairs.slots.unclear()


def test_of_a_dead_slot_without_a_load_nothing_is_to_do(bench: Bench) -> None:
    bench.see((7, 815))
    bench.end(7)
    bench.miss(7)
    assert quiet(bench)


_slots = st.lists(
    st.tuples(st.integers(-1, 5), st.sampled_from([0, 1, 2, 4001, 4002, 9999]), st.integers(0, 1)), max_size=6
)


@settings(max_examples=200)
@given(st.lists(_slots, min_size=1, max_size=6), st.sampled_from([HOST, CONTAINER, UNKNOWN]))
def test_only_owned_slots_get_their_own_hostpid(
    views: list[list[tuple[int, int, int]]], policy: HostpidPolicy
) -> None:
    with ExitStack() as stack:
        bench = Bench(stack)
        for slots in views:
            for state in bench.see(*slots):
                state.owner.close()
            for index, (ns_pid, *_) in enumerate(slots):
                if ns_pid != 3 and bench.repairs.slots.searched(index):  # 3 is unknown
                    bench.own(ns_pid, 4000 + ns_pid)
            listed = [pid for pid, _, status in slots if status]
            for order in bench.plan(policy):
                pid, hostpid, status = slots[order.slot]
                assert status
                assert pid > 0
                assert listed.count(pid) == 1
                assert pid != 3
                assert policy is not UNKNOWN
                assert order.expected == slot_word(pid, hostpid)
                assert order.new == slot_word(pid, 4000 + pid if policy is HOST else pid)
                assert order.target_offset == bench.layout.slot_offset(order.slot)
                assert order.new != order.expected
            unowned = len(slots) - bench.repairs.slots.unowned.count(None)
            assert len(bench.repairs.slots.distinguished()) + unowned == len(listed)
        bench.repairs.close()


def test_dead_slot_of_a_touched_file_is_not_zeroed(bench: Bench) -> None:
    """A process of a restarted container may have taken the slot without changing a byte."""
    bench.see((7, 70, 1, (50, 0)))
    bench.own(7, 4711)
    bench.end(7)
    assert [order.new for order in bench.plan()] == [0]
    bench.now += 1.0
    bench.repairs.slots.touched(attached=False)
    assert bench.plan() == []
    bench.miss(7, UnresolvedReason.OVER_BUDGET)
    assert bench.plan() == []
    bench.miss(7)
    assert [order.new for order in bench.plan()] == [0]


def test_of_claims_without_an_owner_little_is_kept(bench: Bench) -> None:
    """A tenant can make 1,024 such claims in each file at no cost to itself."""
    claims = [(n, 0, 1, (50, 50)) for n in range(1, 1025)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        bench.see(*claims)
        for index in reversed(bench.repairs.slots.due(bench.now)):
            bench.repairs.slots.not_found(index, UnresolvedReason.NO_SUCH_PROCESS, bench.now)
        gc.collect()  # Python keeps some freed tuples
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert bench.repairs.slots.owned == {}
    assert kept <= 1024 * (12 + 2 * 8 + 11) + 8192


def test_nothing_is_written_before_every_slot_was_looked_for(stack: ExitStack) -> None:
    bench = Bench(stack, shared=True)
    bench.see((7, 0), (8, 0))
    bench.own(7, 4711)
    assert bench.plan() == []
    assert bench.reason(7) is UnresolvedReason.OVER_BUDGET
    bench.own(8, 4712)
    assert [order.new >> 32 for order in bench.plan()] == [4711, 4712]


def test_guest_of_another_pod_makes_owner_uncertain(stack: ExitStack) -> None:
    bench = Bench(stack, shared=True)
    bench.see((7, 0), (8, 0), (9, 0, 1, (50, 0)))
    bench.own(7, 4711)
    bench.miss(8, UnresolvedReason.OTHER_POD)
    bench.call_dead(9)  # a dead slot's load stays, too
    bench.miss(9)
    assert bench.plan() == []
    assert bench.reason(7) is UnresolvedReason.OTHER_POD
    bench.see((7, 0), (9, 0, 1, (50, 0)))  # slot 8 went
    assert [(order.device, order.new) for order in bench.plan()] == [(None, 4711 << 32 | 7), (0, 0)]


def test_later_guest_is_only_a_guest(stack: ExitStack) -> None:
    bench = Bench(stack, shared=True)
    bench.see((7, 0))
    bench.own(7, 4711)
    assert len(bench.plan()) == 1
    bench.see((7, 0), (8, 0))
    bench.miss(8, UnresolvedReason.OTHER_POD)
    assert [order.slot for order in bench.plan()] == [0]


def fills(bench: Bench, ns_pid: int, host_pid: int, *ns_pids: int) -> None:
    """Give a slot its owner's right number; then let its watcher fill in NVML's value."""
    handle = bench.hold(ns_pid, host_pid)
    handle.process = handle.process._replace(ns_pids=ns_pids)
    bench.repairs.slots.own(bench.index(ns_pid), handle)
    bench.load[host_pid, "GPU-a"] = 40
    bench.plan()
    bench.now += 0.1
    slots = [(slot.pid, slot.hostpid) for slot in bench.repairs.view.slots]
    bench.see(*((pid, hostpid, 1, (40, 0)) if pid == ns_pid else (pid, hostpid) for pid, hostpid in slots))
    bench.plan()
    bench.repairs.note_finding(bench.now, ())


@pytest.mark.parametrize(
    ("host_pid", "ns_pids", "finding"),
    [
        (4711, (4711, 7), WatcherFinding.CONFIRMS),
        (7, (7, 7), None),  # both numbers are the same
        (7, (7,), None),  # in the host's PID namespace
        (4711, (4711, 30, 7), None),  # its watcher may run in a parent namespace
    ],
)
def test_watcher_confirms_a_distinguishable_hostpid(
    bench: Bench, host_pid: int, ns_pids: tuple[int, ...], finding: WatcherFinding | None
) -> None:
    bench.see((7, host_pid))
    fills(bench, 7, host_pid, *ns_pids)
    assert bench.repairs.finding is finding


def test_finding_lasts_as_long_as_the_owner(bench: Bench) -> None:
    bench.see((9, 4713), (7, 4711))
    bench.own(9, 4713)
    bench.plan()
    word = bench.state(9).evidence.word(0, 0)
    word.contested, word.contested_since = True, bench.now
    bench.now += 10.0

    def noted() -> WatcherFinding | None:
        bench.repairs.note_finding(bench.now, ())
        return bench.repairs.finding

    seen = [noted()]
    fills(bench, 7, 4711, 4711, 7)
    seen.append(noted())
    for ns_pid in (7, 9):
        bench.end(ns_pid)
        seen.append(noted())
    assert seen == [WatcherFinding.DOUBTS, WatcherFinding.CONFIRMS, WatcherFinding.DOUBTS, None]


@pytest.mark.parametrize("writes", [AUTO, ALWAYS])
def test_value_is_not_zeroed_on_one_absence(bench: Bench, writes: WriteUtilization) -> None:
    bench.idle = ()
    bench.load[4711, UUIDS[0]] = 30
    bench.see((7, 4711, 1, (30, 0)))
    bench.own(7, 4711)
    bench.answered = bench.now
    assert bench.plan(writes=writes) == []
    bench.load.clear()
    for zeroes in ([], [0]):
        bench.answered = bench.now = bench.now + 1.0
        bench.plan(writes=writes)
        bench.now += TWO_TICKS
        assert [order.new for order in bench.plan(writes=writes)] == zeroes
