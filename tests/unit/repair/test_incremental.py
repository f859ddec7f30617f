"""Passes that check only changes give exactly the same results as passes that check everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from resolver.base.reasons import UnresolvedReason
from resolver.config import WriteUtilization
from resolver.gpu.attribution import Joined
from resolver.hami.hostpid_policy import HostpidPolicy
from resolver.hami.region import RegionView
from resolver.repair.plan import Inputs, Order
from resolver.repair.region import region_report
from resolver.state import SlotReport, SlotReports, tally
from tests.fakes.planned import CONTAINER, HOST, UNKNOWN, UUIDS, Bench, view

POLICIES = (HOST, CONTAINER, UNKNOWN)
PIDS = range(1, 6)  # 5 is never a live process


class Told(NamedTuple):
    """The results of one step: orders to the writer, and the region's report."""

    orders: list[tuple[int, int | None, int, int, int]]
    gone: list[int]
    conflicts: list[tuple[int, float]]
    slots: list[SlotReport]
    odd: dict[int, UnresolvedReason | None]
    held: list[tuple[int, int | None, int]]
    container_id: str
    due: list[int]


class Life:
    """The life of one region, with the repairer's passes. ``whole``: each pass checks everything."""

    def __init__(self, stack: ExitStack, *, whole: bool) -> None:
        self.whole, self.bench = whole, Bench(stack)
        self.repairs = self.bench.repairs
        self.before: Joined | None = None
        self.answered = 0.0
        self.inputs: tuple[object, ...] = ()

    def step(self, now: float, at: Moment) -> Told:
        repairs = self.repairs
        gone = self._take_in(now, at)
        orders: list[Order] = []
        conflicts: list[tuple[int, float]] = []
        due: list[int] = []
        if at.over_budget:
            repairs.slots.put_off(now)
        elif repairs.has_work(now):
            due = list(repairs.slots.due(now))
            self._find_owners(due, now, at)
            orders = self._carry_out(conflicts, now, at)
        else:
            assert not self.whole
        report = region_report(repairs, at.joined, lambda host_pid: f"container of {host_pid}", now)
        listed = list(report.slots)
        assert tally(report.slots) == tally(SlotReports(tuple(listed)))
        assert len(report.slots) == len(listed)
        return Told(
            sorted((o.slot, o.device, o.expected, o.new, o.guard) for o in orders),
            sorted(gone),
            sorted(conflicts),
            sorted(listed, key=lambda slot: slot.slot),
            self.bench.odd(),
            [(o.slot, o.device, o.new) for o in repairs.held],
            report.container_id or "",
            sorted(due),
        )

    def _take_in(self, now: float, at: Moment) -> list[int]:
        """Apply the changes since the last pass; return the PIDs of slots that are gone."""
        repairs = self.repairs
        if at.joined is not self.before:
            changed = at.joined.changed(self.before)
            self.before, self.answered = at.joined, now
            repairs.values_changed(None if self.whole else changed)
        repairs.region.mtime_ns += at.touched
        for state in [each for each in repairs.slots.distinguished() if each.slot.pid in at.ended]:
            state.owner.close()
            repairs.ended(state)
        if at.abandoned:
            repairs.abandon()
        if self.whole:
            repairs.slots.view = repairs.view._replace(uuids=())  # no state is taken over from this view
        gone = repairs.observe(at.view)
        for state in gone:
            state.owner.close()
        if at.unwritable:
            repairs._unwritable_until = now + 0.6
        if self.whole or (at.policy, at.writes) != self.inputs:
            repairs.unsettle()
        self.inputs = at.policy, at.writes
        return [state.slot.pid for state in gone]

    def _find_owners(self, due: list[int], now: float, at: Moment) -> None:
        slots = self.repairs.slots
        for index in due:
            ns_pid, *_, state = slots.at(index)
            known = ns_pid in at.found
            found = self.bench.hold(ns_pid, 4000 + ns_pid) if known else at.answer
            if state is not None:
                if slots.keeps_owner(state, found):
                    continue
                state.owner.close()
            if isinstance(found, UnresolvedReason):
                slots.not_found(index, found, now)
                if at.vacant:
                    slots.call_dead(index, dead=True)
            else:
                slots.own(index, found)

    def _carry_out(self, conflicts: list[tuple[int, float]], now: float, at: Moment) -> list[Order]:
        joined, repairs = at.joined._replace(answered=self.answered), self.repairs
        plan = repairs.plan(Inputs(now, at.policy, joined, at.writes))
        orders = [order for planned in plan for order in planned]
        conflicts += [(state.slot.pid, state.backoff()) for state in repairs.conflicts]
        for order in orders if at.carried_out else ():
            self._written(order)
        for state in repairs.slots.distinguished():
            state.stuck = state.evidence.why(state.slot.hostpid, at.policy, now)
        return orders

    @staticmethod
    def _written(order: Order) -> None:
        state = order.state
        if state is not None and order.reason is not None:
            state.wrote(order.new >> 32, order.slot, order.reason, changed=False)
        elif state is not None:
            state.evidence.word(order.device or 0, order.new).wrote(order.new)


class Moment(NamedTuple):
    """The inputs of one pass, and the events during it."""

    seconds: float
    view: RegionView
    joined: Joined
    policy: HostpidPolicy
    writes: WriteUtilization
    found: frozenset[int]
    answer: UnresolvedReason
    vacant: bool
    ended: frozenset[int]
    touched: bool
    abandoned: bool
    unwritable: bool
    over_budget: bool
    carried_out: bool


_load = st.sampled_from([0, 0, 20, 80, 130])
_slot = st.tuples(
    st.sampled_from([*PIDS, *PIDS, 0, -1]),
    st.sampled_from([0, 1, 2, 4001, 4002, 4003, 77]),
    st.sampled_from([1, 1, 1, 1, 0]),
    st.tuples(_load, _load),
)
_values = st.dictionaries(
    st.tuples(st.integers(4001, 4005), st.sampled_from(UUIDS)), st.sampled_from([0, 20, 80]), max_size=6
)
_rarely = st.integers(0, 7).map(lambda number: number == 0)
_pids = st.frozensets(st.integers(1, 4), max_size=4)


@st.composite
def moments(draw: st.DrawFn) -> list[Moment]:
    """Draw a life in which mostly one thing changes from moment to moment, as in a real region."""
    slots = draw(st.lists(_slot, min_size=1, max_size=6))
    values, unknown = draw(_values), draw(st.frozensets(st.sampled_from([(4001, "GPU-a"), (4002, "GPU-b")])))
    asked, policy = frozenset(UUIDS), POLICIES[0]
    writes = draw(st.sampled_from(WriteUtilization))
    joined = Joined(1.0, "", {**values, **dict.fromkeys(unknown)}, asked, ())
    shown = view(*slots)
    found: list[Moment] = []
    for _ in range(draw(st.integers(2, 14))):
        what = draw(
            st.sampled_from(["slot", "slot", "slots", "values", "values", "again", "asked", "policy", ""])
        )
        if what == "slot":
            slots = list(slots)
            at = draw(st.integers(0, len(slots) - 1))
            pid, _, status, _ = slots[at]
            _, hostpid, _, loads = draw(_slot)
            slots[at] = (pid, hostpid, status, loads)
            shown = view(*slots)
        elif what == "slots":
            slots = draw(st.lists(_slot, min_size=1, max_size=6))
            shown = view(*slots)
        elif what in ("values", "again", "asked"):
            if what == "values":
                values = {**values, **draw(_values)}
                unknown = draw(st.frozensets(st.sampled_from([(4001, "GPU-a"), (4002, "GPU-b")])))
            if what == "asked":
                asked = frozenset(draw(st.sets(st.sampled_from(UUIDS))))
            joined = Joined(1.0, "", {**values, **dict.fromkeys(unknown)}, asked, ())
        elif what == "policy":
            policy = draw(st.sampled_from(POLICIES))
        found.append(
            Moment(
                draw(st.sampled_from([0.25, 0.25, 0.25, 1.0, 5.0])),
                shown,
                joined,
                policy,
                writes,
                draw(_pids),
                draw(st.sampled_from(UnresolvedReason)),
                draw(_rarely),
                draw(_pids) if draw(_rarely) else frozenset(),
                draw(_rarely),
                draw(_rarely),
                draw(_rarely),
                draw(_rarely),
                not draw(_rarely),
            )
        )
    return found


@contextmanager
def lives() -> Iterator[tuple[Life, Life]]:
    with ExitStack() as stack:
        yield Life(stack, whole=False), Life(stack, whole=True)


@settings(max_examples=150)
@given(moments())
def test_incremental_plan_equals_full_plan(life: list[Moment]) -> None:
    with lives() as (changed, whole):
        now = 100.0
        for at in life:
            now += at.seconds
            assert changed.step(now, at) == whole.step(now, at)
