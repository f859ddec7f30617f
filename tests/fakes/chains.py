"""One container's chain, from its processes to HAMi's monitor, as a daemon's API would tell it."""

from typing import Any

from msgspec.structs import replace

from resolver.base.reasons import RepairReason
from resolver.gpu.attribution import NOTHING
from resolver.gpu.inventory import Gpu, Inventory
from resolver.state import Container, Process, RegionReport, SlotReport, SlotReports

CID, OTHER, POD, GPU = "ab" * 32, "cd" * 32, "11111111-2222-3333-4444-555555555555", "GPU-1"


PATH = f"/usr/local/vgpu/containers/{POD}_main/x.cache"


MAIN = Container(CID, POD, "main", "research", "train-0", "containerd", 4026532000, 4700, (PATH,), 1e9)


RIGHT = SlotReport(7, 0, 4711, 4711, False, None, RepairReason.MISSING, (40,), (40,))


USING = Process(4711, 7, GPU, CID, POD, "main", "research", "train-0", "python", 40, 1 << 30, None)


GPUS = Inventory(
    1, 1e9, "550.54.15", (Gpu(GPU, 0, 0, "A", 1, 1, 40, 50, 70.0, False, (), 0, "ok", None, ()),)
)


def region(*slots: SlotReport, **changes: Any) -> RegionReport:
    return replace(
        RegionReport(PATH, POD, "main", "v1.2", (GPU,), CID, placement="hami", slots=SlotReports(slots)),
        **changes,
    )


def whole(*slots: SlotReport, **changes: Any) -> dict[str, Any]:
    """Return a node on which a container's chain holds, with other slots and fields if given."""
    fields: dict[str, Any] = {
        "containers": (MAIN,),
        "regions": (region(*(slots or (RIGHT,))),),
        "gpu_processes": (USING,),
        "inventory": GPUS,
        "joined": NOTHING._replace(error=""),
        "collected_at": 1e9,
    }
    return fields | changes
