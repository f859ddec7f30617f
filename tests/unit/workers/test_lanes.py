"""The lanes, with real children that are late, are killed, or raise errors."""

import asyncio
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resolver.base.counters import Shortage
from resolver.base.errors import ProcessGone, RegionRejected, TooSlow, WorkerFailed
from resolver.hami.directory_reads import hold_file
from resolver.hami.region import adopt_region
from resolver.linux.procfs import TooLarge, usage
from resolver.workers import lanes as module
from resolver.workers.lane import ALL, LEASES
from resolver.workers.lanes import Lanes
from tests.fakes.cachefiles import region
from tests.fakes.questions import burn, echo, fail, wait
from tests.patience import PATIENCE_S

FOR_EVER = 600


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lanes]:
    monkeypatch.setattr(module, "LATE_SECONDS", 0.5)
    lanes = Lanes()
    yield lanes
    lanes.close()


@pytest.fixture
def be_patient(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that stops later questions from being late on a busy machine."""

    def be_patient() -> None:
        monkeypatch.setattr(module, "LATE_SECONDS", PATIENCE_S)
        for lane in lanes.workers:
            lane.timeout = PATIENCE_S

    return be_patient


async def test_only_late_container_waits_for_second_lane(
    lanes: Lanes, be_patient: Callable[[], None]
) -> None:
    first, second, *_ = lanes.workers
    assert await lanes.ask("good", "good", echo, "hello") == "hello"
    child = first.host_pid
    late = asyncio.create_task(lanes.ask("slow", "slow", wait, FOR_EVER))
    await asyncio.sleep(0)  # asked first
    be_patient()
    assert await lanes.ask("good", "good", echo, "me too") == "me too"
    with pytest.raises(TooSlow, match="makes the kernel wait"):
        await late
    assert lanes.too_slow() == {"slow"}
    assert first.host_pid != child
    with pytest.raises(TooSlow, match="asked again later"):
        await lanes.ask("slow", "slow", echo, "so soon")
    assert second.host_pid is None
    lanes.late["slow"] = (0.0, 1.0)  # its pause is over
    assert await lanes.ask("slow", "slow", echo, "quick again") == "quick again"
    assert second.host_pid
    assert lanes.too_slow() == frozenset()


@pytest.mark.parametrize("about", ["slow", ALL])
async def test_questions_about_late_container_are_late_together(
    lanes: Lanes, be_patient: Callable[[], None], about: str
) -> None:
    """Each question once killed the lane, and other containers' answers waited for four of them."""
    first, *_ = lanes.workers
    await lanes.ask("good", "good", echo, "begun")
    late = [asyncio.create_task(lanes.ask("slow", about, wait, 0.8)) for _ in range(8)]
    await asyncio.sleep(0)
    be_patient()
    assert await lanes.ask("good", "good", echo, "hello") == "hello"
    assert first.failures == 1
    answers = await asyncio.gather(*late, return_exceptions=True)
    assert {type(answer) for answer in answers[:4]} == {TooSlow}  # these were sent to the lane
    assert {type(answer) for answer in answers[4:]} == ({TooSlow} if about else {str})
    assert first.failures == 1


async def test_the_long_time_for_a_start_is_not_the_first_questions(lanes: Lanes) -> None:
    first, *_ = lanes.workers
    asking = asyncio.create_task(lanes.ask("a", "a", echo, "hello"))
    await asyncio.sleep(0)
    assert first.timer
    assert first.timer.when() <= asyncio.get_running_loop().time() + module.LATE_SECONDS / 2
    assert await asking == "hello"


@pytest.mark.parametrize(("about", "apart"), [(ALL, 2), (LEASES, 3)])
async def test_late_lock_of_the_machine_blames_no_container(
    lanes: Lanes, be_patient: Callable[[], None], about: str, apart: int
) -> None:
    with pytest.raises(TooSlow):
        await lanes.ask("any", about, wait, FOR_EVER)
    be_patient()
    assert lanes.too_slow() == frozenset()
    first, own = lanes.workers[0], lanes.workers[apart]
    for _ in range(2):  # one quick answer doesn't bring the questions back to the first lane
        assert await lanes.ask("any", about, echo, "by its own") == "by its own"
        assert [lane for lane in lanes.workers if lane.host_pid] == [own]
    assert await lanes.ask("any", LEASES if about == ALL else ALL, echo, "by the first") == "by the first"
    assert [lane for lane in lanes.workers if lane.host_pid] == [first, own]
    lanes.tidy()
    assert own.host_pid
    lanes.late[about] = (0.0, 1.0)  # its pause is over
    await lanes.ask("any", about, echo, "the last one by its own")
    assert await lanes.ask("any", about, echo, "by the first") == "by the first"
    assert first.host_pid
    lanes.tidy()
    assert own.host_pid is None


async def test_costly_container_has_the_second_lane(lanes: Lanes) -> None:
    first, second, *_ = lanes.workers
    await lanes.ask("costly", "costly", wait, 0.03)
    assert second.host_pid is None
    asked = [asyncio.create_task(lanes.ask("costly", "costly", wait, 0.03)) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(TooSlow, match="take long"):
        await lanes.ask("good", "costly", echo, "about another")
    assert await lanes.ask("good", "good", echo, "hello") == "hello"
    assert not asked[-1].done()
    assert await asyncio.gather(*asked) == ["waited"] * 8
    lanes.tidy()
    assert second.host_pid
    assert lanes.too_slow() == frozenset()
    lanes.costly["costly"] = ("costly", 0.0)
    lanes.tidy()
    assert second.host_pid is None
    assert first.failures == 0


@pytest.mark.parametrize("about", ["tenant", ALL])
async def test_costly_question_is_given_up_for_second_lane(lanes: Lanes, about: str) -> None:
    """Twelve new containers with questions of 80 ms each once delayed all other containers by a second."""
    first, second, *_ = lanes.workers
    await lanes.ask("good", "good", echo, "begun")
    assert first.host_pid
    used = usage(first.host_pid).cpu_seconds
    await asyncio.gather(*(lanes.ask(f"{n}", about and f"{n}", burn, 0.15) for n in range(8)))
    assert usage(first.host_pid).cpu_seconds - used < 0.6  # of 1.2
    assert lanes.costly.keys() == {f"{n}" for n in range(8)}
    assert second.host_pid
    assert (first.failures, lanes.too_slow()) == (0, frozenset())


async def test_accounts_take_turns_before_a_lane(lanes: Lanes) -> None:
    await lanes.ask("a", "a", echo, "begun")
    lanes.budgets.spend("greedy", 1.0)
    order: list[str] = []

    async def ask(account: str) -> None:
        await lanes.ask(account, account, wait, 0.01)
        order.append(account)

    greedy = [asyncio.create_task(ask("greedy")) for _ in range(20)]
    await asyncio.sleep(0)
    await asyncio.gather(ask("good"), ask("good"))
    assert len(order) < 12
    for task in greedy[-3:]:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)
    await ask("last")
    assert order.count("greedy") == 17


async def test_killed_lane_is_replaced_and_asked_again(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COSTLY_SECONDS", 1.0)
    asked = [asyncio.create_task(lanes.ask("a", "a", wait, 0.1)) for _ in range(3)]
    await lanes.ask("a", "a", echo, "begun")
    for _ in range(2):
        child = lanes.workers[0].host_pid
        assert child
        again = asyncio.create_task(lanes.ask("a", "a", wait, 0.2))
        await asyncio.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        assert await again == "waited"
        assert lanes.workers[0].host_pid != child
    assert await asyncio.gather(*asked) == ["waited"] * 3


async def test_question_at_shutdown_is_cancelled(lanes: Lanes) -> None:
    asked = asyncio.create_task(lanes.ask("a", "a", wait, FOR_EVER))
    await asyncio.sleep(0)
    lanes.close()
    late = asyncio.create_task(lanes.ask("a", "a", echo, "late"))
    answers = await asyncio.gather(asked, late, return_exceptions=True)
    assert [type(answer) for answer in answers] == [asyncio.CancelledError] * 2
    assert [lane.host_pid for lane in lanes.workers] == [None] * 4


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("gone", ProcessGone, "it ended"),
        ("rejected", RegionRejected, "it went"),
        ("kernel", PermissionError, "Permission denied"),
        ("defect", WorkerFailed, "ZeroDivisionError"),
        ("long", TooLarge, "is longer than"),
    ],
)
async def test_an_error_is_raised_where_the_question_was_asked(
    lanes: Lanes, how: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await lanes.ask("a", "a", fail, how)
    assert lanes.workers[0].failures == 0


async def test_full_region_of_sixteen_devices_is_read(lanes: Lanes, tmp_path: Path) -> None:
    uuids = [f"GPU-{device:032}".ljust(95, "x") for device in range(16)]
    path = region(tmp_path / "a.cache", [(pid, pid) for pid in range(1, 1025)], uuids, sm_util=2**63)
    with adopt_region(os.open(path, os.O_RDONLY), str(path)) as full:
        view = await full.read_by(lanes, "a")
    assert (len(view.slots), view.uuids) == (1024, tuple(uuids))


@pytest.mark.parametrize("more", [0, 2], ids=["directory", "file"])
async def test_lane_shortage_blames_no_file(lanes: Lanes, tmp_path: Path, more: int) -> None:
    first, *_ = lanes.workers
    (directory := tmp_path / "c1").mkdir()
    (directory / "a.cache").touch()
    await lanes.ask("a", "a", hold_file, str(tmp_path), "c1", "a.cache")
    assert first.host_pid
    room = len(os.listdir(f"/proc/{first.host_pid}/fd")) + more
    resource.prlimit(first.host_pid, resource.RLIMIT_NOFILE, (room, room))
    with pytest.raises(WorkerFailed, match="Too many open files") as caught:
        await lanes.ask("a", "a", hold_file, str(tmp_path), "c1", "a.cache")
    assert caught.value.waiting
    assert first.means.counts == {Shortage.DESCRIPTORS: 1}
    assert "Too many open files" in first.means.short()
    await lanes.ask("a", "a", echo, "hello")
    assert first.means.short() == ""
