"""The ladder of sources, tested with fake sources that work, fail at once, or fail later."""

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resolver.base import journal as log
from resolver.base.errors import CannotKnow
from resolver.linux.procfs import Procfs
from resolver.pids import ladder
from resolver.pids.bpf_load import BpfUnavailable
from resolver.pids.ladder import Ladder
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from resolver.pids.source import PidSource
from resolver.workers import spawn


class Fickle(ScanSource):
    """A scan under another source's name, which a test can make fail."""

    def __init__(self, name: str) -> None:
        super().__init__(Procfs())
        self.name = name
        self.wrong = ""
        self.short = ""
        self.closed = False

    def trouble(self) -> str:
        return self.wrong

    def shortage(self) -> str:
        return self.short

    def close(self) -> None:
        self.closed = True


class Room:
    """A ladder's surroundings: the sources that can be opened, the one in use, and the events reported."""

    def __init__(self, wanted: str, monkeypatch: pytest.MonkeyPatch, map_size: int = 1024) -> None:
        self.broken: dict[str, str | Exception] = {}
        self.made: Callable[[str], PidSource] = Fickle
        self.blind: set[str] = set()
        self.opened: list[str] = []
        self.source: PidSource | None = None
        self.said: list[tuple[str, dict[str, Any]]] = []
        monkeypatch.setattr(ladder, "find_canary", self.canary)
        self.ladder = Ladder(wanted, Procfs(), map_size, self.use, self.say, self.open)

    def open(self, name: str, _procfs: Procfs, _map_size: int) -> PidSource:
        self.opened.append(name)
        broken = self.broken.get(name)
        if broken is not None:
            raise broken if isinstance(broken, Exception) else CannotKnow(broken)
        return self.made(name)

    async def canary(self, source: PidSource) -> ladder.Canary:
        return ladder.Canary("it is blind" if source.name in self.blind else "", "")

    def use(self, source: PidSource) -> None:
        self.source = source

    def say(self, event: str, **fields: Any) -> None:
        self.said.append((event, fields))

    @property
    def name(self) -> str | None:
        return None if self.source is None else self.source.name

    def in_use(self) -> Fickle:
        assert isinstance(self.source, Fickle)
        return self.source


Rooms = Callable[[str], Room]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Rooms:
    return lambda wanted: Room(wanted, monkeypatch)


async def test_unusable_source_is_skipped_with_reason(room: Rooms) -> None:
    made = room("auto")
    made.broken["bpf"] = "this kernel has no BTF"
    made.blind.add("netlink")
    await made.ladder.start()
    assert made.source is None  # the initial scan stays in use
    assert made.ladder.why_not == {"bpf": "this kernel has no BTF", "netlink": "it is blind"}
    sources = [fields["source"] for event, fields in made.said if event == "source_unavailable"]
    assert sources == ["bpf", "netlink"]


async def test_a_defect_of_a_source_is_a_reason_like_others(room: Rooms) -> None:
    made = room("auto")
    made.broken["bpf"] = KeyError("maps")
    await made.ladder.start()
    assert made.name == "netlink"
    assert made.ladder.why_not["bpf"] == "it failed unexpectedly (KeyError: 'maps'); please report it"


async def test_compiler_output_goes_to_the_debug_log(room: Rooms, capsys: pytest.CaptureFixture[str]) -> None:
    made = room("auto")
    made.broken["bpf"] = BpfUnavailable("it does not compile here", "pidmap.c:7: error")
    for level, shown in (("info", False), ("debug", True)):
        log.setup_logging("json", level)
        made.ladder.present = "scan"
        await made.ladder.start()
        assert ("pidmap.c:7: error" in capsys.readouterr().err) is shown


@pytest.mark.parametrize("wanted", ["bpf", "netlink", "scan"])
async def test_source_by_name_is_required_to_work(wanted: str, room: Rooms) -> None:
    made = room(wanted)
    await made.ladder.start()
    assert (made.name, made.opened) == (wanted, [wanted])
    if wanted != "scan":
        made = room(wanted)
        made.broken[wanted] = "CAP_PERFMON is missing"
        with pytest.raises(
            CannotKnow, match=rf"--source {wanted} does not work here: CAP_PERFMON is missing\. With"
        ):
            await made.ladder.start()


async def test_it_falls_at_once_and_climbs_back_later(room: Rooms) -> None:
    made = room("auto")
    await made.ladder.start()
    made.in_use().wrong = "the map cannot be read"
    made.broken["bpf"] = "still out of order"
    await made.ladder.tend(made.in_use())
    assert made.name == "scan"
    assert made.said[-2:] == [
        ("source_failed", {"source": "bpf", "why": "the map cannot be read"}),
        ("source", {"source": "scan", "not_used": {"bpf": "the map cannot be read"}}),
    ]
    del made.broken["bpf"]
    await made.ladder.tend(made.in_use())
    assert made.name == "scan"  # the next climb is not due yet
    made.ladder.next_climb = 0.0
    await made.ladder.tend(made.in_use())
    assert (made.name, made.ladder.why_not) == ("bpf", {})


async def test_climbs_after_a_fall_become_rarer(room: Rooms) -> None:
    made = room("auto")
    await made.ladder.start()
    made.ladder.used_at -= 3600  # it worked for an hour
    made.broken |= {"bpf": "no BTF", "netlink": "no rights"}
    made.in_use().wrong = "the map cannot be read"
    await made.ladder.tend(made.in_use())
    waits = []
    for _ in range(4):
        waits.append(made.ladder.next_climb - time.monotonic())
        made.ladder.next_climb = 0.0
        await made.ladder.tend(made.in_use())
    assert waits == [pytest.approx(seconds, abs=3) for seconds in (5, 10, 20, 40)]
    del made.broken["bpf"]
    made.ladder.next_climb = 0.0
    await made.ladder.tend(made.in_use())
    made.in_use().wrong = "again"
    await made.ladder.tend(made.in_use())
    assert made.ladder.next_climb - time.monotonic() > 100, (
        "one that fails again at once is not tried at once"
    )


class Stubborn(Fickle):
    """A source that fails, and then raises in one more of its methods."""

    def __init__(self, name: str, breaks: str) -> None:
        super().__init__(name)
        self.breaks = breaks

    def trouble(self) -> str:
        if self.wrong and self.breaks == "trouble":
            raise KeyError("map")
        return self.wrong

    def refreshing(self) -> Iterator[None]:
        if self.breaks == "refresh" and self.wrong:
            raise OSError(errno.EIO, "Input/output error")
        return iter(())

    def counters(self) -> dict[str, int]:
        if self.breaks == "counters":
            raise ValueError("no such counter")
        return {"lost": 3}

    def close(self) -> None:
        if self.breaks == "close":
            raise OSError(errno.EBADF, "Bad file descriptor")
        super().close()


@pytest.mark.parametrize("breaks", ["close", "counters", "trouble"])
async def test_failed_source_cannot_stop_the_fall(room: Rooms, breaks: str) -> None:
    """The real `PidMap` closes the failed source."""
    made = room("auto")
    pidmap = PidMap(Stubborn("bpf", breaks))
    made.ladder = Ladder("auto", Procfs(), 1024, pidmap.use, made.say, made.open)
    made.ladder.present = "bpf"
    assert isinstance(pidmap.source, Stubborn)
    pidmap.source.wrong = "the map cannot be read"
    await made.ladder.tend(pidmap.source)
    assert pidmap.source.name == made.ladder.present == "scan"
    assert made.said[-1] == ("source", {"source": "scan", "not_used": made.ladder.why_not})
    (why,) = made.ladder.why_not.values()
    assert ("KeyError" in why) == (breaks == "trouble")


async def test_one_that_breaks_when_the_canary_is_looked_for_is_left() -> None:
    source = Stubborn("bpf", "refresh")
    source.wrong = "set"
    assert "Input/output error" in (await ladder.find_canary(source)).trouble


async def test_unclosable_source_does_not_block_the_next(room: Rooms) -> None:
    made = room("auto")
    made.blind.add("bpf")
    made.made = lambda name: Stubborn(name, "close")
    await made.ladder.start()
    assert (made.name, made.ladder.why_not) == ("netlink", {"bpf": "it is blind"})


@pytest.mark.parametrize("sign", ["minutes", "losses"])
async def test_blind_source_is_left_at_the_next_canary(room: Rooms, sign: str) -> None:
    made = room("auto")
    await made.ladder.start()
    source, drift = made.in_use(), {"drift_missing": 0}
    source.counters = lambda: drift  # type: ignore[method-assign]
    made.blind.add("bpf")
    await made.ladder.tend(source)
    assert made.name == "bpf"  # the next canary runs in minutes
    if sign == "losses":
        drift["drift_missing"] = 2
    else:
        made.ladder.next_check = 0.0
    await made.ladder.tend(source)
    assert (made.name, made.ladder.why_not) == ("scan", {"bpf": "it is blind"})


async def test_source_by_name_is_restarted_at_intervals(room: Rooms) -> None:
    made = room("netlink")
    await made.ladder.start()
    made.in_use().wrong = "the socket failed"
    for _ in range(3):
        await made.ladder.tend(made.in_use())
    assert made.opened == ["netlink"]
    made.ladder.next_climb = 0.0
    await made.ladder.tend(made.in_use())
    assert made.opened == ["netlink", "netlink"]
    assert made.in_use().wrong == ""


@pytest.mark.parametrize("fault", ["the child ends", "no descriptors"])
async def test_failed_canary_says_nothing_about_the_source(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    if fault == "no descriptors":
        monkeypatch.setattr(spawn, "spawn", refuse)
    else:
        monkeypatch.setattr("sys.executable", "/bin/false")
    source = ScanSource(Procfs())
    canary = await ladder.find_canary(source)
    assert canary.trouble == ""
    assert canary.unmade
    assert len(source) == 0  # the source was never read


async def test_the_real_canary_is_missed_by_a_source_that_sees_nothing() -> None:
    class Blind(ScanSource):
        def refreshing(self) -> Iterator[None]:
            return iter(())

    assert "did not see process" in (await ladder.find_canary(Blind(Procfs()))).trouble


async def test_forking_process_is_searched_again() -> None:
    """A process appears in ``/proc`` before its fork event: the parent may lose the CPU in between."""

    class Late(ScanSource):
        looks = 0

        def candidates(self, ns_pid: int, pidns: int | None = None) -> list[int]:
            self.looks += 1
            return super().candidates(ns_pid, pidns) if self.looks > 1 else []

    assert (await ladder.find_canary(Late(Procfs()))).trouble == ""


def a_node(root: Path, processes: int, pid_max: str) -> Procfs:
    for host_pid in range(1, processes + 1):
        (root / str(host_pid)).mkdir()
    (root / "self").mkdir()
    (root / "sys/kernel").mkdir(parents=True)
    (root / "sys/kernel/pid_max").write_text(pid_max)
    return Procfs(str(root))


@pytest.mark.parametrize(
    ("processes", "pid_max", "map_size", "places"),
    [
        (300, "4194304\n", 0, 450),
        (300, "4194304\n", 1024, 1024),
        (20, "4194304\n", 0, 100),
        (300, "32\n", 0, 32),
        (300, "unreadable\n", 0, 450),
    ],
    ids=["half as many again", "as it is set", "the least", "no more than there can be", "no bound known"],
)
def test_the_map_follows_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, pid_max: str, map_size: int, places: int
) -> None:
    monkeypatch.setattr(ladder, "LEAST_ROOM", 100)
    assert ladder.room(a_node(tmp_path, processes, pid_max), map_size) == places


async def test_full_map_is_reopened_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Room("auto", monkeypatch, map_size=0)
    await made.ladder.start()
    small = made.in_use()
    small.short = "the map is full"
    await made.ladder.tend(small)
    assert made.opened == ["bpf"]  # a peak may pass
    made.broken["bpf"] = "no memory"
    for wait in (120.0, 240.0, 480.0):
        made.ladder.next_growth = 1.0
        await made.ladder.tend(small)
        assert (made.ladder.growth_wait, made.in_use()) == (wait, small)
    del made.broken["bpf"]
    made.ladder.next_growth = 1.0
    await made.ladder.tend(small)
    assert made.in_use() is not small
    await made.ladder.tend(made.in_use())
    assert made.ladder.next_growth == 0.0


async def test_map_of_chosen_size_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Room("auto", monkeypatch, map_size=1024)
    await made.ladder.start()
    made.in_use().short = "the map is full"
    made.ladder.next_growth = 1.0
    await made.ladder.tend(made.in_use())
    assert made.opened == ["bpf"]
