"""The sources in the running daemon: the best is taken, one that fails is left, and no repair waits for either."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resolver.config import HostpidNamespace, Settings
from resolver.daemon.service import Service
from resolver.log import journal as log
from resolver.pids import bpf_map
from resolver.pids.bpf import Mapped
from tests.bench.crowd import crowd, host_pids, make_regions
from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.fakes.regions import read_file
from tests.kernel.conftest import Daemon, Start, hand_on, hostpid_of, runs, until
from tests.kernel.test_capabilities import HELD
from tests.patience import PATIENCE_S

FAST = ("--interval", "50ms", "--nvml-interval", "200ms")
AUTO, BPF, NETLINK = ("--source", "auto"), ("--source", "bpf"), ("--source", "netlink")
NO_BPF = "-all,+sys_ptrace,+dac_override,+kill"
NO_BTF = "bpf_map.start.__kwdefaults__['btf'] = '/sys/kernel/btf/none'"
#: Without the right to enter the host's network namespace, nor to load a program.
ALONE = ("unshare", "--net", "setpriv", "--inh-caps", "-all", "--bounding-set", NO_BPF)

SAYS = {
    "no bcc": "bcc is not installed: apt-get install python3-bpfcc",
    "no BTF": "this kernel has no BTF: /sys/kernel/btf/none cannot be read",
    "no capability": "CAP_BPF and CAP_PERFMON are missing: run as root, or give both",
    "no network": "the host's network namespace could not be entered (EPERM): ",
}


def patched(*lines: str) -> tuple[str, ...]:
    """A wrapper that runs the daemon after these lines: what a test changes, it changes inside of the process."""
    code = f"""
        import sys
        from resolver.pids import bpf_map
        from resolver.pids import bpf_load
        from resolver.pids import netlink
        {"; ".join(lines)}
        from resolver.cli import main
        sys.argv = ["resolver", *sys.argv[4:]]
        sys.exit(main())
    """
    return (sys.executable, "-c", textwrap.dedent(code))


def bare_python(place: Path) -> str:
    """A Python of its own, which has no bcc."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "bare"], check=True)
    return f"bpf_map.default_pythons = lambda: ({str(place / 'bare/bin/python')!r},)"


def ways(place: Path) -> dict[str, tuple[str, ...]]:
    """Each reason for which the kernel's map cannot be had, as a wrapper."""
    return {
        "no bcc": patched(bare_python(place)),
        "no BTF": patched(NO_BTF),
        "no capability": ("setpriv", "--inh-caps", "-all", "--bounding-set", NO_BPF),
    }


def descendants(host_pid: int) -> set[int]:
    """Its children of any of its threads, and theirs."""
    found: set[int] = set()
    try:
        threads = os.listdir(f"/proc/{host_pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return found
    for tid in threads:
        try:
            text = Path(f"/proc/{host_pid}/task/{tid}/children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children = set(map(int, text.split()))
        found |= children.union(*map(descendants, children))
    return found


@pytest.fixture
def orphans() -> Iterator[Callable[[], set[int]]]:
    """Which processes that this test's programs left behind still run: they become children of this process."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    before = descendants(os.getpid())
    yield lambda: {host_pid for host_pid in descendants(os.getpid()) - before if runs(host_pid)}
    libc.prctl(36, 0)


# ---- the best that works ------------------------------------------------------------------------------------------


def test_no_repair_waits_for_the_map(node: Node, start: Start, tmp_path: Path) -> None:
    container, go = node.container(), tmp_path / "go"
    tenant = container.tenant(guess="none")
    daemon = start(node, *FAST, *AUTO, wrapper=(sys.executable, "-c", HELD, str(go)))
    daemon.wait_for("repair")
    assert daemon.said("source") == []
    go.touch()
    source = daemon.wait_for("source")
    assert (source["source"], source["not_used"]) == ("bpf", {})
    assert hostpid_of(container, tenant) == tenant.host_pid


@pytest.mark.parametrize("why", ["no bcc", "no BTF", "no capability"])
def test_without_the_map_the_connector_is_taken(node: Node, start: Start, tmp_path: Path, why: str) -> None:
    container = node.container()
    daemon = start(node, *FAST, *AUTO, wrapper=ways(tmp_path)[why])
    source = daemon.wait_for("source")
    assert source["source"] == "netlink"
    assert source["not_used"].keys() == {"bpf"}
    assert source["not_used"]["bpf"].startswith(SAYS[why])
    (refused,) = daemon.said("source_unavailable")
    assert refused["why"] == source["not_used"]["bpf"]
    tenant = container.tenant(guess="none")
    until(lambda: hostpid_of(container, tenant) == tenant.host_pid, "a repair by it")


def test_the_hosts_network_namespace_is_reached_from_another(node: Node, start: Start) -> None:
    container = node.container()
    daemon = start(node, *FAST, *AUTO, wrapper=("unshare", "--net", *patched(NO_BTF)))
    assert daemon.wait_for("source")["source"] == "netlink"
    tenant = container.tenant(guess="none")
    until(lambda: hostpid_of(container, tenant) == tenant.host_pid, "a repair by it")


def test_where_nothing_else_works_it_stays_with_the_scan(node: Node, start: Start) -> None:
    container = node.container()
    tenant = container.tenant(guess="none")
    daemon = start(node, *FAST, *AUTO, wrapper=ALONE)
    source = daemon.wait_for("source")
    assert source["source"] == "scan"
    assert source["not_used"]["bpf"].startswith(SAYS["no capability"])
    assert source["not_used"]["netlink"].startswith(SAYS["no network"])
    assert "hostNetwork: true" in source["not_used"]["netlink"]
    until(lambda: hostpid_of(container, tenant) == tenant.host_pid, "a repair by it")
    assert len(daemon.said("source_unavailable")) == 2


# ---- one that was asked for ---------------------------------------------------------------------------------------


def refusal(daemon: Daemon) -> str:
    """The one sentence with which it ended."""
    assert daemon.wait() == 4
    (sentence,) = daemon.other_output
    assert daemon.said("started") == []
    assert {line["event"] for line in daemon.lines} <= {"source_unavailable"}
    return sentence


@pytest.mark.parametrize("why", ["no bcc", "no BTF", "no capability"])
def test_a_map_that_was_asked_for_and_cannot_be_had_is_an_error(
    node: Node, start: Start, tmp_path: Path, orphans: Callable[[], set[int]], why: str
) -> None:
    sentence = refusal(start(node, *FAST, *BPF, wrapper=ways(tmp_path)[why]))
    assert sentence.startswith(f"resolver run: --source bpf does not work here: {SAYS[why]}")
    assert sentence.endswith("With --source auto the next best source is taken")
    assert orphans() == set()


def test_a_connector_that_was_asked_for_and_cannot_be_had_is_an_error(
    node: Node, start: Start, orphans: Callable[[], set[int]]
) -> None:
    sentence = refusal(start(node, *FAST, *NETLINK, wrapper=ALONE))
    assert sentence.startswith(f"resolver run: --source netlink does not work here: {SAYS['no network']}")
    assert orphans() == set()


@pytest.mark.parametrize("source", ["auto", "bpf", "netlink", "scan"])
def test_outside_of_the_hosts_pid_namespace_nothing_is_known(
    node: Node, start: Start, orphans: Callable[[], set[int]], source: str
) -> None:
    wrapper = ("unshare", "--pid", "--fork", "--mount-proc")
    sentence = refusal(start(node, *FAST, "--source", source, wrapper=wrapper))
    assert "not in the host's PID namespace" in sentence
    assert "hostPID: true" in sentence
    assert orphans() == set()


def test_a_defect_of_one_source_ends_nothing(node: Node, start: Start) -> None:
    container = node.container()
    tenant = container.tenant(guess="none")
    defect = "bpf_map.start = lambda *_, **__: 1 // 0"
    daemon = start(node, *FAST, *AUTO, wrapper=patched(defect))
    source = daemon.wait_for("source")
    assert source["source"] == "netlink"
    assert source["not_used"]["bpf"].startswith("it failed unexpectedly (ZeroDivisionError: ")
    until(lambda: hostpid_of(container, tenant) == tenant.host_pid, "the repair")


@pytest.mark.parametrize("source", ["auto", "bpf"])
def test_it_can_be_ended_while_the_map_is_made(
    node: Node, start: Start, tmp_path: Path, orphans: Callable[[], set[int]], source: str
) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    wrapper = patched(f"bpf_map.default_pythons = lambda: ({str(slow)!r},)")
    daemon = start(node, *FAST, "--source", source, wrapper=wrapper)
    # The loader asks for its end with the daemon's itself; this stand-in cannot, so it is ended here.
    until(lambda: _named(daemon, "sleep"), "the loader")
    loaders = _named(daemon, "sleep")
    assert daemon.stop() == 0
    for loader in loaders:
        os.kill(loader, signal.SIGKILL)
    until(lambda: orphans() == set(), "the end of all")


def _named(daemon: Daemon, name: str) -> list[int]:
    found = []
    for host_pid in descendants(daemon.process.pid):
        try:
            if Path(f"/proc/{host_pid}/comm").read_text().strip() == name:
                found.append(host_pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


# ---- killed -------------------------------------------------------------------------------------------------------


def in_the_kernel(host_pid: int) -> dict[str, set[int]]:
    """Ids of the programs, maps and links that a process holds."""
    found: dict[str, set[int]] = {"prog": set(), "map": set(), "link": set()}
    for path in Path(f"/proc/{host_pid}/fdinfo").iterdir():
        try:
            text = path.read_text()
        except FileNotFoundError:
            continue  # some other descriptor, closed meanwhile
        for kind in ("link", "prog", "map"):
            number = re.search(rf"^{kind}_id:\t(\d+)$", text, re.MULTILINE)
            if number:
                found[kind].add(int(number[1]))
                break
    return found


def listed() -> dict[str, set[int]]:
    """Ids of all programs, maps and links there are, by bpftool's word."""
    return {kind: _ids(kind) for kind in ("prog", "map", "link")}


def _ids(kind: str) -> set[int]:
    """Asked again where bpftool gives up, since one went away between its name and its description."""
    for _ in range(20):
        done = subprocess.run(["bpftool", "-j", kind, "list"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return {each["id"] for each in json.loads(done.stdout or "[]")}
    pytest.fail(f"bpftool {kind} list: {done.stderr}{done.stdout}", pytrace=False)


def test_killed_it_leaves_nothing_in_the_kernel(
    node: Node, start: Start, orphans: Callable[[], set[int]]
) -> None:
    before = listed()
    daemon = start(node, *FAST, *BPF)
    daemon.wait_for("source", source="bpf")
    ours, during = in_the_kernel(daemon.process.pid), listed()
    assert {kind: len(ids) for kind, ids in ours.items()} == {"prog": 4, "map": len(ours["map"]), "link": 4}
    assert len(ours["map"]) >= 4
    for kind, ids in ours.items():
        assert ids <= during[kind]
        assert ids.isdisjoint(before[kind])
    daemon.kill()

    def left() -> set[int]:
        after = listed()
        return set().union(*(ours[kind] & after[kind] for kind in ours))

    until(lambda: not left(), "the end of every program, map and link of it")
    assert orphans() == set()


def test_killed_while_the_map_is_made_it_leaves_no_loader(
    node: Node, start: Start, orphans: Callable[[], set[int]]
) -> None:
    """What it holds in the kernel goes with its last process: nothing is pinned."""
    for wait in (0.1, 0.25, 0.4, 0.55):
        daemon = start(node, *FAST, *BPF, anew=True)
        time.sleep(wait)
        daemon.kill()
        until(lambda: orphans() == set(), "the end of the loader")
    assert not any(Path("/sys/fs/bpf").glob("**/*resolver*"))


# ---- one that fails while it runs ---------------------------------------------------------------------------------


class Room:
    """A daemon within this process, so that what it holds can be broken."""

    def __init__(
        self, node: Node, monkeypatch: pytest.MonkeyPatch, program: Path | None = None, **settings: Any
    ) -> None:
        if program is not None:
            hand_on(program, node.root / program.name)
        for name, value in node.environment().items():
            monkeypatch.setenv(name, value)
        log.setup_logging("json", "error")
        values = {"interval": 0.05, "nvml_interval": 0.2, "containers_dir": (str(node.containers_dir),)}
        values |= {"run_dir": str(node.root)}
        self.service = Service(Settings(**{**values, **settings}))
        # The writer shares a busy machine with us; after some failures in a row nobody asks it for half a minute.
        self.service.repairer.writing.worker.timeout = PATIENCE_S
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.service.ladder._say = lambda event, **fields: self.said.append((event, fields))

    @property
    def source(self) -> str:
        return self.service.pidmap.source.name

    def play(self, scene: Callable[[], Awaitable[None]]) -> None:
        """Run the daemon for as long as the scene takes."""

        async def both() -> None:
            running = asyncio.create_task(self.service.run())
            try:
                await scene()
            finally:
                self.service.stop()
                await running

        asyncio.run(both())
        assert self.service.counters["internal_errors"] == 0

    async def repaired_once_more(self, container: Container) -> float:
        tenant = container.tenant(guess="none")
        return await soon(lambda: hostpid_of(container, tenant) == tenant.host_pid, "a repair")


async def soon(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> float:
    """Like `until`, while the daemon in this process goes on."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"within {timeout_s} s not seen: {what}"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


def default(monkeypatch: pytest.MonkeyPatch, function: Callable[..., object], **values: object) -> None:
    """Give a function other default values."""
    for name, value in values.items():
        monkeypatch.setitem(getattr(function, "__kwdefaults__"), name, value)  # noqa: B009 - mypy has it optional


def break_down(source: Mapped) -> None:
    """Every descriptor of a map becomes one of something else, as if the kernel had taken the map away."""
    nothing = os.open("/dev/null", os.O_RDONLY)
    for fd in source.bpf._loaded.maps.values():
        os.dup2(nothing, fd)
    os.close(nothing)


def test_a_map_that_fails_is_left_at_once_and_taken_again_later(
    node: Node, monkeypatch: pytest.MonkeyPatch, program: Path
) -> None:
    # NVML, and with it the usual look at the source, comes by once in an hour.
    room = Room(node, monkeypatch, program, nvml_interval=3600.0)
    container = node.container()

    async def scene() -> None:
        await room.repaired_once_more(container)
        await soon(lambda: room.source == "bpf", "the map")
        await room.repaired_once_more(container)
        failing = room.service.pidmap.source
        assert isinstance(failing, Mapped)
        break_down(failing)
        print(f"a repair with a broken map: {await room.repaired_once_more(container):.3f} s")
        print(f"the fall: {await soon(lambda: room.source == 'netlink', 'the fall'):.3f} s")
        assert failing.bpf._loaded.maps == {}
        await room.repaired_once_more(container)
        snapshot = room.service.snapshots.take()
        assert snapshot.source == "netlink"
        assert snapshot.sources_not_used["bpf"].startswith("the map cannot be read: Invalid argument")
        assert ("source_failed", {"source": "bpf", "why": snapshot.sources_not_used["bpf"]}) in room.said
        room.service.ladder._next_climb = 0.0
        room.service.source.failed.set()
        await soon(lambda: room.source == "bpf", "the climb")
        await room.repaired_once_more(container)
        await soon(lambda: room.service.snapshots.shown().source == "bpf", "its picture")
        assert room.service.snapshots.take().sources_not_used == {}

    room.play(scene)


def test_a_connector_that_never_keeps_up_is_left_for_the_scan(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    default(monkeypatch, bpf_map.start, btf="/sys/kernel/btf/none")
    room = Room(node, monkeypatch)
    container = node.container()
    storm = "while :; do for i in 1 2 3 4 5 6 7 8 9; do /bin/true & done; wait; done"

    async def scene() -> None:
        await soon(lambda: room.source == "netlink", "the connector")
        room.service.pidmap.source.lister._stream.grow_buffer(4096)  # type: ignore[attr-defined]
        with subprocess.Popen(["/bin/sh", "-c", storm], process_group=0) as flood:
            try:
                # Every look finds that the buffer overflowed since the last one.
                while room.source == "netlink":
                    room.service.pidmap.refresh(unhurried=False)
                    await asyncio.sleep(0.1)
                assert room.source == "scan"
                await room.repaired_once_more(container)
            finally:
                os.killpg(flood.pid, signal.SIGKILL)
        why = room.service.snapshots.take().sources_not_used
        full = re.fullmatch(
            r"the buffer for process events was full (\d+) refreshes in a row", why["netlink"]
        )
        assert full, why
        assert int(full[1]) >= 5
        assert why["bpf"].startswith(SAYS["no BTF"])
        assert room.service.pidmap.counters()["overruns"] >= 5  # kept, though that source is closed
        room.service.ladder._next_climb = 0.0
        await soon(lambda: room.source == "netlink", "the climb")
        await room.repaired_once_more(container)

    room.play(scene)


def test_a_connector_whose_socket_fails_is_left_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    default(monkeypatch, bpf_map.start, btf="/sys/kernel/btf/none")
    room = Room(node, monkeypatch, nvml_interval=3600.0)
    container = node.container()

    async def scene() -> None:
        await soon(lambda: room.source == "netlink", "the connector")
        lister = room.service.pidmap.source.lister  # type: ignore[attr-defined]
        nothing = os.open("/dev/null", os.O_RDONLY)
        os.dup2(nothing, lister.fileno())
        os.close(nothing)
        await soon(lambda: room.source == "scan", "the fall")
        await room.repaired_once_more(container)
        assert (
            room.service.snapshots.take()
            .sources_not_used["netlink"]
            .startswith("the proc connector socket failed: ")
        )

    room.play(scene)


def test_a_map_that_was_asked_for_is_made_anew(
    node: Node, monkeypatch: pytest.MonkeyPatch, program: Path
) -> None:
    room = Room(node, monkeypatch, program, source="bpf")
    container = node.container()

    async def scene() -> None:
        await soon(lambda: room.source == "bpf", "the map")
        room.service.ladder._next_climb = 0.0
        first = room.service.pidmap.source
        assert isinstance(first, Mapped)
        break_down(first)
        await room.repaired_once_more(container)
        await soon(lambda: room.service.pidmap.source is not first, "another map")
        assert room.source == "bpf"
        await room.repaired_once_more(container)

    room.play(scene)


# ---- too small ----------------------------------------------------------------------------------------------------


def test_a_map_too_small_for_the_node_is_said_and_every_repair_is_right(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two numbers each: 3,500, where the map has 2,048 slots and 1,024 entries beside them.
    containers, each = 14, 125
    regions = node.root / "crowd"
    make_regions(regions, containers, each)
    settings: dict[str, Any] = {
        "containers_dir": (str(regions),),
        "hostpid_namespace": HostpidNamespace.HOST,
    }
    room = Room(node, monkeypatch, source="bpf", map_size=1024, **settings)

    def slots(number: int) -> dict[tuple[int, int], int]:
        (path,) = (regions / f"pod-{number}_main").iterdir()
        return {(number, slot.pid): slot.hostpid for slot in read_file(path).slots}

    waiting = list(range(containers))

    def repaired() -> bool:
        """One region at a look: the daemon shares this loop, and reading them all would leave it no time."""
        if waiting and all(slots(waiting[-1]).values()):
            waiting.pop()
        return not waiting

    with crowd(containers, each, regions) as starter:
        truth = {
            (number, ns_pid): host_pid
            for number, pids in host_pids(starter).items()
            for ns_pid, host_pid in enumerate(pids, 1)
        }
        assert len(truth) == containers * each

        async def scene() -> None:
            took = await soon(repaired, "every repair")
            print(f"{len(truth)} repairs with a map for 1024: {took:.2f} s")
            assert {
                of: hostpid for number in range(containers) for of, hostpid in slots(number).items()
            } == truth
            snapshot = room.service.snapshots.take()
            assert snapshot.source == "bpf"
            assert snapshot.source_counters["full"] > 200, snapshot.source_counters
            assert "raise --map-size" in snapshot.incomplete
            assert list(snapshot.unresolved()) == []

        room.play(scene)


def test_a_map_too_small_is_in_the_log(node: Node, start: Start) -> None:
    with crowd(11, 100):
        daemon = start(node, *FAST, *BPF, "--map-size", "1024")
        line = daemon.wait_for("source_incomplete", source="bpf")
        assert line["why"].startswith(
            "the kernel's map does not hold every process, so /proc is scanned beside it"
        )
        container = node.container()
        tenant = container.tenant(guess="none")
        until(lambda: hostpid_of(container, tenant) == tenant.host_pid, "a repair all the same")
        assert len(daemon.said("source_incomplete")) == 1
