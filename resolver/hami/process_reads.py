"""Lane reads (`resolver.workers.lanes`) of a process that its tenant can delay in the kernel.

Mappings are behind a lock of the process, mount tables behind a machine-wide one.
"""

import os
import re
from collections.abc import Iterator
from struct import Struct

from resolver.base.errors import ProcessGone, RegionRejected
from resolver.base.reasons import BypassReason, RegionReason
from resolver.hami.placements import may_be_mounted
from resolver.linux.mappings import (
    MAX_MAPS,
    Descriptor,
    Shown,
    SuperblockPath,
    descriptor,
    mapped_as,
    maps_file,
    open_for_writing,
    open_names,
    shared_files,
    superblock_path,
)
from resolver.linux.mounts import Mount, parse_mountinfo
from resolver.linux.procfs import Procfs, variables
from resolver.linux.safe_open import closing, open_offered
from resolver.workers.lane import OpenFile

#: Superblock and path inside it.
Directory = tuple[str, str]

_LIBRARY = re.compile(rb"/libvgpu\.so[^/\n]*$", re.MULTILINE)
_PRELOAD, _MAX_PRELOAD = b" /etc/ld.so.preload ", 4096
_LONGEST_VARIABLE = 1024
_AUXILIARY, _BASE = Struct("=QQ"), 7  # of <linux/auxvec.h>: AT_BASE is the dynamic linker's address


def directories_and_trees(procfs: Procfs, host_pid: int) -> tuple[list[Directory], list[Directory]]:
    """Return likely container directories, and trees of them, in a process's mount table."""
    table = procfs.mount_table(host_pid)
    return list(container_directories(table)), list(shared_trees(table))


def container_directories(mount_table: bytes) -> Iterator[Directory]:
    """Yield likely directories of containers or claims, as paths inside the file system."""
    for line in mount_table.split(b"\n"):
        fields = line.split(b" ", 4)
        if len(fields) == 5 and may_be_mounted(fields[3]):
            yield from ((mount.device, mount.root) for mount in parse_mountinfo(line))


def shared_trees(mount_table: bytes) -> Iterator[Directory]:
    """Yield trees of container directories mounted where HAMi-core is preloaded.

    The runtime makes both mounts before the container runs. A monitor has no preload.
    """
    if _PRELOAD in mount_table:
        lines = (line for line in mount_table.split(b"\n") if b"/vgpu" in line)
        for mount in parse_mountinfo(b"\n".join(lines)):
            if mount.root.endswith(("/vgpu", "/containers")) and "/vgpu" in mount.mount_point:
                yield mount.device, mount.root


def library_causes(procfs: Procfs, host_pid: int, first: int | None) -> list[BypassReason]:
    """Return why a process may have no slot, by its mappings, start and environment.

    ``first`` is its container's first process.
    """
    controls = [variables(procfs, pid, "CUDA_DISABLE_CONTROL") for pid in {host_pid, first or host_pid}]
    if ["true"] in controls:
        return [BypassReason.CONTROL_DISABLED]
    if _LIBRARY.search(procfs.read(f"{host_pid}/maps", MAX_MAPS)):
        same = first is None or _user(procfs, first) == _user(procfs, host_pid)
        return [BypassReason.LOADED if same else BypassReason.OTHER_USER]
    started_with = procfs.read(f"{host_pid}/auxv")
    whole = len(started_with) // _AUXILIARY.size * _AUXILIARY.size
    base = dict(_AUXILIARY.iter_unpack(started_with[:whole])).get(_BASE)
    # A program that is given to the dynamic linker as an argument has no base either.
    static = base == 0 and not procfs.program(host_pid).startswith("ld")
    preloaded = "libvgpu" in variables(procfs, host_pid, "LD_PRELOAD")[0]
    return [BypassReason.STATIC] * static + [BypassReason.NOT_PRELOADED] * (not preloaded)


def hami_variables(procfs: Procfs, host_pid: int, start_time: int) -> list[str]:
    """Return GPU_CORE_UTILIZATION_POLICY and CUDA_VISIBLE_DEVICES of the process with this start time."""
    values = variables(procfs, host_pid, "GPU_CORE_UTILIZATION_POLICY", "CUDA_VISIBLE_DEVICES")
    if procfs.start_time(host_pid) != start_time:
        raise ProcessGone(f"process {host_pid} ended, and its number is another's")
    return [value[:_LONGEST_VARIABLE] for value in values]


def reordering(visible: str, uuids: tuple[str, ...]) -> str:
    """Explain the effect of CUDA_VISIBLE_DEVICES if it gives the GPUs another order than NVML's; empty if not."""
    for place, entry in enumerate(device.strip() for device in visible.split(",")):
        by_uuid = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        number = int(entry) if entry.isdecimal() else by_uuid[0] if len(by_uuid) == 1 else None
        if number is None or number >= len(uuids):  # CUDA ignores the rest
            return ""
        if number != place:
            return (
                "its CUDA_VISIBLE_DEVICES gives its GPUs another order than NVML's, so HAMi's watcher writes one GPU's "
                "value into another's place: start it without the variable, in a pod that asks for fewer GPUs"
            )
    return ""


def mount_causes(procfs: Procfs, host_pid: int, causes: list[str]) -> list[str]:
    """Return causes from a process's mount table, and those of ``causes`` that the table doesn't rule out."""
    table = procfs.mount_table(host_pid)
    if not any(b"vgpu" in line.split(b" ", 5)[4] for line in table.split(b"\n") if b"vgpu" in line):
        return [BypassReason.NOT_MOUNTED]
    if _PRELOAD in table:
        causes = [cause for cause in causes if cause != BypassReason.NOT_PRELOADED]
    missing = _PRELOAD in table and _preloads_a_missing_library(f"{procfs.root}/{host_pid}/root")
    return causes or [BypassReason.PRELOAD_MISSING if missing else BypassReason.NOT_LOADED]


def _preloads_a_missing_library(root: str) -> bool:
    """Check if ``/etc/ld.so.preload`` in a process's root directory names a library of HAMi's that is missing."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(f"{root}/etc/ld.so.preload", flags | os.O_NONBLOCK), "rb", buffering=0) as file:
            names = os.fsdecode(file.read(_MAX_PRELOAD)).split()
    except OSError:
        return False
    return any("vgpu" in name and _is_missing(root, name, flags | os.O_PATH) for name in names)


def _is_missing(root: str, name: str, flags: int) -> bool:
    """Walk the path without links: an absolute one leads out of the process's root directory."""
    fd = os.open(root, os.O_PATH | os.O_CLOEXEC)
    try:
        for part in filter(None, name.split("/")):
            above, fd = fd, os.open(part, flags, dir_fd=fd)
            os.close(above)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _user(procfs: Procfs, host_pid: int) -> bytes:
    return re.findall(rb"^Uid:.*", procfs.status_text(host_pid), re.MULTILINE)[0]  # type: ignore[no-any-return]


def has_mount(procfs: Procfs, host_pid: int, device: str, root: str) -> bool:
    """Check if a process has a mount of this directory."""
    return procfs.has_mount(host_pid, device, root)


def mounts_near(procfs: Procfs, host_pid: int, device: str, path: str) -> bool:
    """Check if a process has a mount of this directory, of one above it (except the root) or of one below."""
    return any(
        mount.device == device
        and mount.root != "/"  # the host itself mounts the root
        and (f"{path}/".startswith(f"{mount.root}/") or mount.root.startswith(f"{path}/"))
        for mount in procfs.mounts(host_pid)
    )


def files_of(procfs: Procfs, host_pid: int) -> tuple[set[Shown], set[str]]:
    """Return a process's files mapped as shared, and the names of its open files."""
    return shared_files(procfs, host_pid), open_names(procfs, host_pid)


def written_by_name(procfs: Procfs, host_pid: int, name: str) -> list[SuperblockPath | None]:
    """Return places of a process's files of this name open for writing; None if their mount is missing."""
    opened = list(open_for_writing(procfs, host_pid, name))
    return [where for _, where in _located(procfs, host_pid, opened)]


def describe_written(procfs: Procfs, host_pid: int, name: str = "") -> int:
    """Count a process's files open for writing, of this name if given.

    Ask this first about the container: locks on a file delay its description, and `written_in` and `written_by_name`
    also read the mount table, so a tenant's locks would make them late for all containers.
    """
    return sum(1 for _ in open_for_writing(procfs, host_pid, name))


def written_in(
    procfs: Procfs, host_pid: int, device: str, directory: str, inode: int
) -> list[SuperblockPath | None]:
    """Return places of files open for writing in this directory, or possibly with this inode.

    None stands for a file without a known place.
    """
    inside = f"{directory.rstrip('/')}/"
    held: list[SuperblockPath | None] = []
    for opened, where in _located(procfs, host_pid, list(open_for_writing(procfs, host_pid))):
        # Without the mount, only the inode can identify the file, if the kernel shows it.
        here = where is not None and where.device == device and where.path.startswith(inside)
        unknown = where is None and opened.inode == 0
        if (here or unknown or 0 != opened.inode == inode) and where not in held:
            held.append(where)
    return held


def shown_in_maps(procfs: Procfs, host_pid: int, where: str) -> Shown:
    """Return how ``maps`` shows a file that the daemon holds. Raises `RegionRejected` unless the process maps it."""
    with closing(open_offered(where)) as fd:
        shown = mapped_as(procfs, fd)
    if not maps_file(procfs, host_pid, *shown):
        raise RegionRejected(RegionReason.OTHER_DEVICE, "its process holds it open, and maps another")
    return shown


def hold_written(procfs: Procfs, host_pid: int, name: str) -> tuple[OpenFile, str] | None:
    """Hold (O_PATH) a process's first file of this name open for writing, and return its path.

    The file system is not checked here: one that a tenant serves may never answer.
    """
    for opened in open_for_writing(procfs, host_pid, name):
        link = f"{procfs.root}/{host_pid}/fd/{opened.number}"
        return OpenFile(os.open(link, os.O_PATH | os.O_CLOEXEC)), opened.path
    return None


def place_of_held(
    procfs: Procfs, holder: int, fd: int, host_pid: int, name: str, file_systems: list[str]
) -> SuperblockPath:
    """Return the place of a file that ``holder`` has open, if the process holds it open for writing by this name.

    Raises `RegionRejected` unless the process's mount table has its mount, of these ``file_systems``.
    """
    if procfs.userns(host_pid) != procfs.userns("self"):
        raise RegionRejected(
            RegionReason.ACCESS_DENIED,
            "its process is in a separate user namespace, where tenants can make mounts: it is skipped",
        )
    mounts, opened = list(procfs.first_mounts(host_pid, limit=1 << 20)), descriptor(procfs, holder, fd)
    ours, theirs = superblock_path(opened, mounts), written_by_name(procfs, host_pid, name)
    if ours is None or ours not in theirs:
        raise RegionRejected(
            RegionReason.UNPROVEN,
            "the mount table of its process does not have the file's mount, so nothing proves which file it maps",
        )
    kind = next(mount.fs_type for mount in mounts if mount.mount_id == opened.mount_id)
    if kind not in file_systems:
        raise RegionRejected(RegionReason.OTHER_DEVICE, f"it is on a file system of type {kind}")
    return ours


def _located(
    procfs: Procfs, host_pid: int, opened: list[Descriptor]
) -> Iterator[tuple[Descriptor, SuperblockPath | None]]:
    """Yield each descriptor with its place; parse only needed mounts, because tenants can make many."""
    mounts: dict[int, Mount] = {}
    if opened:
        ids = {str(descriptor.mount_id).encode() for descriptor in opened}
        lines = [line for line in procfs.mount_table(host_pid).split(b"\n") if line.partition(b" ")[0] in ids]
        mounts = {mount.mount_id: mount for mount in parse_mountinfo(b"\n".join(lines))}
    for one in opened:
        mounts_here = [mounts[one.mount_id]] if one.mount_id in mounts else []
        yield one, superblock_path(one, mounts_here)
