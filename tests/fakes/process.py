"""Processes in a container in miniature: any program, and the tenant with its commands."""

import contextlib
import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

from tests.fakes.chain import read_chain
from tests.fakes.regions import ProcSlot, Region
from tests.patience import PATIENCE_S, until

#: The kernel reaps a container's processes a moment after their end, on a busy machine a long one.
_REAPED_S: Final = 60.0


class NodeError(RuntimeError):
    """The miniature node cannot do a step; the message names the failure, its cause, and the remedy."""


@contextlib.contextmanager
def watched(host_pid: int) -> Iterator[Callable[[], bool]]:
    """Yield a check whether this process is reaped; then `/proc` may show another one with its number."""
    pidfd = os.pidfd_open(host_pid)

    def gone() -> bool:
        try:
            signal.pidfd_send_signal(pidfd, 0)
        except ProcessLookupError:
            return True
        return False

    try:
        yield gone
    finally:
        os.close(pidfd)


class Process:
    """A process inside a container. `host_pid` comes from the kernel's credentials, `ns_pid` from `/proc`."""

    def __init__(self, host_pid: int, stdin: int, stdout: int) -> None:
        self.host_pid = host_pid
        chain = read_chain(host_pid)
        self.pidns, self.ns_pid = chain.pidns, chain.ns_pid
        self._pidfd = os.pidfd_open(host_pid)
        self._stdin, self.stdout = stdin, stdout
        self._pending = b""

    def read_line(self) -> str:
        """Return the next line of its standard output. Raises NodeError if it ends or writes nothing."""
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._pending:
            if not readable(self.stdout, deadline - time.monotonic()):
                raise NodeError(f"process {self.host_pid} wrote nothing for {PATIENCE_S} s")
            data = os.read(self.stdout, 65536)
            if not data:
                raise NodeError(f"process {self.host_pid} has ended; its message is on standard error")
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        return line.decode()

    def write_line(self, text: str) -> None:
        os.write(self._stdin, text.encode() + b"\n")

    @property
    def alive(self) -> bool:
        return not readable(self._pidfd, 0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        """Wait until it has ended, and its number is free. Raises NodeError after the time limit."""
        if not readable(self._pidfd, PATIENCE_S):
            raise NodeError(f"process {self.host_pid} has not ended within {PATIENCE_S} s")
        deadline = time.monotonic() + _REAPED_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                signal.pidfd_send_signal(self._pidfd, 0)
                time.sleep(0.001)

    def close(self) -> None:
        """Close the descriptors; the process itself ends with its container."""
        for fd in (self._pidfd, self._stdin, self.stdout):
            with contextlib.suppress(OSError):
                os.close(fd)


class Tenant(Process):
    """A process that uses HAMi's cache protocol and the GPU (`tenant/tenant.c`); `region` reads its cache file."""

    def __init__(
        self, host_pid: int, stdin: int, stdout: int, load: int, region: Callable[[], Region]
    ) -> None:
        super().__init__(host_pid, stdin, stdout)
        self.load, self._region = load, region

    @property
    def stored(self) -> ProcSlot:
        region = self._region()
        slot = region.slot(self.ns_pid)
        assert slot is not None, f"no slot of PID {self.ns_pid}: {region.slots}"
        return slot

    @property
    def hostpid(self) -> int:
        return self.stored.hostpid

    @property
    def sm_util(self) -> tuple[int, ...]:
        return self.stored.sm_util

    def until_repaired(self, timeout_s: float = PATIENCE_S) -> Self:
        until(lambda: self.hostpid == self.host_pid, f"the repair of PID {self.ns_pid}", timeout_s)
        return self

    def until_load(self, *sm_util: int) -> None:
        until(lambda: self.sm_util == sm_util, f"{sm_util} % of PID {self.ns_pid}")

    def command(self, text: str) -> Any:
        """Sends one command, returns its JSON answer. Raises NodeError when the tenant refuses."""
        self.write_line(text)
        answer = json.loads(self.read_line())
        if isinstance(answer, dict) and "error" in answer:
            raise NodeError(f"tenant {self.ns_pid} refused `{text}`: {answer['error']}")
        return answer

    def slot(self) -> dict[str, Any]:
        """Its own slot: index, pid, hostpid, status, sm_util and monitorused per device."""
        answer: dict[str, Any] = self.command("slot")
        return answer

    def init(self) -> None:
        """Start CUDA in a tenant started with `init_waits`; return after its guess of its host PID."""
        self.write_line("init")
        self.read_line()

    def set_load(self, load: int, *others: int) -> None:
        """Set its load in percent on all of its devices; with `others`, on each device in order."""
        self.command(" ".join(map(str, ("load", load, *others))))
        self.load = load

    def fork(self) -> int:
        """Forks a child that takes a slot of its own; returns the child's PID in the container."""
        ns_pid: int = self.command("fork")["ns_pid"]
        return ns_pid

    def stop(self) -> None:
        """Let it exit cleanly, which leaves pid 0 and status 0 in the slot."""
        if self.alive:
            self.write_line("quit")
        self.wait()


def readable(fd: int, timeout_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(max(0.0, timeout_s)))
