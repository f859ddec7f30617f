"""When a region is looked at next."""

from __future__ import annotations

import itertools

import pytest

from resolver.repair.agenda import QUIET_INTERVALS, STARTED, Agenda

INTERVAL = 0.25
NEVER = float("inf")


def looks(
    attention: Agenda,
    since: float,
    seconds: float,
    *,
    watched: bool = True,
    quiet: bool = True,
    right: bool = False,
) -> list[float]:
    """When it is looked at, in the seconds after that."""
    found = []
    at = since
    while (at := max(at, attention.next())) <= since + seconds:
        found.append(at)
        until = NEVER if quiet else 0.0
        attention.taken("r", at)
        attention.looked("r", at, INTERVAL, watched=watched, quiet_until=until, right=right)
    return found


def read(attention: Agenda, path: str, at: float, *, watched: bool = True, until: float = NEVER) -> None:
    attention.taken(path, at)
    attention.looked(path, at, INTERVAL, watched=watched, quiet_until=until)


def settled() -> Agenda:
    attention = Agenda()
    attention.found("r", 0.0)
    looks(attention, 0.0, 2 * STARTED)
    return attention


def gaps(found: list[float]) -> list[float]:
    return [later - sooner for sooner, later in itertools.pairwise(found)]


def test_a_region_where_all_is_right_is_looked_at_rarely() -> None:
    assert gaps(looks(settled(), 200.0, 60.0)) == pytest.approx([QUIET_INTERVALS * INTERVAL] * 15)


@pytest.mark.parametrize(("watched", "quiet"), [(False, True), (True, False)])
def test_due_by_clock_without_watch_or_while_waiting(watched: bool, quiet: bool) -> None:  # noqa: FBT001
    found = looks(settled(), 200.0, 10.0, watched=watched, quiet=quiet)
    assert gaps(found) == pytest.approx([INTERVAL] * (len(found) - 1))


def test_reads_after_attachment_become_rarer() -> None:
    attention = settled()
    attention.attached("r", 200.0)
    found = looks(attention, 200.0, 100.0)
    assert found[0] == 200.0
    apart = dict(zip(found, gaps(found), strict=False))
    assert max(gap for at, gap in apart.items() if at < 202.9) <= 0.0201
    assert max(gap for at, gap in apart.items() if at < 219.9) <= 0.1001
    assert max(gap for at, gap in apart.items() if at < 259.0) <= INTERVAL + 0.001
    assert gaps(found)[-1] == pytest.approx(QUIET_INTERVALS * INTERVAL)
    assert min(gaps(found)) >= 0.0039  # and however many events there are


def test_right_slot_is_looked_at_ever_more_rarely() -> None:
    attention = settled()
    attention.attached("r", 200.0)
    found = looks(attention, 200.0, STARTED - 0.1, right=True)
    apart = dict(zip(found, gaps(found), strict=False))
    assert max(gap for at, gap in apart.items() if at < 200.16) <= 0.0201
    assert all(gap <= max(0.0201, (at - 200.0) / 8 + 0.001) for at, gap in apart.items())
    assert max(apart.values()) <= 2.001
    assert len([at for at in found if at <= 203.0]) <= 40
    late = [at for at in found if at > 218.0]
    assert late == [at // 0.5 * 0.5 for at in late], "regions are not read at shared moments"
    attention = settled()
    attention.attached("r", 200.0)
    assert len(looks(attention, 200.0, 3.0, right=True, watched=False)) > 120, "attachments are not reported"


def test_started_processes_are_waited_for_no_longer() -> None:
    attention = settled()
    attention.attached("r", 200.0)
    attention.taken("r", 200.1)
    attention.looked("r", 200.1, INTERVAL, watched=True, quiet_until=NEVER, right=True, started=True)
    assert attention.next() == pytest.approx(200.1 + QUIET_INTERVALS * INTERVAL)


def test_event_during_a_turn_is_read_after_it() -> None:
    attention = settled()
    attention.taken("r", 200.0)
    attention.by("r", 200.05)
    attention.looked("r", 200.0, INTERVAL, watched=True, quiet_until=NEVER)
    assert attention.next() == 200.05
    read(attention, "r", 200.06)
    assert attention.next() > 204.0


def test_events_cannot_beat_the_shortest_pause() -> None:
    attention = settled()
    count = 0
    for millisecond in range(1000):
        now = 200.0 + millisecond / 1000
        attention.attached("r", now)
        if attention.next() <= now:
            count += 1
            read(attention, "r", now)
    assert count <= 251


def test_an_end_brings_one_look() -> None:
    attention = settled()
    looks(attention, 200.0, 1.0)
    attention.by("r", 201.05)
    found = looks(attention, 201.0, 10.0)
    assert found[0] == pytest.approx(201.05)
    assert gaps(found) == pytest.approx([QUIET_INTERVALS * INTERVAL] * (len(found) - 1))


def test_a_dead_slot_is_looked_at_when_it_is_due() -> None:
    attention = settled()
    read(attention, "r", 200.0, until=201.2)
    assert attention.next() == pytest.approx(201.2)


def test_everything_is_due_after_lost_events() -> None:
    attention = settled()
    attention.found("other", 0.0)
    for path in ("r", "other"):
        read(attention, path, 200.0, watched=False)
    attention.everything(200.1)
    assert attention.next() == 200.1
    assert attention.due(200.1) == ["r", "other"]
    assert attention.due(200.05) == []


def test_repeated_losses_are_checked_once_a_second() -> None:
    attention, found = settled(), list[float]()
    for hundredth in range(1000):
        now = 200.0 + hundredth / 100
        attention.events_lost(now)
        if attention.next() <= now:
            assert attention.search_due(now) == (True, True)
            found.append(now)
            attention.searched(now, INTERVAL, full=True, watched=True)
            read(attention, "r", now)
    assert found == pytest.approx([200.0 + second for second in range(10)])


def test_one_that_is_over_its_budget_waits() -> None:
    attention = settled()
    attention.attached("r", 200.0)
    attention.put_off("r", 200.25)
    assert attention.due(200.2) == []
    assert attention.due(200.25) == ["r"]


def test_new_region_is_due_and_forgotten_one_is_not() -> None:
    attention = Agenda()
    assert attention.next() == NEVER
    attention.found("new", 0.0)
    assert attention.due(0.0) == ["new"]
    read(attention, "new", 0.0)
    attention.forget("new")
    attention.attached("new", 1.0)
    assert attention.next() == NEVER


def test_longest_waiting_region_comes_first() -> None:
    attention = Agenda()
    for path, last in (("b", 200.0), ("c", 100.0), ("a", 150.0)):
        attention.found(path, 0.0)
        read(attention, path, last, watched=False)
    attention.found("new", 0.0)
    assert attention.due(300.0) == ["new", "c", "a", "b"]
    assert attention.due(150.25) == ["new", "c", "a"]
