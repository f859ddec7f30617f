"""Field offsets of each released layout of HAMi's shared region. Pure: bytes in, values out.

Offsets are a C compiler's on x86-64, little-endian. File size, ``sizeof(region) + 1``, and version identify a layout.
"""

from struct import Struct, unpack_from
from typing import Any, NamedTuple

from resolver.base.errors import RegionRejected
from resolver.base.reasons import RegionReason

MAGIC = 19920718
MAX_DEVICES = 16
MAX_SLOTS = 1024
UUID_BYTES = 96
#: Bytes that `identify` needs: the magic number and the two version words.
IDENTIFY_BYTES = 12
#: Bytes that `parse_tail_start` needs, from `Layout.proc_num` on.
TAIL_START_BYTES = 8

#: More bytes than any GPU has.
_MOST_BYTES = 1 << 48
_USED_FIELDS = ("context_size", "module_size", "data_size", "offset", "total")
_DEVICE_UTIL_FIELDS = ("dec_util", "enc_util", "sm_util")
_SM_UTIL = 16  # in a device_util


class Layout(NamedTuple):
    """One released layout. Offsets in bytes; ``None`` for missing fields.

    The first group counts from the region's start, the second from a slot's.
    """

    name: str
    released: str  # releases of HAMi that write it
    size: int  # sizeof(shared_region_t)
    version: tuple[int, int] | None
    owner_pid: int
    device_num: int
    uuids: int
    limit: int
    sm_limit: int
    procs: int
    proc_num: int
    last_kernel_time: int | None

    slot_size: int
    seqlock: int | None
    used: int
    used_size: int
    monitorused: int
    device_util: int | None
    device_util_size: int
    status: int

    @property
    def file_bytes(self) -> int:
        return self.size + 1

    def slot_offset(self, index: int) -> int:
        """Return the offset of a slot, whose first word is ``pid`` (low half) and ``hostpid`` (high half)."""
        return self.procs + index * self.slot_size

    def sm_util_offset(self, index: int, device: int) -> int | None:
        """Return the offset of a slot's ``device_util[device].sm_util`` (u64), if any."""
        if self.device_util is None:
            return None
        return self.slot_offset(index) + self.device_util + device * self.device_util_size + _SM_UTIL


#: Offsets and sizes by layout. HAMi 2.8.1 writes version 1.1, but a second semaphore and the seqlock moved the rest.
_TABLE = """
                    v0-no-util            v0          v1.1  v1.1-shifted          v1.2
size                    804680       1197896       2008952       2008984       2008952
owner_pid                    8             8            16            16            16
device_num                  48            48            56            88            56
uuids                       56            56            64            96            64
limit                     1592          1592          1600          1632          1600
sm_limit                  1720          1720          1728          1760          1728
procs                     1848          1848          1856          1888          1856
proc_num                804664       1197880       2008896       2008928       2008896
last_kernel_time             -             -       2008912       2008944       2008912
slot_size                  784          1168          1960          1960          1960
seqlock                      -             -             -             8          1936
used                         8             8             8            16             8
used_size                   40            40            64            64            64
monitorused                648           648          1032          1040          1032
device_util                  -           776          1160          1168          1160
device_util_size             0            24            48            48            48
status                     776          1160          1928          1936          1928
"""
_RELEASES = {
    "v0-no-util": ("HAMi-core of January 2024", None),
    "v0": ("HAMi-core from April 2024", None),
    "v1.1": ("HAMi 2.4.1 to 2.8.0", (1, 1)),
    "v1.1-shifted": ("HAMi 2.8.1", (1, 1)),
    "v1.2": ("HAMi 2.8.2 to 2.10.0", (1, 2)),
}


def _layouts() -> dict[str, Layout]:
    names, *lines = (line.split() for line in _TABLE.strip().splitlines())
    rows = {field: [None if value == "-" else int(value) for value in values] for field, *values in lines}
    columns = ({field: row[place] for field, row in rows.items()} for place in range(len(names)))
    return {
        name: Layout(name=name, released=_RELEASES[name][0], version=_RELEASES[name][1], **values)  # type: ignore[arg-type]
        for name, values in zip(names, columns, strict=True)
    }


#: Known layouts by name.
LAYOUTS = _layouts()
#: The layout that no HAMi monitor shows, the reason, and the next step.
DROPPED = "v1.1-shifted"
DROPPED_WHY = "its fields are not where its version says, so every monitor of HAMi drops it"
DROPPED_FIX = (
    "another release of HAMi's library in that container; until then resolver top and resolver's metrics, also by "
    "HAMi's names (--hami-metrics), have its values"
)
#: Possible sizes of a cache file, checked before anything is read.
FILE_SIZES = frozenset(layout.file_bytes for layout in LAYOUTS.values())


class Header(NamedTuple):
    """The daemon's fields before the slots; lists cover the first ``device_num`` devices."""

    device_num: int
    uuids: tuple[str, ...]
    sm_limit: tuple[int, ...]  # per cent of the cores; 100 means no limit, also if none was set
    limit: tuple[int, ...] = ()  # bytes of device memory; 0 means no limit


def identify(file_bytes: int, header: bytes) -> Layout:
    """Recognize a layout by a file's exact size and first `IDENTIFY_BYTES`.

    Raises `RegionRejected`: ``unknown_size``, ``not_initialized``, ``unknown_version``, ``truncated``.
    """
    if file_bytes not in FILE_SIZES:
        raise RegionRejected(
            RegionReason.UNKNOWN_SIZE,
            f"{file_bytes} bytes match no released layout: a newer HAMi, or not a shared region",
        )
    if len(header) < IDENTIFY_BYTES:
        raise RegionRejected(RegionReason.TRUNCATED, "the file ends within its first 12 bytes")
    magic, major, minor = unpack_from("<iII", header)
    if magic != MAGIC:
        raise RegionRejected(
            RegionReason.NOT_INITIALIZED,
            f"initialized_flag is {magic}, not {MAGIC}: no process has initialised this file yet",
        )
    for layout in LAYOUTS.values():
        if layout.file_bytes == file_bytes and layout.version in (None, (major, minor)):
            return layout
    raise RegionRejected(
        RegionReason.UNKNOWN_VERSION,
        f"version {major}.{minor} in {file_bytes} bytes was never released, or is newer than this program",
    )


def parse_header(layout: Layout, header: bytes) -> Header:
    """Parse the ``layout.procs`` bytes before the slots. Raises `RegionRejected` with ``bad_header``."""
    (device_num,) = unpack_from("<Q", header, layout.device_num)
    if device_num > MAX_DEVICES:
        raise RegionRejected(
            RegionReason.BAD_HEADER, f"the device count is {device_num}, but there are {MAX_DEVICES} places"
        )
    uuids = tuple(_parse_uuid(layout, header, device) for device in range(device_num))
    words = f"<{device_num}Q"
    sm_limit, limit = unpack_from(words, header, layout.sm_limit), unpack_from(words, header, layout.limit)
    return Header(device_num=device_num, uuids=uuids, sm_limit=sm_limit, limit=limit)


def _parse_uuid(layout: Layout, header: bytes, device: int) -> str:
    start = layout.uuids + device * UUID_BYTES
    text, terminator, _ = bytes(header[start : start + UUID_BYTES]).partition(b"\0")
    if not terminator or not text.isascii() or not text.decode("ascii").isprintable():
        raise RegionRejected(RegionReason.BAD_HEADER, f"uuids[{device}] is not printable text")
    return text.decode("ascii")


def parse_tail_start(tail: bytes) -> tuple[int, int]:
    """Return ``(proc_num, utilization_switch)`` from the first `TAIL_START_BYTES` at `Layout.proc_num`."""
    if len(tail) < TAIL_START_BYTES:
        raise RegionRejected(RegionReason.TRUNCATED, "the file ends before proc_num: it was truncated")
    proc_num, utilization_switch = unpack_from("<ii", tail)
    if not 0 <= proc_num <= MAX_SLOTS:
        raise RegionRejected(
            RegionReason.BAD_HEADER, f"proc_num is {proc_num}, but there are {MAX_SLOTS} slots"
        )
    return proc_num, utilization_switch


def parse_used(layout: Layout, slot: bytes, device_num: int) -> tuple[tuple[int, int, int, int], ...]:
    """Return each device's ``context_size``, ``module_size``, ``data_size`` and ``total`` from a slot's start."""
    fields = Struct("<3Q8xQ")
    return tuple(
        fields.unpack_from(slot, layout.used + device * layout.used_size) for device in range(device_num)
    )


def is_plausible(count: int, memory: int | None = None, limit: int | None = None) -> bool:
    """Check a count of bytes against the GPU's ``memory``, and a ``limit`` above that if oversubscribed.

    HAMi-core's counts wrap below 0 when it subtracts more than it had added.
    """
    return count <= min(_MOST_BYTES, max(memory, limit or 0) if memory else _MOST_BYTES)


def parse_region(layout: Layout, header: bytes, slots: bytes, tail: bytes) -> dict[str, Any]:
    """Return the whole content, for display and JSON, under upstream C names."""
    tail_length = layout.size - layout.proc_num
    proc_num, utilization_switch = parse_tail_start(tail)
    if len(header) < layout.procs or len(tail) < tail_length or len(slots) < proc_num * layout.slot_size:
        raise RegionRejected(RegionReason.TRUNCATED, "the file came back shorter than its header says")
    head = parse_header(layout, header)
    recent_kernel, priority = unpack_from("<ii", tail, TAIL_START_BYTES)
    major, minor = unpack_from("<II", header, 4) if layout.version else (None, None)
    last_kernel_time = None
    if layout.last_kernel_time is not None:
        (last_kernel_time,) = unpack_from("<Q", tail, layout.last_kernel_time - layout.proc_num)
    return {
        "layout": layout.name,
        "file_bytes": layout.file_bytes,
        "initialized_flag": unpack_from("<i", header)[0],
        "major_version": major,
        "minor_version": minor,
        "owner_pid": unpack_from("<Q", header, layout.owner_pid)[0],
        "device_num": head.device_num,
        "uuids": list(head.uuids),
        "limit": list(head.limit),
        "sm_limit": list(head.sm_limit),
        "proc_num": proc_num,
        "utilization_switch": utilization_switch,
        "recent_kernel": recent_kernel,
        "priority": priority,
        "last_kernel_time": last_kernel_time,
        "slots": [_parse_slot(layout, slots, index, head.device_num) for index in range(proc_num)],
    }


def _parse_slot(layout: Layout, slots: bytes, index: int, device_num: int) -> dict[str, Any]:
    base = index * layout.slot_size
    slot_pid, hostpid = unpack_from("<ii", slots, base)
    slot: dict[str, Any] = {
        "index": index,
        "pid": slot_pid,
        "hostpid": hostpid,
        "status": unpack_from("<i", slots, base + layout.status)[0],
    }
    if layout.seqlock is not None:
        slot["seqlock"] = unpack_from("<Q", slots, base + layout.seqlock)[0]
    used = base + layout.used
    slot["used"] = _structs(_USED_FIELDS, slots, used, layout.used_size, device_num)
    slot["monitorused"] = list(unpack_from(f"<{device_num}Q", slots, base + layout.monitorused))
    if layout.device_util is not None:
        util = base + layout.device_util
        slot["device_util"] = _structs(_DEVICE_UTIL_FIELDS, slots, util, layout.device_util_size, device_num)
    return slot


def _structs(names: tuple[str, ...], data: bytes, start: int, size: int, count: int) -> list[dict[str, int]]:
    """Parse structs that begin with u64 fields of these names."""
    fields = Struct(f"<{len(names)}Q")
    return [
        dict(zip(names, fields.unpack_from(data, start + index * size), strict=True))
        for index in range(count)
    ]
