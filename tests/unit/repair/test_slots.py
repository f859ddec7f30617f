"""Times of the next search and check of a region's slots, and the states of slots without an owner."""

import itertools
import os

import pytest

from resolver.base.reasons import UnresolvedReason
from resolver.hami.layout import MAX_SLOTS
from resolver.hami.packed_slots import SlotRecord
from resolver.linux.procfs import Procfs
from resolver.repair.slots import EAGER_LOOKS, OwnedSlot, Unowned
from tests.fakes.planned import Bench

NOT_MAPPED, GONE = UnresolvedReason.NOT_MAPPED, UnresolvedReason.NO_SUCH_PROCESS
OVER_BUDGET = UnresolvedReason.OVER_BUDGET


def looked(times: int, why: UnresolvedReason = GONE, *, dead: bool = False) -> Unowned:
    """A slot after so many failed searches for its owner, all at time 100."""
    state = Unowned(dead=dead)
    for _ in range(times):
        state = state.not_found(why, 100.0)
    return state


def test_new_slot_is_searched_eagerly_then_rarely() -> None:
    assert looked(0).due == looked(EAGER_LOOKS).due == 0
    for dead in (False, True):
        waits = [looked(EAGER_LOOKS + more, dead=dead).due - 100 for more in range(1, 9)]
        pauses = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, *[60.0] * 8]
        assert waits == (pauses[1::2] if dead else pauses[:8])
    assert looked(300).due == 160.0


@pytest.mark.parametrize(("attached", "wait"), [(False, 60.0), (True, 2.0)])
def test_slot_of_an_ended_owner_is_searched_once(bench: Bench, attached: bool, wait: float) -> None:  # noqa: FBT001
    bench.see((7, 4711))
    bench.own(7, 4711)
    bench.state(7).followed = attached
    bench.end(7)
    assert (bench.unowned(7).dead, bench.next_look(7)) == (True, 0.0)
    bench.miss(7)
    assert (bench.unowned(7).dead, bench.next_look(7)) == (True, 100 + wait)


def test_touched_file_makes_dead_slots_unsure() -> None:
    for abandoned in (False, True):
        state = looked(EAGER_LOOKS + 5, dead=not abandoned)
        if abandoned:
            state = state.abandon()
        assert state.dead
        state = state.touched()
        assert (state.due, state.dead, state.unsure) == (0.0, not abandoned, True)
        state = state.not_found(NOT_MAPPED, 100.0)
        assert state.dead is not abandoned
        assert state.due == (101.0 if abandoned else 102.0), "it begins to wait again"


def test_hostpid_of_neither_namespace_is_doubted() -> None:
    with Procfs().open_handle(os.getpid()) as handle:
        for hostpid, doubted in ((0, False), (7, False), (os.getpid(), False), (12345, True)):
            state = OwnedSlot(SlotRecord(0, 7, 0, 1, (0,)), handle)
            state.observe(SlotRecord(0, 7, hostpid, 1, (0,)))
            assert state.doubted is doubted, hostpid


def test_slots_without_owner_are_distinguished(bench: Bench) -> None:
    slots = bench.repairs.slots
    bench.see((7, 0), (5, 0), (5, 0), (8, 0), (0, 0), (9, 0))
    bench.own(9, 4713)
    for ns_pid in (7, 8):
        searched(bench, ns_pid)
    bench.call_dead(8)
    bench.see((8, 0), (7, 0), (5, 0), (5, 0), (0, 0), (9, 0), (6, 0))
    assert [slots.searched(index) for index in range(7)] == [True, True, False, False, False, False, True]
    ambiguous, invalid = UnresolvedReason.AMBIGUOUS, UnresolvedReason.INVALID_PID
    assert slots.reasons() == {None, ambiguous, invalid, GONE}
    assert slots.due(bench.now) == [6]
    news = [slots.put_off(bench.now) for _ in range(2)]
    assert news == [True, False], "one that was due waits now"
    codes, meanings = slots.codes()
    assert [meanings.get(code) for code in codes] == [
        (True, GONE),
        (False, GONE),
        (False, ambiguous),
        (False, ambiguous),
        (False, invalid),
        None,
        (False, OVER_BUDGET),
    ]
    dead = [slots.dead(index) for index in range(7)]
    assert dead == [True, *[False] * 6]
    slots.abandon()
    assert [slots.dead(index) for index in range(7)] == [True, True, *[False] * 4, True]
    slots.touched(attached=False)
    assert slots.due(bench.now) == [6, 1, 0]
    assert [slots.dead(index) for index in range(7)] == [False] * 7


def test_mapped_slot_is_not_abandoned() -> None:
    assert not looked(1, NOT_MAPPED).abandon().dead


@pytest.mark.parametrize(
    ("why", "dead"),
    [
        (GONE, True),
        (NOT_MAPPED, True),
        (UnresolvedReason.AMBIGUOUS, False),
        (UnresolvedReason.ACCESS_DENIED, False),
        (UnresolvedReason.OTHER_POD, False),
    ],
)
def test_search_that_may_mean_life_ends_death(why: UnresolvedReason, *, dead: bool) -> None:
    state = looked(EAGER_LOOKS + 5, dead=True).not_found(why, 100.0)
    assert (state.dead, state.due) == (dead, 160.0 if dead else 101.0)


def test_slow_container_is_asked_again_a_second_later() -> None:
    assert looked(1, UnresolvedReason.TOO_SLOW)[:3] == (UnresolvedReason.TOO_SLOW, 0, 101.0)


def test_only_due_slots_are_put_off(bench: Bench) -> None:
    """Covers each reason, dead and live slots, due and not due, for both causes of a delay."""
    waits = UnresolvedReason.OVER_BUDGET, UnresolvedReason.TOO_SLOW
    reasons = [each for each in UnresolvedReason if each not in waits]
    bench.see((7, 0))
    for why, reason, dead, now in itertools.product(waits, reasons, (False, True), (100.0, 101.0)):
        bench.repairs.slots.unowned[0] = looked(EAGER_LOOKS + 1, reason)
        bench.repairs.slots.call_dead(0, dead=dead)
        changes = now == 101.0 and not dead
        assert bench.repairs.slots.put_off(now, why) is changes
        assert bench.repairs.slots.reasons() == {why if changes else reason}
        assert bench.unowned(7).dead is dead


def searched(bench: Bench, *ns_pids: int, times: int = EAGER_LOOKS + 2) -> None:
    """Fail that many searches for each slot, and finish the region's work: the next search is due in 2 s."""
    for ns_pid in ns_pids:
        for _ in range(times):
            bench.miss(ns_pid)
    bench.repairs.has_work(bench.now)
    bench.plan()


def has_work(bench: Bench) -> bool:
    return bench.repairs.has_work(bench.now)


def test_searches_are_due_in_their_time_the_last_slot_first(bench: Bench) -> None:
    bench.see((7, 0), (8, 0), (9, 0))
    assert list(bench.repairs.slots.due(0.0)) == [2, 1, 0]
    searched(bench, 7, 8, 9)
    assert not has_work(bench)
    assert bench.repairs.work_at == bench.now + 2
    assert list(bench.repairs.slots.due(bench.now + 1.9)) == []
    assert list(bench.repairs.slots.due(bench.now + 2)) == [2, 1, 0]


@pytest.mark.parametrize(
    ("attached", "watched", "everything"), [(True, True, True), (False, True, False), (False, False, True)]
)
def test_file_write_makes_all_slots_due(
    bench: Bench, *, attached: bool, watched: bool, everything: bool
) -> None:
    bench.see((7, 0), (8, 4712))
    bench.own(8, 4712)
    searched(bench, 7)
    bench.repairs.region.start_with(3)
    view = bench.repairs.view
    bench.repairs.observe(view, watched=watched)
    assert not has_work(bench)
    if attached:
        bench.repairs.attached = True
    else:
        bench.repairs.region.mtime_ns += 1
    bench.repairs.observe(view, watched=watched)
    assert has_work(bench)
    assert list(bench.repairs.slots.due(bench.now)) == [0]
    assert bench.repairs.region._end == (MAX_SLOTS if everything else 3)
    assert bench.state(8).followed is attached
    searched(bench, 7)
    bench.repairs.observe(view, watched=watched)
    assert not has_work(bench), "once"


def test_new_and_unique_again_slots_are_searched_at_once(bench: Bench) -> None:
    bench.see((7, 0))
    searched(bench, 7)
    bench.see((7, 0), (8, 0))
    assert list(bench.repairs.slots.due(bench.now)) == [1]
    searched(bench, 8)
    bench.see((7, 0), (8, 0), (8, 0))
    assert list(bench.repairs.slots.due(bench.now)) == []
    bench.see((7, 0), (8, 0))
    assert list(bench.repairs.slots.due(bench.now)) == [1]


def test_the_end_of_an_owner_is_looked_into_in_its_own_region(bench: Bench) -> None:
    bench.see((7, 4711), (8, 4712))
    for ns_pid, host_pid in ((7, 4711), (8, 4712)):
        bench.own(ns_pid, host_pid)
    searched(bench)
    bench.repairs.values_changed({4713})
    assert not has_work(bench)
    bench.repairs.values_changed({4712})
    assert has_work(bench)
    searched(bench)
    state = bench.state(7)
    bench.end(7)
    bench.repairs.ended(state)
    assert has_work(bench)
    assert list(bench.repairs.slots.due(bench.now)) == [0]


def test_work_that_is_put_off_has_a_reason_once(bench: Bench) -> None:
    bench.see((7, 4711), (8, 0), (9, 0))
    bench.own(7, 4711)
    bench.miss(9, OVER_BUDGET)
    assert bench.repairs.slots.put_off(bench.now)
    assert not bench.repairs.slots.put_off(bench.now)
    assert [bench.reason(ns_pid) for ns_pid in (7, 8, 9)] == [None, OVER_BUDGET, OVER_BUDGET]


def test_neither_owned_nor_dead_slot_is_unclear(bench: Bench) -> None:
    bench.see((7, 4711), (8, 0))
    bench.own(7, 4711)
    assert bench.repairs.slots.unclear()
    bench.call_dead(8)
    assert not bench.repairs.slots.unclear()


def test_owner_stays_unless_a_search_finds_another(bench: Bench) -> None:
    bench.see((7, 4711))
    bench.own(7, 4711)
    state, keeps = bench.state(7), bench.repairs.slots.keeps_owner
    assert keeps(state, GONE), "it was not doubted"
    state.doubted = True
    assert keeps(state, OVER_BUDGET), "nothing was searched"
    same = bench.hold(7, 4711)
    assert keeps(state, same)
    assert (same.fd, state.doubted) == (-1, False)
    for found in (GONE, bench.hold(7, 4722)):
        bench.state(7).doubted = True
        assert not keeps(bench.state(7), found)
        assert bench.repairs.slots.searched(0)
        bench.own(7, 4711)


def test_abandoned_slots_are_dead_and_checked(bench: Bench) -> None:
    bench.see((7, 0, 1, (50, 0)))
    searched(bench, 7)
    bench.repairs.abandon()
    assert has_work(bench)
    assert [order.new for order in bench.plan()] == [0]


async def test_close_gives_everything_back(bench: Bench) -> None:
    bench.repairs.region.fd = os.open(os.devnull, os.O_RDONLY)
    bench.see((7, 0))
    handle = bench.own(7, 4711)
    bench.repairs.close()
    assert (handle.fd, bench.repairs.slots.owned, bench.repairs.region.fd) == (-1, {}, -1)
