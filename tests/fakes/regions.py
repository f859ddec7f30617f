"""The shared region of the tests: its layouts, and the reports of HAMi's monitors.

The offsets are a C compiler's (`tests.fakes.layouts`), for the tenant as well; the files in
`tests/fixtures/regions` prove them.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fakes.layouts import TABLE

MAGIC: Final = 19920718
DEVICES: Final = 16
SLOTS: Final = 1024


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets of one released layout; None where it has no such field. The file is `size` + 1 bytes."""

    name: str
    size: int
    sm_init_flag: int
    owner_pid: int
    sem: int
    device_num: int
    uuids: int
    limit: int
    sm_limit: int
    procs: int
    proc_num: int
    slot_size: int
    used: int
    used_size: int
    monitorused: int
    status: int
    minor_version: int | None = None
    sem_postinit: int | None = None
    last_kernel_time: int | None = None
    seqlock: int | None = None
    device_util: int | None = None
    device_util_size: int = 0
    sm_util: int | None = None


LAYOUTS: Final = {name: Layout(name, **fields) for name, fields in json.loads(TABLE.read_text()).items()}


@dataclass(frozen=True, slots=True)
class ProcSlot:
    """One slot; one entry per device in use; sm_util is percent, and 0 where there is no such field."""

    index: int
    pid: int
    hostpid: int
    status: int
    sm_util: tuple[int, ...]
    monitorused: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """`beyond` are the slots from `proc_num` on that hold a utilization all the same."""

    layout: Layout
    owner_pid: int
    uuids: tuple[str, ...]
    slots: tuple[ProcSlot, ...]
    beyond: tuple[ProcSlot, ...] = ()

    def slot(self, pid: int) -> ProcSlot | None:
        return next((slot for slot in self.slots if slot.pid == pid), None)


Read = Callable[[int, int], bytes]  # (offset, length) -> bytes


def read_file(path: Path, slots: int = SLOTS) -> Region:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _parse(os.fstat(fd).st_size, lambda offset, length: os.pread(fd, length, offset), slots)
    finally:
        os.close(fd)


Counted = Callable[[Region], Sequence[ProcSlot]]
#: Which slots monitors add up, by HAMi's release; KAI and the DRA driver do as 2.7 to 2.9, Volcano as those before.
RULES: Final[dict[str, Counted]] = {
    "HAMi 2.10": lambda region: [slot for slot in region.slots if slot.status],
    "HAMi 2.7 to 2.9": lambda region: region.slots,
    "HAMi up to 2.6": lambda region: (*region.slots, *region.beyond),
}


def monitor_views(region: Region) -> dict[str, dict[str, int]]:
    """Return each monitor's report of one container, by rule and device: the sum of the slots that the rule counts.

    Neither `pid` nor `hostpid` matters to any of them.
    """
    return {
        rule: {uuid: sum(slot.sm_util[i] for slot in counted(region)) for i, uuid in enumerate(region.uuids)}
        for rule, counted in RULES.items()
    }


def monitor_view(region: Region) -> dict[str, int]:
    """Return the report of all monitors; -1, which equals no utilization, if they differ."""
    views = list(monitor_views(region).values())
    return {uuid: -1 if len({view[uuid] for view in views}) > 1 else views[0][uuid] for uuid in views[0]}


def _parse(length: int, read: Read, most: int = SLOTS) -> Region:
    head = read(0, 4096)
    magic, minor = struct.unpack_from("<i4xi", head)
    layouts = [
        one for one in LAYOUTS.values() if length == one.size + 1 and one.minor_version in (None, minor)
    ]
    if magic != MAGIC or not layouts:
        raise ValueError(f"{length} bytes, magic {magic}, minor version {minor}: not a released layout")
    layout = layouts[0]
    devices = min(struct.unpack_from("<Q", head, layout.device_num)[0], DEVICES)
    uuids = (head[at : at + 96].split(b"\0", 1)[0].decode() for at in _places(layout.uuids, 96, devices))
    count = max(0, min(struct.unpack("<i", read(layout.proc_num, 4))[0], most))
    places = _places(layout.procs, layout.slot_size, count)
    return Region(
        layout=layout,
        owner_pid=struct.unpack_from("<Q", head, layout.owner_pid)[0],
        uuids=tuple(uuids),
        slots=tuple(_slot(read(at, layout.slot_size), layout, i, devices) for i, at in enumerate(places)),
        beyond=tuple(_beyond(read, layout, count, most, devices)),
    )


def _beyond(read: Read, layout: Layout, count: int, most: int, devices: int) -> Iterator[ProcSlot]:
    rest = read(layout.procs + count * layout.slot_size, (most - count) * layout.slot_size)
    if layout.device_util is None or not rest:
        return
    loaded = set[int]()
    for at in _places(layout.device_util + 16, layout.device_util_size, devices):
        words = memoryview(rest).cast("Q")[at // 8 :: layout.slot_size // 8].tolist()
        loaded.update(index for index, value in enumerate(words) if value)
    for index in sorted(loaded):
        at = index * layout.slot_size
        yield _slot(rest[at : at + layout.slot_size], layout, count + index, devices)


def _places(first: int, step: int, count: int) -> range:
    return range(first, first + step * count, step)


def _slot(data: bytes, layout: Layout, index: int, devices: int) -> ProcSlot:
    pid, hostpid = struct.unpack_from("<ii", data)
    if layout.device_util is None:
        sm_util: tuple[int, ...] = (0,) * devices
    else:
        utils = _places(layout.device_util + 16, layout.device_util_size, devices)
        sm_util = tuple(struct.unpack_from("<Q", data, place)[0] for place in utils)
    return ProcSlot(
        index=index,
        pid=pid,
        hostpid=hostpid,
        status=struct.unpack_from("<i", data, layout.status)[0],
        sm_util=sm_util,
        monitorused=struct.unpack_from(f"<{devices}Q", data, layout.monitorused),
    )
