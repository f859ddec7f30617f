"""Which files a process maps and holds open, in the kernel's own words: no file system is asked anything.

A mapping shows a device and an inode number. On btrfs, bcachefs and some overlays two files share that pair, so it
alone never identifies a mapped file. That follows from a descriptor: its mount, and the path below it, name one
file of a superblock for as long as the file has one name (`FilePlace`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from contextlib import suppress
from fcntl import ioctl
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from resolver.errors import ProcessGone
from resolver.linux.procfs import TooLarge, translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from resolver.linux.procfs import Mount, Procfs

#: Descriptors of one process that are read, some 2 us each; HAMi-core opens its file before any device.
MAX_DESCRIPTORS = 4096
#: Writable shared mappings of one process that are read, some 2 us each.
MAX_QUERIES = 4096
#: As much of ``maps`` as is read on kernels before 6.11: some 40,000 mappings.
MAX_MAPS = 4 << 20

# struct procmap_query and its flags, include/uapi/linux/fs.h, Linux 6.11
_QUERY = Struct(
    "=9Q4I2Q"
)  # size, flags, addr, vma start, end, flags, page_size, offset, inode, dev, dev, ...
_PROCMAP_QUERY = 0xC0686611  # _IOWR('f', 17, struct procmap_query)
_SHARED_WRITABLE = 0x02 | 0x08
_COVERING_OR_NEXT, _FILE_BACKED = 0x10, 0x20
_SHARED_LINE = re.compile(rb"^\S+ rw.s \S+ ([0-9a-f]+):([0-9a-f]+) (\d+)(?:[ \n]|$)", re.MULTILINE)
_PROT_NONE, _MAP_SHARED, _MAP_FAILED = 0, 1, (1 << 64) - 1


class FilePlace(NamedTuple):
    """A file as the kernel names it: superblock (``major:minor``) and path inside it.

    Snapshots of one subvolume, and layers of overlays, have paths of their own.
    """

    device: str
    path: str


class Descriptor(NamedTuple):
    """An open file of a process: the path as it shows from here, and the mount that it was reached through.

    ``inode`` is the number that the kernel gives it there, 0 before Linux 5.14: equal for two descriptors of one file.
    """

    path: str
    mount_id: int
    writable: bool
    inode: int = 0


# -- what is mapped -----------------------------------------------------------------------------------


def maps_file(
    procfs: Procfs, host_pid: int | str, device: str, inode: int, *, writable: bool = False
) -> bool:
    """Whether the process maps a file that shows with this device and inode (needs CAP_SYS_PTRACE for others').

    ``device`` is ``major:minor`` of the superblock in decimal, as mountinfo has it. ``writable``: for all who map it to
    see; the kernel gives such a mapping only to who may write to the file. Raises `TooLarge`.
    """
    major, minor = map(int, device.split(":"))
    wanted, line = (inode, major, minor), _line_of(major, minor, inode, writable=writable)

    def is_it(*shown: int) -> bool:
        return shown == wanted

    def by_text(fd: int, path: str) -> bool | None:
        return _by_text(fd, line, path)

    flags = _FILE_BACKED | (_SHARED_WRITABLE if writable else 0)
    return _of_any_thread(procfs, host_pid, lambda path: _ask(procfs, path, flags, is_it, by_text))


def shared_files(procfs: Procfs, host_pid: int) -> set[tuple[str, int]]:
    """Device and inode, as `mapped_as` has them, of every file that the process maps writable and shared.

    Raises `TooLarge`.
    """
    found: set[tuple[str, int]] = set()

    def take(inode: int, major: int, minor: int) -> bool:
        found.add((f"{major}:{minor}", inode))
        return False

    def by_text(fd: int, path: str) -> bool | None:
        empty = True
        for lines in _lines_of(fd, path):
            empty = False
            for major, minor, inode in _SHARED_LINE.findall(lines):
                take(int(inode), int(major, 16), int(minor, 16))
        return None if empty else True

    _of_any_thread(
        procfs, host_pid, lambda path: _ask(procfs, path, _FILE_BACKED | _SHARED_WRITABLE, take, by_text)
    )
    return found


def mapped_as(procfs: Procfs, fd: int) -> tuple[str, int]:
    """Device and inode by which an open regular file shows in ``maps``, for `maps_file`.

    By a mapping of our own that is never touched: on an overlay, and on btrfs, it is the kernel's version that
    decides between numbers, and none of them need be those of ``fstat``.
    """
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
    for line in text.split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) >= 5:
            start, end = (int(each, 16) for each in fields[0].split(b"-"))
            if start <= address < end:
                major, minor = (int(each, 16) for each in fields[3].split(b":"))
                return f"{major}:{minor}", int(fields[4])
    raise OSError(errno.ENOENT, "a mapping that was just made is not in /proc/self/maps")


def _ask(
    procfs: Procfs,
    path: str,
    flags: int,
    take: Callable[[int, int, int], bool],
    by_text: Callable[[int, str], bool | None],
) -> bool | None:
    """By PROCMAP_QUERY where there is one, by the text elsewhere; None if the process has no memory map."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise translate(error, path) from None
    try:
        if procfs.use_procmap_query:
            try:
                return _by_query(fd, flags, take, path)
            except OSError as error:
                if error.errno != errno.ENOTTY:
                    raise translate(error, path) from None
        return by_text(fd, path)
    finally:
        os.close(fd)


def _by_query(fd: int, flags: int, take: Callable[[int, int, int], bool], path: str) -> bool | None:
    """Give ``take`` inode, major and minor of each mapping, until it says True. Raises OSError."""
    address = 0
    query = bytearray(_QUERY.size)
    for _ in range(MAX_QUERIES):
        _QUERY.pack_into(query, 0, _QUERY.size, flags | _COVERING_OR_NEXT, address, *(0,) * 12)
        try:
            ioctl(fd, _PROCMAP_QUERY, query)
        except OSError as error:
            if error.errno == errno.ENOENT:  # no more mappings
                return False
            if error.errno == errno.ESRCH:
                return None
            raise
        found = _QUERY.unpack_from(query)
        if take(*found[8:11]):
            return True
        address = found[4]
    raise TooLarge(f"{path} has more than {MAX_QUERIES} mappings, which is the limit")


def _by_text(fd: int, wanted: re.Pattern[bytes], path: str) -> bool | None:
    """By reading, on kernels before 6.11; None if the process has no memory map."""
    empty = True
    for lines in _lines_of(fd, path):
        if wanted.search(lines):
            return True
        empty = False
    return None if empty else False


def _lines_of(fd: int, path: str) -> Iterator[bytes]:
    """The text of an open ``maps``, in pieces of whole lines. Raises `TooLarge`."""
    total, rest = 0, b""
    try:
        while chunk := os.read(fd, 1 << 16):
            lines, newline, rest = (rest + chunk).rpartition(b"\n")
            yield lines + newline
            total += len(chunk)
            if total > MAX_MAPS:
                raise TooLarge(
                    f"{path} is longer than {MAX_MAPS} bytes, which is as much as is read of a file that a tenant "
                    "can grow"
                )
    except OSError as error:
        raise translate(error, path) from None
    if rest:
        yield rest


def _line_of(major: int, minor: int, inode: int, *, writable: bool) -> re.Pattern[bytes]:
    """The inode's column comes before the path, so a file's name cannot imitate it."""
    return re.compile(
        rb"^[0-9a-f]+-[0-9a-f]+ %s [0-9a-f]+ %02x:%02x %d(?:[ \n]|$)"
        % (rb"rw[x-]s" if writable else rb"[r-][w-][x-][sp]", major, minor, inode),
        re.MULTILINE,
    )


def _of_any_thread(procfs: Procfs, host_pid: int | str, ask: Callable[[str], bool | None]) -> bool:
    """Asked of the leader, or of another thread where the leader has exited while others run on."""
    with suppress(ProcessGone):
        answer = ask(f"{procfs.root}/{host_pid}/maps")
        if answer is not None:
            return answer
    try:
        tids = os.listdir(f"{procfs.root}/{host_pid}/task")
    except OSError as error:
        raise translate(error, f"{procfs.root}/{host_pid}/task") from None
    for tid in tids:
        with suppress(ProcessGone):
            if tid != str(host_pid):
                answer = ask(f"{procfs.root}/{host_pid}/task/{tid}/maps")
                if answer is not None:
                    return answer
    raise ProcessGone(f"{procfs.root}/{host_pid}/maps: the process ended")


# -- what is open -------------------------------------------------------------------------------------


def descriptor(procfs: Procfs, host_pid: int | str, fd: int | str) -> Descriptor:
    """One open file of a process (``self``: ours). Raises OSError."""
    path = os.readlink(f"{procfs.root}/{host_pid}/fd/{fd}")
    with open(f"{procfs.root}/{host_pid}/fdinfo/{fd}", "rb", buffering=0) as file:
        info = file.read(4096)
    fields = dict(line.split(b":", 1) for line in info.split(b"\n") if b":" in line)
    access = int(fields[b"flags"], 8) & os.O_ACCMODE
    writable = access in (os.O_RDWR, os.O_WRONLY)
    return Descriptor(
        path=path, mount_id=int(fields[b"mnt_id"]), writable=writable, inode=int(fields.get(b"ino", 0))
    )


def opened_by_name(procfs: Procfs, host_pid: int, name: str) -> list[Descriptor]:
    """The process's open files that have this name now (needs CAP_SYS_PTRACE for others').

    Found by the links of its descriptors, which are read and not followed. Raises `TooLarge`.
    """
    directory, found, tail = f"{procfs.root}/{host_pid}/fd", [], f"/{name}"
    try:
        with os.scandir(directory) as listing:
            for entry in islice(listing, MAX_DESCRIPTORS):
                with suppress(FileNotFoundError):  # closed meanwhile
                    if os.readlink(f"{directory}/{entry.name}").endswith(tail):
                        found.append(descriptor(procfs, host_pid, entry.name))
            if next(listing, None) is None or found:
                return found
    except OSError as error:
        raise translate(error, directory) from None
    raise TooLarge(f"{directory} has more than {MAX_DESCRIPTORS} entries, which is as many as are read")


def open_for_writing(procfs: Procfs, host_pid: int) -> list[Descriptor]:
    """The process's open files of file systems that it can write to (needs CAP_SYS_PTRACE for others').

    Pipes, sockets and memory have no path. Raises `TooLarge`, ProcessGone and AccessDenied.
    """
    directory, found = f"{procfs.root}/{host_pid}/fd", []
    try:
        with os.scandir(directory) as listing:
            for entry in islice(listing, MAX_DESCRIPTORS):
                with suppress(FileNotFoundError):  # closed meanwhile
                    path = os.readlink(f"{directory}/{entry.name}")
                    if path.startswith(("/", "(unreachable)")) and not path.startswith("/memfd:"):
                        opened = descriptor(procfs, host_pid, entry.name)
                        found += [opened] if opened.writable else []
            if next(listing, None) is None:
                return found
    except OSError as error:
        raise translate(error, directory) from None
    raise TooLarge(f"{directory} has more than {MAX_DESCRIPTORS} entries, which is as many as are read")


def open_names(procfs: Procfs, host_pid: int) -> set[str]:
    """The names of all files that the process has open, also of those that have no name any more.

    Raises `TooLarge`, ProcessGone and AccessDenied.
    """
    directory, names = f"{procfs.root}/{host_pid}/fd", set()
    try:
        with os.scandir(directory) as listing:
            for entry in islice(listing, MAX_DESCRIPTORS):
                with suppress(FileNotFoundError):  # closed meanwhile
                    path = os.readlink(f"{directory}/{entry.name}").removesuffix(" (deleted)")
                    names.add(path.rpartition("/")[2])
            if next(listing, None) is None:
                return names
    except OSError as error:
        raise translate(error, directory) from None
    raise TooLarge(f"{directory} has more than {MAX_DESCRIPTORS} entries, which is as many as are read")


def place_of(opened: Descriptor, mounts: Iterable[Mount]) -> FilePlace | None:
    """Where an open file is, by the mount table of a process that has its mount; None if it is not there."""
    for mount in mounts:
        if mount.mount_id == opened.mount_id:
            above = mount.mount_point.rstrip("/")
            if opened.path != above and not opened.path.startswith(f"{above}/"):
                return None
            inside = opened.path[len(above) :].strip("/")
            return FilePlace(mount.device, os.path.join(mount.root, inside) if inside else mount.root)
    return None
