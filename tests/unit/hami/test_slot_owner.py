"""Slots' owners, found in a fake /proc; tests/kernel has real namespaces."""

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resolver.base.budget import Slices
from resolver.base.errors import ResolverError
from resolver.base.reasons import UnresolvedReason
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.hami.directory_reads import place_of
from resolver.hami.discovery import ClaimDirectory, SharedDirectory
from resolver.hami.slot_owner import OwnerFinder
from resolver.linux import mappings
from resolver.linux import procfs as procfs_module
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.pids.scan import ScanSource
from resolver.workers.lanes import TenantReader
from tests.fakes.direct import Stalling, Waiting
from tests.fakes.procs import DEVICE, HOOK, INODE, OTHERS, OURS, FakeProc, maps, mountinfo
from tests.patience import PATIENCE_S


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


class Counting(Procfs):
    """A `Procfs` that counts reads of mount tables."""

    def __init__(self, root: str) -> None:
        super().__init__(root, use_pidfd=False)
        self.tables = Counter[int]()

    def mount_table(self, host_pid: int | str) -> bytes:
        self.tables[int(host_pid)] += 1
        return super().mount_table(host_pid)


def counting(proc: FakeProc, reader: type[TenantReader] = TenantReader) -> Counting:
    procfs = Counting(str(proc.root))
    proc.index = KnownNamespaces(procfs, proc.pidmap)
    proc.containers = OwnerFinder(procfs, proc.pidmap, proc.index, reader=reader(procfs))
    return procfs


def test_the_owner_has_the_number_the_mount_and_the_mapping(proc: FakeProc) -> None:
    proc.put(100, 7)
    proc.put(101, 8)
    proc.put(200, 7, mounts=mountinfo(OTHERS), mapped=maps(inode=99))
    proc.put(300, mounts=mountinfo(), mapped="")
    assert proc.find(7) == 100
    assert proc.find(8) == 101
    assert proc.find(7, OTHERS, 99) == 200
    assert proc.find(9) is UnresolvedReason.NO_SUCH_PROCESS
    assert proc.find(7, OTHERS) is UnresolvedReason.NOT_MAPPED


@pytest.mark.parametrize(
    ("ns_pids", "options", "asked", "expected"),
    [
        ((), {}, 100, 100),  # in the host's PID namespace both numbers are one
        ((7, 3), {}, 7, UnresolvedReason.NO_SUCH_PROCESS),  # the innermost number counts
        ((7, 3), {}, 3, 100),
        ((7,), {"mapped": maps(path="/usr/local/vgpu/a.cache (deleted)")}, 7, 100),
        ((7,), {"state": "Z"}, 7, UnresolvedReason.NO_SUCH_PROCESS),  # a zombie owns nothing
    ],
)
def test_one_process_and_its_number(
    proc: FakeProc, ns_pids: tuple[int, ...], options: dict[str, Any], asked: int, expected: object
) -> None:
    proc.put(100, *ns_pids, **options)
    assert proc.find(asked) == expected


@pytest.mark.parametrize(
    ("mount", "expected"),
    [
        *(
            (mount, UnresolvedReason.NO_SUCH_PROCESS)
            for mount in (
                (DEVICE, OURS.path + "/sub", "/usr/local/vgpu"),  # a bind mount of a subdirectory
                (DEVICE, OURS.path + "x", "/usr/local/vgpu"),
                (DEVICE, "/home/evil" + OURS.path, "/usr/local/vgpu"),  # a path with the same ending
                ("8:2", OURS.path, "/usr/local/vgpu"),  # another file system with the same names
                ("0:45", OURS.path, "/usr/local/vgpu"),  # a tmpfs of the tenant's own
                (DEVICE, HOOK, "/usr/local/vgpu"),  # all containers' directories: a monitor's mount
                (DEVICE, "/", OURS.path),  # the mount point proves nothing
            )
        ),
        # The kernel never writes this escape, but it decodes to exactly the directory's path.
        ((DEVICE, OURS.path.replace("/uid", "\\057uid"), "/usr/local/vgpu"), 100),
        ((*OURS, "/somewhere/else"), 100),
    ],
)
def test_only_a_mount_of_the_directory_proves_the_container(
    proc: FakeProc, mount: tuple[str, str, str], expected: object
) -> None:
    many = [(DEVICE, f"{HOOK}/uid-{n}_main", f"/mnt/{n}") for n in range(50, 90)]
    proc.put(100, 7, mounts=mountinfo(*many, mount, OTHERS))
    assert proc.find(7) == expected


def test_a_directory_with_odd_characters(proc: FakeProc) -> None:
    odd = SharedDirectory(DEVICE, f"{HOOK}/uid-1_a b\\c\n")
    escaped = odd.path.replace("\\", "\\134").replace(" ", "\\040").replace("\n", "\\012")
    proc.put(100, 7, mounts=mountinfo((DEVICE, escaped, "/usr/local/vgpu")))
    assert proc.find(7, odd) == 100


@pytest.mark.parametrize(
    "mapped",
    [
        "",
        maps(inode=INODE + 1),
        maps(inode=int(f"{INODE}0")),
        maps(device="08:02"),
        maps(device="00:2d"),
        maps(inode=1, path=f"/x 08:01 {INODE}"),
        maps(inode=1, path=f"/x\\0127f0-7f1 rw-s 00000000 08:01 {INODE} /y"),
    ],
)
def test_a_process_that_does_not_map_the_file_is_not_the_owner(proc: FakeProc, mapped: str) -> None:
    proc.put(100, 7, mapped=mapped or "7f00-7f10 rw-p 00000000 00:00 0\n")
    assert proc.find(7) is UnresolvedReason.NOT_MAPPED


async def test_searches_of_all_processes_run_one_by_one(proc: FakeProc) -> None:
    """If all containers of a node start at once, each search needs the mount tables that the others read."""
    directories = [SharedDirectory(DEVICE, f"{HOOK}/uid-{number}_main") for number in range(20)]
    for number, directory in enumerate(directories):
        proc.put(100 + number, 7, mounts=mountinfo(directory))
    procfs = counting(proc, Waiting)
    await proc.pidmap.catch_up(Slices())
    owners = await asyncio.gather(
        *(proc.containers.owner(each, (each.device, INODE), 7) for each in directories)
    )
    handles = [each for each in owners if isinstance(each, ProcessHandle)]
    assert [each.process.host_pid for each in handles] == list(range(100, 120))
    assert max(procfs.tables.values()) <= 3  # by the first search, and when the owner is held
    for each in handles:
        each.close()


async def test_process_that_makes_the_lane_wait_delays_no_other_search(proc: FakeProc) -> None:
    proc.put(100, 7, mounts=mountinfo(OTHERS))
    proc.put(101, 7)
    await proc.pidmap.catch_up(Slices())
    finder = OwnerFinder(proc.procfs, proc.pidmap, proc.index, reader=Stalling(proc.procfs, 100))
    late = asyncio.create_task(finder.owner(OTHERS, (DEVICE, INODE), 7))
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        owner = await finder.owner(OURS, (DEVICE, INODE), 7)
    assert isinstance(owner, ProcessHandle)
    assert (owner.process.host_pid, late.done()) == (101, False)
    owner.close()
    late.cancel()
    await asyncio.wait({late})
    assert proc.held() == 0


@contextmanager
def unreadable(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """Refuse reads of these files in the system call, because root may read everything."""
    real = os.open

    def refusing(path: str, flags: int, *args: int, **kwargs: int | None) -> int:
        if str(path).endswith(names):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(procfs_module.os, "open", refusing)  # type: ignore[attr-defined]
        yield


@pytest.mark.parametrize("name", ["mountinfo", "maps"])
def test_one_that_fits_and_one_that_cannot_be_seen_is_no_answer(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    proc.put(100, 7)
    proc.put(101, 9, 7)  # nested: also PID 7 in its own namespace
    with unreadable(monkeypatch, f"/101/{name}"):
        assert proc.find(7) is UnresolvedReason.ACCESS_DENIED
    assert proc.find(7) is UnresolvedReason.AMBIGUOUS
    proc.put(101, 9, 7, mapped=maps(inode=1))
    assert proc.find(7) == 100


def test_unreadable_process_may_be_the_owner(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    proc.put(100, 7)
    with unreadable(monkeypatch, "/100/status"):
        assert proc.find(7) is UnresolvedReason.ACCESS_DENIED
    assert proc.find(7) == 100


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs_module, "MAX_MOUNT_TABLE", 1 << 16)
    monkeypatch.setattr(procfs_module, "MAX_TENANT_FILE", 1 << 16)
    monkeypatch.setattr(mappings, "MAX_MAPS", 1 << 16)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("name", ["mountinfo", "maps"])
def test_a_file_that_is_blown_up_is_not_read(proc: FakeProc, name: str) -> None:
    file = proc.put(100, 7) / name
    file.write_text("x" * (1 << 18) + "\n" + file.read_text())
    assert proc.find(7) is UnresolvedReason.TOO_LARGE


@pytest.mark.usefixtures("small_limits")
def test_unreadable_neighbour_hides_no_other_process(proc: FakeProc) -> None:
    proc.put(100, 7)
    hostile = proc.put(101, 7, mounts="x" * (1 << 18) + "\n")
    assert proc.find(7) is UnresolvedReason.TOO_LARGE  # the container of both processes is unknown
    (proc.root / "100" / "cgroup").write_text(f"0::/docker/{'a' * 64}\n")
    assert proc.find(7) is UnresolvedReason.TOO_LARGE
    (hostile / "cgroup").write_text(f"0::/docker/{'b' * 64}\n")
    assert proc.find(7) == 100
    (hostile / "cgroup").write_text(f"0::/docker/{'a' * 64}\n")
    assert proc.find(7) is UnresolvedReason.TOO_LARGE
    proc.put(101, 7, mounts="x" * (1 << 18) + "\n")
    (proc.root / "100" / "maps").write_text("")
    assert proc.find(7) is UnresolvedReason.TOO_LARGE


@pytest.mark.usefixtures("small_limits")
def test_large_mount_table_is_read_once_per_refresh(proc: FakeProc) -> None:
    procfs = counting(proc)
    proc.put(101, 7, mounts="x" * (1 << 18) + "\n")
    for refreshes in (1, 2):
        proc.refresh()
        for number in range(20):
            directory = SharedDirectory(DEVICE, f"{HOOK}/uid-{number}_main")
            assert proc.ask(directory=directory) is UnresolvedReason.TOO_LARGE
        assert procfs.tables[101] == refreshes


@pytest.mark.parametrize("missing", ["mountinfo", "maps", "stat", "status"])
def test_one_that_ends_while_it_is_looked_at(proc: FakeProc, missing: str) -> None:
    place = proc.put(100, 7)
    proc.refresh()
    (place / missing).unlink()
    assert proc.find(7) is UnresolvedReason.NO_SUCH_PROCESS


def test_a_number_that_is_used_again_between_map_and_look(proc: FakeProc) -> None:
    proc.put(100, 7)
    proc.refresh()
    proc.put(100, 8)  # same process directory: the map still has PID 7
    assert proc.pidmap.source.candidates(7) == [100]
    assert proc.find(7) is UnresolvedReason.NO_SUCH_PROCESS


def test_mounts_that_are_made_after_the_process_was_seen(proc: FakeProc) -> None:
    proc.put(100, 7, mounts=mountinfo())
    assert proc.find(7) is UnresolvedReason.NO_SUCH_PROCESS
    proc.put(100, 7)
    assert proc.find(7) == 100


# ---- by key ------------------------------------------------------------------------------------

CONTAINER, OTHER = f"0::/docker/{'a' * 64}", f"0::/docker/{'b' * 64}"


def with_container(proc: FakeProc, pidns: int = 5001) -> None:
    proc.put(100, 1, pidns=pidns, cgroup=CONTAINER)


def test_only_the_containers_namespace_is_searched(proc: FakeProc) -> None:
    with_container(proc)
    proc.put(101, 7, pidns=5001, cgroup=CONTAINER)
    proc.put(102, 7, pidns=5002, cgroup=CONTAINER)  # its PID fits, but its namespace is unknown
    assert proc.find(7) == 101
    proc.put(103, 1, mounts=mountinfo(OTHERS), pidns=5002, cgroup=OTHER)
    assert proc.find(7) == 101
    assert proc.find(7, OTHERS) is UnresolvedReason.OTHER_CONTAINER


def test_a_process_of_the_hosts_namespace_is_asked_for_too(proc: FakeProc) -> None:
    with_container(proc)
    proc.put(208, mounts=mountinfo(), pidns=procfs_module.HOST_PIDNS, cgroup="0::/system.slice/x")
    assert proc.find(208) is UnresolvedReason.NO_SUCH_PROCESS
    proc.put(207, pidns=procfs_module.HOST_PIDNS, cgroup=CONTAINER)
    assert proc.find(207) == 207
    assert proc.find(208) is UnresolvedReason.OTHER_CONTAINER  # the host's namespace is the container's now


def test_host_mounts_are_recognized_without_mount_table(proc: FakeProc) -> None:
    """A read of any mount table waits while another process copies one (namespace_sem)."""
    procfs = counting(proc)
    with_container(proc)
    proc.put(101, 7, pidns=5001, cgroup=CONTAINER)
    for host_pid, mounts in ((2, 4001), (7, 4001), (8, 4002)):
        place = proc.put(host_pid, mounts=mountinfo(), pidns=procfs_module.HOST_PIDNS, cgroup="0::/x")
        (place / "ns/mnt").symlink_to(f"mnt:[{mounts}]")
    assert proc.find(7) == 101
    assert proc.find(8) is UnresolvedReason.NO_SUCH_PROCESS
    assert 7 not in procfs.tables
    assert 8 in procfs.tables


def test_a_process_that_shows_no_mount_is_told_by_its_cgroup(proc: FakeProc) -> None:
    """Such a process called chroot, or has a mount namespace of its own."""
    with_container(proc)
    place = proc.put(101, 7, mounts=mountinfo(), pidns=5001, cgroup=CONTAINER)
    assert proc.find(7) == 101
    (place / "cgroup").write_text(f"{OTHER}\n")
    assert proc.find(7) is UnresolvedReason.OTHER_CONTAINER
    (place / "cgroup").write_text("0::/\n")
    assert proc.find(7) is UnresolvedReason.OTHER_CONTAINER


def test_named_process_in_unknown_namespace_is_checked(proc: FakeProc) -> None:
    """Two containers share the directory, and the second is too new to be in the index."""
    with_container(proc)
    proc.put(101, 7, pidns=5001, cgroup=CONTAINER)
    place = proc.put(201, 7, pidns=6001, cgroup=OTHER)
    assert proc.find(7) == 101

    assert proc.ask(rival=201) is UnresolvedReason.AMBIGUOUS
    assert proc.ask(rival=4711) == proc.ask(rival=101) == 101
    (place / "mountinfo").unlink()
    (place / "mountinfo").mkdir()
    assert proc.ask(rival=201) is UnresolvedReason.OVER_BUDGET
    proc.refresh()
    (place / "mountinfo").rmdir()
    (place / "mountinfo").write_text(mountinfo(OTHERS))
    assert proc.ask(rival=201) == 101


def test_named_process_in_unlisted_namespace_is_checked(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung process can outlive its namespace's PID 1; another container may share its claim."""
    with_container(proc)
    proc.put(101, 7, pidns=5001, cgroup=CONTAINER)
    proc.put(102, 7, pidns=5002, cgroup=OTHER)
    monkeypatch.setattr(proc.pidmap.source, "everywhere", lambda _ns_pid: iter([101]))
    assert proc.find(directory=ClaimDirectory(*OURS)) == 101
    assert proc.ask(directory=ClaimDirectory(*OURS), rival=102) is UnresolvedReason.AMBIGUOUS


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        ("nothing", 100),
        ("its end", UnresolvedReason.NO_SUCH_PROCESS),
        ("another source", UnresolvedReason.OVER_BUDGET),  # another source proves nothing
    ],
)
def test_walk_among_all_processes_pauses_after_each(proc: FakeProc, happens: str, expected: object) -> None:
    place = proc.put(100, 7)
    for host_pid in range(1000, 1010):
        proc.put(host_pid, 7, mounts=mountinfo(OTHERS))
    proc.refresh()
    paused = Counter[None]()

    async def pause() -> None:
        paused[None] += 1
        if paused.total() == 2 and happens == "its end":
            (place / "stat").unlink()
        elif happens == "another source":
            proc.pidmap.source = ScanSource(proc.procfs)

    assert proc.ask(pause=pause) == expected
    assert paused.total() == 11


def test_a_walk_that_fails_loses_no_descriptor(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes may fit a claim, so the first that fits is held while the rest are searched."""
    with_container(proc)
    proc.put(101, 7, pidns=5001, cgroup=CONTAINER)
    assert proc.find() == 101

    def refuse(_ns_pid: int) -> Iterator[int]:
        held.append(proc.held())
        raise OSError(errno.EMFILE, "Too many open files")

    held = [proc.held()]
    monkeypatch.setattr(proc.pidmap.source, "everywhere", refuse)
    with pytest.raises(OSError, match="Too many"):
        proc.ask(directory=ClaimDirectory(*OURS))
    assert held == [0, 1]
    assert proc.held() == 0


# ---- is it dead --------------------------------------------------------------------------------


def test_pid_is_vacant_only_after_a_seen_owner(proc: FakeProc) -> None:
    with_container(proc)
    owner = proc.put(101, 7, pidns=5001, cgroup=CONTAINER)
    proc.put(102, 8, mounts=mountinfo(), mapped="", pidns=5001, cgroup=CONTAINER)
    proc.refresh()
    assert not proc.containers.vacant(OURS, 9)  # no owner is proven yet: the PIDs may be another kernel's
    assert proc.find(7) == 101
    assert proc.containers.vacant(OURS, 9)
    assert not proc.containers.vacant(OURS, 7)
    assert not proc.containers.vacant(OURS, 8)
    assert not proc.containers.vacant(OTHERS, 9)
    (owner / "stat").write_text((owner / "stat").read_text().replace(" S ", " Z "))
    (owner / "task/101/stat").write_text((owner / "stat").read_text())
    assert proc.containers.vacant(OURS, 7)
    proc.containers.forget(OURS)
    assert not proc.containers.vacant(OURS, 9)


def test_process_ending_during_vacancy_check(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that forks endlessly once ended the pass of all containers, and after ten the daemon."""
    with_container(proc)
    proc.put(101, 7, pidns=5001, cgroup=CONTAINER)
    proc.refresh()
    assert proc.find(7) == 101
    monkeypatch.setattr(proc.containers, "_by_key", lambda *_: [102])
    assert proc.containers.vacant(OURS, 9)
    # A live process of unknown container may be the container's.
    monkeypatch.setattr(proc.containers, "_by_key", lambda *_: [103])
    (proc.put(103, 9, pidns=5001, cgroup=CONTAINER) / "ns/pid").unlink()
    assert not proc.containers.vacant(OURS, 9)


# ---- our own directory as the kernel names it --------------------------------------------------


@pytest.mark.parametrize(
    ("path", "mount", "root"),
    [
        ("/data/hook/containers/a_b", ("/", "/data"), "/hook/containers/a_b"),
        ("/data/hook/containers/a_b", ("/vol/7", "/data"), "/vol/7/hook/containers/a_b"),
        ("/hook/a_b", ("/", "/"), "/hook/a_b"),
        ("/mnt/a_b", ("/hook/a_b", "/mnt/a_b"), "/hook/a_b"),  # the mount point itself
        ("/da ta/a_b", ("/", "/da\\040ta"), "/a_b"),
    ],
)
def test_the_path_inside_the_file_system(
    tmp_path: Path, path: str, mount: tuple[str, str], root: str
) -> None:
    place = tmp_path / "self"
    (place / "fd").mkdir(parents=True)
    (place / "fdinfo").mkdir()
    (place / "fd" / "5").symlink_to(path)
    (place / "fdinfo" / "5").write_text("pos:\t0\nflags:\t0100000\nmnt_id:\t77\nino:\t1\n")
    lines = ["76 1 8:9 / / rw - ext4 /dev/x rw", f"77 1 8:1 {mount[0]} {mount[1]} rw - ext4 /dev/y rw"]
    (place / "mountinfo").write_text("\n".join(lines) + "\n")
    assert place_of(Procfs(str(tmp_path)), 5)[0] == ("8:1", root)
    (place / "mountinfo").write_text(lines[0] + "\n")
    with pytest.raises(ResolverError, match="on no mount"):
        place_of(Procfs(str(tmp_path)), 5)


def test_owner_search_works_while_namespaces_are_placed(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc.put(101, 7)
    proc.refresh()
    monkeypatch.setattr(KnownNamespaces, "behind", True)  # one namespace has not been read yet
    assert proc.ask() == 101
    assert not proc.containers.vacant(OURS, 8)


def test_endless_namespaces_are_not_remembered_forever(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resolver.containers.known_namespaces.MAX_NAMESPACES", 4)
    index = proc.index
    monkeypatch.setattr(index, "_still_there", lambda learned: learned.container_id == "living")
    index.learn(OURS, 1, "living")
    for pidns in range(2, 200):
        index.learn(OURS, pidns, "gone")
    assert len(index._learned[OURS]) <= 9
    assert 1 in index._learned[OURS]
    assert index.proven(OURS)


# ---- trees that containers have as a whole ------------------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
def test_trees_of_a_tenants_making_hide_no_other(proc: FakeProc, *, first: bool) -> None:
    """A tenant with a whole tree can mount any directory of it like a device plugin: mounts prove nothing.

    64 forged trees once filled the table of trees, and mounts below the real tree counted as proof again.
    """
    preload = (DEVICE, "/usr/local/vgpu/ld.so.preload", "/etc/ld.so.preload")

    def put(host_pid: int, *trees: str) -> None:
        mounted = mountinfo(preload, *((DEVICE, tree, f"/usr/local/vgpu{tree}") for tree in trees))
        proc.put(host_pid, 1, mounts=mounted, mapped="", pidns=4026532000 + host_pid)

    proc.put(100, 7)
    assert not isinstance(proc.find(), UnresolvedReason)
    trees = [f"/var/lib/kubelet/pods/uid/volumes/{number}/vgpu" for number in range(80)]
    for host_pid, made in ((300, [HOOK] if first else trees), (400, trees if first else [HOOK])):
        put(host_pid, *made)
        found = proc.find()
    assert found is UnresolvedReason.UNPROVEN
