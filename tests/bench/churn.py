"""A node where tenants start and end all the time: how long a new slot waits for its right ``hostpid``.

180 starts a second over 24 containers, each process for two seconds, with each source of PIDs, and the same beside
four busy loops. The truth is the kernel's: each process reports over a socket, and its credentials have its host PID.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.bench.timing import Progress, RowValues
from tests.bench.usage import cpu
from tests.fakes.container import Container
from tests.fakes.daemon import BOUND, Daemon
from tests.fakes.node import Node
from tests.fakes.regions import read_file

SOURCES: Final = ("bpf", "netlink", "scan")
CONTAINERS, RATE, LIFE_S = 24, 180.0, 2.0
#: Share of the slots that may be wrong a second after they were seen.
AIMS: Final = {"bpf": 0.1, "netlink": 1.0, "scan": 1.0}
_LATE_S: Final = 1.0
_SETTLE_S: Final = 3.0
_LOOK_S: Final = 0.02
_CREDENTIALS: Final = struct.Struct("3i")


class Seen(NamedTuple):
    """Slots that lived long enough to be judged; those wrong after `_LATE_S`; the longest wait; CPU in per cent."""

    slots: int
    late: int
    longest_s: float
    per_cent: float
    of_children: float


def measure(seconds: float, scratch: Path, progress: Progress) -> list[RowValues]:
    """All rows; takes six times as long."""
    program = scratch / "churn"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-static", "-o", program, source], check=True)
    rows: list[RowValues] = []
    for busy in (0, 4):
        for name in SOURCES:
            progress(f"{seconds:.0f} s of churn with --source {name}, {busy} busy loops beside")
            place = scratch / f"churn-{name}-{busy}"
            place.mkdir()
            with _busy(busy):
                seen = run(place, program, name, seconds)
            rows += _rows(name, busy, seen)
    return rows


def _rows(source: str, busy: int, seen: Seen) -> list[RowValues]:
    beside = f"{seen.late} of {seen.slots}; load {os.getloadavg()[0]:.1f}, {busy} busy loops"
    share = seen.late / max(1, seen.slots) * 100
    return [
        (f"churn, {source}: slots not right after 1 s", share, "%", AIMS[source], beside),
        ("  longest that one waited", seen.longest_s, "s", _LATE_S, ""),
        ("  CPU of the daemon and its children", seen.per_cent + seen.of_children, "% core", None, ""),
    ]


def run(scratch: Path, program: Path, source: str, seconds: float, options: Sequence[str] = ()) -> Seen:
    """One source, for so many seconds."""
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node(scratch / "node", "535.183.01"))
        containers = [node.container(name=f"c{number}", watcher=False) for number in range(CONTAINERS)]
        watched = _Watched(scratch / "socket", containers)
        stack.callback(watched.close)
        daemon = Daemon(node, scratch / "run", "--source", source, *options, wrapper=BOUND)
        stack.enter_context(daemon)
        time.sleep(_SETTLE_S)
        for container in containers:
            tenant = container.tenant_arguments(guess="none")
            tenant = tenant[: tenant.index("--driver-socket")]
            words = [
                str(program),
                str(RATE / CONTAINERS),
                str(LIFE_S * 1000),
                str(scratch / "socket"),
                *tenant,
            ]
            container.spawn(words)
        time.sleep(_SETTLE_S)
        began, before = time.monotonic(), cpu(daemon.process.pid)
        watched.follow(seconds)
        used = cpu(daemon.process.pid).per_cent(before, time.monotonic() - began)
        late = [wait for wait in watched.waits if wait > _LATE_S]
        return Seen(len(watched.waits), len(late), max(watched.waits, default=0.0), used.own, used.children)


class _Watched:
    """The containers' files, and the processes that have reported; ``waits`` in seconds from slot to right value."""

    def __init__(self, path: Path, containers: Sequence[Container]) -> None:
        self._containers = containers
        self._pidns = {container.pidns: index for index, container in enumerate(containers)}
        self._host_pids: dict[tuple[int, int], int] = {}  # by container and PID in it, the last one
        self._seen: dict[
            tuple[int, int], tuple[int, float]
        ] = {}  # host PID, and when its slot was first wrong
        self.waits: list[float] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(path))
        path.chmod(0o777)
        self._reader = threading.Thread(target=self._read, name="reports")
        self._reader.start()

    def _read(self) -> None:
        while True:
            text, ancillary, _, _ = self._socket.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
            if not text:
                return
            with contextlib.suppress(OSError):
                host_pid = _CREDENTIALS.unpack(ancillary[0][2])[0]
                index = self._pidns[os.stat(f"/proc/{host_pid}/ns/pid").st_ino]
                self._host_pids[index, struct.unpack("i", text)[0]] = host_pid

    def follow(self, seconds: float) -> None:
        """Look at all files again and again. A slot that ends before it was right counts if it was wrong for long."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            for index, container in enumerate(self._containers):
                with contextlib.suppress(OSError, ValueError):
                    self._look(index, container, now)
            time.sleep(max(0.0, now + _LOOK_S - time.monotonic()))

    def _look(self, index: int, container: Container, now: float) -> None:
        living = {slot.pid: slot.hostpid for slot in read_file(container.cache).slots if slot.pid}
        for ns_pid, hostpid in living.items():
            host_pid = self._host_pids.get((index, ns_pid), 0)
            if not host_pid:
                continue
            known = self._seen.get((index, ns_pid))
            if known is None or known[0] != host_pid:
                known = self._seen[index, ns_pid] = host_pid, now
            if known[1] and hostpid == host_pid:
                self.waits.append(now - known[1])
                self._seen[index, ns_pid] = host_pid, 0.0
        for key, (host_pid, since) in list(self._seen.items()):
            if key[0] == index and (key[1] not in living or not Path(f"/proc/{host_pid}").exists()):
                del self._seen[key]
                self._host_pids.pop(key, None)
                if since and now - since > _LATE_S:
                    self.waits.append(now - since)

    def close(self) -> None:
        """End the thread."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"", self._socket.getsockname())
        self._reader.join()
        self._socket.close()


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """That many processes that compute all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
