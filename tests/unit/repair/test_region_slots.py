"""When the slots of a region are searched and checked again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from resolver.base.reasons import UnresolvedReason
from resolver.hami.layout import MAX_SLOTS
from resolver.repair.slot_states import EAGER_LOOKS
from tests.fakes.planned import HOST, Bench

GONE, OVER_BUDGET = UnresolvedReason.NO_SUCH_PROCESS, UnresolvedReason.OVER_BUDGET


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


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
