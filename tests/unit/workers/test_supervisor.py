"""The supervisor of the children, with real children that hang, die or send garbage."""

import asyncio
import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from resolver.base.counters import Shortage
from resolver.base.errors import WorkerFailed
from resolver.linux.procfs import run_delay, usage
from resolver.workers import means, spawn, supervisor
from resolver.workers.spawn import ChildProcess
from resolver.workers.supervisor import WorkerProcess
from tests.patience import PATIENCE_S, until

Make = Callable[..., WorkerProcess]
#: A child that obeys orders and reports its state.
PUPPET = """
import json, os, signal, socket, sys, time
from resolver.workers.child import inherited
def main():
    channel = socket.socket(fileno=os.dup(0))
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 4096, 10)
        if not message: break
        word, _, rest = message.decode().partition(" ")
        if word == "files":
            names = lambda fds: [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]
            channel.send(json.dumps({"inherited": names(inherited()), "sent": names(fds)}).encode())
            continue
        if word == "hang": time.sleep(600)
        if word == "ignore": signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)
        if word == "exit": return int(rest)
        if word == "raise": raise SystemExit("puppet: on purpose")
        if word == "kill": os.kill(os.getpid(), int(rest))
        if word == "close": channel.close(); os.close(0); time.sleep(600)
        if word == "leave": channel.close(); os.close(0); time.sleep(0.05); os.kill(os.getpid(), int(rest))
        if word == "late": time.sleep(float(rest))
        answer = {"path": str(sys.path), "name": open("/proc/self/comm").read().strip(),
                  "group": os.getpgrp() == os.getpid(), "env": os.environ.get(rest, "not set"),
                  "fds": sorted(os.listdir("/proc/self/fd")), "flags": f"{sys.flags.isolated}{sys.flags.no_site}",
                  "empty": ""}.get(word, message.decode())
        channel.send(str(answer).encode())
    return 0
"""


@pytest.fixture
def puppet(tmp_path: Path) -> Iterator[Make]:
    (tmp_path / "puppet.py").write_text(PUPPET)
    made: list[WorkerProcess] = []

    def make(module: str = "puppet", timeout: float = PATIENCE_S) -> WorkerProcess:
        made.append(WorkerProcess("puppet of this test", module, str(tmp_path), timeout=timeout))
        return made[-1]

    yield make
    for worker in made:
        worker.stop(PATIENCE_S)


@pytest.fixture
def files() -> Iterator[list[int]]:
    fds = [os.open(path, os.O_RDONLY) for path in ("/dev/zero", "/dev/full")]
    yield fds
    for fd in fds:
        os.close(fd)


async def ask(worker: WorkerProcess, text: str) -> str:
    return (await worker.request(text.encode())).decode()


async def fails(asking: Awaitable[object]) -> WorkerFailed:
    with pytest.raises(WorkerFailed) as caught:
        await asking
    return caught.value


def gone(host_pid: int) -> bool:
    """Return True if a process has ended; a zombie counts as ended."""
    try:
        return ") Z " in Path(f"/proc/{host_pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_child_starts_on_first_use_and_stays(puppet: Make) -> None:
    worker = puppet()
    assert (worker.host_pid, worker.starts) == (None, 0)
    assert await ask(worker, "hello") == "hello"
    first = worker.host_pid
    assert await ask(worker, "again") == "again"
    assert (worker.host_pid, worker.starts, worker.failures) == (first, 1, 0)
    worker.stop()
    assert first is not None
    assert gone(first)
    assert worker.host_pid is None
    assert await ask(worker, "back") == "back"
    assert (worker.starts, worker.failures) == (2, 0)


def test_child_has_name_group_and_no_descriptors(puppet: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/evil")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/where/the/driver/is")
    monkeypatch.setenv("RESOLVER_METRICS_TOKEN", "secret")
    kept = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(kept, True)

    async def scene() -> None:
        worker = puppet()
        assert await ask(worker, "name") == "puppet of this"  # 15 bytes, for ps and top
        assert await ask(worker, "group") == "True"  # Ctrl-C does not reach the child
        assert await ask(worker, "flags") == "11"
        assert "/evil" not in await ask(worker, "path")
        assert await ask(worker, "env LD_LIBRARY_PATH") == "/where/the/driver/is"
        assert await ask(worker, "env RESOLVER_METRICS_TOKEN") == "not set"
        # The channel twice, /dev/null, standard error, and the listing itself: no descriptor of the daemon's.
        assert len((await ask(worker, "fds")).split(",")) == 5

    try:
        asyncio.run(scene())
    finally:
        os.close(kept)


async def test_timely_answer_counts_despite_busy_loop(puppet: Make) -> None:
    worker = puppet()
    await ask(worker, "warm up")
    worker.timeout = 0.5
    asking = asyncio.create_task(ask(worker, "late 0.05"))
    await asyncio.sleep(0)
    time.sleep(1.0)  # noqa: ASYNC251 - blocks the loop on purpose
    assert await asking == "late 0.05"
    assert worker.failures == 0


@pytest.mark.parametrize("stopped", [False, True])
async def test_hanging_child_is_killed_in_time(puppet: Make, *, stopped: bool) -> None:
    worker = puppet()
    await ask(worker, "warm up")
    host_pid, usual, worker.timeout = worker.host_pid, worker.timeout, 0.2
    assert host_pid is not None
    if stopped:
        os.kill(host_pid, signal.SIGSTOP)
    began = time.monotonic()
    error = await fails(ask(worker, "ignore"))
    assert time.monotonic() - began >= 0.2
    worker.timeout = usual
    assert "did not answer within 0.2 s" in str(error)
    assert (error.own_fault, error.waiting) == (False, False)
    until(lambda: gone(host_pid))
    assert await ask(worker, "next") == "next"


def test_starved_child_is_given_more_time(puppet: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an overloaded node a new child would be as late, at the cost of another start."""
    worker = puppet()
    asyncio.run(ask(worker, "begin"))
    child, worker.timeout = worker.host_pid, 0.2
    monkeypatch.setattr(ChildProcess, "starved", lambda process, _seconds: process.host_pid == child)
    monkeypatch.setattr(supervisor, "STARVED_TURNS", int(PATIENCE_S / worker.timeout))
    asyncio.run(ask(worker, "late 0.5"))
    assert worker.host_pid == child
    monkeypatch.setattr(supervisor, "STARVED_TURNS", 2)
    with pytest.raises(WorkerFailed, match=r"did not answer within 0\.2 s"):
        asyncio.run(ask(worker, "late 600"))


def test_child_without_cpu_is_not_late() -> None:
    """On a CPU shared with a normal busy loop, a SCHED_IDLE loop gets a few thousandths of the time."""
    spin = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    only = {min(os.sched_getaffinity(0))}

    def starved_after(child: subprocess.Popen[bytes], seconds: float) -> bool:
        process = ChildProcess(spin)
        process._process = child
        process.measure()
        time.sleep(seconds)
        return process.starved(seconds)

    with (
        subprocess.Popen(spin, stdout=subprocess.PIPE) as loop,
        subprocess.Popen(spin, stdout=subprocess.PIPE) as idle,
    ):
        try:
            for each in (loop, idle):
                assert each.stdout is not None
                assert each.stdout.readline()
            os.sched_setaffinity(loop.pid, only)
            busy = ChildProcess(spin)
            busy._process = loop
            busy._measured = usage(loop.pid).cpu_seconds - 1.0, run_delay(loop.pid)
            assert not busy.starved(1.0)  # it had a CPU all the while
            os.sched_setscheduler(idle.pid, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setaffinity(idle.pid, only)
            assert starved_after(idle, 0.5)
            delayed = run_delay(idle.pid)
            os.sched_setscheduler(idle.pid, os.SCHED_OTHER, os.sched_param(0))
            assert starved_after(idle, 0.5)  # half of the CPU time that it needed
            assert run_delay(idle.pid) > delayed
            idle.send_signal(signal.SIGSTOP)
            os.waitpid(idle.pid, os.WUNTRACED)
            assert not starved_after(idle, 0.1)
        finally:
            loop.kill()
            idle.kill()
    assert not starved_after(idle, 0.1)  # it has ended


@pytest.mark.parametrize(
    ("order", "what", "own_fault"),
    [
        ("exit 3", "ended with code 3", False),
        ("exit 0", "ended with code 0", False),
        ("raise", "ended with code 1", False),
        (f"kill {signal.SIGKILL}", "was killed by SIGKILL", False),
        (f"kill {signal.SIGBUS}", "was killed by SIGBUS", True),
        (f"kill {signal.SIGSEGV}", "was killed by SIGSEGV", True),
        ("kill 40", "was killed by signal 40", False),
        ("close", "closed its socket", False),
    ],
)
async def test_error_names_how_the_child_died(
    puppet: Make, monkeypatch: pytest.MonkeyPatch, order: str, what: str, *, own_fault: bool
) -> None:
    monkeypatch.setattr(spawn, "ENDING_SECONDS", 0.2 if order == "close" else PATIENCE_S)
    worker = puppet()
    await ask(worker, "warm up")
    error = await fails(ask(worker, order))
    assert str(error) == worker.last_failure == f"the puppet of this test {what}"
    assert (error.own_fault, error.waiting, worker.failures) == (own_fault, False, 1)
    assert await ask(worker, "next") == "next"  # the first restart is immediate


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if the thread blocks for a child; a child's end may take long on a busy machine."""

    def wait(_process: object, timeout: float | None = None) -> None:
        assert timeout == 0
        raise subprocess.TimeoutExpired("child", timeout)

    with monkeypatch.context() as patch:
        patch.setattr(spawn, "ENDING_SECONDS", PATIENCE_S)
        patch.setattr(subprocess.Popen, "wait", wait)
        yield


@pytest.mark.parametrize(("number", "own_fault"), [(signal.SIGBUS, True), (signal.SIGKILL, False)])
async def test_loop_goes_on_until_a_child_has_ended(
    puppet: Make, no_waiting: None, number: int, *, own_fault: bool
) -> None:
    worker = puppet()
    await ask(worker, "warm up")
    error = await fails(ask(worker, f"leave {number}"))
    assert (str(error), error.own_fault) == (
        f"the puppet of this test was killed by {signal.Signals(number).name}",
        own_fault,
    )
    assert worker.means.counts == ({} if own_fault else {Shortage.KILLED: 1})
    assert await ask(worker, "next") == "next"
    second = worker.host_pid
    await worker.end()
    assert not os.path.exists(f"/proc/{second}")


async def test_first_descriptors_are_inherited_later_ones_sent(puppet: Make, files: list[int]) -> None:
    worker = puppet()
    files_of_child = json.loads(await worker.request(b"files", [files[0]]))
    assert files_of_child == {"inherited": ["/dev/zero"], "sent": []}
    files_of_child = json.loads(await worker.request(b"files", [files[1]]))
    assert files_of_child["sent"] == ["/dev/full"]
    assert (worker.starts, worker.means.counts) == (1, {})


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM])
async def test_refused_process_is_a_shortage_and_retried(
    puppet: Make, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    now = [time.monotonic() - 21.0]  # all later times are behind the real clock

    def refused(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    worker = puppet()
    monkeypatch.setattr(spawn, "spawn", refused)
    for module in (means, supervisor):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(40):
        error = await fails(ask(worker, "hello"))
        assert (error.own_fault, error.late, error.waiting) == (False, False, False)
        now[0] += 0.5
    assert "could not be started" in worker.means.lacking()
    assert sum(worker.means.counts.values()) == 40
    monkeypatch.undo()
    worker.not_before = 0.0
    assert await ask(worker, "hello") == "hello"


def test_shortage_without_new_refusals_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(means, "time", SimpleNamespace(monotonic=lambda: now[0]))
    own = means.Shortages("this test")
    own.refused(Shortage.MEMORY, "no memory")
    assert (own.short(), own.lacking()) == ("no memory", "")
    for _ in range(4):
        now[0] += 3
        own.refused(Shortage.MEMORY, "no memory")
    assert own.lacking() == "for 12 s no memory"
    now[0] += 6
    assert (own.short(), own.lacking()) == ("", "")


async def test_answer_is_received_without_epoll(puppet: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    worker = puppet()
    monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", refused)
    assert await ask(worker, "late 0.05") == "late 0.05"
    assert worker.means.counts == {Shortage.WATCHES: 1}
    worker.timeout = 0.05
    assert (await fails(ask(worker, "hang"))).late


async def test_error_names_why_a_child_did_not_start(puppet: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    error = await fails(ask(puppet(module="no_such_module"), "hello"))
    assert ("ended with code 1" in str(error), error.own_fault) == (True, False)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python3")
    worker = puppet()
    assert "could not be started: No such file" in str(await fails(ask(worker, "hello")))
    assert worker.host_pid is None


async def test_child_killed_while_idle_is_replaced_at_once(puppet: Make) -> None:
    worker = puppet()
    for turn in range(5):
        await ask(worker, "warm up")
        assert worker.host_pid
        host_pid = worker.host_pid
        os.kill(host_pid, signal.SIGKILL)
        until(lambda pid=host_pid: gone(pid))  # type: ignore[misc]
        assert await ask(worker, "hello") == "hello"
        assert (worker.failures, worker.starts) == (turn + 1, turn + 2)


async def test_pause_grows_with_failures_in_a_row(puppet: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))

    worker = puppet()
    await fails(ask(worker, "exit 1"))
    for wait in (0.05, 0.1, 0.2, 0.4):
        assert not (await fails(ask(worker, "exit 1"))).waiting
        starts, now = worker.starts, now + wait * 0.99
        error = await fails(ask(worker, "exit 1"))
        assert "ended with code 1" in str(error)
        assert (error.waiting, worker.starts) == (True, starts)
        now += wait * 0.02
    worker.failures_in_a_row = 20
    await fails(ask(worker, "exit 1"))
    assert worker.not_before == now + 30.0
    now += 30.0
    assert await ask(worker, "well") == "well"
    assert not (await fails(ask(worker, "exit 1"))).waiting
    assert await ask(worker, "an answer made it forget") == "an answer made it forget"


async def test_answer_of_a_cancelled_request_is_dropped(puppet: Make) -> None:
    worker = puppet()
    await ask(worker, "warm up")
    task = asyncio.create_task(ask(worker, "late 0.1"))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await ask(worker, "mine") == "mine"
    assert worker.failures == 0


async def test_reusable_descriptors_are_not_sent_again(puppet: Make, files: list[int]) -> None:
    worker = puppet()
    asked = asyncio.create_task(fails(worker.request(b"late 600", [files[0]])))
    await asyncio.sleep(0)
    worker.malformed("spoke nonsense")
    assert "spoke nonsense" in str(await asked)
    assert worker.host_pid is None
    assert await ask(worker, "next") == "next"


async def test_cancellation_is_never_lost(puppet: Make) -> None:
    """A cancellation may arrive in the same iteration of the event loop as the answer."""
    worker = puppet()
    answered = 0
    for turns in range(12):
        await ask(worker, "warm up")
        task = asyncio.create_task(ask(worker, "hello"))
        await asyncio.sleep(0)
        # The answer is in the socket before the loop polls it again.
        assert worker._child.channel
        assert select.select([worker._child.channel], [], [], PATIENCE_S)[0]
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert await task == "hello"
            answered += 1
    assert 0 < answered < 12


async def test_requests_take_turns(puppet: Make) -> None:
    worker = puppet()
    asked = [asyncio.create_task(ask(worker, f"late {n / 1000}")) for n in range(20)]
    await asyncio.sleep(0)
    assert len(worker._asked) == 1, "the end of the child would fail others with descriptors, too"
    assert await asyncio.gather(*asked) == [f"late {n / 1000}" for n in range(20)]
    assert worker.starts == 1


async def test_descriptors_do_not_pile_up(puppet: Make) -> None:
    worker = puppet()
    await ask(worker, "warm up")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await fails(ask(worker, "exit 1"))
        worker.not_before = 0.0
        await ask(worker, "hello")
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "as many descriptors as before")


DAEMON = """
import asyncio, os, sys
from resolver.workers.supervisor import WorkerProcess
async def main():
    worker = WorkerProcess("orphan", "puppet", sys.argv[1], timeout=60)
    await worker.request(b"hello")
    print(worker.host_pid, flush=True)
    await worker.request(sys.argv[2].encode())
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["idle", "hanging", "stopped"])
def test_children_die_with_the_daemon(puppet: Make, tmp_path: Path, state: str) -> None:
    puppet()
    order = "hang" if state == "hanging" else "hello"
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(tmp_path), order], stdout=subprocess.PIPE
    ) as daemon:
        assert daemon.stdout is not None
        child = int(daemon.stdout.readline())
        if state == "stopped":
            os.kill(child, signal.SIGSTOP)
        daemon.kill()
        daemon.wait()
        until(lambda: gone(child))
