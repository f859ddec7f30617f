"""Snapshots for tests of their readers: an empty node with a test's changes."""

from typing import Any

from msgspec.structs import replace

from resolver.base.reasons import RegionReason, RepairReason, SampleReason, UnresolvedReason
from resolver.config import Setting
from resolver.gpu.attribution import NOTHING
from resolver.gpu.inventory import NONE, Gpu, Illness, Inventory, MigInstance, Sample
from resolver.hami.hostpid_policy import Origin
from resolver.state import (
    Container,
    PassSeconds,
    Policy,
    Process,
    RegionReport,
    SlotReport,
    SlotReports,
    Snapshot,
    Source,
    Worker,
)

_EMPTY = Snapshot(
    at=1_700_000_000.0,
    started_at=1_699_990_000.0,
    passes=1,
    passed_at=4e9,
    pass_seconds=PassSeconds((0.001, 1.0), (1, 1), 1, 0.0005),
    source=Source(
        "scan", not_used={}, incomplete=None, not_ready=None, processes=5, map_size=32768, counters={}
    ),
    policy=Policy(
        "host",
        "driver 550.54.15: samples carry host PIDs up to 565.77",
        Origin.BY_VERSION,
        {"confirms": 1, "doubts": 0},
    ),
    driver_version="550.54.15",
    inventory=NONE,
    regions=(),
    rejected={},
    missing_dirs=(),
    containers=(),
    gpu_processes=(),
    joined=NOTHING,
    collected_at=0.0,
    workers=(),
    counters={},
    dry_run=False,
)


def picture(**changes: Any) -> Snapshot:
    """An empty node's snapshot, with these fields instead, also of its ``source`` and its ``policy``."""
    for name in ("source", "policy"):
        changes[name] = replace(getattr(_EMPTY, name), **changes.get(name, {}))
    return _EMPTY._replace(**changes)


CID, POD, GPU = "ab" * 32, "11111111-2222-3333-4444-555555555555", "GPU-1"


SLOTS = (
    SlotReport(7, 0, 4711, 4711, False, None, RepairReason.MISSING, (40, 0), (40, None), "why it is stuck"),
    SlotReport(8, 1, 0, None, False, UnresolvedReason.NOT_MAPPED, None, (), (None, None)),
    SlotReport(9, 2, 5, None, True, None, None, (0, 0), (0, 0)),
)


FULL: dict[str, Any] = {
    "containers": (
        Container(CID, POD, "main", "ns", "pod-0", "containerd", 4026532000, 4700, ("/a.cache",), 1e9),
        Container("cd" * 32, *(None,) * 7, (), 1e9),
    ),
    "regions": (
        RegionReport("/a.cache", POD, "main", "v1.2", (GPU, "GPU-2"), CID, slots=SlotReports(SLOTS)),
        RegionReport("/b.cache", POD, "other", "v1.2", (GPU,), None, quarantined=True, slots=SlotReports(())),
    ),
    "rejected": {"/c.cache": RegionReason.SYMLINK},
    "missing_dirs": ("/gone",),
    "gpu_processes": (
        Process(4711, 7, GPU, CID, POD, "main", "ns", "pod-0", "python", 40, 1 << 30, None),
        Process(99, None, GPU, *(None,) * 8, SampleReason.NOT_IN_CONTAINER),
    ),
    "joined": NOTHING._replace(
        error="",
        orphans=(
            Sample(99, GPU, 3, SampleReason.NOT_IN_CONTAINER, None),
            Sample(98, GPU, 3, SampleReason.NO_SLOT, CID),
        ),
    ),
    "collected_at": 1.7e9,
    "inventory": Inventory(
        3,
        1.7e9,
        "550.54.15",
        (
            Gpu(
                GPU, 0, None, "A GPU", 1 << 34, None, None, 50, 71.5, True,
                (MigInstance("MIG-1", 1, 0, None, 5),), None, "unsupported", "MIG",
                (Illness("too_hot", "96 C", 1.7e9),),
            ),
        ),
    ),
    "workers": (Worker("nvml worker", 2, 1, "it hung"), Worker("slot writer", 1, 0, None)),
    "counters": {"repairs": 5},
    "settings": (Setting("interval", 0.25, "default"), Setting("containers_dir", ["/x"], "file x")),
}  # fmt: skip
