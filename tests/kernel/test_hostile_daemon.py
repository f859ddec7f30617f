"""Everything hostile at once, beside two good containers, under the running daemon: nobody else notices."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from resolver.errors import WorkerFailed
from resolver.workers import slot_writer
from resolver.workers.supervisor import WorkerProcess
from tests.fakes.cachefiles import poke, recorded, write
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.regions import LAYOUTS
from tests.kernel.conftest import (
    ROOT,
    WRITER,
    Line,
    Start,
    cpu_seconds,
    hostpid_of,
    slot_of,
    until,
)

V1_2: Final = LAYOUTS["v1.2"]
assert V1_2.device_util is not None
SM_UTIL: Final = V1_2.device_util + 16


# ---- what a tenant can put into its directory ---------------------------------------------------------------------


def region(place: Path, *changes: tuple[int, str, int | bytes]) -> None:
    write(place, recorded("v1.2"))
    for offset, code, value in changes:
        poke(place, offset, code, value)


def slots(place: Path, *pids: int) -> None:
    """A region whose slots claim these PIDs, all in use. Those that cannot be a dead process's have a load."""
    region(place, (V1_2.proc_num, "i", len(pids)))
    with place.open("r+b") as file:
        for index, pid in enumerate(pids):
            at = V1_2.procs + index * V1_2.slot_size
            file.seek(at)
            file.write(struct.pack("<ii", pid, 0) + bytes(V1_2.slot_size - 8))
            file.seek(at + V1_2.status)
            file.write(struct.pack("<i", 1))
            if pid <= 1:
                file.seek(at + SM_UTIL)
                file.write(struct.pack("<Q", 50))


def unix_socket(place: Path) -> None:
    here = os.open(place.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/{place.name}")  # a socket's path may have 107 bytes only
    os.close(here)


def hard_link(place: Path) -> None:
    region(place)
    place.with_name("second-name").hardlink_to(place)


def a_tebibyte(place: Path) -> None:
    region(place)
    os.truncate(place, 1 << 40)


def ten_thousand(place: Path) -> None:
    for number in range(10_000):
        place.with_name(f"{number}.cache").touch()


#: Each in a directory of its own; the reason that it must be counted under.
HOSTILE: Final[dict[str, tuple[Callable[[Path], object], str]]] = {
    "link-to-file": (lambda place: place.symlink_to("/etc/passwd"), "symlink"),
    "link-to-directory": (lambda place: place.symlink_to("/etc"), "symlink"),
    "fifo": (os.mkfifo, "not_regular"),
    "socket": (unix_socket, "not_regular"),
    "device": (lambda place: os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(5, 0)), "not_regular"),
    "hard-link": (hard_link, "hard_link"),
    "directory": (lambda place: place.mkdir(), "not_regular"),
    "tebibyte": (a_tebibyte, "unknown_size"),
    "ten-thousand": (ten_thousand, "too_many_entries"),
    "proc-num-minus-1": (lambda place: region(place, (V1_2.proc_num, "i", -1)), "bad_header"),
    "proc-num-int-max": (lambda place: region(place, (V1_2.proc_num, "i", 2**31 - 1)), "bad_header"),
    "uuids": (lambda place: region(place, (V1_2.uuids, "96s", b"\xff\x00" + b"\x01" * 94)), "bad_header"),
    "uuid-without-end": (lambda place: region(place, (V1_2.uuids, "96s", b"G" * 96)), "bad_header"),
    "devices": (lambda place: region(place, (V1_2.device_num, "Q", 2**64 - 1)), "bad_header"),
    "magic": (lambda place: region(place, (0, "i", 1)), "not_initialized"),
    "version": (lambda place: region(place, (8, "i", 77)), "unknown_version"),
}


def stamps(directory: Path) -> dict[str, tuple[int, ...]]:
    """What a write, a growth or a new name in a directory would change."""
    found: dict[str, tuple[int, ...]] = {}
    for path in [directory, *directory.iterdir()]:
        info = path.lstat()
        found[path.name] = (info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_nlink, info.st_blocks)
    return found


@contextmanager
def restless(path: Path) -> Iterator[None]:
    """A file that is truncated and regrown all the time, by whoever has it."""
    stop = threading.Event()
    head, tail = recorded("v1.2")[:8192], recorded("v1.2")[V1_2.proc_num :]

    def run() -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        while not stop.is_set():
            for length in (0, 100, 8192, V1_2.size, V1_2.size + 1):
                os.ftruncate(fd, length)
            os.pwrite(fd, head, 0)
            os.pwrite(fd, tail, V1_2.proc_num)
            time.sleep(0.0005)
        os.close(fd)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Good:
    """A container that does nothing wrong, and wants its repairs."""

    def __init__(self, node: Node, name: str) -> None:
        self.node = node
        self.container = node.container(name=name)
        self.parent = self.container.tenant(load=21, guess="none")

    def repaired_once_more(self) -> None:
        """A process comes, its slot is repaired, it goes."""
        ns_pid = self.parent.fork()
        host_pid = self.node.gpu.host_pid(self.container.pidns, ns_pid)
        assert host_pid is not None
        until(lambda: slot_of(self.container, ns_pid).hostpid == host_pid, "a good container's repair")
        os.kill(host_pid, signal.SIGKILL)

    def check(self) -> None:
        assert hostpid_of(self.container, self.parent) == self.parent.host_pid
        until(lambda: self.parent.slot()["sm_util"] == [21], "a good container's load")


def test_everything_at_once(node: Node, start: Start, source: str, request: pytest.FixtureRequest) -> None:
    good = [Good(node, "good-a"), Good(node, "good-b")]
    daemon = start(node, "--interval", "250ms")
    until(lambda: all(hostpid_of(g.container, g.parent) == g.parent.host_pid for g in good), "the beginning")
    wanted = {}
    for name, (make, reason) in HOSTILE.items():
        directory = node.containers_dir / f"bad-uid_{name}"
        directory.mkdir()
        make(directory / "x.cache")
        wanted[directory] = reason
    (node.containers_dir / "bad-uid_link").symlink_to(good[0].container.directory)
    liars = _liars(node, good[1])
    for path in [path for directory in liars for path in directory.glob("*.cache")]:
        request.addfinalizer(path.open("r+b").close)  # what nobody has open may be called dead
    before = {directory: stamps(directory) for directory in [*wanted, *liars]}
    (node.containers_dir / "bad-uid_restless").mkdir()
    with restless(node.containers_dir / "bad-uid_restless" / "x.cache"):
        for _ in range(5):
            for one in good:
                one.repaired_once_more()
    for directory, reason in wanted.items():
        until(lambda d=directory, r=reason: _refused(daemon.lines, d, r), f"{directory.name}: {reason}")  # type: ignore[misc]
    until(
        lambda: _refused(daemon.lines, node.containers_dir / "bad-uid_link", "symlink"),
        "the linked directory",
    )
    for one in good:
        one.check()
    assert {directory: stamps(directory) for directory in before} == before
    assert [line for line in daemon.said("repair") if "good" not in str(line["container"])] == []
    unresolved = _unresolved(node)
    for pid in (0, -1, -(2**31)):
        assert unresolved[str(pid)] == {"invalid_pid"}
    for pid in (1, good[1].parent.ns_pid, good[1].parent.host_pid):
        assert unresolved[str(pid)] == {"no_such_process"}
    daemon.stop()
    counters = daemon.counters()
    for reason in set(wanted.values()):
        assert counters[f"rejected_{reason}"] >= 1


def _liars(node: Node, victim: Good) -> list[Path]:
    """Containers whose slots claim processes that are not theirs; returns the directories."""
    # In the victim's own PID namespace, as another container of its pod: the PID is there, and it is not his.
    beside = node.container(
        victim.container.pod_uid, "liar-beside", pid_namespace=victim.container, watcher=False
    )
    slots(beside.cache, victim.parent.ns_pid, 1)
    # With a PID namespace of its own, where nobody has that number.
    alone = node.container(name="liar-alone", watcher=False)
    slots(alone.cache, 4, 0, -1, 2**31 - 1, -(2**31), os.getpid())
    # A directory without a container.
    nobody = node.containers_dir / "bad-uid_nobody"
    nobody.mkdir()
    slots(nobody / "x.cache", 1, victim.parent.ns_pid, victim.parent.host_pid)
    return [beside.directory, alone.directory, nobody]


def _refused(lines: list[dict[str, object]], directory: Path, reason: str) -> bool:
    return any(
        line["event"] == "region_rejected"
        and line["reason"] == reason
        and str(line["path"]).startswith((f"{directory}/", str(directory)))
        for line in list(lines)
    )


def _unresolved(node: Node) -> dict[str, set[str]]:
    """What one dry pass says is unresolved: reasons by PID."""
    command = [sys.executable, "-m", "resolver", "run", "--once", "--dry-run"]
    done = subprocess.run(
        [*command, "--containers-dir", str(node.containers_dir)],
        cwd=ROOT,
        env=node.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    found: dict[str, set[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("unresolved: "):
            head, reason = line.rsplit(": ", 1)
            found.setdefault(head.rsplit(" ", 1)[1], set()).add(reason)
    return found


# ---- many slots, and ever new ones --------------------------------------------------------------------------------


def test_a_thousand_claims_and_a_flood_of_new_ones_cost_a_bounded_share(node: Node, start: Start) -> None:
    good = Good(node, "good")
    flooded = node.container(name="flooded", watcher=False)
    honest = flooded.tenant(guess="none")
    stop = threading.Event()

    def flood() -> None:
        """A thousand new PIDs each 10 ms, behind the honest tenant's slot."""
        fd = os.open(flooded.cache, os.O_RDWR)
        first = 10_000
        while not stop.is_set():
            first = first + 1023 if first < 4_000_000 else 10_000
            for index in range(1, 1024):
                at = V1_2.procs + index * V1_2.slot_size
                os.pwrite(fd, struct.pack("<ii", first + index, 0), at)
                os.pwrite(fd, struct.pack("<i", 1), at + V1_2.status)
            os.pwrite(fd, struct.pack("<i", 1024), V1_2.proc_num)
            stop.wait(0.01)
        os.close(fd)

    daemon = start(node, "--interval", "250ms")
    until(lambda: hostpid_of(good.container, good.parent) == good.parent.host_pid, "the beginning")
    thread = threading.Thread(target=flood)
    thread.start()
    try:
        until(lambda: hostpid_of(flooded, honest) == honest.host_pid, "the honest tenant's repair")
        spent, began = cpu_seconds(daemon.process.pid), time.monotonic()
        while time.monotonic() - began < 4:
            good.repaired_once_more()
        share = (cpu_seconds(daemon.process.pid) - spent) / (time.monotonic() - began)
    finally:
        stop.set()
        thread.join()
    print(f"the daemon used {share:.1%} of a core under a flood of 1,023 new claims each 10 ms")
    assert share < 0.6
    good.check()
    for slot in flooded.region().slots[1:]:
        assert slot.hostpid == 0


# ---- the writer's own dangers -------------------------------------------------------------------------------------


def test_a_file_that_is_cut_under_the_writer_kills_the_writer_only(tmp_path: Path) -> None:
    """Straight at the child: orders without end for a file that loses and regains its pages."""
    path = tmp_path / "region"
    region(path)

    async def hammer() -> WorkerFailed | None:
        child = WorkerProcess("slot writer", "resolver.workers.slot_writer", timeout=60)
        fd = os.open(path, os.O_RDONLY)
        at = V1_2.procs + 900 * V1_2.slot_size
        message = slot_writer.HEAD.pack(V1_2.size + 1, 1) + slot_writer.ORDER.pack(-1, 0, at, 1, at, 1, 1)
        deadline = time.monotonic() + 60
        try:
            while time.monotonic() < deadline:
                await child.request(message, [fd])
        except WorkerFailed as error:
            return error
        finally:
            child.stop()
            os.close(fd)
        return None

    with _cut(path):
        error = asyncio.run(hammer())
    assert error is not None, "it lived"
    assert error.own_fault
    assert "SIGBUS" in str(error)


@contextmanager
def _cut(path: Path) -> Iterator[None]:
    script = """
        import os, sys
        fd = os.open(sys.argv[1], os.O_RDWR)
        size = os.fstat(fd).st_size
        while True:
            os.ftruncate(fd, 8192)
            os.ftruncate(fd, size)
            for _ in range(300):
                pass
    """
    process = subprocess.Popen([sys.executable, "-I", "-c", textwrap.dedent(script), str(path)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


CUTTER = """
    import os, struct, sys, time
    path, procs, size, proc_num, status, sm_util, first, members = sys.argv[1], *map(int, sys.argv[2:])
    fd = os.open(path, os.O_RDWR)
    length = os.fstat(fd).st_size
    for index in range(first, first + members):
        at = procs + index * size
        os.pwrite(fd, struct.pack("<ii", 20000 + index, 0), at)  # nobody: to be set to 0, again and again
        os.pwrite(fd, struct.pack("<i", 1), at + status)
        os.pwrite(fd, struct.pack("<Q", 50), at + sm_util)
    os.pwrite(fd, struct.pack("<i", first + members), proc_num)
    tail = os.pread(fd, 8, proc_num)
    slots = os.pread(fd, members * size, procs + first * size)
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        os.ftruncate(fd, 8192)
        for _ in range(200):
            pass
        os.ftruncate(fd, length)
        os.pwrite(fd, slots, procs + first * size)
        os.pwrite(fd, tail, proc_num)
        time.sleep(0.001)
"""


def test_a_tenant_that_cuts_its_file_is_left_alone_for_a_while(node: Node, start: Start) -> None:
    good = Good(node, "good")
    cut = node.container(name="cut", watcher=False)
    cut.tenant(guess="none").stop()
    numbers = [V1_2.procs, V1_2.slot_size, V1_2.proc_num, V1_2.status, SM_UTIL, 200, 100]
    path = f"/usr/local/vgpu/{cut.cache_name}"
    script = textwrap.dedent(CUTTER)
    cutter = cut.spawn([sys.executable, "-I", "-c", script, path, *map(str, numbers)])
    assert cutter.read_line() == "ready"
    daemon = start(node, "--interval", "10ms", "--hostpid-namespace", "host")
    daemon.wait_for("dead_slots_zeroed", container=cut.directory.name)
    cutter.write_line("go")
    seen: list[Line] = []
    deadline = time.monotonic() + 60
    while not seen and time.monotonic() < deadline:
        good.repaired_once_more()
        seen = [line for line in daemon.said("region_quarantined") if "SIGBUS" in line["why"]]
    assert seen, daemon.tail()
    assert seen[0]["container"] == cut.directory.name
    assert seen[0]["seconds"] >= 10
    for _ in range(3):
        good.repaired_once_more()
    good.check()
    assert daemon.process.poll() is None


def test_a_writer_that_hangs_is_killed_and_the_next_one_tries_again(node: Node, start: Start) -> None:
    """Stopped in the middle of a request: nobody knows whether the file or the machine is to blame."""
    good, other = Good(node, "good"), node.container(name="other", watcher=False)
    first: Tenant = other.tenant(guess="none")
    daemon = start(node, "--interval", "100ms")

    def repaired() -> set[int]:
        return {int(line["after"]) for line in daemon.said("repair")}

    until(lambda: {first.host_pid, good.parent.host_pid} <= repaired(), "the beginning")
    for _ in range(3):
        stuck = daemon.child(WRITER)
        os.kill(stuck, signal.SIGSTOP)
        another = other.tenant(guess="none")
        until(lambda: another.host_pid in repaired(), "the next writer's answer")  # noqa: B023 - it is over
        assert hostpid_of(other, another) == another.host_pid
        assert not Path(f"/proc/{stuck}").exists()
    until(lambda: len(daemon.said("writer_failed")) >= 3, "three failures of the writer")
    assert all("did not answer within 1 s" in line["why"] for line in daemon.said("writer_failed"))
    assert daemon.said("region_quarantined") == []
    for _ in range(5):
        good.repaired_once_more()
    good.check()
