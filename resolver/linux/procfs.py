"""``/proc`` as an object with a root, so that a directory of fixtures can stand in for it.

Parsing bytes and reading files are separate functions. Two errors leave this module: `ProcessGone`
(ENOENT between list and open, ESRCH between open and read; both mean that the process ended) and
`AccessDenied`. Everything a tenant can blow up (``maps``, ``mountinfo``, supplementary groups in
``status``) is read with a bound.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from fcntl import ioctl

from resolver.errors import AccessDenied, CannotKnow, ProcessGone
from resolver.linux.cgroup import NO_CONTAINER, ContainerCgroup, parse_cgroup
from resolver.linux.pidfd import HeldProcess
from resolver.records import NamedTuple

TYPE_CHECKING = False  # as typing's, which a look-up does without
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Inode of the initial PID namespace, fixed since Linux 3.8 (PROC_PID_INIT_INO in include/linux/proc_ns.h).
HOST_PIDNS = 0xEFFFFFFC
#: Longest ``maps`` or ``mountinfo`` that is read. 65,530 mappings (vm.max_map_count) of 100 bytes fit.
MAX_TENANT_FILE = 16 << 20
#: As much of a mount table as is read of a process in a container: some 2,000 mounts, and 5 ms.
MAX_MOUNT_TABLE = 128 << 10
#: ioctl for the parent of a namespace, _IO(0xb7, 2), Linux 4.9 (include/uapi/linux/nsfs.h).
NS_GET_PARENT = 0xB702

_FIRST_READ = 4096
_CAP_SYS_PTRACE = 19  # include/uapi/linux/capability.h
_DIGITS = frozenset("123456789")


class ProcessIdentity(NamedTuple):
    """A process is its PID *and* its start time.

    ``ns_pids`` are the numbers of the ``NSpid:`` line, outermost (the reader's) first, so
    ``ns_pids[0] == host_pid`` when the reader is in the initial PID namespace. ``start_time`` is in clock
    ticks since boot, field 22 of ``/proc/<pid>/stat``.
    """

    host_pid: int
    start_time: int
    ns_pids: tuple[int, ...]


class ProcessStatus(NamedTuple):
    """What is used of ``/proc/<pid>/status``. ``ns_pids`` is empty on kernels before 4.1."""

    name: str
    state: str
    tgid: int
    ppid: int
    ns_pids: tuple[int, ...]


class Mount(NamedTuple):
    """One line of ``mountinfo``. ``device`` is ``major:minor`` of the superblock, as in ``maps``."""

    mount_id: int
    device: str
    root: str
    mount_point: str
    fs_type: str
    super_options: str


class TooLarge(CannotKnow):
    """A file that a tenant can grow is longer than is read of it."""


def parse_ns_pids(status: bytes) -> tuple[int, ...]:
    """The ``NSpid:`` numbers of a status file, outermost first; empty if the line is not there.

    A name cannot forge the line: the kernel escapes newlines in ``Name:``.
    """
    start = status.find(b"\nNSpid:")
    if start < 0:
        return ()
    end = status.find(b"\n", start + 7)
    return tuple(map(int, status[start + 7 : end].split())) if end > 0 else ()


def parse_status(status: bytes) -> ProcessStatus:
    """The few lines of ``/proc/<pid>/status`` that are used; raises ValueError on anything else."""
    fields: dict[bytes, bytes] = {}
    for line in status.split(b"\n"):
        key, _, value = line.partition(b":")
        fields[key] = value.strip()
    try:
        return ProcessStatus(
            name=fields[b"Name"].decode("utf-8", "backslashreplace"),
            state=fields[b"State"][:1].decode("ascii", "replace"),
            tgid=int(fields[b"Tgid"]),
            ppid=int(fields[b"PPid"]),
            ns_pids=parse_ns_pids(status),
        )
    except KeyError as error:
        raise ValueError(f"status has no {error} line") from None


def parse_start_time(stat: bytes) -> int:
    """Field 22 of ``/proc/<pid>/stat`` in clock ticks since boot. ``comm`` may hold spaces and ')'."""
    return int(stat[stat.rindex(b")") + 2 :].split(b" ", 20)[19])


def _unescape(field: bytes) -> str:
    """Undo the kernel's octal escapes (blank, tab, newline, backslash) in a mountinfo field."""
    if b"\\" in field:
        field = re.sub(rb"\\([0-7]{3})", lambda match: bytes((int(match[1], 8) & 0xFF,)), field)
    return os.fsdecode(field)


def parse_mountinfo(text: bytes) -> Iterator[Mount]:
    """The mounts of a ``mountinfo`` file; lines that are not whole are passed over (proc(5))."""
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


class ProcessHandle(HeldProcess):
    """A process that was taken hold of, and who it is."""

    __slots__ = ("process",)

    def __init__(self, process: ProcessIdentity, fd: int, *, is_pidfd: bool) -> None:
        super().__init__(fd, is_pidfd=is_pidfd)
        self.process = process


class Procfs:
    """A mounted ``/proc``. ``use_pidfd=False`` forces the way of kernels before 5.3."""

    def __init__(self, root: str = "/proc", *, use_pidfd: bool = True) -> None:
        self.root = root
        self.use_pidfd = use_pidfd and hasattr(os, "pidfd_open")
        #: Whether the kernel is asked for mappings by ioctl where it can be (Linux 6.11); they are read otherwise.
        self.use_procmap_query = True

    # -- lists --------------------------------------------------------------------------------------

    def entries(self) -> dict[int, int]:
        """``{host_pid: inode of its directory}`` of every process.

        The inode changes when the PID is used again (the kernel drops the entry when the process is
        reaped), so equal pairs in two calls are the same process. A changed inode proves nothing.
        """
        return dict(self.each_entry())

    def each_entry(self) -> Iterator[tuple[int, int]]:
        """The same one by one, as the kernel lists them: whoever lives all the while is among them."""
        with os.scandir(self.root) as listing:
            yield from ((int(entry.name), entry.inode()) for entry in listing if entry.name[0] in _DIGITS)

    # -- one process --------------------------------------------------------------------------------

    def _read(self, path: str, limit: int = MAX_TENANT_FILE) -> bytes:
        """A whole small file, at most ``limit`` bytes; `TooLarge` beyond."""
        try:
            fd = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                chunk = os.read(fd, _FIRST_READ)
                if len(chunk) < _FIRST_READ // 2:  # seq files come back short only at their end
                    rest = os.read(fd, 1 << 16)
                    if not rest:
                        return chunk
                    chunk += rest
                chunks, total = [chunk], len(chunk)
                while chunk := os.read(fd, 1 << 16):
                    chunks.append(chunk)
                    total += len(chunk)
                    if total > limit:
                        raise TooLarge(
                            f"{self.root}/{path} is longer than {limit} bytes, which is as much as is read "
                            "of a file that a tenant can grow"
                        )
                return b"".join(chunks)
            finally:
                os.close(fd)
        except OSError as error:
            raise translate(error, f"{self.root}/{path}") from None

    def status(self, host_pid: int) -> ProcessStatus:
        """``/proc/<host_pid>/status``; works for thread ids too (``tgid`` is their process)."""
        return parse_status(self.status_text(host_pid))

    def status_text(self, host_pid: int | str) -> bytes:
        """``/proc/<host_pid>/status`` as it is; ``<host_pid>/task/<tid>`` names a thread."""
        return self._read(f"{host_pid}/status")

    def ns_pids(self, host_pid: int | str) -> tuple[int, ...]:
        """The ``NSpid:`` numbers, read as cheaply as Python can; the loop of a scan calls this.

        One open and one read of 4 KiB are enough unless the process has hundreds of supplementary groups.
        """
        try:
            fd = os.open(f"{self.root}/{host_pid}/status", os.O_RDONLY | os.O_CLOEXEC)
            try:
                text = os.read(fd, _FIRST_READ)
                start = text.find(b"\nNSpid:")
                end = text.find(b"\n", start + 7)
                if start < 0 or end < 0:
                    while more := os.read(fd, 1 << 16):
                        text += more
                    return parse_ns_pids(text)
                return tuple(map(int, text[start + 7 : end].split()))
            finally:
                os.close(fd)
        except OSError as error:
            raise translate(error, f"{self.root}/{host_pid}/status") from None

    def start_time(self, host_pid: int) -> int:
        """Start time in clock ticks since boot.

        Read from ``task/<pid>/stat``: the same field, without summing up thousands of threads.
        """
        return parse_start_time(self._read(f"{host_pid}/task/{host_pid}/stat"))

    def process(self, host_pid: int) -> ProcessIdentity:
        """The identity of a process now."""
        return ProcessIdentity(host_pid, self.start_time(host_pid), self.ns_pids(host_pid))

    def cgroup(self, host_pid: int) -> str:
        """``/proc/<host_pid>/cgroup`` as text, for the functions of `resolver.linux.cgroup`."""
        return os.fsdecode(self._read(f"{host_pid}/cgroup"))

    def container(self, host_pid: int) -> ContainerCgroup:
        """The container that the process's cgroup names, `NO_CONTAINER` if it names none."""
        return parse_cgroup(self.cgroup(host_pid)) or NO_CONTAINER

    def comm(self, host_pid: int) -> str:
        """The command name, at most 15 bytes and whatever the process chose."""
        return self._read(f"{host_pid}/comm").rstrip(b"\n").decode("utf-8", "backslashreplace")

    def program(self, host_pid: int) -> str:
        """Name of the file that the process executes (needs CAP_SYS_PTRACE for others' processes)."""
        path = f"{self.root}/{host_pid}/exe"
        try:
            return os.readlink(path).rsplit("/", 1)[-1]
        except OSError as error:
            raise translate(error, path) from None

    def _read_of_any_thread(self, host_pid: int | str, name: str, limit: int) -> bytes:
        """A file of the process that its leader has no more once it has exited, while other threads run on.

        It may be empty: after chroot into a plain directory no mount is below the root.
        """
        with contextlib.suppress(ProcessGone):
            return self._read(f"{host_pid}/{name}", limit)
        try:
            tids = os.listdir(f"{self.root}/{host_pid}/task")
        except OSError as error:
            raise translate(error, f"{self.root}/{host_pid}/task") from None
        for tid in tids:
            with contextlib.suppress(ProcessGone):
                if tid != str(host_pid):
                    return self._read(f"{host_pid}/task/{tid}/{name}", limit)
        raise ProcessGone(f"{self.root}/{host_pid}/{name}: the process ended")

    def mount_table(self, host_pid: int | str) -> bytes:
        """``mountinfo`` as the process sees it (needs CAP_SYS_PTRACE for others' processes). Raises `TooLarge`."""
        return self._mount_table(host_pid)

    def _mount_table(self, host_pid: int | str) -> bytes:
        # One that is in no container may have those of all of them, on a busy host.
        if host_pid != "self":
            try:
                return self._read_of_any_thread(host_pid, "mountinfo", MAX_MOUNT_TABLE)
            except TooLarge:
                if self.container(int(host_pid)).container_id:
                    raise
        return self._read_of_any_thread(host_pid, "mountinfo", MAX_TENANT_FILE)

    def mounts(self, host_pid: int | str) -> list[Mount]:
        """The mount table as the process sees it (needs CAP_SYS_PTRACE for others' processes)."""
        return list(parse_mountinfo(self.mount_table(host_pid)))

    def first_mounts(self, host_pid: int, limit: int = MAX_MOUNT_TABLE) -> Iterator[Mount]:
        """The beginning of the mount table, ``limit`` bytes of it: what the runtime made stands before all others.

        For what is only wanted if it is cheap; a tenant can make its mount table as long as it likes.
        """
        chunks, total = list[bytes](), 0
        path = f"{self.root}/{host_pid}/mountinfo"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while total < limit and (chunk := os.read(fd, 1 << 16)):
                    chunks.append(chunk)
                    total += len(chunk)
            finally:
                os.close(fd)
        except OSError as error:
            raise translate(error, path) from None
        return parse_mountinfo(b"".join(chunks))  # a line that is cut is passed over

    def has_mount(self, host_pid: int, device: str, root: str) -> bool:
        """Whether a directory, given by superblock and path inside it, is mounted in that process's view.

        The pair is exact and cannot be forged by a tenant: a bind mount of something inside its own
        directory has a longer root.
        """
        text = self._mount_table(host_pid)
        tail = os.fsencode(root.rsplit("/", 1)[-1])
        if b"\\" not in tail and not re.search(rb"[ \t\n]", tail) and tail not in text:
            return False
        return any(mount.device == device and mount.root == root for mount in parse_mountinfo(text))

    # -- namespaces ---------------------------------------------------------------------------------

    def pidns(self, host_pid: int | str) -> int:
        """Inode of the PID namespace the process is in (needs CAP_SYS_PTRACE for others' processes)."""
        path = f"{self.root}/{host_pid}/ns/pid"
        try:
            return int(os.readlink(path)[5:-1])  # "pid:[4026531836]"
        except OSError as error:
            raise self._translate_namespace(error, host_pid) from None

    def userns(self, host_pid: int | str) -> int:
        """Inode of the user namespace the process is in (needs CAP_SYS_PTRACE for others' processes)."""
        try:
            return int(os.readlink(f"{self.root}/{host_pid}/ns/user")[6:-1])  # "user:[4026531837]"
        except OSError as error:
            raise self._translate_namespace(error, host_pid) from None

    def pidns_chain(self, host_pid: int | str) -> tuple[int, ...]:
        """Inodes of the process's PID namespaces in the order of ``NSpid:``, innermost last.

        Needs Linux 4.9 when the process is nested more than once; `CannotKnow` before.
        """
        depth = len(self.ns_pids(host_pid))
        path = f"{self.root}/{host_pid}/ns/pid"
        opened: list[int] = []
        try:
            opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            while len(opened) < depth:
                opened.append(ioctl(opened[-1], NS_GET_PARENT))
            return tuple(os.fstat(fd).st_ino for fd in reversed(opened))
        except OSError as error:
            if error.errno == errno.ENOTTY:
                raise CannotKnow("nested PID namespaces need Linux 4.9 or later (NS_GET_PARENT)") from None
            raise self._translate_namespace(error, host_pid) from None
        finally:
            for fd in opened:
                os.close(fd)

    def _translate_namespace(self, error: OSError, host_pid: int | str) -> Exception:
        """The kernel says EACCES for the namespace of an ended process too (fs/proc/namespaces.c).

        It was refused to us only if the process is still there after a second refusal.
        """
        if error.errno == errno.EACCES:
            try:
                fd = os.open(f"{self.root}/{host_pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as gone:
                return translate(gone, f"{self.root}/{host_pid}")
            try:
                os.readlink("ns/pid", dir_fd=fd)
                return ProcessGone(f"{self.root}/{host_pid}: the process ended, and its PID is used again")
            except OSError as second:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    os.stat("status", dir_fd=fd)
                    return translate(second, f"{self.root}/{host_pid}/ns/pid")
                return ProcessGone(f"{self.root}/{host_pid}: the process ended")
            finally:
                os.close(fd)
        return translate(error, f"{self.root}/{host_pid}/ns/pid")

    # -- handles ------------------------------------------------------------------------------------

    def open_handle(self, host_pid: int) -> ProcessHandle:
        """Take hold of the process that has this PID now; its identity is read after it was taken hold of."""
        fd, is_pidfd = -1, False
        if self.use_pidfd:
            try:
                fd, is_pidfd = os.pidfd_open(host_pid), True
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.ENOENT):  # a thread id; ENOENT since Linux 6.15
                    raise ProcessGone(f"PID {host_pid} is a thread, not a process") from None
                if error.errno not in (errno.ENOSYS, errno.EPERM):
                    raise translate(error, f"pidfd of {host_pid}") from None
        if fd < 0:
            try:
                fd = os.open(f"{self.root}/{host_pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                raise translate(error, f"{self.root}/{host_pid}") from None
        try:
            if not is_pidfd and self.status(host_pid).tgid != host_pid:
                raise ProcessGone(f"PID {host_pid} is a thread, not a process")
            handle = ProcessHandle(self.process(host_pid), fd, is_pidfd=is_pidfd)
            if handle.alive():
                return handle
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        raise ProcessGone(f"process {host_pid} ended while it was checked")

    # -- what can be seen from here -----------------------------------------------------------------

    def in_host_pidns(self) -> bool:
        """Whether this process and this ``/proc`` are those of the initial PID namespace."""
        return self.pidns("self") == HOST_PIDNS

    def require_host_view(self) -> None:
        """Raise `CannotKnow`, with the fix, unless every process of the host can be seen from here."""
        if not os.path.isdir(f"{self.root}/self"):
            raise CannotKnow(f"{self.root} is not a mounted proc file system: mount -t proc proc {self.root}")
        if not self.in_host_pidns():
            raise CannotKnow(
                "this process is not in the host's PID namespace, so it cannot see host PIDs: "
                "run it on the host, or with hostPID: true (Kubernetes) or --pid=host (Docker)"
            )
        if not os.path.exists(f"{self.root}/1/status"):
            raise CannotKnow(
                f"{self.root} is mounted with hidepid and hides other users' processes: run as root with "
                f"CAP_SYS_PTRACE, or remount it with: mount -o remount,hidepid=0 {self.root}"
            )

    def require_all_processes(self, mounts: Iterable[Mount]) -> None:
        """Raise `CannotKnow` if hidepid hides any process from us, process 1 or not.

        ``mounts`` is our own mount table. Members of the group ``gid=`` see all but with hidepid=ptraceable.
        """
        options = ""
        for mount in mounts:
            if mount.fs_type == "proc" and mount.mount_point == self.root:
                options = mount.super_options  # the last one covers those before
        hidden = dict(option.split("=", 1) for option in options.split(",") if "=" in option)
        if hidden.get("hidepid", "0") in ("0", "off"):
            return
        capabilities = re.search(rb"^CapEff:\s*([0-9a-f]+)$", self._read("self/status"), re.MULTILINE)
        if capabilities is not None and int(capabilities[1], 16) >> _CAP_SYS_PTRACE & 1:
            return
        groups = {*os.getgroups(), os.getegid()}
        if hidden["hidepid"] not in ("ptraceable", "4") and int(hidden.get("gid", -1)) in groups:
            return
        raise CannotKnow(
            f"{self.root} is mounted with hidepid={hidden['hidepid']} and hides processes from this one: "
            f"give it CAP_SYS_PTRACE, or remount with: mount -o remount,hidepid=0 {self.root}"
        )


def translate(error: OSError, what: str) -> Exception:
    """An error of the operating system as what it says of the process, or itself."""
    # EINVAL: mountinfo of a process that is past exit_task_namespaces (fs/proc_namespace.c)
    if error.errno in (errno.ENOENT, errno.ESRCH, errno.EINVAL):
        return ProcessGone(f"{what}: the process ended")
    if error.errno in (errno.EACCES, errno.EPERM):
        return AccessDenied(
            f"{what} may not be read: run as root, or give CAP_SYS_PTRACE "
            "(Kubernetes: securityContext.capabilities.add: [SYS_PTRACE])"
        )
    if error.errno == errno.ENAMETOOLONG:  # by control groups or directories that a tenant nests
        return AccessDenied(f"{what} may not be read: there is a path in it that is too long for the kernel")
    return error
