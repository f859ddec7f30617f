"""Files that a process maps and holds open, from the kernel alone: no file system is queried.

Files on btrfs, bcachefs and some overlays can share device and inode, so a mapping identifies no file. A descriptor
does, by mount and path, while the file has one name.
"""

import ctypes
import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fcntl import ioctl
from struct import Struct
from typing import NamedTuple

from resolver.base.errors import ProcessGone
from resolver.linux.mounts import Mount
from resolver.linux.procfs import Procfs, TooLarge, translate

#: Descriptors of one process that are read, some 2 us each; HAMi-core opens its file before any device.
MAX_DESCRIPTORS = 4096
#: Writable shared mappings of one process that are read, some 2 us each.
MAX_QUERIES = 4096
#: As much of ``maps`` as is read on kernels before 6.11: some 40,000 mappings.
MAX_MAPS = 4 << 20

# struct procmap_query and its flags, include/uapi/linux/fs.h, Linux 6.11
# Its members: size, flags, address; start, end, flags, page size, offset, inode, major, minor, ...
_QUERY = Struct("=9Q4I2Q")
PROCMAP_QUERY = 0xC0686611  # _IOWR('f', 17, struct procmap_query)
_SHARED_WRITABLE = 0x02 | 0x08
_COVERING_OR_NEXT, _FILE_BACKED = 0x10, 0x20
# The inode's column precedes the path, so that no file name can imitate it.
_LINE = re.compile(rb"^[0-9a-f]+-\S+ rw.s \S+ ([0-9a-f]+):([0-9a-f]+) (\d+)(?:[ \n]|$)", re.MULTILINE)
_PROT_NONE, _MAP_SHARED, _MAP_FAILED = 0, 1, (1 << 64) - 1


#: Device (``major:minor``) and inode of a file in ``maps``: on some kernels neither those of ``stat`` nor of its mount.
Shown = tuple[str, int]


class SuperblockPath(NamedTuple):
    """Superblock (``major:minor``) and path inside it."""

    device: str
    path: str


class Descriptor(NamedTuple):
    """Open file of a process: its path as seen from here, and mount. ``inode`` is 0 before Linux 5.14."""

    path: str
    mount_id: int
    writable: bool
    inode: int = 0
    number: int = -1


def maps_file(procfs: Procfs, host_pid: int | str, device: str, inode: int) -> bool:
    """Check if the process maps a file with this device (``major:minor``) and inode, writable and shared.

    That takes the right to write; a reader's or private mapping proves nothing. Raises `TooLarge`.
    """
    return (device, inode) in _mapped_files(procfs, host_pid)


def shared_files(procfs: Procfs, host_pid: int) -> set[Shown]:
    """Device and inode of files mapped writable and shared. Raises `TooLarge`."""
    return set(_mapped_files(procfs, host_pid))


def mapped_as(procfs: Procfs, fd: int) -> Shown:
    """Return an open file's device and inode in ``maps``; ``fstat`` may differ (overlay, btrfs)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, 4096, _PROT_NONE, _MAP_SHARED, fd, 0)
    if address in (None, _MAP_FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        with open(f"{procfs.root}/self/maps", "rb", buffering=0) as file:
            text = file.readall()
    finally:
        libc.munmap(address, 4096)
    # A line: '7f2c8a000000-7f2c8a001000 ---s 00000000 00:2d 1311072                    /tmp/vgpu/6f1e2d3c.cache'
    for line in text.split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) >= 5:
            start, end = (int(number, 16) for number in fields[0].split(b"-"))
            if start <= address < end:
                major, minor = (int(number, 16) for number in fields[3].split(b":"))
                return f"{major}:{minor}", int(fields[4])
    raise OSError(errno.ENOENT, "a mapping that was just made is not in /proc/self/maps")


def _mapped_files(procfs: Procfs, host_pid: int | str) -> Iterator[Shown]:
    """Yield device and inode of each shared writable mapping.

    A thread stands in for an exited leader.
    """
    for thread in procfs.threads(host_pid):
        with suppress(ProcessGone):
            yield from _mapped_by(f"{procfs.root}/{thread}/maps")
            return
    raise ProcessGone(f"{procfs.root}/{host_pid}/maps: the process ended")


def _mapped_by(path: str) -> Iterator[tuple[str, int]]:
    """Query PROCMAP_QUERY, or read the text on older kernels. Raises `ProcessGone`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                yield from _by_query(fd, path)
            except OSError as error:
                if error.errno != errno.ENOTTY:
                    raise
                yield from _by_text(fd, path)
        finally:
            os.close(fd)
    except OSError as error:
        raise translate(error, path) from None


def _by_query(fd: int, path: str) -> Iterator[tuple[str, int]]:
    address, query = 0, bytearray(_QUERY.size)
    flags = _COVERING_OR_NEXT | _FILE_BACKED | _SHARED_WRITABLE
    for _ in range(MAX_QUERIES):
        _QUERY.pack_into(query, 0, _QUERY.size, flags, address, *(0,) * 12)
        try:
            ioctl(fd, PROCMAP_QUERY, query)
        except OSError as error:
            if error.errno == errno.ENOENT:  # no more mappings
                return
            raise
        mapping = _QUERY.unpack_from(query)
        yield f"{mapping[9]}:{mapping[10]}", mapping[8]
        address = mapping[4]
    raise TooLarge(f"{path} has more than {MAX_QUERIES} mappings, which is the limit")


def _by_text(fd: int, path: str) -> Iterator[tuple[str, int]]:
    total, rest = 0, b""
    while chunk := os.read(fd, 1 << 16):
        lines, newline, rest = (rest + chunk).rpartition(b"\n")
        for major, minor, inode in _LINE.findall(lines + newline):
            yield f"{int(major, 16)}:{int(minor, 16)}", int(inode)
        total += len(chunk)
        if total > MAX_MAPS:
            raise TooLarge(f"{path} is longer than {MAX_MAPS} bytes, the limit for a tenant's file")
    if not total:
        raise ProcessGone(f"{path}: there is no memory map")


# /proc/<pid>/fdinfo/<fd>: 'pos:\t0', 'flags:\t02100002', 'mnt_id:\t1361', 'ino:\t1311072'
def descriptor(procfs: Procfs, host_pid: int | str, fd: int | str) -> Descriptor:
    """Describe an open file of a process (or ``self``). Raises OSError."""
    path = os.readlink(f"{procfs.root}/{host_pid}/fd/{fd}")
    with open(f"{procfs.root}/{host_pid}/fdinfo/{fd}", "rb", buffering=0) as file:
        info = file.read(4096)
    fields = dict(line.split(b":", 1) for line in info.split(b"\n") if b":" in line)
    access = int(fields[b"flags"], 8) & os.O_ACCMODE
    writable = access in (os.O_RDWR, os.O_WRONLY)
    inode = int(fields.get(b"ino", 0))
    return Descriptor(path, int(fields[b"mnt_id"]), writable=writable, inode=inode, number=int(fd))


def open_paths(procfs: Procfs, host_pid: int) -> Iterator[tuple[str, str]]:
    """Yield number and path of each descriptor; no link is followed.

    Raises `TooLarge`, `ProcessGone` and `AccessDenied`.
    """
    directory = f"{procfs.root}/{host_pid}/fd"
    try:
        with os.scandir(directory) as listing:
            for count, entry in enumerate(listing):
                if count == MAX_DESCRIPTORS:
                    raise TooLarge(f"{directory} has more than {MAX_DESCRIPTORS} entries, which is the limit")
                with suppress(FileNotFoundError):  # closed meanwhile
                    yield entry.name, os.readlink(f"{directory}/{entry.name}")
    except OSError as error:
        raise translate(error, directory) from None


def open_for_writing(procfs: Procfs, host_pid: int, name: str = "") -> Iterator[Descriptor]:
    """Yield files (not pipes, sockets, memory) open for writing, of that name if given.

    Raises as `open_paths`, except `TooLarge` after a file of that name.
    """
    matched = False
    try:
        for fd, path in open_paths(procfs, host_pid):
            is_file = path.startswith(("/", "(unreachable)")) and not path.startswith("/memfd:")
            if path.endswith(f"/{name}") if name else is_file:
                try:
                    opened = descriptor(procfs, host_pid, fd)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise translate(error, f"{procfs.root}/{host_pid}/fd/{fd}") from None
                matched = bool(name)
                if opened.writable:
                    yield opened
    except TooLarge:
        if not matched:
            raise


def open_names(procfs: Procfs, host_pid: int) -> set[str]:
    """Names of open files. Raises as `open_paths`."""
    paths = (path for _, path in open_paths(procfs, host_pid))
    return {path.removesuffix(" (deleted)").rpartition("/")[2] for path in paths}


def superblock_path(opened: Descriptor, mounts: Iterable[Mount]) -> SuperblockPath | None:
    """Locate an open file in a mount table; None if its mount isn't there."""
    for mount in mounts:
        if mount.mount_id == opened.mount_id:
            above = mount.mount_point.rstrip("/")
            if opened.path != above and not opened.path.startswith(f"{above}/"):
                return None
            inside = opened.path[len(above) :].strip("/")
            return SuperblockPath(mount.device, os.path.join(mount.root, inside) if inside else mount.root)
    return None
