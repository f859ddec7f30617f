"""The real daemon on a miniature node: its process, its log lines as values, its children.

What a test compares with is never the daemon's own word: PIDs come from the kernel's credentials (the node has
them), slots from the file through the tests' own table of offsets.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fakes import warm
from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.regions import LAYOUTS, ProcSlot
from tests.fakes.warm import Stock
from tests.patience import PATIENCE_S

ROOT: Final = Path(__file__).parent.parent.parent
#: A driver whose samples carry host PIDs and whose process list carries the container's: the famous failure.
DRIVER: Final = "535.183.01"
#: The children's names as the kernel shows them: 15 bytes.
WRITER: Final = "slot writer"
NVML: Final = "nvml worker"

#: The sources that the main job is held to, the best first: all of them, or the one that RESOLVER_SOURCE names.
SOURCES: Final = (
    (os.environ["RESOLVER_SOURCE"],) if os.environ.get("RESOLVER_SOURCE") else ("bpf", "netlink", "scan")
)
#: What a daemon takes where the source doesn't matter: nothing has to be loaded, the map takes LLVM 2 s of CPU.
USUAL: Final = SOURCES[-1]
#: For tests that are to pass with each of them; `source` alone takes the usual one.
EVERY_SOURCE: Final = pytest.mark.parametrize("source", SOURCES, indirect=True)


def with_every_source(name: str, values: Iterable[Any]) -> pytest.MarkDecorator:
    """For tests that are to pass with each of these values, and with the last of them by each source."""
    *others, last = values
    cases = [*((each, USUAL) for each in others), *((last, source) for source in SOURCES)]
    return pytest.mark.parametrize((name, "source"), cases, indirect=["source"])


Line = dict[str, Any]


def until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> float:
    """Polls until it is so; returns after how many seconds. Fails with `what` after the time limit."""
    began, waited = time.monotonic(), 0.0
    while not condition():
        assert waited < timeout_s, f"within {timeout_s} s not seen: {what}"
        time.sleep(min(0.002 + waited / 20, 0.025))  # what takes long is not asked for all the time
        waited = time.monotonic() - began
    return waited


def never(condition: Callable[[], object], what: str, for_s: float = 0.5) -> None:
    """Fails as soon as it is so."""
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        assert not condition(), f"seen, and should not be: {what}"
        time.sleep(0.005)


class Daemon:
    """One `resolver run`. `lines` are its log lines in order, each with `at`, the monotonic time it came."""

    def __init__(
        self,
        node: Node,
        run_dir: Path,
        *arguments: str,
        containers_dir: Path | None = None,
        environment: dict[str, str] | None = None,
        wrapper: tuple[str, ...] = (),
        stock: Stock | None = None,
    ) -> None:
        words = ["run", "--run-dir", str(run_dir)]
        words += ["--containers-dir", str(containers_dir or node.containers_dir), "--log-format", "json"]
        if "--metrics-addr" not in arguments:
            words += ["--metrics-addr", "off"]  # one port, and many daemons
        self.run_dir = run_dir
        environment = dict(node.environment() if environment is None else environment)
        if "--source" not in arguments:
            environment.setdefault("RESOLVER_SOURCE", USUAL)
        if stock is not None and not wrapper:
            self._watch(stock.start([*words, *arguments], environment, ROOT))
        else:
            self._launch([*wrapper, sys.executable, "-m", "resolver", *words, *arguments], environment)

    def _launch(self, command: list[str], environment: dict[str, str]) -> None:
        self._watch(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    def _watch(self, process: subprocess.Popen[str] | warm.Process) -> None:
        self.lines: list[Line] = []
        self.other_output: list[str] = []
        self._news = threading.Condition()
        self.process = process
        self._reader = threading.Thread(target=self._read, name="daemon log")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for text in stream:
                at = time.monotonic()
                with self._news:
                    try:
                        self.lines.append({**json.loads(text), "at": at})
                    except ValueError:
                        self.other_output.append(text.rstrip("\n"))
                    self._news.notify_all()

    # ---- what it said ------------------------------------------------------------------------------

    def said(self, event: str, **fields: object) -> list[Line]:
        """Every line of that event whose fields have these values."""
        wanted = {"event": event, **fields}
        return [line for line in list(self.lines) if wanted.items() <= line.items()]

    def wait_for(
        self, event: str, *, timeout_s: float = PATIENCE_S, count: int = 1, **fields: object
    ) -> Line:
        """The line number `count` of that event with these values, waited for if need be."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while len(found := self.said(event, **fields)) < count:
                left = deadline - time.monotonic()
                assert left > 0, f"within {timeout_s} s not said: {event} {fields}; said: {self.tail()}"
                assert self.process.poll() is None or self._reader.is_alive(), f"it ended: {self.tail()}"
                self._news.wait(min(left, 0.2))
        return found[count - 1]

    def tail(self) -> str:
        return "\n".join(str(line) for line in [*self.lines[-20:], *self.other_output[-20:]])

    def counters(self) -> dict[str, int]:
        """The counters of its last line; it has to be stopped. What never happened isn't said, and is 0."""
        (last,) = self.said("stopped")
        return Counter(
            {name: value for name, value in last.items() if isinstance(value, int) and name != "at"}
        )

    # ---- its processes -----------------------------------------------------------------------------

    def children(self) -> dict[str, int]:
        """Its living children by name."""
        return children_of(self.process.pid)

    def child(self, name: str) -> int:
        """PID of a child, waited for if it is only now being started."""
        until(lambda: name in self.children(), f"a {name}")
        return self.children()[name]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self, *, within_s: float = PATIENCE_S) -> int:
        """SIGTERM; returns its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.wait(within_s)

    def wait(self, within_s: float = PATIENCE_S) -> int:
        """Until it has ended by itself; returns its exit code."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"it did not end within {within_s} s: {self.tail()}", pytrace=False)
        self._reader.join()
        return code

    def kill(self) -> None:
        """SIGKILL, and waits."""
        self.process.kill()
        self.process.wait()
        self._reader.join()


class Start:
    """Starts daemons; at the end of the test each is stopped and held to what holds for all of them."""

    def __init__(self, run_dir: Path, stock: Stock | None = None, program: Path | None = None) -> None:
        self._run_dir, self._stock, self._program = run_dir, stock, program
        self.started: list[Daemon] = []

    def __call__(
        self,
        node: Node,
        *arguments: str,
        run_dir: Path | None = None,
        anew: bool | None = None,
        **options: Any,
    ) -> Daemon:
        """``anew``: by `exec` and with nothing kept of an earlier one, as an operator starts the first.

        Otherwise it is forked from what has its modules (`warm`), and finds the compiled probes of the test before.
        Under a wrapper nothing is forked, and nothing is found unless ``anew`` is False.
        """
        if anew is None:
            anew = "wrapper" in options
        options.setdefault("stock", None if anew else self._stock)
        where = run_dir or self._run_dir
        if self._program is not None and not anew and _may_use_bpf(arguments):
            hand_on(self._program, where / self._program.name)
        daemon = Daemon(node, where, *arguments, **options)
        self.started.append(daemon)
        return daemon

    def close(self) -> None:
        problems: list[object] = []
        for daemon in self.started:
            children = daemon.children()
            if daemon.process.poll() is None:
                daemon.stop()
            else:
                daemon.wait()
            problems += [line for line in daemon.lines if line["event"] == "internal_error"]
            problems += [text for text in daemon.other_output if "Traceback" in text or "Error" in text]
            until(lambda these=children: not any(map(runs, these.values())), "the end of its children")  # type: ignore[misc]
            if self._program is not None:
                hand_on(daemon.run_dir / self._program.name, self._program)
        assert problems == []


def _may_use_bpf(arguments: tuple[str, ...]) -> bool:
    words = ("--source", os.environ.get("RESOLVER_SOURCE", USUAL), *arguments)
    return words[max(at for at, word in enumerate(words) if word == "--source") + 1] in ("auto", "bpf")


def hand_on(kept: Path, where: Path) -> None:
    """A compiled program for who needs one: LLVM takes a second of CPU for each. One that doesn't fit isn't taken."""
    if where.exists() or not kept.exists():
        return
    where.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new = where.with_name(f".{where.name}.of.{os.getpid()}")
    new.touch(0o600)
    new.write_bytes(kept.read_bytes())
    new.rename(where)


@pytest.fixture
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The source that this test's daemons are told to take, and no other."""
    name = str(getattr(request, "param", USUAL))
    monkeypatch.setenv("RESOLVER_SOURCE", name)
    return name


@pytest.fixture(scope="session")
def stock() -> Iterator[Stock]:
    """What daemons are forked from."""
    stock = Stock()
    yield stock
    stock.close()


@pytest.fixture(scope="session")
def kept_in(program: Path) -> str:
    """The directory of `program`: a map of the usual `Sizes` takes the same one as the daemon's."""
    return str(program.parent)


@pytest.fixture
def start(tmp_path: Path, stock: Stock, program: Path) -> Iterator[Start]:
    """Starts a daemon on a node: `start(node, "--interval", "50ms")`."""
    starter = Start(tmp_path / "run", stock, program)
    yield starter
    starter.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with the driver that makes every guess of HAMi's wrong."""
    with Node(tmp_path, DRIVER) as node:
        assert node.left_out == []
        yield node


# ---- looking at processes -----------------------------------------------------------------------------------------


def command(node: Node, run_dir: Path, pods: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``resolver`` as a person at the node does, beside the daemon of ``run_dir`` if there is one."""
    return subprocess.run(
        [sys.executable, "-m", "resolver", *words],
        cwd=ROOT,
        env=node.environment()
        | {
            "RESOLVER_CONTAINERS_DIR": str(node.containers_dir),
            "RESOLVER_POD_LOGS_DIR": str(pods),
            "RESOLVER_SOCKET": str(run_dir / "resolver.sock"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def children_of(host_pid: int) -> dict[str, int]:
    """Living children by `comm`; empty when the process is gone."""
    try:
        text = Path(f"/proc/{host_pid}/task/{host_pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    found = {}
    for child in map(int, text.split()):
        try:
            if runs(child):
                found[Path(f"/proc/{child}/comm").read_text().strip()] = child
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def runs(host_pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{host_pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def cpu_seconds(host_pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{host_pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- looking at, and tampering with, a region ---------------------------------------------------------------------


def slot_of(container: Container, ns_pid: int) -> ProcSlot:
    """The slot with this container PID."""
    slot = container.region().slot(ns_pid)
    assert slot is not None, f"no slot of PID {ns_pid} in {container.name}: {container.region().slots}"
    return slot


def hostpid_of(container: Container, tenant: Tenant) -> int:
    """What the tenant's slot says, read from the file."""
    return slot_of(container, tenant.ns_pid).hostpid


def write_hostpid(container: Container, tenant: Tenant, hostpid: int) -> None:
    """Another writer: sets a slot's `hostpid`; the slot stands still."""
    layout = LAYOUTS[container.layout]
    index = slot_of(container, tenant.ns_pid).index
    write_at(container.cache, layout.procs + index * layout.slot_size + 4, struct.pack("<i", hostpid))


def write_at(path: Path, offset: int, data: bytes) -> None:
    """Changes bytes of a file in place."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


def lock_words(container: Container) -> bytes:
    """What only tenants may touch of the lock: semaphore and `owner_pid`."""
    layout, data = LAYOUTS[container.layout], container.cache.read_bytes()
    return data[layout.sem : layout.sem + 32] + data[layout.owner_pid : layout.owner_pid + 8]
