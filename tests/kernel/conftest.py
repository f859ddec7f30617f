"""The real daemon on a miniature node.

Tests compare with the kernel and the files, never with the daemon: PIDs come from the kernel's credentials, slots
from the file by the tests' own table of offsets.
"""

import compileall
import os
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from tests.fakes.bpf.lives import compile_lives
from tests.fakes.command import run
from tests.fakes.container import Container
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.regions import LAYOUTS, ProcSlot
from tests.fakes.scraper import Scraper
from tests.fakes.traced import Tracer
from tests.fakes.warm import Stock
from tests.patience import until

ROOT: Final = Path(__file__).parent.parent.parent
#: Its samples have host PIDs and its process list has container PIDs: the well-known failure.
DRIVER: Final = "535.183.01"
#: The four kinds of driver, and the PIDs of their samples.
ROWS: Final = (("535.104.05", "host"), ("560.35.03", "host"), ("565.77", "host"), ("570.86.15", "container"))
#: The children's names as the kernel shows them: 15 bytes.
WRITER: Final = "slot writer"
NVML: Final = "nvml worker"

#: Events that mean only that a child of the daemon or a tenant's watcher had no CPU for seconds.
STARVED: Final = frozenset({"nvml_unavailable", "nvml_available", "writer_failed", "slot_stuck"})

#: A test's pace.
FAST: Final = ("--interval", "50ms", "--nvml-interval", "200ms")

#: The sources in the order of preference.
SOURCES: Final = ("bpf", "netlink", "scan")
#: The source for tests of other things: loading the map costs 2 s of CPU.
USUAL: Final = SOURCES[-1]
#: For tests with every source; the fixture `source` alone takes the usual one.
EVERY_SOURCE: Final = pytest.mark.parametrize("source", SOURCES, indirect=True)


def with_every_source(name: str, values: Iterable[Any]) -> pytest.MarkDecorator:
    """Run a test with each of these values, and with the last value for every source."""
    *others, last = values
    cases = [*((each, USUAL) for each in others), *((last, source) for source in SOURCES)]
    return pytest.mark.parametrize((name, "source"), cases, indirect=["source"])


class Start:
    """Starts daemons, stops them at the end of the test, and checks that none logged a defect."""

    def __init__(
        self,
        run_dir: Path,
        stock: Stock | None = None,
        program: Path | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._run_dir, self._stock, self._program, self._tracer = run_dir, stock, program, tracer
        self.started: list[Daemon] = []

    def __call__(
        self,
        node: Node,
        *arguments: str,
        run_dir: Path | None = None,
        anew: bool | None = None,
        **options: Any,
    ) -> Daemon:
        """Start a daemon. ``anew``: by `exec` and with no files of an earlier one, as on a new node.

        Otherwise it is forked from a process with its modules (`warm`), and finds compiled probes.
        With a wrapper, it is never forked, and finds those probes only if ``anew`` is False.
        """
        if anew is None:
            anew = "wrapper" in options
        options.setdefault("stock", None if anew else self._stock)
        if "--source" not in arguments:
            environment = options.get("environment") or node.environment()
            options["environment"] = {"RESOLVER_SOURCE": USUAL, **environment}
        where = run_dir or self._run_dir
        if self._program is not None and not anew and _may_use_bpf(arguments):
            hand_on(self._program, where / self._program.name)
        if self._tracer is not None and "wrapper" not in options:  # a wrapper's calls are not the daemon's
            options["started"] = self._tracer.watch
        daemon = Daemon(node, where, *arguments, **options)
        self.started.append(daemon)
        return daemon

    def close(self) -> None:
        problems: list[object] = []
        for daemon in self.started:
            if daemon.alive:
                childless = without_children(daemon)
                daemon.stop()
                until(childless, "the end of its children")
            daemon.wait()
            problems += [line for line in daemon.lines if line["event"] == "internal_error"]
            if self._tracer is not None:
                problems += self._tracer.unlisted(daemon.process)
            problems += [text for text in daemon.other_output if "Traceback" in text or "Error" in text]
            if self._program is not None:
                hand_on(daemon.run_dir / self._program.name, self._program)
        assert not problems, "\n".join(map(str, problems))


def without_children(daemon: Daemon) -> Callable[[], bool]:
    """Return a check that the daemon's present children have ended, even if their PIDs are reused."""
    children = list[psutil.Process]()
    for host_pid in daemon.children().values():
        with suppress(psutil.NoSuchProcess):
            children.append(psutil.Process(host_pid))

    def runs(child: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        return False

    return lambda: not any(map(runs, children))


def _may_use_bpf(arguments: tuple[str, ...]) -> bool:
    words = ("--source", os.environ.get("RESOLVER_SOURCE", USUAL), *arguments)
    return words[max(at for at, word in enumerate(words) if word == "--source") + 1] in ("auto", "bpf")


def hand_on(kept: Path, where: Path) -> None:
    """Copy a compiled program, which spares LLVM a second of CPU; a daemon ignores one that doesn't fit."""
    if where.exists() or not kept.exists():
        return
    where.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new = where.with_name(f".{where.name}.of.{os.getpid()}")
    new.touch(0o600)
    new.write_bytes(kept.read_bytes())
    new.rename(where)


@pytest.fixture
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only source that this test's daemons may use."""
    name = str(getattr(request, "param", USUAL))
    monkeypatch.setenv("RESOLVER_SOURCE", name)
    return name


@pytest.fixture(scope="session")
def stock() -> Iterator[Stock]:
    stock = Stock()
    yield stock
    stock.close()


@pytest.fixture(scope="session")
def tracer() -> Iterator[Tracer]:
    """The BPF program that records the system calls of daemons' loops.

    A module changed since `make setup` lacks bytecode: a late import would show the loop writing it.
    """
    compileall.compile_dir(ROOT / "resolver", quiet=1)
    with Tracer() as tracer:
        yield tracer


@pytest.fixture(scope="session")
def kept_in(program: Path) -> str:
    """The directory of `program`; a map of the default size has the same program as the daemon's."""
    return str(program.parent)


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_lives(tmp_path_factory.mktemp("lives"))


@pytest.fixture
def start(tmp_path: Path, stock: Stock, program: Path, tracer: Tracer) -> Iterator[Start]:
    """Starts a daemon on a node: `start(node, "--interval", "50ms")`; its loop may call what `loop_calls` lists."""
    starter = Start(tmp_path / "run", stock, program, tracer)
    yield starter
    starter.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with a driver for which each of HAMi's guesses is wrong."""
    with Node(tmp_path, DRIVER) as node:
        yield node


def command(node: Node, run_dir: Path, pods: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``resolver`` as a person on the node does, beside the daemon of ``run_dir`` if one runs."""
    places = {
        "RESOLVER_CONTAINERS_DIR": str(node.containers_dir),
        "RESOLVER_POD_LOGS_DIR": str(pods),
        "RESOLVER_SOCKET": str(run_dir / "resolver.sock"),
    }
    return run(*words, env=node.environment() | places)


def slot_of(container: Container, ns_pid: int) -> ProcSlot:
    slot = container.region().slot(ns_pid)
    assert slot is not None, f"no slot of PID {ns_pid} in {container.name}: {container.region().slots}"
    return slot


def write_sm_util(container: Container, slot: int, value: int) -> None:
    layout = LAYOUTS[container.layout]
    assert layout.device_util is not None
    at = layout.procs + slot * layout.slot_size + layout.device_util + 16
    write_at(container.cache, at, struct.pack("<Q", value))


def write_hostpid(container: Container, tenant: Tenant, hostpid: int) -> None:
    """Set a slot's `hostpid`, as another writer does; the slot must not move meanwhile."""
    layout = LAYOUTS[container.layout]
    at = layout.procs + tenant.stored.index * layout.slot_size + 4
    write_at(container.cache, at, struct.pack("<i", hostpid))


def write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), data, offset)


def lock_words(container: Container) -> bytes:
    """Return the words of the lock that only tenants may change: semaphore and `owner_pid`."""
    layout, data = LAYOUTS[container.layout], container.cache.read_bytes()
    return data[layout.sem : layout.sem + 32] + data[layout.owner_pid : layout.owner_pid + 8]


def right_number(tenant: Tenant, namespace: str) -> int:
    return tenant.host_pid if namespace == "host" else tenant.ns_pid


@pytest.fixture
def scraping(start: Start, node: Node, tmp_path: Path) -> Callable[..., Scraper]:
    def scraping(*arguments: str, **options: Any) -> Scraper:
        pods = ("--pod-logs-dir", str(tmp_path / "pods"))
        daemon = start(node, *FAST, "--metrics-addr", "127.0.0.1:0", *pods, *arguments, **options)
        until(daemon.socket.exists, "its socket")
        return Scraper(daemon)

    return scraping
