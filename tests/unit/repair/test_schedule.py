"""Schedules: the time of a region's next read."""

import itertools

import pytest

from resolver.repair.schedule import QUIET_INTERVALS, STARTED, Schedule

INTERVAL = 0.25
RARELY = QUIET_INTERVALS * INTERVAL
NEVER = float("inf")


def looks(
    schedule: Schedule,
    since: float,
    seconds: float,
    *,
    watched: bool = True,
    quiet: bool = True,
    right: bool = False,
) -> list[float]:
    """Times of the region's reads in the ``seconds`` after ``since``."""
    times = []
    at = since
    while (at := max(at, schedule.due)) <= since + seconds:
        times.append(at)
        read(schedule, at, watched=watched, until=NEVER if quiet else 0.0, right=right)
    return times


def read(
    schedule: Schedule,
    at: float,
    *,
    watched: bool = True,
    until: float = NEVER,
    right: bool = False,
    started: bool = False,
) -> None:
    schedule.taken(at)
    schedule.looked(INTERVAL, watched=watched, work_at=until, right=right, started=started)


def settled() -> Schedule:
    schedule = Schedule(0.0)
    looks(schedule, 0.0, 2 * STARTED)
    return schedule


def attached() -> Schedule:
    schedule = settled()
    schedule.attach(200.0)
    return schedule


def gaps(times: list[float]) -> list[float]:
    return [later - sooner for sooner, later in itertools.pairwise(times)]


def test_right_regions_are_read_rarely_and_together() -> None:
    times = looks(settled(), 201.0, 60.0)[1:]
    assert times == [at // RARELY * RARELY for at in times]
    assert gaps(times) == [RARELY] * (len(times) - 1)
    assert len(times) == 15


@pytest.mark.parametrize(("watched", "quiet"), [(False, True), (True, False)])
def test_due_by_clock_without_watch_or_while_waiting(watched: bool, quiet: bool) -> None:  # noqa: FBT001
    times = looks(settled(), 200.0, 10.0, watched=watched, quiet=quiet)
    assert gaps(times) == pytest.approx([INTERVAL] * (len(times) - 1))


def test_reads_after_attachment_become_rarer() -> None:
    times = looks(attached(), 200.0, 100.0)
    assert times[0] == 200.0
    apart = dict(zip(times, gaps(times), strict=False))
    assert max(gap for at, gap in apart.items() if at < 202.9) <= 0.0201
    assert max(gap for at, gap in apart.items() if at < 219.9) <= 0.1001
    assert max(gap for at, gap in apart.items() if at < 259.0) <= INTERVAL + 0.001
    assert gaps(times)[-1] == pytest.approx(RARELY)
    assert min(gaps(times)) >= 0.0039  # for any number of events


def test_right_slot_is_looked_at_ever_more_rarely() -> None:
    times = looks(attached(), 200.0, STARTED - 0.1, right=True)
    apart = dict(zip(times, gaps(times), strict=False))
    assert max(gap for at, gap in apart.items() if at < 200.06) <= 0.0201
    assert all(gap <= max(0.0201, (at - 200.0) / 2 + 0.001) for at, gap in apart.items())
    assert max(apart.values()) <= 4.001
    assert len([at for at in times if at <= 203.0]) <= 20
    late = [at for at in times if at > 218.0]
    assert late == [at // 2.0 * 2.0 for at in late], "regions are not read at shared moments"
    assert len(looks(attached(), 200.0, 3.0, right=True, watched=False)) > 120, "attachments are not reported"


def test_started_processes_are_waited_for_no_longer() -> None:
    schedule = attached()
    read(schedule, 200.1, right=True, started=True)
    assert schedule.due == 204.0


def test_event_during_a_turn_is_read_after_it() -> None:
    schedule = settled()
    schedule.taken(200.0)
    for when in (200.05, 200.09):  # a later event puts nothing off
        schedule.by(when)
    schedule.looked(INTERVAL, watched=True, work_at=NEVER)
    assert schedule.due == 200.05
    read(schedule, 200.06)
    assert schedule.due == 204.0


def test_events_cannot_beat_the_shortest_pause() -> None:
    schedule, count = settled(), 0
    for millisecond in range(1000):
        now = 200.0 + millisecond / 1000
        schedule.attach(now)
        if schedule.due <= now:
            count += 1
            read(schedule, now)
    assert count <= 251


def test_dead_slot_is_looked_at_when_it_is_due() -> None:
    schedule = settled()
    read(schedule, 200.0, until=201.2)
    assert schedule.due == pytest.approx(201.2)


def test_one_that_is_over_its_budget_waits() -> None:
    schedule = attached()
    schedule.put_off(200.25)
    assert schedule.due == 200.25
