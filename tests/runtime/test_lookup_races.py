"""Look-ups while processes end and PIDs are used again: the right number, or the word that it is gone."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resolver.errors import NotFound, ProcessGone
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.lookup.forward import lookup
from tests.runtime.conftest import Start
from tests.runtime.runc import RuncContainer
from tests.runtime.test_lookup_runc import host_pid, run

# Others than those of test_lookup_runc, which may run beside.
A, B = "c1b2c3d4e5f60718" * 4, "d1b2c3d4e5f60718" * 4
NS_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


class Life:
    """Who had one and the same PID in a container, one after the other, and when, in ns of CLOCK_MONOTONIC."""

    def __init__(self, container: RuncContainer) -> None:
        self.lives: list[tuple[int, int, int]] = []
        born_after, host = 0, 0
        for told in container.told:
            if told.role == "born":
                host = told.host_pid
            elif told.role == "reaped":
                self.lives.append((host, born_after, told.time))
                born_after = told.time

    def had_it(self, pid: int, start: int, end: int) -> bool:
        """Whether this host process had the number at some moment between start and end."""
        return any(host == pid and born <= end and start <= reaped for host, born, reaped in self.lives)


def test_one_number_for_thousands_of_processes(start: Start) -> None:
    container = start(A, f"/kubepods/burstable/pod-x/{A}")
    container.order("churn 400 1000000 2000")
    procfs, nothing = Procfs(), 0
    answers: list[tuple[int, int, int]] = []
    until = time.monotonic() + 60  # as many as it takes on a busy machine
    while len(answers) < 150 or len({host_pid for host_pid, _, _ in answers}) < 100 or not nothing:
        assert time.monotonic() < until, f"{len(answers)} answers, {nothing} without one, in 60 s"
        began = time.monotonic_ns()
        try:
            answers.append((lookup(procfs, A, 400).host_pid, began, time.monotonic_ns()))
        except (NotFound, ProcessGone):
            nothing += 1
    container.wait("reaped", len(container.all("reaped")) + 2)
    life = Life(container)
    assert [answer for answer in answers if not life.had_it(*answer)] == []


def test_the_same_through_the_command(start: Start) -> None:
    container = start(A, f"/docker/{A}")
    container.order("churn 400 400 30000")
    answers: list[tuple[int, int, int]] = []
    rounds = 1
    while len(answers) < 20:
        if len(container.all("churned")) == rounds:  # it was faster than the commands
            assert rounds < 20, f"{len(answers)} answers"
            container.order("churn 400 400 30000")
            rounds += 1
        began = time.monotonic_ns()
        done = run(A[:10], 400)
        if done.returncode == 0:
            answers.append((int(done.stdout), began, time.monotonic_ns()))
        else:
            assert (done.returncode, done.stdout) == (1, ""), done
    container.wait("churned", rounds)
    life = Life(container)
    assert [answer for answer in answers if not life.had_it(*answer)] == []


@pytest.mark.parametrize("lookups", [100, pytest.param(300, marks=pytest.mark.long)])
def test_those_that_stay_are_found_among_those_that_go(start: Start, lookups: int) -> None:
    container = start(A, f"/kubepods/pod-y/crio-{A}")
    staying = container.order("fork 100", "child", 100)
    container.order("churn 0 4000 100")
    procfs, rounds = Procfs(), 1
    for told in random.Random(7).choices(staying, k=lookups):
        if len(container.all("churned")) == rounds:  # others come and go during all look-ups
            container.order("churn 0 4000 100")
            rounds += 1
        assert lookup(procfs, A, told.ns_pid).host_pid == told.host_pid
    told = staying[-1]
    assert host_pid(A, told.ns_pid) == told.host_pid


class Interrupted(Procfs):
    """Lets something happen once, at the moment when the process that was found is about to be held."""

    def __init__(self, happen: Callable[[int], None], *, use_pidfd: bool, after: bool = False) -> None:
        super().__init__(use_pidfd=use_pidfd)
        self.happen = happen
        self.after = after

    def open_handle(self, host_pid: int) -> ProcessHandle:
        if self.after:
            handle = super().open_handle(host_pid)
            self.happen(host_pid)
            return handle
        self.happen(host_pid)
        return super().open_handle(host_pid)


@pytest.mark.parametrize("use_pidfd", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_it_ends_while_it_is_looked_at(start: Start, *, use_pidfd: bool, after: bool) -> None:
    container = start(A, f"/docker/{A}")
    container.order("as 400", "as")
    procfs = Interrupted(
        lambda _: container.order("kill 400", "killed").clear(), use_pidfd=use_pidfd, after=after
    )
    with pytest.raises(ProcessGone, match=r"process 400 of container .* ended"):
        lookup(procfs, A, 400)


@pytest.mark.parametrize("use_pidfd", [True, False])
def test_its_host_pid_is_used_again_by_the_host(start: Start, *, use_pidfd: bool) -> None:
    container = start(A, f"/docker/{A}")
    children: list[int] = []

    def take_over(host_pid: int) -> None:
        container.order("kill 400", "killed")
        NS_LAST_PID.write_text(str(host_pid - 1))
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        children.append(child)

    try:
        for _ in range(50):  # somebody else on the node may be quicker and get the number
            told = container.order("as 400", "as")[0]
            with pytest.raises(ProcessGone):
                lookup(Interrupted(take_over, use_pidfd=use_pidfd), A, 400)
            if children[-1] == told.host_pid:
                break
        else:
            raise AssertionError("in 50 tries the host PID never came back")
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_its_host_pid_is_used_again_for_the_same_number_in_another_container(start: Start) -> None:
    container, other = start(A, f"/docker/{A}"), start(B, f"/docker/{B}")
    taken: list[int] = []

    def take_over(host_pid: int) -> None:
        container.order("kill 400", "killed")
        NS_LAST_PID.write_text(str(host_pid - 1))
        taken.append(other.order("as 400", "as")[0].host_pid)

    for _ in range(50):
        told = container.order("as 400", "as")[0]
        with pytest.raises(ProcessGone):
            lookup(Interrupted(take_over, use_pidfd=True), A, 400)
        if taken[-1] == told.host_pid:
            return
        other.order("kill 400", "killed")
    raise AssertionError("in 50 tries the host PID never came back")


def test_its_number_is_used_again_in_the_container(start: Start) -> None:
    container = start(A, f"/docker/{A}")
    first = container.order("as 400", "as")[0]

    def replace(_: int) -> None:
        container.order("kill 400", "killed")
        container.order("as 400", "as")

    with pytest.raises(ProcessGone):
        lookup(Interrupted(replace, use_pidfd=True), A, 400)
    second = container.all("as")[-1]
    assert second.host_pid != first.host_pid
    assert host_pid(A, 400) == second.host_pid
