"""Real containers by the distribution's runc, and the truth about their processes from the kernel.

A container runs `tester.c`, whose processes tell their PIDs over a datagram socket to which the kernel adds the
sender's host PID: an account of what is where that owes nothing to the code under test.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

#: Everything these tests make in the cgroup hierarchies is below directories of this name, and goes with them.
CGROUP_TOP = f"resolver-runtime-{os.getpid()}"
_CREDENTIALS = struct.Struct("3i")
_CAPABILITIES = ["CAP_SYS_ADMIN", "CAP_KILL", "CAP_CHECKPOINT_RESTORE"]


class Told(NamedTuple):
    """What a process said: ``host_pid`` by the kernel, the rest by itself; ``time`` is of CLOCK_MONOTONIC, in ns."""

    host_pid: int
    role: str
    ns_pid: int
    time: int


def build_tester(directory: Path) -> Path:
    """The static program that is all there is in a container's root file system."""
    program = directory / "tester"
    command: list[str | Path] = [
        "cc",
        *["-O2", "-Wall", "-Wextra", "-Werror", "-static", "-pthread", "-o"],
        program,
    ]
    command.append(Path(__file__).with_name("tester.c"))
    subprocess.run(command, check=True)
    return program


def cgroup_mounts() -> list[Path]:
    """Where the hierarchies are mounted, asked of the kernel and not of the code under test."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [Path(line.split()[1]) for line in lines if line.split()[2] in ("cgroup", "cgroup2")]


def remove_cgroups(path: Path) -> None:
    """A cgroup directory and those below; waits for killed processes to leave it."""
    for below, _, _ in os.walk(path, topdown=False):
        for _ in range(100):
            try:
                os.rmdir(below)
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.02)
        else:
            raise AssertionError(f"{below} could not be removed: a process is still in it")


class RuncContainer:
    """A container with a chosen cgroup path; ``with`` starts it and leaves nothing behind.

    ``pidns`` is None for a namespace of its own, ``"host"``, or the path of a namespace to join. ``binds`` are
    ``(source, destination)`` pairs.
    """

    def __init__(
        self,
        tester: Path,
        work: Path,
        container_id: str,
        cgroup_path: str,
        *,
        pidns: str | None = None,
        binds: tuple[tuple[Path, str], ...] = (),
    ) -> None:
        self.container_id = container_id
        self.cgroup_path = f"/{CGROUP_TOP}{cgroup_path}"
        self.told: list[Told] = []
        self._state = work / "state"
        self._bundle = work / container_id.replace("/", "_")[:24]
        self._news = threading.Condition()
        self._stdin = -1
        self._receiver: threading.Thread | None = None
        self._prepare(tester, pidns, binds)

    def _prepare(self, tester: Path, pidns: str | None, binds: tuple[tuple[Path, str], ...]) -> None:
        (self._bundle / "rootfs").mkdir(parents=True)
        shutil.copy(tester, self._bundle / "rootfs/tester")
        truth = self._bundle / "truth"
        truth.mkdir()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(truth / "socket"))
        namespaces: list[dict[str, str]] = [{"type": "mount"}, {"type": "ipc"}, {"type": "uts"}]
        if pidns is None:
            namespaces.append({"type": "pid"})
        elif pidns != "host":
            namespaces.append({"type": "pid", "path": pidns})
        config = {
            "ociVersion": "1.0.2",
            "process": {
                "args": ["/tester"],
                "cwd": "/",
                "user": {"uid": 0, "gid": 0},
                "capabilities": dict.fromkeys(
                    ("bounding", "effective", "permitted", "inheritable"), _CAPABILITIES
                ),
            },
            "root": {"path": "rootfs"},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                *(
                    {"destination": to, "type": "bind", "source": str(source), "options": ["bind", "rw"]}
                    for source, to in (*binds, (truth, "/truth"))
                ),
            ],
            "linux": {"namespaces": namespaces, "cgroupsPath": self.cgroup_path},
        }
        (self._bundle / "config.json").write_text(json.dumps(config))

    # -- life -----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        reader, self._stdin = os.pipe()
        self._receiver = threading.Thread(target=self._receive, daemon=True)
        self._receiver.start()
        log = self._bundle / "log"
        try:
            with log.open("wb") as output:
                done = subprocess.run(
                    [*self._runc, "run", "--detach", "--bundle", self._bundle, self._runc_id],
                    stdin=reader,
                    stdout=output,
                    stderr=output,
                    check=False,
                )
        finally:
            os.close(reader)
        if done.returncode != 0:
            self.__exit__(None, None, None)
            raise AssertionError(f"runc could not start a container: {log.read_text()}")
        self.wait("main", 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._stdin)
        subprocess.run([*self._runc, "delete", "--force", self._runc_id], capture_output=True, check=False)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._receiver is not None:
            self._receiver.join(60)
        self._socket.close()
        for mount in cgroup_mounts():
            remove_cgroups(mount / self.cgroup_path.lstrip("/"))

    @property
    def _runc(self) -> list[str | Path]:
        return ["runc", "--root", self._state]

    @property
    def _runc_id(self) -> str:
        return self.container_id.replace("/", "_")

    # -- commands and the truth -----------------------------------------------------------------------

    def order(self, command: str, role: str | None = None, count: int = 1) -> list[Told]:
        """Give the main process a command; with ``role``, what the ``count`` processes it makes say."""
        known = len(self.all(role)) if role else 0
        os.write(self._stdin, command.encode() + b"\n")
        return self.wait(role, known + count)[known:] if role else []

    def wait(self, role: str, count: int, seconds: float = 60) -> list[Told]:
        """What processes of a role said, once there are ``count`` of them."""
        with self._news:
            if not self._news.wait_for(lambda: len(self.all(role)) >= count, seconds):
                log = (self._bundle / "log").read_text()
                raise AssertionError(f"{len(self.all(role))} of {count} {role!r} in {seconds} s. {log}")
        return self.all(role)

    def all(self, role: str) -> list[Told]:
        """What the processes of a role have said so far."""
        return [told for told in list(self.told) if told.role == role]

    @property
    def main(self) -> Told:
        """The container's main process."""
        return self.all("main")[0]

    def _receive(self) -> None:
        size = socket.CMSG_SPACE(_CREDENTIALS.size)
        while True:
            message, ancillary, _, _ = self._socket.recvmsg(256, size)
            if not message:
                return
            host_pid, _, _ = _CREDENTIALS.unpack(ancillary[0][2])
            role, ns_pid, at = message.decode().split()
            with self._news:
                self.told.append(Told(host_pid, role, int(ns_pid), int(at)))
                self._news.notify_all()
