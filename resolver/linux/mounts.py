"""Parser of ``mountinfo``."""

import os
from collections.abc import Iterator

from resolver.base.records import NamedTuple


class Mount(NamedTuple):
    """One line of ``mountinfo``; ``device`` is the superblock's ``major:minor``."""

    mount_id: int
    device: str
    root: str
    mount_point: str
    fs_type: str
    super_options: str


def _unescape(field: bytes) -> str:
    if b"\\" in field:
        first, *rest = field.split(b"\\")
        field = first + b"".join(bytes((int(part[:3], 8) & 0xFF,)) + part[3:] for part in rest)
    return os.fsdecode(field)


# A line: '1361 1200 0:54 /kubelet/pods/8f1e /data\040set rw,relatime shared:41 - ext4 /dev/sda1 rw,errors=continue'
def parse_mountinfo(text: bytes) -> Iterator[Mount]:
    """Parse a mount table (proc(5)); incomplete lines are skipped."""
    for line in text.split(b"\n"):  # not splitlines: a path may hold a carriage return
        left, dash, right = line.partition(b" - ")
        fields, tail = left.split(b" "), right.split(b" ")
        if dash and len(fields) >= 6 and len(tail) >= 3:
            yield Mount(
                mount_id=int(fields[0]),
                device=fields[2].decode("ascii"),
                root=_unescape(fields[3]),
                mount_point=_unescape(fields[4]),
                fs_type=tail[0].decode("ascii", "replace"),
                super_options=_unescape(tail[2]),
            )
