"""Cache files for tests: the recorded ones, as they are or with single words changed."""

import gzip
import json
import math
import os
import struct
from collections.abc import Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from resolver.hami.directory_finder import DirectoryFinder
from resolver.hami.discovery import Place
from resolver.hami.layout import LAYOUTS
from tests.fakes.direct import at_once

RECORDED = Path(__file__).parent.parent / "fixtures" / "regions"
#: Layouts that have a recorded file.
NAMES = tuple(path.name.removesuffix(".cache.gz") for path in sorted(RECORDED.glob("*.cache.gz")))
POD_UID = "8d2f0c7e-51b4-4b8a-9a36-3d6f2b7d1c01"


@cache
def recorded(name: str) -> bytes:
    return gzip.decompress((RECORDED / f"{name}.cache.gz").read_bytes())


def expected(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return content


def write(path: Path, data: bytes) -> Path:
    """Write a file as a tenant leaves it: sparse where it is zero."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for start in range(0, len(data), 4096):
            page = data[start : start + 4096]
            if page.count(0) != len(page):
                file.seek(start)
                file.write(page)
        file.truncate(len(data))
    return path


def container(containers: Path, name: str = "main", layout: str = "v1.2", pod_uid: str = POD_UID) -> Path:
    """A container's directory with one good file in it; returns the file."""
    return write(containers / f"{pod_uid}_{name}" / "6f1e2d3c.cache", recorded(layout))


def region(path: Path, slots: Sequence[tuple[int, int]], uuids: Sequence[str], *, sm_util: int = 0) -> Path:
    """Write a file of layout v1.2 with these slots, ``(pid, hostpid)``, without a core limit."""
    layout = LAYOUTS["v1.2"]
    data = bytearray(recorded(layout.name))
    struct.pack_into("<Q", data, layout.device_num, len(uuids))
    for device, uuid in enumerate(uuids):
        struct.pack_into("<96s", data, layout.uuids + 96 * device, uuid.encode())
    struct.pack_into("<Q", data, layout.sm_limit, 0)
    data[layout.procs : layout.proc_num] = bytes(layout.proc_num - layout.procs)
    struct.pack_into("<i", data, layout.proc_num, len(slots))
    for index, (pid, hostpid) in enumerate(slots):
        struct.pack_into("<ii", data, layout.slot_offset(index), pid, hostpid)
        struct.pack_into("<i", data, layout.slot_offset(index) + layout.status, 1)
        for device in range(len(uuids)):
            struct.pack_into("<Q", data, layout.sm_util_offset(index, device) or 0, sm_util)
    return write(path, bytes(data))


def poke(path: Path, offset: int, code: str, *values: int | bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, struct.pack("<" + code, *values), offset)
    finally:
        os.close(fd)


class AtOnce(DirectoryFinder):
    """Searches within `refresh`, without an event loop."""

    def _begin(self, place: Place, work: Coroutine[Any, Any, None]) -> None:
        place.due = math.inf
        at_once(work)
