"""What is known of a slot's owner: when it is looked for again, and that nothing of it gets lost in eleven bytes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from resolver.base.reasons import UnresolvedReason
from resolver.hami.packed_slots import SlotRecord
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.repair.slot_states import EAGER_LOOKS, SlotState, UnownedSlots
from resolver.state import UnownedCode
from tests.fakes.slots import packed

NOT_MAPPED, GONE = UnresolvedReason.NOT_MAPPED, UnresolvedReason.NO_SUCH_PROCESS


def slot(index: int = 0, hostpid: int = 0) -> SlotRecord:
    return SlotRecord(index, 7, hostpid, 1, (0,))


@pytest.fixture
def handle() -> Iterator[ProcessHandle]:
    with Procfs().open_handle(os.getpid()) as handle:
        yield handle


def looked(times: int, *, dead: bool = False) -> SlotState:
    """A slot whose owner was looked for in vain so often, at the time 100."""
    state = SlotState(slot())
    state.dead = dead
    for _ in range(times):
        state.found(GONE, 100.0)
    return state


def test_new_slot_is_read_eagerly_then_ever_more_rarely() -> None:
    assert SlotState(slot()).due(0.0)
    new = SlotState(slot())
    assert (new.dead, new.abandoned, new.unsure, new.doubted, new.guessed, new.followed) == (False,) * 6
    assert (new.conflicts, new.not_before) == (0, 0.0), "it may be written at once"
    assert looked(EAGER_LOOKS).due(0.0)
    for dead in (False, True):
        waits = [looked(EAGER_LOOKS + more, dead=dead).next_look - 100 for more in range(1, 9)]
        assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_doubted_owner_stays_unless_another_is_found(handle: ProcessHandle) -> None:
    state = SlotState(slot())
    state.found(handle, 100.0)
    assert state.keeps_owner(GONE), "nobody doubted it"
    state.doubted = True
    assert state.keeps_owner(UnresolvedReason.OVER_BUDGET), "nobody searched"
    assert not state.keeps_owner(GONE)
    with Procfs().open_handle(os.getppid()) as another, Procfs().open_handle(os.getpid()) as same:
        assert not state.keeps_owner(another)
        assert another.fd >= 0
        assert state.keeps_owner(same)
        assert (same.fd, state.doubted) == (-1, False)
    state.doubted = True
    state.release()
    assert (state.owner, state.doubted) == (None, False)


def test_ended_slot_is_read_rarely_unless_attached(
    handle: ProcessHandle,
) -> None:
    for attached, wait in ((False, 60.0), (True, 1.0)):
        state = SlotState(slot())
        state.found(handle, 100.0)
        state.followed = attached
        state.owner_ended()
        assert (state.dead, state.owner, state.due(0.0)) == (True, None, True)
        state.found(GONE, 100.0)
        assert state.next_look == 100 + wait


def test_touched_file_makes_dead_slots_unsure() -> None:
    for abandoned in (False, True):
        state = looked(EAGER_LOOKS + 5, dead=True)
        state.abandoned = abandoned
        state.touched(attached=True)
        assert state.due(0.0)
        assert (state.dead, state.abandoned, state.unsure, state.followed) == (
            not abandoned,
            False,
            True,
            True,
        )
        state.found(NOT_MAPPED, 100.0)
        assert not state.unsure
        assert state.next_look == 101.0, "it begins to wait again"


def test_foreign_hostpid_is_doubted_until_searched(
    handle: ProcessHandle,
) -> None:
    for hostpid, doubted in ((0, False), (7, False), (os.getpid(), False), (12345, True)):
        state = SlotState(slot())
        state.found(handle, 100.0)
        state.observe(slot(hostpid=hostpid))
        assert (state.doubted, state.due(0.0)) == (doubted, doubted), hostpid
    state.found(handle, 100.0)
    assert not state.doubted
    assert (state.dead, state.guessed, state.conflicts, state.looks) == (False, False, 0, 0)


# ---- eleven bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("abandoned", [False, True])
@pytest.mark.parametrize("unsure", [False, True])
def test_slot_states_round_trip(*, dead: bool, abandoned: bool, unsure: bool) -> None:
    state, kept = looked(300), UnownedSlots(4)
    state.slot, state.dead, state.abandoned, state.unsure = slot(2), dead, abandoned, unsure
    assert 2 not in kept
    kept.put(state)
    assert 2 in kept
    assert (kept.dead(2), kept.next_look(), kept.unclear()) == (dead and not unsure, 160.0, not dead)
    assert (list(kept.due(159.9)), list(kept.due(160.0))) == ([], [2])
    assert kept.reasons() == {GONE}
    moved = UnownedSlots(4)
    moved.move(1, kept, 2)
    for index, place in ((2, kept), (1, moved)):
        found = place.take(slot(index))
        assert (found.dead, found.abandoned, found.unsure) == (dead, abandoned, unsure)
        assert (found.reason, found.looks, found.next_look) == (GONE, 255, 160.0)
        assert (index in place, place.reasons(), place.unclear()) == (False, set(), False)


def test_slots_of_many_kinds_are_told_apart() -> None:
    kept, slots = UnownedSlots(5), packed([slot(index) for index in range(5)])
    kept.begin(0)
    kept.set_odd(1, UnresolvedReason.AMBIGUOUS)
    for index, state in ((2, looked(EAGER_LOOKS + 9)), (3, looked(EAGER_LOOKS + 9, dead=True))):
        state.slot = slot(index)
        kept.put(state)
    assert [index in kept for index in range(5)] == [True, False, True, True, False]
    assert kept.reasons() == {None, UnresolvedReason.AMBIGUOUS, GONE}
    assert list(kept.due(0.0)) == [0]
    news = [kept.put_off(100.0, UnresolvedReason.OVER_BUDGET) for _ in range(2)]
    assert news == [True, False], "one that was due waits now"
    waits = UnownedCode.of(UnresolvedReason.OVER_BUDGET)
    assert [code == waits for code in kept.codes()] == [True, False, False, False, False]
    assert [kept.dead(index) for index in range(5)] == [False, False, False, True, False]
    kept.apply(slots, SlotState.abandon)
    assert [kept.dead(index) for index in range(5)] == [True, False, True, True, False]
    kept.apply(slots, SlotState.touched)
    assert list(kept.due(0.0)) == [0, 2, 3]
    assert [kept.dead(index) for index in range(5)] == [False] * 5
    alive = kept.take(slot(2))
    assert (alive.dead, alive.abandoned, alive.unsure, alive.looks) == (False, False, True, EAGER_LOOKS)
    assert 1 not in kept


def test_unmapped_slot_is_not_abandoned() -> None:
    kept, slots = UnownedSlots(2), packed([slot(index) for index in range(2)])
    for index, reason in ((0, NOT_MAPPED), (1, GONE)):
        state = SlotState(slot(index))
        state.reason, state.dead = reason, reason is GONE
        kept.put(state)
    kept.apply(slots, SlotState.touched)
    dead = kept.take(slot(1))
    assert (dead.dead, dead.unsure) == (True, True)
    kept.apply(slots, SlotState.abandon)
    alive = kept.take(slot(0))
    assert (alive.dead, alive.abandoned) == (False, False)


def test_slow_container_is_asked_again_after_a_second() -> None:
    state = SlotState(slot())
    state.found(UnresolvedReason.TOO_SLOW, 100.0)
    assert (state.next_look, state.looks) == (101.0, 0)


def test_a_packed_slot_is_put_off_as_its_state_is() -> None:
    """Each reason, each flag, due or not, put off for either cause."""
    flags = list(itertools.product((False, True), repeat=3))
    waits = UnresolvedReason.OVER_BUDGET, UnresolvedReason.TOO_SLOW
    for why, reason, due, (dead, abandoned, unsure) in itertools.product(
        waits, (None, *UnresolvedReason), (0.0, 100.0, 100.5), flags
    ):
        state = SlotState(slot())
        state.reason, state.next_look = reason, due
        state.dead, state.abandoned, state.unsure = dead, abandoned, unsure
        kept, expected = UnownedSlots(1), UnownedSlots(1)
        kept.put(state)
        assert kept.put_off(100.0, why) == state.put_off(100.0, why)
        expected.put(state)
        assert (kept.codes(), kept.next_look()) == (expected.codes(), expected.next_look())
