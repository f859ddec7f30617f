"""A mounted ``/proc``, or a directory of fixtures.

Raises `ProcessGone` and `AccessDenied`; others' processes take CAP_SYS_PTRACE. Reads of tenants' files are bounded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from fcntl import ioctl

from resolver.base.errors import AccessDenied, CannotKnow, ProcessGone
from resolver.base.records import NamedTuple
from resolver.linux.cgroup import NO_CONTAINER, ContainerCgroup, parse_cgroup
from resolver.linux.mounts import Mount, parse_mountinfo
from resolver.linux.pidfd import HeldProcess

TYPE_CHECKING = False  # as typing's, which a look-up does without
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeVar

    _T = TypeVar("_T")

#: Inode of the initial PID namespace, fixed since Linux 3.8 (PROC_PID_INIT_INO in include/linux/proc_ns.h).
HOST_PIDNS = 0xEFFFFFFC
#: Seconds that a process may be in ``/proc`` before the event of its fork comes: its parent may have lost the CPU.
EVENT_SECONDS = 0.1
#: Longest ``maps`` or ``mountinfo`` that is read. 65,530 mappings (vm.max_map_count) of 100 bytes fit.
MAX_TENANT_FILE = 16 << 20
#: As much of a mount table as is read of a process in a container: some 2,000 mounts, and 5 ms.
MAX_MOUNT_TABLE = 128 << 10
#: ioctl for the parent of a namespace, _IO(0xb7, 2), Linux 4.9 (include/uapi/linux/nsfs.h).
NS_GET_PARENT = 0xB702

_FIRST_READ = 4096
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_AT_FDCWD, _OPENAT2, _RESOLVE_CACHED = -100, 437, 0x20  # Linux 5.12, on x86-64 and arm64 alike
_DIGITS = frozenset("123456789")


class ProcessIdentity(NamedTuple):
    """PID and start time, in clock ticks since boot. ``ns_pids`` are those of ``NSpid:``, the reader's first."""

    host_pid: int
    start_time: int
    ns_pids: tuple[int, ...]


class NotAProcess(ProcessGone):
    """The number is a thread's."""


class TooLarge(CannotKnow):
    """A tenant's file exceeds the limit."""


# /proc/<pid>/status: 'NSpid:\t48213\t12'
def parse_ns_pids(status: bytes) -> tuple[int, ...]:
    """Parse the ``NSpid:`` line, outermost first; empty without it. No name can forge it."""
    start = status.find(b"\nNSpid:")
    if start < 0:
        return ()
    end = status.find(b"\n", start + 7)
    return tuple(map(int, status[start + 7 : end].split())) if end > 0 else ()


class ProcessUsage(NamedTuple):
    """State (a letter), CPU seconds and resident pages."""

    state: bytes
    cpu_seconds: float
    resident_pages: int


def usage(host_pid: int) -> ProcessUsage:
    """Read a process's usage; empty if the process is unreadable."""
    try:
        with open(f"/proc/{host_pid}/stat", "rb") as file:
            fields = _after_comm(file.read())
    except OSError:
        return ProcessUsage(b"", 0.0, 0)
    return ProcessUsage(
        fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(fields[21])
    )


# A line: '1934217 83021 12': nanoseconds on a CPU, nanoseconds of waiting for one, turns
def run_delay(host_pid: int | str) -> float:
    """Seconds for which a process's main thread was ready and had no CPU; 0 if unknown (CONFIG_SCHED_INFO)."""
    try:
        with open(f"/proc/{host_pid}/schedstat", "rb", buffering=0) as file:
            return int(file.read(64).split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


# A line: '48213 (python3) S 48190 48213 48190 0 -1 4194304 ...': the name may hold blanks and parentheses
def _after_comm(stat: bytes) -> list[bytes]:
    return stat[stat.rindex(b")") + 2 :].split(b" ", 22)


def parse_start_time(stat: bytes) -> int:
    """Parse field 22 of ``stat``: clock ticks since boot."""
    return int(_after_comm(stat)[19])


class ProcessHandle(HeldProcess):
    """Held process with its identity."""

    __slots__ = ("process",)

    def __init__(self, process: ProcessIdentity, fd: int, *, is_pidfd: bool) -> None:
        super().__init__(fd, is_pidfd=is_pidfd)
        self.process = process


class Procfs:
    """A mounted ``/proc``; ``use_pidfd=False`` as before Linux 5.3.

    ``careful`` is for the daemon's loop. To open a directory of a process that has just ended makes the kernel drop
    its cache below it, and wait for others that do so, for seconds if they have no CPU. So cached, valid directories
    are requested (Linux 5.16), and others are opened only while the process exists: nothing is cached below them yet.
    """

    def __init__(self, root: str = "/proc", *, use_pidfd: bool = True, careful: bool = False) -> None:
        self.root = root
        self.use_pidfd = use_pidfd and root == "/proc" and hasattr(os, "pidfd_open")
        self._cached = _open_cached() if careful else None

    # -- lists --------------------------------------------------------------------------------------

    def entries(self) -> dict[int, int]:
        """``{host_pid: inode of its directory}``.

        Equal pairs in two calls are the same process. A changed inode proves nothing.
        """
        return dict(self.each_entry())

    def each_entry(self) -> Iterator[tuple[int, int]]:
        with os.scandir(self.root) as listing:
            yield from ((int(entry.name), entry.inode()) for entry in listing if entry.name[0] in _DIGITS)

    # -- one process --------------------------------------------------------------------------------

    def read(self, path: str, limit: int = MAX_TENANT_FILE, *, cut: bool = False) -> bytes:
        """Read a file. Beyond ``limit`` bytes: `TooLarge`, or ``cut``."""
        chunks, total, size = list[bytes](), 0, _FIRST_READ
        fd = self._open(path)
        try:
            while (total < limit or not cut) and (chunk := os.read(fd, size)):
                chunks.append(chunk)
                total, size = total + len(chunk), 1 << 16
                if total > limit and not cut:
                    why = f"is longer than {limit} bytes, the limit for a tenant's file"
                    raise TooLarge(f"{self.root}/{path} {why}")
        except OSError as error:
            raise translate(error, f"{self.root}/{path}") from None
        finally:
            os.close(fd)
        return b"".join(chunks)

    def _open(self, path: str, flags: int = os.O_RDONLY | os.O_CLOEXEC) -> int:
        return self._at(path, lambda name, directory: os.open(name, flags, dir_fd=directory))

    def _readlink(self, path: str) -> str:
        return self._at(path, lambda name, directory: os.readlink(name, dir_fd=directory))

    def _at(self, path: str, use: Callable[[str, int | None], _T]) -> _T:
        """Call ``use`` with a path, or with its last component and its directory. Raises as this module does."""
        process, *names = path.split("/")
        try:
            if self._cached is None or not process.isdecimal():
                return use(f"{self.root}/{path}", None)
            directory = self._enter(f"{self.root}/{process}", process)
            try:
                for name in names[:-1]:
                    above, directory = directory, self._enter(name, process, directory)
                    os.close(above)
                return use(names[-1], directory)
            finally:
                os.close(directory)
        except OSError as error:
            if error.errno == errno.EACCES and names[0] == "ns" and self.inode(process) is None:
                error.errno = errno.ESRCH  # refusal and end both give EACCES (fs/proc/namespaces.c)
            raise translate(error, f"{self.root}/{path}") from None

    def _enter(self, path: str, process: str, above: int | None = None) -> int:
        """Open the directory of a process, or one below. Raises OSError."""
        if self._cached and (directory := self._cached(path, above)) is not None:
            return directory
        with contextlib.suppress(PermissionError, OverflowError):
            os.kill(int(process), 0)  # raises if the process does not exist
        return os.open(path, _DIRECTORY, dir_fd=above)

    def status_text(self, host_pid: int) -> bytes:
        """Read ``status``: for lanes, because with 65,536 supplementary groups it takes 15 ms."""
        return self.read(f"{host_pid}/status")

    def ns_pids(self, host_pid: int) -> tuple[int, ...]:
        """Return the PIDs of a process, the reader's first. Raises `ProcessGone` for a thread's number."""
        with self.hold(host_pid) as held:
            return self.ns_pids_of(held, host_pid)

    def ns_pids_of(self, held: HeldProcess, host_pid: int) -> tuple[int, ...]:
        """Return a held process's PIDs, from the pidfd's description (Linux 5.5): no tenant chooses its size."""
        if held.is_pidfd:
            ns_pids = parse_ns_pids(self.read(f"self/fdinfo/{held.fd}", _FIRST_READ, cut=True))
            if ns_pids[:1] and ns_pids[0] <= 0:
                raise ProcessGone(f"process {host_pid} has ended")
            if ns_pids:
                return ns_pids
        if not (ns_pids := parse_ns_pids(self.status_text(host_pid))):
            raise CannotKnow(
                "this kernel does not show PIDs in containers: Linux 4.1 or later is required (NSpid)"
            )
        return ns_pids

    def tgid(self, host_pid: int) -> int:
        """Return the process of a thread: the leader is the first in the list."""
        try:
            self.hold(host_pid).close()
        except NotAProcess:
            path = f"{host_pid}/task/."
            fd = self._open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with os.scandir(fd) as listing:
                    return int(next(listing).name)
            except OSError as error:
                raise translate(error, f"{self.root}/{path}") from None
            except StopIteration:
                raise ProcessGone(f"{self.root}/{path}: the thread ended") from None
            finally:
                os.close(fd)
        return host_pid

    def parent(self, host_pid: int) -> int:
        """PID of the parent; 0 if it is not visible."""
        return int(_after_comm(self.read(f"{host_pid}/task/{host_pid}/stat"))[1])

    def inode(self, host_pid: int | str) -> int | None:
        try:
            return self._at(f"{host_pid}/.", lambda name, directory: os.stat(name, dir_fd=directory).st_ino)
        except ProcessGone:
            return None

    def start_time(self, host_pid: int) -> int:
        """Clock ticks since boot, without summing up threads."""
        return parse_start_time(self.read(f"{host_pid}/task/{host_pid}/stat"))

    def is_exiting(self, host_pid: int) -> bool:
        """Check PF_EXITING (``include/linux/sched.h``), set before a process leaves anything."""
        return bool(int(_after_comm(self.read(f"{host_pid}/task/{host_pid}/stat"))[6]) & 0x4)

    def cgroup(self, host_pid: int) -> str:
        return os.fsdecode(self.read(f"{host_pid}/cgroup"))

    def container(self, host_pid: int) -> ContainerCgroup:
        """Return the cgroup's container, or `NO_CONTAINER`."""
        return parse_cgroup(self.cgroup(host_pid)) or NO_CONTAINER

    def comm(self, host_pid: int) -> str:
        """Command name, chosen by the process."""
        return self.read(f"{host_pid}/comm").rstrip(b"\n").decode("utf-8", "backslashreplace")

    def program(self, host_pid: int) -> str:
        return self._readlink(f"{host_pid}/exe").rsplit("/", 1)[-1]

    def threads(self, host_pid: int | str) -> Iterator[str]:
        """Yield paths of the process and its other threads, which outlive an exited leader.

        Raises `ProcessGone` and `AccessDenied`.
        """
        yield str(host_pid)
        try:
            tids = os.listdir(f"{self.root}/{host_pid}/task")
        except OSError as error:
            raise translate(error, f"{self.root}/{host_pid}/task") from None
        yield from (f"{host_pid}/task/{tid}" for tid in tids if tid != str(host_pid))

    def _mount_table(self, host_pid: int | str, limit: int) -> bytes:
        for thread in self.threads(host_pid):
            with contextlib.suppress(ProcessGone):
                return self.read(f"{thread}/mountinfo", limit)
        raise ProcessGone(f"{self.root}/{host_pid}/mountinfo: the process ended")

    def mount_table(self, host_pid: int | str) -> bytes:
        """``mountinfo`` as the process sees it. Raises `TooLarge`.

        A process outside containers may have all their mounts.
        """
        if host_pid != "self":
            try:
                return self._mount_table(host_pid, MAX_MOUNT_TABLE)
            except TooLarge:
                if self.container(int(host_pid)).container_id:
                    raise
        return self._mount_table(host_pid, MAX_TENANT_FILE)

    def mounts(self, host_pid: int | str) -> list[Mount]:
        return list(parse_mountinfo(self.mount_table(host_pid)))

    def first_mounts(self, host_pid: int, limit: int = MAX_MOUNT_TABLE) -> Iterator[Mount]:
        """Yield mounts in the table's first ``limit`` bytes: the runtime's come first."""
        return parse_mountinfo(self.read(f"{host_pid}/mountinfo", limit, cut=True))

    def has_mount(self, host_pid: int, device: str, root: str) -> bool:
        """Check if a directory, by superblock and path, is mounted.

        No tenant can forge the pair: a bind mount of its directory has a longer root.
        """
        text = self.mount_table(host_pid)
        tail = os.fsencode(root.rsplit("/", 1)[-1])
        if tail.translate(None, b"\\ \t\n") == tail:
            # Most lines are others', and to parse one takes as long as the kernel needs to make it.
            text = b"\n".join(line for line in text.split(b"\n") if tail in line)
        return any(mount.device == device and mount.root == root for mount in parse_mountinfo(text))

    # -- namespaces ---------------------------------------------------------------------------------

    def pidns(self, host_pid: int | str) -> int:
        """Inode of the PID namespace."""
        return self._namespace(host_pid, "pid")

    def userns(self, host_pid: int | str) -> int:
        return self._namespace(host_pid, "user")

    def has_host_mounts(self, host_pid: int) -> bool:
        """Check for kthreadd's mount namespace, which no container has; False if unreadable."""
        with contextlib.suppress(AccessDenied, ProcessGone):
            return self._namespace(host_pid, "mnt") == self._namespace(2, "mnt")
        return False

    def _namespace(self, host_pid: int | str, kind: str) -> int:
        return int(self._readlink(f"{host_pid}/ns/{kind}")[len(kind) + 2 : -1])  # "pid:[4026531836]"

    def pidns_chain(self, host_pid: int) -> tuple[int, ...]:
        """Inodes of the process's PID namespaces, innermost last.

        Raises `CannotKnow` before Linux 4.9 if there are several.
        """
        depth = len(self.ns_pids(host_pid))
        opened = [self._open(f"{host_pid}/ns/pid")]
        try:
            while len(opened) < depth:
                opened.append(ioctl(opened[-1], NS_GET_PARENT))
            return tuple(os.fstat(fd).st_ino for fd in reversed(opened))
        except OSError as error:
            if error.errno == errno.ENOTTY:
                raise CannotKnow("nested PID namespaces need Linux 4.9 or later (NS_GET_PARENT)") from None
            raise translate(error, f"{self.root}/{host_pid}/ns/pid") from None
        finally:
            for fd in opened:
                os.close(fd)

    # -- handles ------------------------------------------------------------------------------------

    def hold(self, host_pid: int) -> HeldProcess:
        """Hold the process with this PID, or its zombie. Raises `NotAProcess` for a thread's."""
        if self.use_pidfd:
            try:
                return HeldProcess(os.pidfd_open(host_pid), is_pidfd=True)
            except OverflowError:
                raise ProcessGone(f"no process has the number {host_pid}") from None
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.ENOENT):  # ENOENT since Linux 6.15
                    raise NotAProcess(f"PID {host_pid} is a thread, not a process") from None
                if error.errno not in (errno.ENOSYS, errno.EPERM):
                    raise translate(error, f"pidfd of {host_pid}") from None
        path = f"{self.root}/{host_pid}"
        try:
            held = HeldProcess(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), is_pidfd=False)
        except OSError as error:
            raise translate(error, path) from None
        try:
            # A line: 'Tgid:\t48213'
            tgid = self.status_text(host_pid).partition(b"\nTgid:\t")[2].partition(b"\n")[0]
            if tgid and int(tgid) != host_pid:
                raise NotAProcess(f"PID {host_pid} is a thread, not a process")
        except BaseException:
            held.close()
            raise
        return held

    def open_handle(self, host_pid: int) -> ProcessHandle:
        """Hold the process with this PID, then read its identity."""
        held = self.hold(host_pid)
        try:
            identity = ProcessIdentity(host_pid, self.start_time(host_pid), self.ns_pids_of(held, host_pid))
            if held.alive():
                return ProcessHandle(identity, held.fd, is_pidfd=held.is_pidfd)
        except BaseException:
            held.close()
            raise
        held.close()
        raise ProcessGone(f"process {host_pid} ended while it was checked")

    @contextlib.contextmanager
    def verify(self, host_pid: int, *, keep: bool = False) -> Iterator[ProcessHandle]:
        """Hold a process for a ``with`` block; ProcessGone at its end if the process has ended by then.

        ``keep``: without an error the handle stays open, for the caller.
        """
        handle, kept = self.open_handle(host_pid), False
        try:
            yield handle
            # Last of all: a process that runs now was there, under this PID, during every read of the block.
            if not handle.alive():
                raise ProcessGone(f"process {host_pid} ended while it was checked")
            kept = keep
        finally:
            if not kept:
                handle.close()


def _open_cached() -> Callable[[str, int | None], int | None]:
    """Return a function that opens a cached, valid directory, or returns None; it neither waits nor drops anything."""
    import ctypes

    call = ctypes.PyDLL(None).syscall
    how = ctypes.create_string_buffer(struct.pack("=QQQ", _DIRECTORY, 0, _RESOLVE_CACHED), 24)

    def open_cached(path: str, dir_fd: int | None) -> int | None:
        fd = call(_OPENAT2, _AT_FDCWD if dir_fd is None else dir_fd, path.encode(), how, 24)
        return fd if fd >= 0 else None

    return open_cached


def translate(error: OSError, what: str) -> Exception:
    """Translate an error, or return it."""
    # EINVAL: mountinfo of a process that is past exit_task_namespaces (fs/proc_namespace.c)
    if error.errno in (errno.ENOENT, errno.ESRCH, errno.EINVAL):
        return ProcessGone(f"{what}: the process ended")
    if error.errno in (errno.EACCES, errno.EPERM):
        return AccessDenied(
            f"{what} may not be read: run as root, or give CAP_SYS_PTRACE "
            "(Kubernetes: securityContext.capabilities.add: [SYS_PTRACE])"
        )
    if error.errno == errno.ENAMETOOLONG:  # a tenant nested control groups or directories too deep
        return AccessDenied(f"{what} may not be read: there is a path in it that is too long for the kernel")
    return error


# A file: 'HOME=/root\0GPU_CORE_UTILIZATION_POLICY=default\0'
def variables(procfs: Procfs, host_pid: int, *names: str) -> list[str]:
    """Variables of the first environment, each empty without it. As in getenv, the first of several counts."""
    values: dict[bytes, bytes] = {}
    for entry in procfs.read(f"{host_pid}/environ").split(b"\0"):
        key, _, value = entry.partition(b"=")
        values.setdefault(key, value)
    return [values.get(name.encode(), b"").decode("utf-8", "replace") for name in names]
