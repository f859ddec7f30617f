"""What the reporter asks of an API server: a node's day, and a thousand nodes that start, rest, and lose the server.

The reporters are the real ones, the API server is the stand-in of the tests, both in this process and on loopback.
A day is played quickly: its bookmarks, its changes of the node and its ends of the watch, as many as a real one has.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from resolver.kube import node_events, reporter
from resolver.kube.device import health
from resolver.log import journal as log
from tests.bench.timing import Progress, RowValues
from tests.fakes.kube import Asked, KubeServer
from tests.fakes.reported import Run, gpu

NODES: Final = 1000
#: In a day of a node: the watch ends once an hour; kubelet writes the node's status each five minutes, or more often.
ENDS, STATUSES, BOOKMARKS, CHANGES = 24, 288, 1440, 10
#: Over 30 s, and not the 10 s of life: clients and server share one Python here.
_SPREAD, _REST_SECONDS, _GONE_SECONDS = 30.0, 5.0, 4.0
_PATIENCE = 120.0


def measure(scratch: Path, progress: Progress) -> list[RowValues]:
    """Rows of the bench."""
    log.setup_logging("json", "error")
    progress("a day of a node, played quickly")
    rows = asyncio.run(_day(scratch / "day"))
    progress(f"{NODES} nodes: start, rest, and an API server that goes and comes back")
    _allow_files(8 * NODES)
    try:
        return rows + asyncio.run(_fleet(scratch / "fleet"))
    except TimeoutError as error:
        # A thousand clients and their server on one machine: a busy one does not get there.
        return [*rows, (f"devices: {NODES:,} nodes at once", None, "", None, str(error))]


# ---- a day --------------------------------------------------------------------------------------------------------


async def _day(root: Path) -> list[RowValues]:
    with KubeServer(root) as kube, _quickly():
        kube.set_node("gpu-0", _annotations())
        async with _working(Run(kube, "gpu-0")) as run:
            run.daemon.say(*_gpus())
            await run.in_sync()
            begun = len(kube.asked)
            for _ in range(ENDS):
                watches = _watches(kube)
                kube.end_watches()
                await run.until(lambda watches=watches: _watches(kube) > watches and kube.watching)
                for _ in range(STATUSES // ENDS):
                    kube.set_node("gpu-0", _annotations())
            await run.in_sync()
            await asyncio.sleep(0.5)
            quiet = kube.asked[begun:]
            begun = len(kube.asked)
            for number in range(CHANGES):
                run.daemon.say(*_gpus(*(["too_hot"] if number % 2 == 0 else [])))
                await run.until(lambda number=number: len(kube.events) == number + 1)
            changed = kube.asked[begun:]
    bookmark = (
        len('{"type":"BOOKMARK","object":{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1",') + 90
    )
    still = sum(each.received + each.sent for each in quiet) + BOOKMARKS * bookmark
    more = sum(each.received + each.sent for each in changed)
    beside = f"{STATUSES} events of the node and {BOOKMARKS} bookmarks in its watches; HTTP, without TLS"
    return [
        (
            "devices: requests of a node's day without changes",
            len(quiet),
            "",
            None,
            f"{ENDS} watches and reads",
        ),
        ("  bytes", still / 1024, "KiB", None, beside),
        (
            f"  requests with {CHANGES} changes",
            len(quiet) + len(changed),
            "",
            None,
            "each one write and one event",
        ),
        (f"  bytes with {CHANGES} changes", (still + more) / 1024, "KiB", None, "8 GPUs"),
    ]


@contextlib.contextmanager
def _quickly() -> Any:
    """Without the pauses that keep writes and events apart."""
    kept = reporter._APART_SECONDS, node_events._APART_SECONDS
    reporter._APART_SECONDS, node_events._APART_SECONDS = 0.0, 0.0
    try:
        yield
    finally:
        reporter._APART_SECONDS, node_events._APART_SECONDS = kept


def _watches(kube: KubeServer) -> int:
    return sum("watch" in each.query for each in kube.asked)


# ---- a thousand nodes ---------------------------------------------------------------------------------------------


async def _fleet(root: Path) -> list[RowValues]:
    names = [f"gpu-{number}" for number in range(NODES)]
    with KubeServer(root) as kube:
        for name in names:
            kube.set_node(name, _annotations())
        runs = [Run(kube, name, spread=_SPREAD) for name in names]
        async with contextlib.AsyncExitStack() as stack:
            for run in runs:
                run.daemon.say(*_gpus())
                await stack.enter_async_context(_working(run))
            began = time.monotonic()
            start = await _until(lambda: all(not run.tally.not_in_sync for run in runs))
            at_start = [each for each in kube.asked if each.at >= began]
            before = len(kube.asked)
            await asyncio.sleep(_REST_SECONDS)
            resting = len(kube.asked) - before
            kube.stop()
            ill = runs[:: NODES // 100]
            for run in ill:
                run.daemon.say(*_gpus("too_hot"))
            await asyncio.sleep(_GONE_SECONDS)
            before = len(kube.asked)
            kube.start()
            back = await _until(lambda: all(_is_ill(kube, run.node) for run in ill))
            whole = await _until(
                lambda: kube.watching == NODES and not any(run.tally.not_in_sync for run in runs)
            )
            returned = kube.asked[before:]
    each_minute = NODES / 60
    return [
        (
            f"devices: {NODES:,} nodes start at once, busiest second",
            _busiest(at_start),
            "req/s",
            None,
            f"over {_SPREAD:g} s; {len(at_start)} requests in all, every object right after {start:.1f} s",
        ),
        (
            "  at rest",
            resting / _REST_SECONDS,
            "req/s",
            None,
            f"{resting} requests in {_REST_SECONDS:g} s; everything written each minute: {each_minute:.1f} writes/s",
        ),
        (
            f"  an API server is back after {_GONE_SECONDS:g} s, busiest second",
            _busiest(returned),
            "req/s",
            None,
            f"{len(returned)} requests; all {NODES:,} in sync after {back + whole:.1f} s",
        ),
        (
            f"  the objects of {len(ill)} changed nodes right",
            back,
            "s",
            None,
            "after its return; limited by the stand-in, which makes one TLS handshake after the other",
        ),
    ]


def _is_ill(kube: KubeServer, name: str) -> bool:
    return not all(state[0] for state in health(kube.devices[name]).values())


def _busiest(asked: Iterable[Asked]) -> int:
    """Requests in the busiest second."""
    times = sorted(each.at for each in asked)
    window, most = collections.deque[float](), 0
    for at in times:
        window.append(at)
        while window[0] <= at - 1:
            window.popleft()
        most = max(most, len(window))
    return most


async def _until(what: Callable[[], bool]) -> float:
    """Seconds until it is so."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > _PATIENCE:
            raise TimeoutError(f"the nodes were not in sync within {_PATIENCE:g} s: is this machine busy?")
        await asyncio.sleep(0.05)
    return time.monotonic() - began


@contextlib.asynccontextmanager
async def _working(run: Run) -> Any:
    task = asyncio.create_task(run.reporter.run())
    try:
        yield run
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await run.server.close()


def _gpus(*reasons: str) -> list[Any]:
    """Eight, the last one perhaps ill."""
    healthy = [gpu(f"GPU-5a3c1e70-8d42-4f6b-9b1e-2f7d0c9a4e{n:02}", n) for n in range(7)]
    return [*healthy, gpu("GPU-5a3c1e70-8d42-4f6b-9b1e-2f7d0c9a4e07", 7, *reasons)]


def _annotations() -> dict[str, str]:
    """As many bytes as a GPU node's have in life: HAMi registers its GPUs there."""
    return {
        "hami.io/node-nvidia-register": "x" * 1200,
        "volumes.kubernetes.io/controller-managed": "true" + "x" * 400,
    }


def _allow_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(wanted, soft), hard), hard))
