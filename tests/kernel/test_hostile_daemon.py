"""Hostile files of every kind at once, beside two good containers, which the daemon serves as before."""

import contextlib
import os
import signal
import socket
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

import pytest

from tests.bench.hostile import Good
from tests.fakes.cachefiles import poke, recorded, write
from tests.fakes.command import run
from tests.fakes.daemon import Daemon
from tests.fakes.halted import halted_when_it_maps, wait_until_halted
from tests.fakes.node import Node
from tests.fakes.process import Tenant, watched
from tests.fakes.regions import LAYOUTS
from tests.kernel.conftest import WRITER, Start, command, write_hostpid
from tests.kernel.rights import patched
from tests.kernel.serving import answer
from tests.patience import PATIENCE_S, until

V1_2: Final = LAYOUTS["v1.2"]
assert V1_2.device_util is not None
SM_UTIL: Final = V1_2.device_util + 16


@contextmanager
def unseen(place: Path) -> Iterator[Path]:
    """Yield another name to make the file under: the daemon would clear dead slots of a valid one."""
    new = place.with_name("new")
    yield new
    new.rename(place)


def region(place: Path, *changes: tuple[int, str, int | bytes]) -> None:
    with unseen(place) as new:
        write(new, recorded("v1.2"))
        for offset, code, value in changes:
            poke(new, offset, code, value)


def slots(place: Path, *pids: int) -> BinaryIO:
    """Write a region whose slots claim these PIDs; only PIDs that can't be a dead process's have a load.

    The file is open before it has its name: slots of a file that no process has open may be judged dead.
    """
    sound = place.with_name("sound")
    region(sound, (V1_2.proc_num, "i", len(pids)))
    file = sound.open("r+b", buffering=0)
    # No load above these slots, because the daemon sets such copies to 0.
    os.pwrite(file.fileno(), bytes(V1_2.proc_num - V1_2.procs), V1_2.procs)
    for index, pid in enumerate(pids):
        at = V1_2.procs + index * V1_2.slot_size
        os.pwrite(file.fileno(), struct.pack("<ii", pid, 0) + bytes(V1_2.slot_size - 8), at)
        os.pwrite(file.fileno(), struct.pack("<i", 1), at + V1_2.status)
        if pid == 1 or pid < 0:  # the load of PID 0 would be zeroed
            os.pwrite(file.fileno(), struct.pack("<Q", 50), at + SM_UTIL)
    sound.rename(place)
    return file


def unix_socket(place: Path) -> None:
    here = os.open(place.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/{place.name}")  # a socket's path may have 107 bytes only
    os.close(here)


def hard_link(place: Path) -> None:
    region(place.with_name("second-name"))
    place.hardlink_to(place.with_name("second-name"))


def a_tebibyte(place: Path) -> None:
    with unseen(place) as new:
        write(new, recorded("v1.2"))
        os.truncate(new, 1 << 40)


def ten_thousand(place: Path) -> None:
    for number in range(10_000):
        place.with_name(f"{number}.cache").touch()


def named(name: str | bytes) -> Callable[[Path], object]:

    def make(place: Path) -> None:
        new = place.with_name("new")
        write(new, recorded("v1.2"))
        new.rename(place.with_name(os.fsdecode(name)))

    return make


def mounted_over(place: Path) -> None:
    """Mount another directory of the same file system over it, with the same device number."""
    elsewhere = place.parents[2] / "elsewhere" / place.name
    if not elsewhere.exists():
        write(elsewhere, recorded("v1.2"))
    if place.parent.name.endswith("-file"):
        place.touch()
    else:
        elsewhere, place = elsewhere.parent, place.parent
    subprocess.run(["mount", "--bind", elsewhere, place], check=True)


#: By the name of its directory: how the file is made, and the reason for its rejection.
HOSTILE: Final[dict[str, tuple[Callable[[Path], object], str]]] = {
    "link-to-file": (lambda place: place.symlink_to("/etc/passwd"), "symlink"),
    "link-to-directory": (lambda place: place.symlink_to("/etc"), "symlink"),
    "dangling-link": (lambda place: place.symlink_to("/nowhere"), "symlink"),
    "fifo": (os.mkfifo, "not_regular"),
    "socket": (unix_socket, "not_regular"),
    "device": (lambda place: os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(5, 0)), "not_regular"),
    "block-device": (lambda place: os.mknod(place, stat.S_IFBLK | 0o666, os.makedev(7, 0)), "not_regular"),
    "hard-link": (hard_link, "hard_link"),
    "empty": (lambda place: place.touch(), "unknown_size"),
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
    "no-text": (named(b"\xff.cache"), "bad_name"),
    "escape": (named("\x1b]0;owned\x07.cache"), "bad_name"),
    "right-to-left": (named("\u202egnp.cache"), "bad_name"),
    "mount-over-file": (mounted_over, "other_device"),
    "mount-over-directory": (mounted_over, "other_device"),
}


LISTS: Final = ("containers", "regions", "slots", "processes", "gpus", "unresolved", "status", "events")


def stamps(directory: Path) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for path in [directory, *directory.iterdir()]:
        info = path.lstat()
        found[path.name] = (info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_nlink, info.st_blocks)
    return found


@contextmanager
def restless(path: Path) -> Iterator[None]:
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


def repaired_once_more(good: Good) -> None:
    good.repair()
    assert not good.samples[-1].trouble


def check(good: Good) -> None:
    assert good.right()
    good.parent.until_load(21)


def answers_are_printable(daemon: Daemon, node: Node, container_id: str) -> None:
    assert all(line["path"].isprintable() for line in daemon.said("region_rejected"))
    for each in LISTS:
        assert answer(daemon, each)
    for words in (("status",), ("slots",), ("containers",), ("explain", container_id), ("top", "--once")):
        done = command(node, daemon.run_dir, node.pod_logs_dir, *words)
        assert all(sign.isprintable() or sign == "\n" for sign in done.stdout + done.stderr)


def test_everything_at_once(node: Node, start: Start, source: str, request: pytest.FixtureRequest) -> None:
    good = [Good(node, name, PATIENCE_S) for name in ("good-a", "good-b")]
    daemon = start(node, "--interval", "250ms")
    until(lambda: all(each.right() for each in good), "the beginning")
    wanted = {}
    for name, (make, reason) in HOSTILE.items():
        directory = node.containers_dir / f"bad-uid_{name}"
        directory.mkdir()
        make(directory / "x.cache")
        if make is mounted_over:
            mounted = directory / "x.cache" if name == "mount-over-file" else directory
            request.addfinalizer(partial(subprocess.run, ["umount", "--lazy", mounted], check=True))
        wanted[directory] = reason
    link = node.containers_dir / "bad-uid_link"
    link.symlink_to(good[0].container.directory)
    liars = _liars(node, good[1])
    for file in liars.values():
        request.addfinalizer(file.close)
    before = {directory: stamps(directory) for directory in [*wanted, *liars]}
    (node.containers_dir / "bad-uid_restless").mkdir()
    with restless(node.containers_dir / "bad-uid_restless" / "x.cache"):
        for _ in range(5):
            for honest in good:
                repaired_once_more(honest)
    for directory, reason in wanted.items():
        until(lambda d=directory, r=reason: _refused(daemon, d, r), f"{directory.name}: {reason}")  # type: ignore[misc]
    until(lambda: _refused(daemon, link, "symlink"), "the linked directory")
    for honest in good:
        check(honest)
    changed = {directory.name for directory in before if stamps(directory) != before[directory]}
    assert changed == set(), [line for line in daemon.lines if any(name in str(line) for name in changed)]
    assert [line for line in daemon.said("repair") if "good" not in str(line["container"])] == []
    unresolved = _unresolved(node)
    for pid in (0, -1, -(2**31)):
        assert unresolved[str(pid)] == {"invalid_pid"}
    for pid in (1, good[1].parent.ns_pid, good[1].parent.host_pid):
        assert unresolved[str(pid)] == {"no_such_process"}
    answers_are_printable(daemon, node, good[0].container.container_id)
    daemon.stop()
    counters = daemon.counters()
    for reason in set(wanted.values()):
        assert counters[f"rejected_{reason}"] >= 1


def _liars(node: Node, victim: Good) -> dict[Path, BinaryIO]:
    # Another container of the victim's pod, in its PID namespace, claims the victim's PID.
    beside = node.container(
        victim.container.pod_uid, "liar-beside", pid_namespace=victim.container, watcher=False
    )
    of_beside = slots(beside.cache, victim.parent.ns_pid, 1)
    # A claim in a PID namespace without the claimed PID.
    alone = node.container(name="liar-alone", watcher=False)
    of_alone = slots(alone.cache, 4, 0, -1, 2**31 - 1, -(2**31), os.getpid())
    # A directory without a container.
    nobody = node.containers_dir / "bad-uid_nobody"
    nobody.mkdir()
    of_nobody = slots(nobody / "x.cache", 1, victim.parent.ns_pid, victim.parent.host_pid)
    return {beside.directory: of_beside, alone.directory: of_alone, nobody: of_nobody}


@pytest.mark.parametrize("kind", ["private", "memfd"])
def test_a_process_that_does_not_share_the_file_owns_no_slot(node: Node, kind: str) -> None:
    container = node.container(name="liar", watcher=False)
    with slots(container.cache, 1) as file:
        process = container.spawn([str(node.built / "hostile"), "600", "maps", container.inside, kind])
        process.read_line()
        os.pwrite(file.fileno(), struct.pack("<i", process.ns_pid), V1_2.procs)
        assert _unresolved(node) == {str(process.ns_pid): {"not_mapped"}}


def _refused(daemon: Daemon, directory: Path, reason: str) -> bool:
    paths = [Path(line["path"]) for line in daemon.said("region_rejected", reason=reason)]
    return any(directory in (path, *path.parents) for path in paths)


def _unresolved(node: Node) -> dict[str, set[str]]:
    words = ["run", "--once", "--dry-run", "--containers-dir", node.containers_dir]
    done = run(*words, env=node.environment())
    assert done.returncode == 1, done.stderr
    found: dict[str, set[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("unresolved: "):
            head, reason = line.rsplit(": ", 1)
            found.setdefault(head.rsplit(" ", 1)[1], set()).add(reason)
    return found


#: The writer is halted for as long as the test takes.
PATIENT = patched("from resolver.repair import orders; orders.WRITER_SECONDS = 180.0")


def cut(cache: Path) -> None:
    os.truncate(cache, 0)


def punch(cache: Path) -> None:
    """Free the file's first page, and fill the file system, so the page can't be allocated again."""
    with cache.with_name("filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        subprocess.run(["fallocate", "--punch-hole", "--length", "4096", str(cache)], check=True)
        while True:
            filler.write(bytes(4096))


@pytest.fixture
def small(node: Node) -> Iterator[Node]:
    options = "size=16m,mode=755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(node.containers_dir)], check=True)
    yield node
    subprocess.run(["umount", "--lazy", str(node.containers_dir)], check=True)


@pytest.mark.parametrize("spoil", [cut, punch])
def test_tenant_that_truncates_its_file_is_quarantined(
    small: Node, start: Start, spoil: Callable[[Path], None]
) -> None:
    """The file is cut between the writer's mapping and its write, which kills only the writer."""
    good, other = Good(small, "good", PATIENCE_S), small.container(name="other", watcher=False)
    subprocess.run(["fallocate", "--length", str(V1_2.size), str(good.container.cache)], check=True)
    tenant = other.tenant(guess="none")
    daemon = start(small, "--interval", "10ms", "--hostpid-namespace", "host", wrapper=PATIENT, anew=False)
    tenant.until_repaired()
    writer = daemon.child(WRITER)
    with halted_when_it_maps(other.cache, writer):
        write_hostpid(other, tenant, 0)
        wait_until_halted(other.cache, writer)
        spoil(other.cache)
    quarantined = daemon.wait_for("region_quarantined", container=other.directory.name)
    assert "SIGBUS" in quarantined["why"]
    assert quarantined["seconds"] >= 10
    for _ in range(3):
        repaired_once_more(good)
    check(good)
    assert daemon.process.poll() is None
    assert len(daemon.said("region_quarantined")) == 1


def test_hanging_writer_is_killed_and_replaced(node: Node, start: Start) -> None:
    """A writer that stops in a request proves neither the file nor the machine guilty."""
    good, other = Good(node, "good", PATIENCE_S), node.container(name="other", watcher=False)
    first: Tenant = other.tenant(guess="none")
    daemon = start(node, "--interval", "100ms")

    def repaired() -> set[int]:
        return {int(line["after"]) for line in daemon.said("repair")}

    until(lambda: {first.host_pid, good.parent.host_pid} <= repaired(), "the beginning")
    for _ in range(3):
        stuck = daemon.child(WRITER)
        with watched(stuck) as gone:
            os.kill(stuck, signal.SIGSTOP)
            another = other.tenant(guess="none")
            until(lambda: another.host_pid in repaired(), "the next writer's answer")  # noqa: B023 - it is over
            assert another.hostpid == another.host_pid
            until(gone, "the end of the one that hung")
    until(lambda: len(daemon.said("writer_failed")) >= 3, "three failures of the writer")
    assert all("did not answer within 1 s" in line["why"] for line in daemon.said("writer_failed"))
    assert daemon.said("region_quarantined") == []
    for _ in range(5):
        repaired_once_more(good)
    check(good)
