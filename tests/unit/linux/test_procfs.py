"""The /proc files: bytes from tables, directories from fixtures, and our own processes in the real /proc."""

import contextlib
import mmap
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resolver.base.errors import AccessDenied, CannotKnow, ProcessGone
from resolver.linux import mappings
from resolver.linux import procfs as module
from resolver.linux.host_view import require_host_view
from resolver.linux.mappings import maps_file
from resolver.linux.mounts import Mount, parse_mountinfo
from resolver.linux.procfs import (
    HOST_PIDNS,
    ProcessIdentity,
    Procfs,
    TooLarge,
    parse_ns_pids,
    parse_start_time,
)
from tests.descriptors import is_open, pidfds_of
from tests.patience import until

# -- bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "numbers"),
    [
        (b"Name:\tx\nNStgid:\t9\nNSpid:\t4026\t12\t1\nNSpgid:\t9\n", (4026, 12, 1)),
        (b"Name:\tx\nNSpid:\t7\nNSpgid:\t7\n", (7,)),
        (b"Name:\tNSpid:\t9\nNSpid:\t7\n", (7,)),  # a name with the line's text
        (b"Name:\t\\nNSpid:\t9\nNSpid:\t7\n", (7,)),  # the kernel escapes newlines in names
        (b"Name:\tx\nPid:\t7\n", ()),  # before Linux 4.1
        (b"Name:\tx\nNSpid:\t70", ()),  # cut short: digits may be missing
        (b"", ()),
    ],
)
def test_numbers_of_a_status_file(status: bytes, numbers: tuple[int, ...]) -> None:
    assert parse_ns_pids(status) == numbers


@pytest.mark.parametrize("comm", [b"a", b"a b", b")", b") S 1 2 3", b"(", b"\xff\n", b""])
def test_the_start_time_whatever_the_name(comm: bytes) -> None:
    fields = b" ".join(b"%d" % number for number in range(4, 53))
    assert parse_start_time(b"77 (" + comm + b") S " + fields + b"\n") == 22


LINE = b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue\n"
NEAR_LINES = st.lists(
    st.sampled_from([*(bytes((byte,)) for byte in b" -\\\n1a/\r"), LINE, b" - ", b"\\040"]), max_size=40
).map(b"".join)


@pytest.mark.parametrize(
    ("line", "mount"),
    [
        (LINE, Mount(36, "98:0", "/mnt1", "/mnt2", "ext3", "rw,errors=continue")),
        (b"1 0 0:2 / / rw - tmpfs none rw\n", Mount(1, "0:2", "/", "/", "tmpfs", "rw")),
        (
            rb"1 0 0:2 /a\040b\011c\012d\134e / rw - cgroup2 none rw" + b"\n",
            Mount(1, "0:2", "/a b\tc\nd\\e", "/", "cgroup2", "rw"),
        ),
        (b"1 0 0:2 /a\rb\xff / rw - ext4 x rw\n", Mount(1, "0:2", "/a\rb\udcff", "/", "ext4", "rw")),
        (
            b"1 0 0:2 /a-b /x rw shared:1 - fuse.x a-b rw,x=1\n",
            Mount(1, "0:2", "/a-b", "/x", "fuse.x", "rw,x=1"),
        ),
        (b"1 0 0:2 / / rw\n", None),
        (b"1 0 0:2 / - ext4 x rw\n", None),
        (b"\n", None),
    ],
)
def test_a_line_of_a_mount_table(line: bytes, mount: Mount | None) -> None:
    assert list(parse_mountinfo(line)) == ([mount] if mount else [])
    assert list(parse_mountinfo(LINE + line + LINE))[1:-1] == ([mount] if mount else [])


@given(st.one_of(st.binary(max_size=300), NEAR_LINES))
def test_numbers_are_all_a_hostile_table_can_break(text: bytes) -> None:
    with contextlib.suppress(ValueError):  # only for fields that the kernel alone writes
        list(parse_mountinfo(text))


# -- a directory of fixtures -----------------------------------------------------------------------------


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    directory = tmp_path / "12"
    (directory / "ns").mkdir(parents=True)
    (directory / "task/12").mkdir(parents=True)
    groups = " ".join(map(str, range(100_000, 110_000)))
    (directory / "stat").write_text("12 (x) S " + " ".join(map(str, range(4, 53))))
    (directory / "status").write_text(
        f"Name:\tx\nState:\tS\nTgid:\t12\nPPid:\t1\nGroups:\t{groups}\nNSpid:\t12\t3\nVm:\n"
    )
    (directory / "task/12/stat").write_text("12 (x) S " + " ".join(map(str, range(4, 53))))
    (directory / "cgroup").write_text("0::/docker/x\n")
    (directory / "comm").write_bytes(b"a\xffb\n")
    (directory / "ns/pid").symlink_to("pid:[4026532000]")
    for name in ("self", "2", "sys"):
        (tmp_path / name / "ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to(f"pid:[{HOST_PIDNS}]")
    (tmp_path / "self/status").write_text("CapEff:\t0000000000000000\n")
    (tmp_path / "2/status").write_text("Name:\tkthreadd\nNSpid:\t2\n")
    return tmp_path


def test_a_process_that_is_not_there_is_gone(proc: Path) -> None:
    procfs = Procfs(str(proc), use_pidfd=False)
    assert procfs.comm(12) == "a\\xffb"
    for read in (procfs.parent, procfs.ns_pids, procfs.start_time, procfs.cgroup, procfs.comm, procfs.pidns):
        with pytest.raises(ProcessGone):
            read(13)
    for more in (procfs.mounts, procfs.pidns_chain, procfs.tgid, procfs.open_handle):
        with pytest.raises(ProcessGone):
            more(13)


def test_of_a_containers_mount_table_less_is_read(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root in a user namespace can make a table of 65,000 lines, which blocked the loop for 0.4 s."""
    procfs, many = Procfs(str(proc)), LINE * (600_000 // len(LINE))
    (proc / "12/mountinfo").write_bytes(many)
    (proc / "12/cgroup").write_text("0::/system.slice/docker.service\n")
    assert len(procfs.mounts(12)) == len(many) // len(LINE)  # the host's table may be that long
    (proc / "12/cgroup").write_text(f"0::/docker/{'a' * 64}\n")
    for read in (lambda: procfs.mounts(12), lambda: procfs.has_mount(12, "8:1", "/x")):
        with pytest.raises(TooLarge, match="longer than"):
            read()
    (proc / "self/mountinfo").write_bytes(many)
    assert len(procfs.mounts("self")) == len(many) // len(LINE)
    monkeypatch.setattr(module, "MAX_TENANT_FILE", 1 << 19)
    with pytest.raises(TooLarge, match="longer than"):
        procfs.mounts("self")


def table(device: str, root: str) -> str:
    return LINE.decode() + f"1 0 {device} {root} /usr/local/vgpu rw - ext4 /dev/sda rw\n"


@pytest.mark.parametrize(
    ("line", "mounted"),
    [
        (("8:1", r"/vgpu/containers/u\040a"), True),
        (("8:2", r"/vgpu/containers/u\040a"), False),
        (("8:1", r"/vgpu/containers/u\040a/sub"), False),
        (("8:1", r"/x/vgpu/containers/u\040a"), False),
        (("8:1", r"/vgpu/containers/u\040ab"), False),
    ],
)
@pytest.mark.parametrize("blank", ["_", " "])
def test_whether_it_has_the_mount(proc: Path, line: tuple[str, str], blank: str, *, mounted: bool) -> None:
    device, root = line
    (proc / "12/mountinfo").write_text(table(device, root if blank == " " else root.replace(r"\040", "_")))
    assert Procfs(str(proc)).has_mount(12, "8:1", f"/vgpu/containers/u{blank}a") is mounted


MAPS = "7f00-7f01 rw-s 00000000 {} {}{}\n"


@pytest.mark.parametrize(
    ("line", "mapped"),
    [
        (MAPS.format("08:01", 77, "        /tmp/x.cache"), True),
        (MAPS.format("08:01", 77, ""), True),
        (MAPS.format("08:01", 777, "       /tmp/x.cache"), False),
        (MAPS.format("08:02", 77, "        /tmp/x.cache"), False),
        (
            MAPS.format("08:01", 78, "   /a 7f00-7f01 rw-s 00000000 08:01 77 "),
            False,
        ),  # a path that contains the line
        ("x" + MAPS.format("08:01", 77, ""), False),
        (MAPS.format("08:01", 77, "").replace("rw-s", "rw-p"), False),
        (MAPS.format("08:01", 77, "").replace("rw-s", "r--s"), False),
        (MAPS.format("103:4d2", 77, ""), True),
    ],
)
def test_whether_it_maps_the_inode(proc: Path, line: str, *, mapped: bool) -> None:
    (proc / "12/maps").write_text("55-56 r-xp 00000000 fe:10 5    /bin/x\n" + line)
    device = "259:1234" if "103:4d2" in line else "8:1"
    assert maps_file(Procfs(str(proc)), 12, device, 77) is mapped


def test_the_view_of_the_host(proc: Path) -> None:
    require_host_view(Procfs(str(proc)))
    (proc / "2/status").write_text("Name:\tkthreadd\n")
    with pytest.raises(CannotKnow, match=r"Linux 4\.1"):
        require_host_view(Procfs(str(proc)))
    (proc / "2/status").rename(proc / "status")
    with pytest.raises(CannotKnow, match="remount"):
        require_host_view(Procfs(str(proc)))
    (proc / "self/ns/pid").unlink()
    (proc / "self/ns/pid").symlink_to("pid:[4026532000]")
    for root, fix in ((proc, "hostPID: true"), (proc / "sys", "mount -t proc")):
        with pytest.raises(CannotKnow, match=fix):
            require_host_view(Procfs(str(root)))


#: Reads as in the daemon's loop (careful), or as in commands and lanes.
EITHER = pytest.mark.parametrize("careful", [False, True])

# -- the real thing --------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture
def zombie() -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield pid
    os.waitpid(pid, 0)


@pytest.fixture
def many_groups() -> Iterator[int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgroups(range(100_000, 165_536))
        os.write(writing, b"x")
        signal.pause()
    os.read(reading, 1)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)


@EITHER
def test_own_process_is_read(*, careful: bool) -> None:
    procfs, ourselves = Procfs(careful=careful), os.getpid()
    assert procfs.entries()[ourselves] == os.stat(f"/proc/{ourselves}").st_ino
    assert (procfs.tgid(ourselves), procfs.parent(ourselves)) == (ourselves, os.getppid())
    assert procfs.ns_pids(ourselves) == parse_ns_pids(procfs.status_text(ourselves))
    assert procfs.ns_pids(ourselves)[-1] == ourselves
    assert procfs.pidns(ourselves) == os.stat("/proc/self/ns/pid").st_ino
    assert procfs.pidns_chain(ourselves)[-1] == procfs.pidns(ourselves)
    assert procfs.cgroup(ourselves) == Path("/proc/self/cgroup").read_text()
    assert procfs.inode(ourselves) == os.stat(f"/proc/{ourselves}").st_ino
    assert procfs.program(ourselves) == os.path.realpath("/proc/self/exe").rpartition("/")[2]
    assert {mount.mount_point for mount in procfs.mounts("self")} >= {"/", "/proc"}
    with procfs.open_handle(ourselves) as handle:
        assert handle.process == ProcessIdentity(
            ourselves, procfs.start_time(ourselves), procfs.ns_pids(ourselves)
        )


@pytest.mark.parametrize("query", [True, False])
def test_a_file_that_we_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, query: bool) -> None:
    if not query:  # as on kernels before Linux 6.11
        monkeypatch.setattr(mappings, "PROCMAP_QUERY", 0)
    path = tmp_path / "mapped"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        procfs, ourselves, inode = Procfs(), os.getpid(), os.fstat(file.fileno()).st_ino
        longest = max(
            (mount for mount in procfs.mounts("self") if str(path).startswith(mount.mount_point)),
            key=lambda mount: len(mount.mount_point),
        )
        for less in (mmap.ACCESS_COPY, mmap.ACCESS_READ):
            with mmap.mmap(file.fileno(), 4096, access=less):
                assert not maps_file(procfs, ourselves, longest.device, inode)
        with mmap.mmap(file.fileno(), 4096):
            assert maps_file(procfs, ourselves, longest.device, inode)
            assert not maps_file(procfs, ourselves, longest.device, inode + 1)
        assert not maps_file(procfs, ourselves, longest.device, inode)


@pytest.mark.parametrize("use_pidfd", [True, False])
def test_a_handle_outlives_its_process(sleeper: subprocess.Popen[bytes], *, use_pidfd: bool) -> None:
    procfs = Procfs(use_pidfd=use_pidfd)
    with procfs.open_handle(sleeper.pid) as handle:
        assert handle.is_pidfd is use_pidfd
        assert handle.process == (sleeper.pid, procfs.start_time(sleeper.pid), procfs.ns_pids(sleeper.pid))
        assert handle.alive()
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        assert not handle.alive(), "a process that only waits for its parent is dead"
        sleeper.wait()
        assert not handle.alive()
    handle.close()
    assert handle.fd == -1


@pytest.mark.parametrize("use_pidfd", [True, False])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("error", [None, ProcessGone, KeyError])
def test_reads_count_only_if_the_process_lives_on(
    sleeper: subprocess.Popen[bytes], *, use_pidfd: bool, keep: bool, error: type[Exception] | None
) -> None:
    handles = []
    with contextlib.nullcontext() if error is None else pytest.raises(error):  # noqa: SIM117 - its end raises
        with Procfs(use_pidfd=use_pidfd).verify(sleeper.pid, keep=keep) as handle:
            handles.append(handle)
            assert handle.process.host_pid == sleeper.pid
            os.fstat(handle.fd)
            if error is ProcessGone:
                sleeper.kill()
                os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # a zombie still has its PID
            elif error is not None:
                raise error
    assert (handles[0].fd >= 0) is (keep and error is None)
    handles[0].close()


@pytest.mark.parametrize("use_pidfd", [True, False])
def test_the_dead_are_not_held(zombie: int, *, use_pidfd: bool) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ProcessGone):
        Procfs(use_pidfd=use_pidfd).open_handle(zombie)
    until(lambda: pidfds_of(zombie) == 0, "no pidfd of it")
    until(lambda: not is_open(Path(f"/proc/{zombie}")), "no directory of it")
    until(lambda: set(os.listdir("/proc/self/fd")) <= before, "no further descriptor")


@EITHER
def test_zombie_has_numbers_and_no_mounts(zombie: int, *, careful: bool) -> None:
    procfs = Procfs(careful=careful)
    assert procfs.ns_pids(zombie)[-1] == zombie
    assert procfs.pidns(zombie) == procfs.pidns("self")
    with pytest.raises(ProcessGone):
        procfs.mounts(zombie)
    with pytest.raises(ProcessGone):
        procfs.has_mount(zombie, "8:1", "/")


def test_supplementary_groups_make_no_read_expensive(many_groups: int) -> None:
    """With 65,536 groups, ``status`` has 722 KB, and a read takes 15 ms of CPU time."""
    procfs = Procfs()

    def used(host_pid: int) -> float:
        began = time.thread_time()
        for _ in range(20):
            procfs.open_handle(host_pid).close()
            procfs.ns_pids(host_pid)
            procfs.pidns_chain(host_pid)
            procfs.tgid(host_pid)
            procfs.parent(host_pid)
        return time.thread_time() - began

    few = min(used(os.getppid()) for _ in range(3))
    assert min(used(many_groups) for _ in range(3)) < few * 5 + 0.02


@EITHER
@pytest.mark.parametrize("use_pidfd", [True, False])
def test_thread_id_is_no_process(*, use_pidfd: bool, careful: bool) -> None:
    procfs, started, end = Procfs(use_pidfd=use_pidfd, careful=careful), threading.Event(), threading.Event()

    def stay() -> None:
        started.set()
        end.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        started.wait()
        tid = thread.native_id
        assert tid is not None
        assert procfs.tgid(tid) == os.getpid()
        assert tid not in procfs.entries()
        with pytest.raises(ProcessGone, match="is a thread"):
            procfs.open_handle(tid)
    finally:
        end.set()
        thread.join()


@EITHER
def test_process_ending_during_reads_is_gone(*, careful: bool) -> None:
    """If a process ends between a link's look-up and its read, the kernel returns EACCES, even to root."""
    procfs, ended = Procfs(careful=careful), 0
    for _ in range(150):
        child = os.posix_spawn("/bin/true", ["true"], {})  # a fork would copy all that was collected
        reaper = threading.Thread(target=os.waitpid, args=(child, 0))
        reaper.start()
        try:
            while True:
                procfs.pidns(child)
                procfs.pidns_chain(child)
                procfs.open_handle(child).close()
                procfs.comm(child)
        except ProcessGone:
            ended += 1
        reaper.join()
    assert ended == 150


@EITHER
def test_namespace_without_the_right_is_refused(*, careful: bool) -> None:
    if os.geteuid() != 0:
        pytest.fail("this test gives root up and needs it first: sudo make test")
    child = os.fork()
    if child == 0:
        code = 3
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            Procfs(careful=careful).pidns(os.getppid())
        except AccessDenied as error:
            code = 0 if "CAP_SYS_PTRACE" in str(error) else 4
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
