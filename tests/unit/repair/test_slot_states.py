"""Owners of slots: when they are searched again, and eleven bytes for each slot without one."""

from __future__ import annotations

import itertools
import os

import pytest

from resolver.base.reasons import UnresolvedReason
from resolver.hami.packed_slots import SlotRecord
from resolver.linux.procfs import Procfs
from resolver.repair.slot_states import EAGER_LOOKS, OwnedSlot, UnownedSlots

NOT_MAPPED, GONE = UnresolvedReason.NOT_MAPPED, UnresolvedReason.NO_SUCH_PROCESS


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
