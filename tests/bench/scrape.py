"""What one node sends to Prometheus: series and bytes of a scrape, for nodes of several sizes.

The text is made by the daemon's own code from a picture of such a node, so the numbers are exact; time is measured.
"""

import asyncio
import gzip
import time
from typing import Final

from msgspec.structs import replace

from resolver.config import Settings
from resolver.gpu.attribution import Joined
from resolver.metrics import Page
from resolver.pids.bpf_map import COUNTERS
from resolver.state import PassSeconds, Snapshot, Worker
from tests.bench.timing import RowValues, progress
from tests.fakes.busy import GIB, Builder, gpu

#: GPUs, containers, GPUs of each container, processes of each container on each of its GPUs.
SHAPES: Final = ((1, 4, 1, 1), (4, 16, 1, 2), (8, 32, 1, 2), (8, 100, 1, 2), (8, 100, 8, 1))
_DRIFT: Final = ("drift_missing",)
#: The node that the sums for a fleet are made with.
USUAL: Final = (8, 32, 1, 2)


def measure() -> list[RowValues]:
    rows: list[RowValues] = []
    for shape in SHAPES:
        progress(f"the scrape of a node with {words_of(shape)}")
        seconds, text = min(_scrape(shape) for _ in range(5))
        series = sum(not line.startswith(b"#") for line in text.splitlines())
        packed = len(gzip.compress(text, 6)) / 1024
        rows += [
            (f"scrape of {words_of(shape)}", seconds * 1e3, "ms", None, f"{series} series"),
            ("  text", len(text) / 1024, "KiB", None, f"gzip {packed:.1f} KiB"),
        ]
    return rows


def words_of(shape: tuple[int, int, int, int]) -> str:
    gpus, containers, each, _ = shape
    on = " on all of them" if each == gpus > 1 else ""
    return f"{gpus} GPU{'s' * (gpus > 1)}, {containers} containers{on}"


def _scrape(shape: tuple[int, int, int, int]) -> tuple[float, bytes]:
    """Seconds to make one answer, and the answer."""
    snapshot = node(shape)
    page = Page(lambda: snapshot, Settings())
    began = time.perf_counter()
    _, _, text = asyncio.run(page.answer("/metrics"))
    return time.perf_counter() - began, text


def node(shape: tuple[int, int, int, int]) -> Snapshot:
    """A busy node: every value is known, and names are as long as they are in life."""
    count, containers, each, processes = shape
    gpus = tuple(gpu(index) for index in range(count))
    build = Builder()
    for number in range(containers):
        on = tuple(gpus[(number * each + which) % count].uuid for which in range(each))
        build.named(gpus[0], f"ml-research/finetune-{number}-7f9c8d6b5-x2x9k/worker")
        # HAMi's scheduler always gives a share of the memory, and usually one of the cores.
        build.regions[-1] = replace(
            build.regions[-1], device_uuids=on, limit=(8 * GIB,) * each, sm_limit=(30,) * each
        )
        for slot in range(each * processes):
            build.host_pid += 7
            build.process("python3", build.host_pid, slot + 2, 17, 3, device=on[slot // processes])
    known, now = frozenset(each.uuid for each in gpus), time.time()
    values = {(process.host_pid, process.device_uuid): 17 for process in build.processes}
    return build.picture(
        gpus,
        at=now,
        pass_seconds=PassSeconds((0.001, 0.01, 0.1, 1.0), (7_000,) * 4, 7_000, 7.7),
        source={"name": "bpf", "counters": dict.fromkeys((*COUNTERS, *_DRIFT), 0)},
        joined=Joined(now, "", values, known, (), (), known),
        collected_at=now,
        workers=(Worker("slot writer", 1, 0, None), Worker("nvml worker", 1, 0, None)),
    )
