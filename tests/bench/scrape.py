"""What one node sends to Prometheus: series and bytes of a scrape, for nodes of several sizes.

The text is made by the daemon's own code from a picture of such a node, so the numbers are exact; time is measured.
"""

import asyncio
import gzip
import time
import uuid
from typing import Final, NamedTuple

from msgspec.structs import replace

from resolver.config import Settings
from resolver.gpu.attribution import Joined
from resolver.gpu.inventory import Gpu, Inventory
from resolver.metrics import Page
from resolver.pids.bpf_syscall import COUNTERS
from resolver.state import (
    Container,
    PassSeconds,
    Process,
    RegionReport,
    SlotReport,
    SlotReports,
    Snapshot,
    Worker,
)
from tests.bench.timing import Progress, RowValues
from tests.fakes.pictures import picture

#: GPUs, containers, GPUs of each container, processes of each container on each of its GPUs.
SHAPES: Final = ((1, 4, 1, 1), (4, 16, 1, 2), (8, 32, 1, 2), (8, 100, 1, 2), (8, 100, 8, 1))
_DRIFT: Final = ("drift_missing",)
#: The node that the sums for a fleet are made with.
USUAL: Final = (8, 32, 1, 2)


class Scrape(NamedTuple):
    """Of one answer of ``/metrics``. ``seconds`` is the time to make it, by the daemon's own code."""

    series: int
    text_bytes: int
    gzip_bytes: int
    seconds: float


def measure(progress: Progress) -> list[RowValues]:
    rows: list[RowValues] = []
    for shape in SHAPES:
        progress(f"the scrape of a node with {words_of(shape)}")
        found = min((scrape(shape) for _ in range(5)), key=lambda each: each.seconds)
        rows += [
            (f"scrape of {words_of(shape)}", found.seconds * 1e3, "ms", None, f"{found.series} series"),
            ("  text", found.text_bytes / 1024, "KiB", None, f"gzip {found.gzip_bytes / 1024:.1f} KiB"),
        ]
    return rows


def words_of(shape: tuple[int, int, int, int]) -> str:
    gpus, containers, each, _ = shape
    on = " on all of them" if each == gpus > 1 else ""
    return f"{gpus} GPU{'s' * (gpus > 1)}, {containers} containers{on}"


def scrape(shape: tuple[int, int, int, int], **wanted: object) -> Scrape:
    snapshot = node(shape)
    page = Page(lambda: snapshot, Settings(**wanted))  # type: ignore[arg-type]
    began = time.perf_counter()
    _, _, text = asyncio.run(page.answer("/metrics"))
    seconds = time.perf_counter() - began
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    return Scrape(series, len(text), len(gzip.compress(text, 6)), seconds)


def node(shape: tuple[int, int, int, int]) -> Snapshot:
    """A busy node: every value is known, and names are as long as they are in life."""
    count, containers, each, processes = shape
    gpus = tuple(_gpu(index) for index in range(count))
    reports, regions, running = [], [], []
    host_pid = 40_000
    for number in range(containers):
        report = _container(number)
        on = tuple(gpus[(number * each + which) % count].uuid for which in range(each))
        slots = []
        for slot in range(each * processes):
            host_pid += 7
            running.append(_process(report, host_pid, slot + 2, on[slot // processes]))
            slots.append(SlotReport(slot + 2, slot, host_pid, host_pid, False, None, None, (17,), (17,)))
        regions.append(_region(report, on, tuple(slots)))
        reports.append(report)
    known, now = frozenset(gpu.uuid for gpu in gpus), time.time()
    values = {(process.host_pid, process.device_uuid): 17 for process in running}
    return picture(
        at=now,
        pass_seconds=PassSeconds((0.001, 0.01, 0.1, 1.0), (7_000,) * 4, 7_000, 7.7),
        source={"name": "bpf", "counters": dict.fromkeys((*COUNTERS, *_DRIFT), 0)},
        inventory=Inventory(1, now, "550.54.15", gpus),
        containers=tuple(reports),
        regions=tuple(regions),
        gpu_processes=tuple(running),
        joined=Joined(now, "", values, known, (), (), known),
        collected_at=now,
        workers=(Worker("slot writer", 1, 0, None), Worker("nvml worker", 1, 0, None)),
    )


def _uuid(seed: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, seed))


def _gpu(index: int) -> Gpu:
    name, used = "NVIDIA A100-SXM4-80GB", 41 << 30
    known = (80 << 30, used, 87, 61, 312.4)
    return Gpu(f"GPU-{_uuid(f'gpu {index}')}", index, index, name, *known, False, (), 0, "ok", "", ())


def _container(number: int) -> Container:
    names = ("worker", "ml-research", f"finetune-{number}-7f9c8d6b5-x2x9k", "containerd")
    ids = f"{number:064x}", _uuid(f"pod {number}")
    return Container(*ids, *names, 4_026_532_000 + number, 40_000 + number, (), 1.7e9)


def _process(of: Container, host_pid: int, ns_pid: int, device_uuid: str) -> Process:
    whose = (of.container_id, of.pod_uid, of.container_name, of.namespace, of.pod)
    return Process(host_pid, ns_pid, device_uuid, *whose, "python3", 17, 3 << 30, None)


def _region(of: Container, on: tuple[str, ...], slots: tuple[SlotReport, ...]) -> RegionReport:
    path = f"/usr/local/vgpu/containers/{of.pod_uid}_{of.container_name}/{of.container_id[-8:]}.cache"
    report = RegionReport(
        path, of.pod_uid or "", of.container_name or "", "v1.2", on, of.container_id, slots=SlotReports(slots)
    )
    # HAMi's scheduler always gives a share of the memory, and usually one of the cores.
    return replace(report, limit=(8 << 30,) * len(on), sm_limit=(30,) * len(on))
