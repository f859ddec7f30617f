"""When a slot is called stuck: not by one look, not while anything else explains it, and once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resolver.config import HostpidNamespace
from resolver.hami import stuck
from resolver.hami.policy import Policy
from resolver.hami.stuck import EVIDENCE_SECONDS, Evidence
from resolver.types import UnresolvedReason

BY_VERSION = Policy(HostpidNamespace.HOST, "", "by version")
GPU = "GPU-1"


def slot(hostpid: int = 4711, sm_util: tuple[int, ...] = (0,)) -> Any:
    return SimpleNamespace(index=0, pid=7, hostpid=hostpid, status=1, sm_util=sm_util)


def state(**changes: Any) -> Any:
    owner = SimpleNamespace(process=SimpleNamespace(host_pid=4711))
    made = SimpleNamespace(slot=slot(), owner=owner, reason=None, stuck="", evidence=Evidence())
    for name, value in changes.items():
        setattr(made, name, value)
    return made


class Case:
    """One region with some slots, looked at again and again."""

    def __init__(self, *states: Any, maintained: bool = True, policy: Policy = BY_VERSION) -> None:
        self.states, self.maintained, self.policy = states, maintained, policy
        self.load: int | None = 40

    def look(self, now: float, answered_at: float | None = None) -> list[Any]:
        view = SimpleNamespace(uuids=(GPU,), slots=tuple(state.slot for state in self.states))
        repairs: Any = SimpleNamespace(
            view=view, maintained=lambda: self.maintained, told_apart=lambda: list(self.states)
        )
        at = now if answered_at is None else answered_at
        return list(stuck.look(repairs, self.policy, lambda _pid, _uuid: self.load, at, now))


def test_a_busy_process_that_shows_nothing_for_long_is_stuck_once() -> None:
    one = state()
    case = Case(one)
    assert [case.look(second) for second in (0, 1, 2, 2.9)] == [[], [], [], []]
    assert one.stuck == ""
    assert case.look(EVIDENCE_SECONDS) == [one]
    assert one.stuck.startswith("no watcher writes: sm_util of every slot of this container is 0")
    assert case.look(4) == case.look(60) == []
    assert one.stuck


def test_one_answer_of_nvml_is_no_evidence() -> None:
    one = state()
    case = Case(one)
    assert [case.look(second, answered_at=0.0) for second in (0, 2, 5, 60)] == [[], [], [], []]
    assert case.look(61, answered_at=61.0) == [one]


@pytest.mark.parametrize(
    "excuse",
    [
        {"sm_util": 30},
        {"load": 0},
        {"load": None},
        {"reason": UnresolvedReason.CONFLICT},
        {"hostpid": 7},
        {"hostpid": 0},
        {"owner": None},
        {"maintained": False},
        {"policy": Policy(None, "")},
        {"no_field": True},
    ],
    ids=str,
)
def test_what_explains_a_zero_begins_the_wait_anew(excuse: dict[str, Any]) -> None:
    one = state()
    case = Case(one)
    for second in (0, 1, 2):
        case.look(second)
    right, owner = one.slot, one.owner
    if "sm_util" in excuse:
        one.slot = slot(sm_util=(30,))
    if "no_field" in excuse:
        one.slot = slot(sm_util=())
    if "hostpid" in excuse:
        one.slot = slot(hostpid=excuse["hostpid"])
    if "load" in excuse:
        case.load = excuse["load"]
    one.reason = excuse.get("reason")
    one.owner = excuse.get("owner", owner)
    case.maintained = excuse.get("maintained", True)
    case.policy = excuse.get("policy", BY_VERSION)
    assert case.look(3.5) == []
    one.slot, one.owner, one.reason, case.load = right, owner, None, 40
    case.maintained, case.policy = True, BY_VERSION
    assert [case.look(second) for second in (4, 5, 6.9)] == [[], [], []]
    assert case.look(7.0) == [one]


def test_it_ends_and_is_not_told_again_for_the_same_process() -> None:
    one = state()
    case = Case(one)
    for second in (0, 1, 2, 3):
        case.look(second)
    assert one.stuck
    one.slot = slot(sm_util=(30,))
    assert case.look(4) == []
    assert one.stuck == ""
    one.slot = slot()
    assert [case.look(second) for second in (5, 6, 7, 8, 9)] == [[]] * 5
    assert one.stuck
    one.evidence = Evidence()  # another process
    assert [case.look(second) for second in (10, 14)] == [[], []]
    one.stuck = ""
    assert case.look(15) == [one]


def test_the_reasons_tell_what_is_known() -> None:
    def why(policy: Policy, *others: Any) -> str:
        one = state(slot=slot(hostpid=policy.wanted(4711, 7) or 0))
        case = Case(one, *others, policy=policy)
        for second in (0, 1, 2, 3):
            case.look(second)
        return str(one.stuck)

    alive = state(slot=slot(sm_util=(30,)))
    measured = Policy(HostpidNamespace.HOST, "", "measured")
    assert why(measured) == "no watcher writes: sm_util of every slot of this container is 0"
    assert why(measured, alive) == (
        "the container's watcher runs, but finds no sample of 4711, which this slot's hostpid is"
    )
    by_version = why(BY_VERSION, alive)
    assert by_version.startswith(why(measured, alive))
    assert by_version.endswith(
        "the driver's samples do not carry host PIDs as its version says: with CAP_SYS_ADMIN that is measured"
    )
    forced = why(Policy(HostpidNamespace.CONTAINER, "", "forced"))
    assert forced.endswith("or --hostpid-namespace container is wrong for this driver: try auto")
