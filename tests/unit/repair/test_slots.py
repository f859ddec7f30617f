"""When the slots of a region are searched and checked again, and eleven bytes for each slot without an owner."""

import itertools
import os

import pytest

from resolver.base.reasons import UnresolvedReason
from resolver.hami.layout import MAX_SLOTS
from resolver.hami.packed_slots import SlotRecord
from resolver.linux.procfs import Procfs
from resolver.repair.slots import EAGER_LOOKS, OwnedSlot, UnownedSlots
from tests.fakes.planned import HOST, Bench

NOT_MAPPED, GONE = UnresolvedReason.NOT_MAPPED, UnresolvedReason.NO_SUCH_PROCESS
OVER_BUDGET = UnresolvedReason.OVER_BUDGET


def looked(times: int, why: UnresolvedReason = GONE, *, dead: bool = False, slots: int = 1) -> UnownedSlots:
    """Slots whose owners were looked for in vain so often, at the time 100."""
    kept = UnownedSlots(slots)
    for index in range(slots):
        kept.begin(index)
        kept.call_dead(index, dead=dead)
        for _ in range(times):
            kept.not_found(index, why, 100.0)
    return kept


def test_new_slot_is_searched_eagerly_then_rarely() -> None:
    assert list(looked(0).due(0.0)) == list(looked(EAGER_LOOKS).due(0.0)) == [0]
    for dead in (False, True):
        waits = [looked(EAGER_LOOKS + more, dead=dead).next_look() - 100 for more in range(1, 9)]
        pauses = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, *[60.0] * 8]
        assert waits == (pauses[1::2] if dead else pauses[:8])
    assert looked(300).next_look() == 160.0


@pytest.mark.parametrize(("attached", "wait"), [(False, 60.0), (True, 2.0)])
def test_slot_of_an_ended_owner_is_searched_once(attached: bool, wait: float) -> None:  # noqa: FBT001
    kept = looked(0)
    kept.ended(0, followed=attached)
    assert (kept.dead(0), list(kept.due(0.0))) == (True, [0])
    kept.not_found(0, GONE, 100.0)
    assert (kept.dead(0), kept.next_look()) == (True, 100 + wait)


def test_touched_file_makes_dead_slots_unsure() -> None:
    for abandoned in (False, True):
        kept = looked(EAGER_LOOKS + 5, dead=not abandoned)
        if abandoned:
            kept.abandon()
        assert kept.dead(0)
        kept.touched()
        assert list(kept.due(0.0)) == [0]
        assert (kept.called_dead(0), kept.dead(0)) == (not abandoned, False)
        kept.not_found(0, NOT_MAPPED, 100.0)
        assert kept.dead(0) is not abandoned
        assert kept.next_look() == (101.0 if abandoned else 102.0), "it begins to wait again"


def test_hostpid_of_neither_namespace_is_doubted() -> None:
    with Procfs().open_handle(os.getpid()) as handle:
        for hostpid, doubted in ((0, False), (7, False), (os.getpid(), False), (12345, True)):
            state = OwnedSlot(SlotRecord(0, 7, 0, 1, (0,)), handle)
            state.observe(SlotRecord(0, 7, hostpid, 1, (0,)))
            assert state.doubted is doubted, hostpid


def test_packed_slots_of_many_kinds_are_distinguished() -> None:
    kept = UnownedSlots(5)
    kept.begin(0)
    kept.set_odd(1, UnresolvedReason.AMBIGUOUS)
    for index, dead in ((2, False), (3, True)):
        kept.move(index, looked(EAGER_LOOKS + 9, dead=dead), 0)
    assert [index in kept for index in range(5)] == [True, False, True, True, False]
    assert kept.reasons() == {None, UnresolvedReason.AMBIGUOUS, GONE}
    assert list(kept.due(0.0)) == [0]
    news = [kept.put_off(100.0, UnresolvedReason.OVER_BUDGET) for _ in range(2)]
    assert news == [True, False], "one that was due waits now"
    codes, meanings = kept.states()
    assert [meanings.get(code) for code in codes] == [
        (False, UnresolvedReason.OVER_BUDGET),
        (False, UnresolvedReason.AMBIGUOUS),
        (False, GONE),
        (True, GONE),
        None,
    ]
    assert [kept.dead(index) for index in range(5)] == [False, False, False, True, False]
    kept.abandon()
    assert [kept.dead(index) for index in range(5)] == [True, False, True, True, False]
    kept.touched()
    assert list(kept.due(0.0)) == [0, 2, 3]
    assert [kept.dead(index) for index in range(5)] == [False] * 5
    kept.remove(2)
    assert (2 in kept, kept.states()[0][2]) == (False, 0)


def test_mapped_slot_is_not_abandoned() -> None:
    kept = looked(1, NOT_MAPPED)
    kept.abandon()
    assert not kept.called_dead(0)


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
    kept = looked(EAGER_LOOKS + 5, dead=True)
    kept.not_found(0, why, 100.0)
    assert kept.dead(0) is dead
    assert kept.next_look() == (160.0 if dead else 101.0)


def test_slow_container_is_asked_again_a_second_later() -> None:
    kept = looked(1, UnresolvedReason.TOO_SLOW)
    assert (kept.next_look(), kept.missed_again(0)) == (101.0, False)


def test_only_due_slots_are_put_off() -> None:
    """Each reason, dead or not, due or not, put off for either cause."""
    waits = UnresolvedReason.OVER_BUDGET, UnresolvedReason.TOO_SLOW
    reasons = [each for each in UnresolvedReason if each not in waits]
    for why, reason, dead, now in itertools.product(waits, reasons, (False, True), (100.0, 101.0)):
        kept = looked(EAGER_LOOKS + 1, reason)
        kept.call_dead(0, dead=dead)
        changes = now == 101.0 and not dead
        assert kept.put_off(now, why) is changes
        assert kept.reasons() == {why if changes else reason}
        assert kept.called_dead(0) is dead


def searched(bench: Bench, *ns_pids: int, times: int = EAGER_LOOKS + 2) -> None:
    """Search so often in vain, and end the region's work: the next search is due in 2 s."""
    for ns_pid in ns_pids:
        for _ in range(times):
            bench.miss(ns_pid)
    bench.repairs.has_work(bench.now, HOST)
    bench.plan()
    bench.repairs.slots.rest()


def has_work(bench: Bench) -> bool:
    return bench.repairs.has_work(bench.now, HOST)


def test_searches_are_due_in_their_time_the_last_slot_first(bench: Bench) -> None:
    bench.see((7, 0), (8, 0), (9, 0))
    assert list(bench.repairs.slots.due(0.0)) == [2, 1, 0]
    searched(bench, 7, 8, 9)
    assert not has_work(bench)
    assert bench.repairs.quiet_until() == bench.now + 2
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
    bench.repairs.slots.rest()
    assert list(bench.repairs.slots.due(bench.now)) == []
    bench.see((7, 0), (8, 0))
    assert list(bench.repairs.slots.due(bench.now)) == [1]


def test_the_end_of_an_owner_is_looked_into_in_its_own_region(bench: Bench) -> None:
    bench.see((7, 4711), (8, 4712))
    for ns_pid, host_pid in ((7, 4711), (8, 4712)):
        bench.own(ns_pid, host_pid)
    searched(bench)
    assert not bench.repairs.values_changed({4713}, bench.now)
    assert not has_work(bench)
    assert bench.repairs.values_changed({4712}, bench.now)
    assert has_work(bench)
    searched(bench)
    state = bench.state(7)
    bench.end(7)
    assert not bench.repairs.slots.ended(state), "once"
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
    assert bench.unowned.unclear()
    bench.call_dead(8)
    assert not bench.unowned.unclear()


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
        assert 0 in bench.unowned
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
