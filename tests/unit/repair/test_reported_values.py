"""Causes of values that differ from NVML's, and the reaction to each; the test controls the clock."""

from collections.abc import Iterable
from itertools import pairwise

import pytest

from resolver.config import HostpidNamespace
from resolver.hami.hostpid_policy import HostpidPolicy, Origin, WatcherFinding
from resolver.repair.reported_values import (
    REPORTED_AFTER,
    TWO_TICKS,
    UNABLE,
    Evidence,
    ReportedValue,
    Verdict,
)
from resolver.workers.slot_writer import MARK, differs

RIGHT, WAIT, WRONG = Verdict.RIGHT, Verdict.WAIT, Verdict.WRONG
CONFIRMS, DOUBTS = WatcherFinding.CONFIRMS, WatcherFinding.DOUBTS
BY_VERSION = HostpidPolicy(HostpidNamespace.HOST, "", Origin.BY_VERSION)
FORCED = HostpidPolicy(HostpidNamespace.CONTAINER, "", Origin.FORCED)
PASS = 0.25


@pytest.mark.parametrize(
    ("present", "actual", "is_another"),
    [
        (30, 30, False),
        (33, 30, False),
        (34, 30, True),
        (27, 30, False),
        (0, 0, False),
        (0, 1, True),
        (1, 0, True),
    ],
)
def test_differences_that_count(present: int, actual: int, *, is_another: bool) -> None:
    assert differs(present, actual) is is_another


class Scene:
    """One value, with four passes and one NVML answer a second; each pass calls `write`."""

    def __init__(self, present: int) -> None:
        self.word, self.present = ReportedValue(present, present, present), present
        self.now, self.actual, self.answered = 100.0, 0, 99.0
        self.writes: list[float] = []

    def nvml(self, actual: int) -> None:
        self.actual, self.answered = actual, self.now

    def look(self, *, write: bool = True) -> Verdict:
        verdict = self.word.judge(self.present, self.actual, self.answered, 0.0, self.now)
        if verdict is WRONG and write:
            self.present = self.actual
            self.word.wrote(self.actual)
            self.writes.append(self.now)
        self.now += PASS
        return verdict

    def second(self, actual: int, values: Iterable[int | None]) -> list[Verdict]:
        """An answer, then four passes; before each the tenant writes a value, or None: nothing."""
        self.nvml(actual)
        seen = []
        for value in values:
            self.present = self.present if value is None else value
            seen.append(self.look())
        return seen


NOTHING = (None,) * 4


def test_still_value_is_repaired_after_answer_and_two_ticks() -> None:
    scene = Scene(30)
    assert scene.second(30, NOTHING) == [RIGHT] * 4
    assert scene.second(0, NOTHING) == [WAIT, WRONG, RIGHT, RIGHT]
    assert scene.second(0, NOTHING) == [RIGHT] * 4
    assert len(scene.writes) == 1
    assert not scene.word.contested


def test_fast_answers_do_not_delay_a_repair() -> None:
    scene = Scene(30)
    verdicts = []
    for actual in (10, 12, 8, 10, 11):
        scene.nvml(actual)
        verdicts.append(scene.look())
        scene.now += 0.1 - PASS
    assert verdicts == [WAIT, WAIT, WAIT, WRONG, WRONG]  # later, resolver keeps it equal


AHEAD = 10, 50, 20, 90, 0, 40, 70, 0, 100, 30
JITTER = ((44, (40, 48, 39, 45)), (39, (46, 41, 48, 38)), (47, (42, 50, 44, 39))) * 5


@pytest.mark.parametrize(
    "seconds",
    [
        # The load changes just after each answer, so the value differs from NVML's in every second.
        pytest.param([(before, (load, None, None, None)) for before, load in pairwise(AHEAD)], id="ahead"),
        pytest.param(JITTER, id="jitters"),
        # Bursts of less than a second: NVML's answer has their last, smaller sample.
        pytest.param([(25, (0, 40, 80, 0))] * 6, id="bursts"),
        pytest.param([(25, (0, 40, 60, 80)), (25, (80, 0, 0, 0))] * 4, id="bursts across answers"),
        *([(load, range(load + step, load + 5 * step, step)) for load in range(0, 100 - 3 * step, 4 * step)]
          for step in (2, 5, 10, 20)),
    ],
)  # fmt: skip
def test_load_that_changes_is_not_fought(seconds: Iterable[tuple[int, Iterable[int | None]]]) -> None:
    scene = Scene(0)
    for actual, values in seconds:
        scene.second(actual, values)
    assert scene.writes == []
    assert not scene.word.contested


def test_a_second_device_that_is_never_zeroed_stays_uncontested() -> None:
    """As 2.9.0: the watcher sets the value while the process is busy, and never resets it to 0."""
    scene = Scene(0)
    for _ in range(6):
        scene.second(0, (30, None, None, None))  # busy, after the answer
        assert scene.second(30, NOTHING) == [RIGHT] * 4
        assert scene.second(0, NOTHING) == [WAIT, WRONG, RIGHT, RIGHT]
    assert len(scene.writes) == 6
    assert not scene.word.contested


@pytest.mark.parametrize("actual", [0, 25])
def test_bursts_that_are_never_zeroed_are_not_called_added(actual: int) -> None:
    scene = Scene(0)
    for _ in range(6):
        scene.second(actual, (None, 40, 80, None))
    assert not scene.word.grew


def test_value_reset_after_writes_is_contested() -> None:
    """As HAMi 2.4.1 does on its first device."""
    scene = Scene(0)
    assert scene.second(40, NOTHING) == [WAIT, WRONG, RIGHT, RIGHT]
    scene = Scene(0)
    assert scene.second(40, (None, None, 0, None)) == [WAIT, WRONG, WAIT, WAIT]
    assert scene.second(40, (None, None, 0, 0)) == [WAIT, WRONG, WRONG, WRONG]
    assert scene.word.contested
    assert "HAMi 2.4.1" in scene.word.describe_fault()


def test_the_cause_is_told_by_the_last_wrong_value() -> None:
    """A view from before our value's replacement shows it again: neither a program nor a GPU caused that."""
    evidence = Evidence()
    evidence.since = 100.0
    for device in (0, 1):
        word = evidence.word(device, 0)
        word.judge(0, 40, 99.0, 0.0, 100.0)
        word.wrote(40)
        word.see(0, 101.0)
        assert word.judge(40, 40, 99.0, 0.0, 101.0) is RIGHT
        word.contested, word.contested_since = True, 100.0
    why = evidence.why(4711, FORCED, 101.0 + REPORTED_AFTER)
    assert why.startswith("a watcher sets sm_util to 0 at every tick and fills nothing in")
    assert why.endswith("is wrong for this driver: try auto")


@pytest.mark.parametrize("load", [5, 12, 40])
def test_added_value_is_contested_within_one_answer(load: int) -> None:
    """As HAMi 2.5.0 does from its second device on, with two ticks in each pass."""
    scene = Scene(0)
    for actual in (0, load):
        for turn in range(4):
            if turn == 0:
                scene.nvml(actual)
            scene.present += 2 * load
            scene.look()
    assert scene.word.contested
    assert "2.5" in scene.word.describe_fault()
    assert scene.present == load


def test_more_than_a_device_can_do_is_put_right_at_once() -> None:
    scene = Scene(525)
    assert scene.look() is WRONG
    assert scene.present == 0


def test_watcher_right_at_two_answers_ends_contest() -> None:
    scene = Scene(500)
    scene.look()
    assert scene.word.contested
    scene.second(20, (20, None, None, None))
    assert scene.word.contested
    scene.second(40, (40, None, None, None))
    assert not scene.word.contested


def test_silence_is_no_peace() -> None:
    scene = Scene(500)
    scene.look()
    scene.second(20, (20, None, None, None))
    scene.second(20, NOTHING)  # the value stays, so it is unknown if a watcher would set it
    scene.second(40, (40, None, None, None))
    assert scene.word.contested
    scene.second(20, (20, None, None, None))
    assert not scene.word.contested


def test_replaced_value_wants_a_newer_answer_of_nvml() -> None:
    scene, evidence = Scene(0), Evidence()
    evidence.words[0] = scene.word
    scene.second(40, NOTHING)
    assert (scene.present, evidence.unsure()) == (40, False)
    scene.second(40, (None, None, None, 0))
    assert evidence.unsure()
    scene.second(40, (None,))
    assert not evidence.unsure()


def test_value_of_the_slot_writer_is_no_watchers_value() -> None:
    word = ReportedValue(MARK, MARK, MARK)
    word.judge(MARK, 40, 99.0, 0.0, 100.0)
    assert not word.contested


def test_our_own_value_proves_nothing_of_its_watcher() -> None:
    word = ReportedValue(0, 0, 0)
    word.lost = True
    word.wrote(40)
    assert word.judge(40, 40, 99.0, 0.0, 100.0) is RIGHT
    assert word.lost
    word.judge(38, 38, 100.0, 0.0, 101.0)
    assert not word.lost


def test_held_value_is_no_watchers_value() -> None:
    word, now = ReportedValue(0, 0, 0), 100.0
    word.contested, word.ours, word.fault = True, True, 0
    for load in (20, 28, 24, 20):
        word.hold(load)
        assert word.judge(load, load, now, 0.0, now) is RIGHT
        now += 1.0
    assert (word.contested, word.found_at, word.fault) == (True, float("-inf"), 0)
    word.judge(26, 25, now, 0.0, now)
    assert word.found_at == now, "a value that was never ordered"


def test_refused_watcher_is_unable_and_no_doubt() -> None:
    evidence, word = Evidence(), ReportedValue(0, 0, 0)
    evidence.since, evidence.words = 0.0, {1: word}
    word.contested, word.contested_since, word.fault = True, 10.0, 0
    assert evidence.finding(20.0) is DOUBTS
    assert evidence.finding(20.0, {0}) is DOUBTS
    assert evidence.finding(20.0, {1}) is WatcherFinding.UNABLE
    assert UNABLE in evidence.why(4711, BY_VERSION, 20.0, blind={1})


def test_contested_value_is_calm_only_while_held() -> None:
    evidence = Evidence()
    assert (evidence.logged, evidence.calm(held=False)) == (False, True)
    word = evidence.word(1, 500)
    word.judge(500, 20, 99.0, 0.0, 100.0)
    word.wrote(20)
    assert (evidence.calm(held=False), evidence.calm(held=True)) == (False, True)
    word.undisturbed()
    assert word.contested, "one report is not enough"
    word.undisturbed()
    assert not word.contested


def test_a_small_value_where_nothing_works_was_added() -> None:
    word = ReportedValue(0, 0, 0)
    word.see(1, 100.0)
    assert "adds to sm_util" in word.describe_fault()


def test_watcher_gets_two_ticks_after_right_hostpid() -> None:
    word = ReportedValue(0, 0, 0)
    assert word.judge(0, 40, 100.0, since=200.0, now=200.0) is WAIT
    assert word.judge(0, 40, 100.0, since=200.0, now=200.01 + TWO_TICKS) is WRONG


def test_fault_is_reported_after_a_while_with_details() -> None:
    def told(word: ReportedValue, policy: HostpidPolicy) -> str:
        evidence = Evidence()
        evidence.since, evidence.words[0] = 100.0, word
        assert evidence.why(4711, policy, 100.0 + REPORTED_AFTER - 0.1) == ""
        return evidence.why(4711, policy, 100.01 + REPORTED_AFTER)

    added, zeroed = ReportedValue(500, 500, 500), ReportedValue(0, 0, 0)
    added.judge(500, 20, 99.0, 0.0, 100.0)
    zeroed.contested, zeroed.contested_since = True, 100.0
    assert told(added, BY_VERSION) == (
        "a watcher adds to sm_util instead of setting it, as HAMi 2.5 and 2.6 do; it is put right after each tick"
    )
    assert told(zeroed, BY_VERSION) == (
        "a watcher sets sm_util to 0 at every tick and fills nothing in, as HAMi 2.4.1 does; it is put right after "
        "each tick; or it works, and finds no sample of 4711: "
        "the driver's samples do not carry host PIDs as its version says: "
        "check with make gpu-check, then set --hostpid-namespace container"
    )
    assert told(zeroed, FORCED).endswith("--hostpid-namespace container is wrong for this driver: try auto")
    zeroed.found_at = 100.1
    assert told(zeroed, BY_VERSION).endswith("as HAMi 2.4.1 does; it is put right after each tick")


def test_unwritten_wrong_value_is_reported_as_such() -> None:
    evidence, now = Evidence(), 100.0
    for _ in range(20):
        evidence.word(1, 30).judge(30, 0, 99.0, 0.0, now)
        assert now >= 100.0 + REPORTED_AFTER or evidence.why(4711, BY_VERSION, now) == ""
        now += PASS
    assert evidence.why(4711, BY_VERSION, now) == "it says 30 % where NVML says 0 %, and is not written to"
    evidence.word(1, 30).judge(0, 0, 99.0, 0.0, now)
    assert evidence.why(4711, BY_VERSION, now) == ""


class Watched:
    """A slot with one device, whose ``hostpid`` is right from 100.0 on."""

    def __init__(self, present: int = 0, actual: int = 40) -> None:
        self.evidence, self.actual = Evidence(), actual
        self.evidence.since = 100.0
        self.word = self.evidence.word(0, present)
        self.look(present, 100.0)

    def look(self, present: int, now: float, *, since: float = 100.0) -> WatcherFinding | None:
        self.word.judge(present, self.actual, now - 0.1, since, now)
        return self.evidence.finding(now)


def test_a_watcher_that_fills_nvmls_value_in_confirms_the_number() -> None:
    watched = Watched()
    assert watched.look(0, 100.1) is None
    assert watched.look(38, 100.2) is CONFIRMS
    assert watched.look(41, 100.3) is CONFIRMS
    watched.evidence.since = 100.3  # the number was wrong in between
    assert watched.look(41, 100.4) is None
    watched.evidence.since = None
    assert watched.look(39, 100.5) is None


def test_finding_lasts_while_the_process_idles() -> None:
    watched = Watched()
    watched.look(40, 100.2)
    watched.actual = 0
    assert watched.look(0, 101.0) is CONFIRMS


@pytest.mark.parametrize(
    ("present", "actual", "values"),
    [
        (40, 40, [40] * 20),  # the value was there before the number was right
        (0, 0, [0] * 20),
        (0, 40, [0, 90, 12, 0]),  # NVML contradicts
        (30, 0, [0]),
    ],
)
def test_value_that_shows_no_sample_confirms_nothing(present: int, actual: int, values: list[int]) -> None:
    watched = Watched(present, actual)
    assert {watched.look(value, 100.0 + PASS * n) for n, value in enumerate(values, 1)} == {None}


def test_own_or_old_value_confirms_nothing() -> None:
    watched = Watched()
    watched.word.wrote(40)
    assert watched.look(40, 101.0) is None
    watched.word.see(0, 101.1)
    assert watched.look(40, 101.2) is None
    assert watched.look(41, 101.3) is CONFIRMS


def test_the_slot_writers_mark_confirms_nothing_at_full_load() -> None:
    watched = Watched(actual=100)
    assert watched.look(MARK, 100.2) is None
    assert watched.look(100, 100.3) is CONFIRMS


def test_a_watcher_that_keeps_zeroing_doubts_it_after_a_while() -> None:
    watched, now = Watched(), 100.0
    seen: dict[float, WatcherFinding | None] = {}
    while now < 108.0:
        now += PASS
        seen[now] = watched.look(0, now)
        if watched.word.wrong_since is not None:
            watched.word.wrote(40)
    assert watched.word.contested
    since = watched.word.contested_since
    assert {at: found for at, found in seen.items() if found} == {
        at: DOUBTS for at in seen if at >= since + REPORTED_AFTER
    }
    watched.evidence.since = now  # the number has just become right
    assert watched.evidence.finding(now) is None
    assert watched.evidence.finding(now + REPORTED_AFTER) is DOUBTS
    watched.word.found_at = now + 0.1  # one matched sample outweighs all unmatched ones
    assert watched.evidence.finding(now + REPORTED_AFTER) is CONFIRMS


def test_one_that_adds_does_not_doubt_the_number() -> None:
    watched = Watched()
    watched.look(500, 100.2)
    assert watched.word.contested
    assert watched.look(500, 100.3 + REPORTED_AFTER) is None
    assert watched.look(0, 100.4 + REPORTED_AFTER) is None, "it zeroes the first device before it adds"


def test_another_order_of_gpus_is_the_cause() -> None:
    evidence, now = Evidence(), 100.0
    word = evidence.word(0, 60)
    evidence.word(1, 0)
    word.actual, word.contested, word.contested_since = 20, True, now
    now += REPORTED_AFTER
    rival = "a watcher adds to sm_util instead of setting it, as HAMi 2.5 and 2.6 do; it is put right after each tick"
    assert evidence.why(4711, BY_VERSION, now) == rival
    assert (
        evidence.why(4711, BY_VERSION, now, "another order")
        == "another order; it is put right after each tick"
    )


def zeroes(answers: Iterable[tuple[int, bool]], *, watcher: bool) -> tuple[Scene, list[int]]:
    """Give one answer a second (NVML's value, device idle); return the seconds in which 0 was written."""
    scene, written = Scene(30), []
    for second, (actual, idle) in enumerate(answers):
        scene.nvml(actual)
        for _ in range(4):
            if watcher:
                scene.present = 30
            verdict = scene.word.judge(scene.present, actual, scene.answered, 0.0, scene.now, idle=idle)
            if verdict is WRONG and not actual and scene.word.enough_for_zero():
                scene.present = 0
                scene.word.wrote(0)
                written.append(second)
            scene.now += PASS
    return scene, written


@pytest.mark.parametrize(
    ("answers", "watcher", "seconds"),
    [
        ([(30, False)] + [(0, False)] * 3, False, [2]),
        ([(30, False), (0, True), (0, True)], False, [1]),
        (([(30, False)] + [(0, False)] * 9) * 10, True, [2]),
    ],
    ids=["busy", "idle", "flapping"],
)
def test_zero_needs_an_idle_device_or_two_absences(
    answers: list[tuple[int, bool]], *, watcher: bool, seconds: list[int]
) -> None:
    scene, written = zeroes(answers, watcher=watcher)
    assert (written, scene.word.disputed) == (seconds, watcher)


def test_watcher_that_fills_in_after_a_zero_is_not_fought() -> None:
    """Happens if NVML's answers omit a busy process, or if the number is another process's."""
    scene, written = zeroes([(30, False)] + [(0, False)] * 60, watcher=True)
    assert written == [2]
    evidence = Evidence()
    evidence.words[0] = scene.word
    assert evidence.disputed()
    assert "no 0 is written any more" in evidence.why(4711, BY_VERSION, scene.now)


def test_idle_device_ends_the_dispute() -> None:
    scene, written = zeroes([(30, False)] + [(0, False)] * 5 + [(0, True)] * 2, watcher=True)
    assert min(written[1:]) == 6
    assert not scene.word.disputed


def test_watchers_own_zero_ends_the_dispute() -> None:
    scene, _ = zeroes([(30, False)] + [(0, False)] * 5, watcher=True)
    assert scene.word.disputed
    scene.second(0, (0, None, None, None))
    assert not scene.word.disputed
