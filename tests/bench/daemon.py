"""The whole daemon: from a slot's appearance to its right ``hostpid``, and its memory."""

import contextlib
import ssl
import time
import urllib.request
from pathlib import Path

from resolver import client
from resolver.base.errors import NoDaemon
from tests.bench import repairs
from tests.bench.crowd import crowd, make_regions
from tests.bench.timing import RowValues, progress
from tests.bench.usage import memory
from tests.fakes.certificates import certificate
from tests.fakes.daemon import BOUND, Daemon, free_port
from tests.fakes.node import Node


def measure(scratch: Path) -> list[RowValues]:
    rows = repairs.measure(scratch)
    progress("the memory of a daemon alone, and of one beside 10,000 processes in 100 containers")
    small, large = _memory(scratch / "s", 4, 0), _memory(scratch / "l", 100, 10_000)
    encrypted = _memory(scratch / "t", 4, 0, tls=True)
    return [
        *rows,
        *_memory_rows("idle, probes, API and metrics on", 44.0, *small),
        ("  the same with TLS on the metrics", encrypted[0], "MiB", 60.0, "PSS, children included"),
        *_memory_rows("10,000 processes and 100 containers", None, *large),
    ]


def _memory_rows(what: str, bound: float | None, taken: float, peak: float, again: float) -> list[RowValues]:
    beside = f"PSS, the loader included; {again:.0f} at the next start"
    return [
        (f"memory of all of it, {what}", taken, "MiB", bound, "PSS, children included"),
        ("  at most while it starts", peak, "MiB", None, beside),
    ]


def _memory(
    scratch: Path, containers: int, processes: int, *, tls: bool = False
) -> tuple[float, float, float]:
    """Return a daemon's memory a while after its start and a question for every page, and its maximum before.

    The last is that of its next start, which compiles nothing.
    """
    scratch.mkdir()
    cert = certificate(scratch, "metrics") if tls else None
    with Node(scratch / "node", "535.183.01") as node, contextlib.ExitStack() as stack:
        if processes:
            make_regions(node.containers_dir, containers, 2)
            stack.enter_context(crowd(containers, processes // containers, node.containers_dir))
        for number in range(0 if processes else containers):
            node.container(name=f"m{number}").tenant(load=10, guess="none")
        taken, first = _one_life(scratch, node, cert)
        return taken, first, _one_life(scratch, node, cert)[1]


def _one_life(scratch: Path, node: Node, cert: Path | None) -> tuple[float, float]:
    metrics = f"127.0.0.1:{free_port()}"
    options = ["--source", "auto", "--metrics-addr", metrics, "--log-level", "error"]
    url, context = f"http://{metrics}/metrics", None
    if cert is not None:
        options += ["--metrics-tls-cert", str(cert), "--metrics-tls-key", str(cert.with_suffix(".key"))]
        url, context = f"https://{metrics}/metrics", ssl.create_default_context(cafile=str(cert))
    with Daemon(node, scratch / "run", *options, wrapper=BOUND) as daemon:
        pid, api = daemon.process.pid, str(daemon.socket)
        peak, until = 0.0, time.monotonic() + 60
        while not _has_probes(api) and time.monotonic() < until:
            peak = max(peak, memory(pid))
        for _ in range(3):
            urllib.request.urlopen(url, context=context).read()  # noqa: S310 - this machine
            client.processes(api)
            time.sleep(2)
        return memory(pid), peak


def _has_probes(socket_path: str) -> bool:
    try:
        return bool(client.status(socket_path)["source"]["name"] == "bpf")
    except NoDaemon:
        return False
