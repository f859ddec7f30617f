"""The cost of one hostile tenant to all others: each attack at its size and at twice that, beside good clients.

These are a container whose process forks again and again (time from a slot to its right ``hostpid``), root's client and
a container's client of the API, and a scraper. The daemon's loop is watched (`tests.bench.watched`). The CPU time of a
single stretch of the loop doesn't depend on other load of the machine; all other times do.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from resolver.linux.procfs import run_delay
from tests.bench.attacks import ATTACKS, Attack, Scene
from tests.bench.timing import RowValues, progress
from tests.bench.usage import Cpu, cpu, rss
from tests.bench.watched import WatchedDaemon
from tests.fakes.daemon import free_port
from tests.fakes.node import Node
from tests.fakes.traced import Tracer
from tests.patience import until

_HERE = Path(__file__).parent
ROOT = _HERE.parent.parent
_WARM_SECONDS, _SETTLE_SECONDS, _AFTER_SECONDS, _AGAIN_SECONDS = 2.0, 8.0, 3.0, 2.0
_PATIENCE = 10.0  # for a repair
_BOUNDS = {
    "repair": 600.0,
    "api": 100.0,
    "scrape": 1000.0,
    "block": 50.0,
    "memory": 2.0,
    "lines": 1.0,
    "end": 1.0,
    "none": 0.0,
}


class Sample(NamedTuple):
    """One answer or repair: the time of the request, seconds until it was done, and its error."""

    at: float
    seconds: float
    trouble: str


class Client:
    """A well-behaved client: a process of its own, whose answers are collected as they come."""

    def __init__(self, end: Callable[[], object], stdout: int) -> None:
        self._end = end
        self.samples: list[Sample] = []
        self._lines = os.fdopen(stdout)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with self._lines as lines:
            for line in lines:
                if line.startswith("["):
                    self.samples.append(Sample(*json.loads(line)))

    def end(self) -> None:
        """End; a client on the host first awaits the answer to its last request."""
        self._end()
        self._reader.join()


class Good:
    """A container whose process forks, is repaired, and forks again; each repair is a sample."""

    def __init__(self, node: Node, name: str = "good", patience: float = _PATIENCE) -> None:
        self.node, self._patience = node, patience
        self.container = node.container(name=name)
        self.parent = self.container.tenant(load=21, guess="none")
        self.samples: list[Sample] = []

    def right(self) -> bool:
        return self._hostpid(self.parent.ns_pid) == self.parent.host_pid

    def _hostpid(self, ns_pid: int) -> int | None:
        slot = self.container.region().slot(ns_pid)
        return slot.hostpid if slot else None

    def repair(self) -> None:
        """Start a process that takes a slot, await that the daemon writes its ``hostpid``, and end the process."""
        ns_pid = self.parent.fork()
        host_pid = self.node.gpu.host_pid(self.container.pidns, ns_pid)
        assert host_pid is not None
        began, trouble = time.monotonic(), ""
        while (found := self._hostpid(ns_pid)) != host_pid:
            if found:
                trouble = f"{found} was written for {host_pid}"
            if time.monotonic() - began > self._patience:
                trouble = trouble or "none in time"
                break
            time.sleep(0.004)
        self.samples.append(Sample(began, time.monotonic() - began, trouble))
        os.kill(host_pid, signal.SIGKILL)

    def restart(self) -> None:
        self.container.restart()
        self.parent = self.container.tenant(load=21, guess="none")

    def end(self) -> None:
        self.container.stop()
        self.node.containers.remove(self.container)
        shutil.rmtree(self.container.directory)


class Seen(NamedTuple):
    repairs: list[Sample]
    api: list[Sample]
    scrapes: list[Sample]
    own: list[Sample]  # of a well-behaved container that asks for itself; none where it can't
    block: float  # CPU seconds of the loop in one go
    wait: float  # and by the wall
    busy: Cpu  # per cent of a core
    waited: float  # share of the time that the loop waited for a CPU
    before: float  # MiB
    after: float
    lines: Counter[str]  # of the log, by container
    seconds: float
    ended: float | None  # seconds from SIGTERM
    unlisted: list[str]  # calls that the loop may not make


class Stage:
    """A node with a good container and a daemon, and the clients beside; ready when it is entered."""

    def __init__(self, scratch: Path, *, tree: Path = ROOT, everywhere: bool = False) -> None:
        self._everywhere = everywhere
        self._stack = contextlib.ExitStack()
        self._scratch, self._tree = scratch, tree
        self.tenant_socket = scratch / "run" / "tenants" / "resolver.sock"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.node = stack.enter_context(Node(self._scratch / "node", "535.183.01"))
            self.good = Good(self.node)
            self.port = free_port()
            self.daemon = stack.enter_context(contextlib.closing(self.start()))
            self.daemon.wait_until_it_listens()
            self.scene = Scene(self.node, self.tenant_socket, self.port)
            until(self.good.right, "the good container is repaired")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start(self, *options: str, number: int = 0) -> WatchedDaemon:
        """A daemon; another ``number`` for each that shares this stage."""
        everywhere = self.node.placement_options() if self._everywhere else ()
        return WatchedDaemon(
            self.node,
            self._scratch,
            ("--source", "auto", "--tenant-socket", str(self.tenant_socket), *everywhere, *options),
            metrics=self.port,
            tree=self._tree,
            number=number,
        )

    def adopt(self, daemon: WatchedDaemon) -> None:
        """Take this daemon as the attacked one; it ends with the stage."""
        self.daemon = self._stack.enter_context(contextlib.closing(daemon))

    def client(self, *arguments: str) -> Client:
        process = subprocess.Popen(
            [sys.executable, "-I", str(_HERE / "beside.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)  # not ended yet if the attack failed
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdout:
            return Client(process.stdin.close, os.dup(process.stdout.fileno()))

    def root_client(self) -> Client:
        """Start a client that asks for the good container's process and compares the answer with the right one."""
        parent, container = self.good.parent, self.good.container
        question = f"/v1/lookup?container={container.container_id}&pid={parent.ns_pid}"
        return self.client("api", str(self.daemon.socket), question, f"{parent.host_pid}")

    def own_client(self) -> Client:
        script, parent = str(_HERE / "beside.py"), self.good.parent
        question = ("own", str(self.tenant_socket), f"/v1/lookup?pid={parent.ns_pid}", f"{parent.host_pid}")
        process = self.good.container.spawn([sys.executable, "-I", script, *question])
        return Client(process.kill, os.dup(process.stdout))


@contextlib.contextmanager
def open_directory() -> Iterator[Path]:
    """A temporary directory that users without any rights in it can pass."""
    with tempfile.TemporaryDirectory(prefix="resolver-hostile-") as name:
        os.chmod(name, 0o755)  # noqa: S103 - containers ask at a socket below it
        yield Path(name)


def measure(*, only: str = "", tree: Path = ROOT) -> Iterator[RowValues]:
    """All attacks, or those whose names begin with ``only``; with the daemon of the checkout ``tree``."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])  # the aims are for two cores
    for key, attack in ATTACKS.items():
        for size in attack.sizes if key.startswith(only) else ():
            progress(f"under {attack.name(size)}")
            with open_directory() as scratch:
                seen = under(attack, size, scratch, tree=tree)
                yield from rows(attack.name(size), seen, {**_BOUNDS, **attack.bounds})
    os.sched_setaffinity(0, cores)


def under(attack: Attack, size: int, scratch: Path, *, tree: Path = ROOT) -> Seen:
    with Tracer() as tracer, Stage(scratch, tree=tree, everywhere=attack.everywhere) as stage:
        daemon = stage.daemon
        tracer.watch(daemon.process.pid)
        good = [stage.good, *(Good(stage.node, f"good-{number}") for number in range(1, attack.good))]
        own = stage.own_client() if attack.at_socket else None
        clients = [stage.root_client(), stage.client("scrape", str(daemon.metrics))]
        repair_for(good, _WARM_SECONDS)
        before = rss(daemon.process.pid)
        daemon.reset_longest()
        with attack.begin(stage.scene, size):
            began, used, delayed = time.monotonic(), cpu(daemon.process.pid), run_delay(daemon.process.pid)
            repair_for(good, attack.seconds)
            seconds = time.monotonic() - began
            busy = cpu(daemon.process.pid).per_cent(used, seconds)
            waited = (run_delay(daemon.process.pid) - delayed) / seconds
        repair_for(good, _AFTER_SECONDS)
        for client in (*clients, *([own] if own else [])):
            client.end()
        after = _settled(daemon.process.pid, before)
        block, wait = daemon.longest_block(), daemon.longest_wait()
        with attack.begin(stage.scene, size):
            time.sleep(_AGAIN_SECONDS)
            ended = daemon.stopped_after()
        unlisted = daemon.unlisted(tracer)
        lines = [line for line in daemon.lines if began <= line["at"] < began + seconds]
    samples = [each for one in good for each in one.samples]
    during = [each for each in samples if began <= each.at < began + seconds]
    api, scrapes = (
        [each for each in client.samples if began <= each.at < began + seconds + margin]
        for client, margin in zip(clients, (0.0, _AFTER_SECONDS), strict=True)
    )
    asked = [each for each in own.samples if began <= each.at < began + seconds] if own else []
    return Seen(
        during, api, scrapes, asked, block, wait, busy, waited, before, after, by_container(lines), seconds,
        ended, unlisted,
    )  # fmt: skip


def repair_for(good: Sequence[Good], seconds: float) -> None:
    until = time.monotonic() + seconds
    for container in itertools.cycle(good):
        if time.monotonic() > until:
            return
        container.repair()
        time.sleep(0.03 + (time.monotonic() * 7.3) % 0.1)  # at every moment of a pass's interval


def _settled(host_pid: int, before: float) -> float:
    """Return the MiB once they are as before, or after some seconds."""
    until = time.monotonic() + _SETTLE_SECONDS
    while (now := rss(host_pid)) > before + 1.0 and time.monotonic() < until:
        time.sleep(0.25)
    return now


def by_container(lines: list[dict[str, Any]]) -> Counter[str]:
    """Count the log's lines about each hostile container."""
    found: Counter[str] = Counter()
    for line in lines:
        about = f"{line.get('container', '')} {line.get('path', '')}"
        if "_hostile-" in about:
            found[about.partition("_hostile-")[2].split("/")[0].split()[0]] += 1
    return found


def rows(name: str, seen: Seen, bounds: Mapping[str, float]) -> list[RowValues]:
    """Rows of the bench. The loop's block comes first, since it depends on nothing else."""
    wrong = wrong_values(seen.repairs, seen.api)
    failed, asked = sum(bool(each.trouble) for each in seen.own), f"of {len(seen.own)}{_troubles(seen.own)}"
    of_children = (
        f"its children {seen.busy.children:.0f}; its loop lacked one for {seen.waited:.0%} of the time"
    )
    lines = max(seen.lines.values(), default=0) / seen.seconds
    of_all = f"the one with most of them; {seen.lines.total()} of all {len(seen.lines)}"
    ended, end = (20.0, "still there after 20 s") if seen.ended is None else (seen.ended, "")
    longest = max((each.seconds for each in seen.scrapes), default=_PATIENCE)
    measured = [
        ("and by the wall", seen.wait * 1e3, "ms", "block", "but for waits for a CPU"),
        *_times("a good container's repair", seen.repairs, "repair"),
        *_times("root's question to the API", seen.api, "api"),
        ("a scrape, longest", longest * 1e3, "ms", "scrape", _troubles(seen.scrapes)),
        *([("a good container's own questions, failed", failed, "", "none", asked)] if seen.own else []),
        ("calls that the loop may not make", len(seen.unlisted), "", "none", "; ".join(seen.unlisted)),
        ("wrong values", len(wrong), "", "none", wrong[0] if wrong else ""),
        ("CPU of the daemon", seen.busy.own, "% core", "", of_children),
        ("memory not given back", seen.after - seen.before, "MiB", "memory", f"of {seen.after:.0f} MiB"),
        ("lines of the log, for one container", lines, "/s", "lines", of_all),
        ("SIGTERM to its end", ended, "s", "end", end),
    ]
    first = f"under {name}: the loop's longest block"
    return [
        (first, seen.block * 1e3, "ms", bounds["block"], "of its own CPU"),
        *((f"  {what}", value, unit, bounds.get(key), beside) for what, value, unit, key, beside in measured),
    ]


def wrong_values(repairs: list[Sample], api: list[Sample]) -> list[str]:
    written = [each.trouble for each in repairs if "was written" in each.trouble]
    return written + [each.trouble for each in api if "200 OK" in each.trouble]


def most(samples: list[Sample]) -> float:
    """Return the seconds within which 99 % of the samples were done."""
    ordered = sorted(each.seconds for each in samples)
    return ordered[len(ordered) * 99 // 100] if ordered else _PATIENCE


def _times(what: str, samples: list[Sample], bound: str) -> list[tuple[str, float, str, str, str]]:
    middle = statistics.median([each.seconds for each in samples] or [_PATIENCE])
    beside = f"of {len(samples)}{_troubles(samples)}"
    return [
        (f"{what}, median", middle * 1e3, "ms", "", ""),
        (f"{what}, 99 %", most(samples) * 1e3, "ms", bound, beside),
    ]


def _troubles(samples: list[Sample]) -> str:
    counted = Counter(each.trouble[:60].replace("\n", " ") for each in samples if each.trouble)
    return "".join(f"; {count} times {what}" for what, count in counted.most_common(2))
