"""The parts of a look-up that need no real container: its argument, its search, and the namespace's owner."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolver.base.errors import Ambiguous, CannotKnow, NotFound, ProcessGone, UsageError
from resolver.containers import find
from resolver.containers.find import Wanted, container_name
from resolver.containers.namespaces import (
    HOST,
    Member,
    Namespace,
    members_of,
    nested_namespace,
    own_namespace,
)
from resolver.linux import cgroup_directories
from resolver.linux.cgroup_directories import cgroup_roots, find_directories, processes_in
from resolver.linux.mounts import Mount
from resolver.linux.procfs import HOST_PIDNS, Procfs
from tests.fakes.procs import FakeProc

A, B = "a1b2c3d4e5f60718" * 4, "a1b2c3ffe5f60718" * 4
UID = "0a1b2c3d-1111-4222-8333-444455556666"
STATIC = "5dbb3c4e2a90fd1870c2b1b0e1a2f3c4"


BUILD = "q3vd9k1m5x7z0b2c4f6h8j1n0"
ALLOC = "5f0d1a2b-3c4d-5e6f-7a8b-9c0d1e2f3a4b"
NSPAWN = "/system.slice/systemd-nspawn@web.service"


@pytest.mark.parametrize(
    ("asked", "cgroup", "keys"),
    [
        (A, f"0::/kubepods/pod{UID}/{A}\n", {A}),
        (A, f"3:cpu:/\n2:pids:/docker/{A}\n0::/\n", {A}),
        (A[:6], f"0::/docker/{A}\n", {A}),
        (f" containerd://{A[:7]} ", f"0::/docker/{A}\n", {A}),
        (A[:7], f"0::/docker/{B}\n", set()),
        (A[3:], f"0::/docker/{A}\n", set()),  # not a prefix
        (A, f"0::/kubepods/pod{UID}/crio-conmon-{A}.scope\n", set()),
        (A, f"0::/docker/{A}/kubelet/kubepods/pod{UID}/{B}\n", {A}),  # the node of a container
        (A[:6], f"0::/docker/{A}/kubelet/kubepods/pod{UID}/{B}\n", {A, B}),
        ("nginx", "0::/default/nginx\n", {"/default/nginx"}),
        ("nginx", "0::/default/nginx/init.scope\n", {"/default/nginx"}),
        ("nginx", "0::/default/nginx2\n", set()),
        ("web", "0::/lxc.payload.web/.lxc\n", {"/lxc.payload.web"}),
        ("lxc.payload.web", "0::/lxc.payload.web\n", {"/lxc.payload.web"}),
        ("web", "0::/lxc.payload.web-1\n", set()),
        ("web", "0::/lxc.monitor.web\n", set()),
        ("100", "0::/lxc/100/ns/init.scope\n", {"/lxc/100"}),
        ("100", "0::/lxc.monitor/100\n", set()),
        (BUILD, f"0::/system.slice:docker:{BUILD}\n", {f"/system.slice:docker:{BUILD}"}),
        (ALLOC, f"0::/nomad.slice/{ALLOC}.web.scope\n", {f"/nomad.slice/{ALLOC}.web.scope"}),
        (f"{ALLOC}.web", f"0::/nomad.slice/{ALLOC}.web.scope\n", {f"/nomad.slice/{ALLOC}.web.scope"}),
        (f"{ALLOC}.db", f"0::/nomad.slice/{ALLOC}.web.scope\n", set()),
        ("web", "0::/system.slice/systemd-nspawn@web.service/payload\n", {NSPAWN}),
        ("web", "0::/default/web (deleted)\n", {"/default/web"}),
        ("user.slice", "0::/user.slice\n", set()),
        (f"{UID}/main", f"0::/kubepods/pod{UID}/{A}\n", {A}),
        (
            f"{UID}/main",
            f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/crio-{A}.scope\n",
            {A},
        ),
        (f"{UID.replace('-', '_')}/main", f"0::/kubepods/pod{UID}/{A}\n", {A}),
        (f"{UID}/main", f"0::/x.slice/x-pod{UID.replace('-', '_')}.slice:cri-containerd:{A}\n", {A}),
        (f"{UID}/main", f"0::/kubepods/pod{UID}\n", set()),
        (f"{UID}/main", f"0::/docker/{B}/kubelet/kubepods/pod{UID}/{A}\n", {A}),
        (f"{UID}/main", f"0::/kubepods/pod{STATIC}/{A}\n", set()),
        (f"{STATIC}/main", f"0::/kubepods/pod{STATIC}/{A}\n", {A}),
    ],
)
def test_container_of_a_cgroup_path(asked: str, cgroup: str, keys: set[str]) -> None:
    assert Wanted(asked).keys_in(cgroup) == keys


@pytest.mark.parametrize("asked", ["", "containerd://", f"{UID}/", "/main", "pod/main", f"{UID}0/main"])
def test_impossible_queries_are_refused(asked: str) -> None:
    with pytest.raises(UsageError):
        Wanted(asked)


def mounts(*roots: str) -> list[Mount]:
    return [Mount(i, "8:1", root, f"/m{i}", "ext4", "rw") for i, root in enumerate(roots)]


@pytest.mark.parametrize(
    ("name", "roots"),
    [
        ("trainer", ["/", f"/usr/local/vgpu/containers/{UID}_trainer"]),
        ("a_b", [f"/containers/{UID}_a_b"]),
        ("trainer", [f"/var/lib/kubelet/pods/{UID}/containers/trainer/0a1b2c3d"]),
        ("trainer", [f"/pods/{UID}/containers/trainer/0a1b2c3d"]),  # kubelet's directory is a separate disk
        ("first", [f"/k/pods/{UID}/containers/first/1", f"/k/pods/{UID}/containers/second/1"]),
        # HAMi's directory may carry the name of an init container, and stands before or after kubelet's.
        ("main", [f"/vgpu/containers/{UID}_init", f"/k/pods/{UID}/containers/main/1"]),
        ("main", [f"/k/pods/{UID}/containers/main/1", f"/vgpu/containers/{UID}_init"]),
        (None, ["/", f"/var/lib/kubelet/pods/{UID}/etc-hosts"]),
        (None, [f"/vgpu/containers/{UID[:-1]}0_trainer"]),
        ("trainer", [f"/{UID}_trainer"]),  # `containers` is a separate disk
        (None, [f"/{UID}_trainer/sub"]),
        (None, [f"/vgpu/containers/{UID}_"]),
        # Groups that a tenant can make below its cgroup to pass for another container:
        (None, [f"/vgpu/containers/{UID}_trainer/containers/{UID}_other"]),
        (None, [f"/vgpu/containers/{UID}_trainer/sub"]),
        (None, [f"/k/pods/{UID}/volumes/kubernetes.io~empty-dir/x/pods/{UID}/containers/other/1"]),
        (None, [f"/k/pods/{UID}/volumes/kubernetes.io~empty-dir/x/containers/{UID}_other"]),
        (None, [f"/k/pods/{UID}/containers/trainer/1/2"]),
        (None, [f"/k/pods/{UID}/containers/trainer"]),
    ],
)
def test_the_container_name_in_mount_roots(name: str | None, roots: list[str]) -> None:
    assert container_name(mounts(*roots), UID) == name
    assert container_name(mounts(*roots), None) is None


def test_each_hierarchy_once_and_v2_first() -> None:
    def mount(device: str, root: str, where: str, fs_type: str, options: str = "rw") -> Mount:
        return Mount(1, device, root, where, fs_type, options)

    table = [
        mount("8:1", "/", "/", "ext4"),
        mount("0:30", "/", "/sys/fs/cgroup/cpu,cpuacct", "cgroup"),
        mount("0:31", "/", "/sys/fs/cgroup/memory", "cgroup"),
        mount("0:33", "/", "/sys/fs/cgroup/systemd", "cgroup", "rw,xattr,name=systemd"),
        mount("0:30", "/docker/x", "/containers/x/cpu", "cgroup"),
        mount("0:32", "/docker/x", "/containers/x/unified", "cgroup2"),
        mount("0:32", "/", "/sys/fs/cgroup/unified", "cgroup2"),
    ]
    names = ("unified", "systemd", "cpu,cpuacct", "memory")
    assert cgroup_roots(table) == [f"/sys/fs/cgroup/{name}" for name in names]
    assert cgroup_roots([]) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, host_pids in {
        f"kubepods/pod{UID}/{A}": [],
        f"kubepods/pod{UID}/{A}/container": [11, 12],
        f"kubepods/pod{UID}/crio-conmon-{A}": [13],
        f"docker/{B}": [21],
        f"docker/{B}/kubelet/kubepods/pod{STATIC}/{'c' * 64}": [22],
        "system.slice/x.service": [31],
    }.items():
        directory = tmp_path / path
        directory.mkdir(parents=True)
        (directory / "cgroup.procs").write_text("".join(f"{host_pid}\n" for host_pid in host_pids))
    return tmp_path


def test_a_walk_of_one_directory_only(tree: Path) -> None:
    found = find_directories(str(tree), Wanted(A).match, f"/kubepods/pod{UID}/{A}")
    assert sorted(processes_in(found[A])) == [11, 12]
    assert not processes_in(find_directories(str(tree), Wanted(A).match, f"/gone/{A}")[A])


@pytest.mark.parametrize(("text", "walked"), [(A, 1), ("e" * 64, 1), ("x.service", 2)])
def test_id_is_searched_in_one_hierarchy_with_ids(
    tree: Path, monkeypatch: pytest.MonkeyPatch, text: str, walked: int
) -> None:
    roots: list[str] = []
    walk = find_directories

    def walks(root: str, match: Any, **given: str) -> dict[str, list[str]]:
        roots.append(root)
        return walk(root, match, **given)

    monkeypatch.setattr(find, "find_directories", walks)
    empty = tree / "system.slice"  # has no container, so the next directory is searched, too
    find.by_directories(Wanted(text), [str(empty), str(tree), str(tree)])
    assert roots == [str(empty), *[str(tree)] * walked]


def test_id_that_v2_lacks_is_searched_in_v1(tree: Path) -> None:
    (v2 := tree / "v2/kubepods" / B).mkdir(parents=True)
    (tree / "v2/cgroup.controllers").touch()
    (v2 / "cgroup.procs").write_text("21\n")
    roots = [str(tree / "v2"), str(tree)]
    assert [container.keys for container in find.by_directories(Wanted(A), roots)] == [{A}]
    assert [container.directories for container in find.by_directories(Wanted(B), roots)] == [(str(v2),)]


@pytest.mark.parametrize(
    ("pod", "name", "listed"),
    [
        (f"pod{UID}", A, False),
        (f"pod{STATIC}", f"crio-{A}", False),
        (f"kubepods-pod{UID.replace('-', '_')}.slice", f"cri-containerd-{A}.scope", False),
        (f"pod{UID}", f"new-{A}", True),  # an unknown runtime
    ],
)
def test_pods_are_listed_for_unknown_runtimes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pod: str, name: str, *, listed: bool
) -> None:
    other, top = tmp_path / f"kubepods/pod{'0' * 32}", tmp_path / "kubepods" / pod / name
    for directory in (other / B, top / "init"):
        directory.mkdir(parents=True)
    seen: list[str] = []
    subdirectories = cgroup_directories.subdirectories

    def lists(path: str) -> list[str]:
        seen.append(path)
        return subdirectories(path)

    monkeypatch.setattr(cgroup_directories, "subdirectories", lists)
    found = find_directories(str(tmp_path), Wanted(A).match, container_id=A)
    assert (found, str(other) in seen) == ({A: [str(top), f"{top}/init"]}, listed)


def test_watcher_of_nspawn_is_no_process_of_its_container(tree: Path) -> None:
    inside = f"payload/{NSPAWN[1:]}/supervisor"  # a systemd in the container made it
    for name, host_pid in (("supervisor", 41), ("payload", 42), (inside, 43)):
        (group := tree / NSPAWN[1:] / name).mkdir(parents=True)
        (group / "cgroup.procs").write_text(f"{host_pid}\n")
    (web,) = find.by_directories(Wanted("web"), [str(tree)])
    assert sorted(web.host_pids) == [42, 43]


@pytest.mark.parametrize("name", ["x.service/supervisor", "lxc.monitor/x"])
def test_container_cannot_hide_its_processes_by_a_name(tree: Path, name: str) -> None:
    (group := tree / "kubepods" / f"pod{UID}" / A / name).mkdir(parents=True)
    (group / "cgroup.procs").write_text("13\n")
    (container,) = find.by_directories(Wanted(A), [str(tree)])
    assert 13 in container.host_pids


def test_a_symbolic_link_is_no_cgroup(tree: Path) -> None:
    (tree / ("d" * 64)).symlink_to(tree / "docker")
    assert find_directories(str(tree), Wanted("d" * 64).match) == {}


def test_vanished_directories_hold_no_container(tree: Path) -> None:
    assert list(processes_in([f"{tree}/gone", f"{tree}/docker/{B}"])) == [21]
    assert find_directories(f"{tree}/gone", Wanted(A).match) == {}


MakeProc = Callable[..., tuple[Procfs, list[Member]]]
ProcessFacts = tuple[int, tuple[int, ...], int, int, int]


@pytest.fixture
def make_proc(tmp_path: Path) -> MakeProc:
    """Make a fake /proc: ``(host PID, (NSpid numbers), inode of its namespace, parent, start time)``."""

    def make(*processes: ProcessFacts) -> tuple[Procfs, list[Member]]:
        proc = FakeProc(tmp_path)
        for host_pid, inside, pidns, parent, start in processes:
            proc.put(host_pid, *inside, pidns=pidns, parent=parent, start=start)
        return proc.procfs, members_of(proc.procfs, [process[0] for process in processes])

    return make


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        # the namespace of its PID 1
        (((50, (7,), 900, 40, 5), (40, (1,), 900, 9, 4)), Namespace(900, 1)),
        # not a namespace made inside
        (((40, (1,), 900, 9, 4), (60, (8, 1), 901, 40, 6), (61, (9, 2), 901, 60, 6)), Namespace(900, 1)),
        # the pod's; the pod's beside one made inside
        (((50, (7,), 900, 9, 5), (51, (8,), 900, 50, 6)), Namespace(900, 1)),
        (((50, (7,), 900, 9, 5), (60, (8, 1), 901, 50, 6)), Namespace(900, 1)),
        # the host's; beside a nested one; with an ended parent
        (((50, (), HOST_PIDNS, 9, 5), (51, (), HOST_PIDNS, 50, 6)), HOST),
        (((50, (), HOST_PIDNS, 9, 5), (60, (1,), 901, 50, 5)), HOST),
        (((50, (), HOST_PIDNS, 9, 5), (60, (1,), 901, 1, 6)), HOST),
        # a container's, with a younger process of the host
        (((70, (), HOST_PIDNS, 9, 8), (60, (1,), 901, 1, 6)), Namespace(901, 1)),
    ],
)
def test_the_namespace_of_a_container(
    make_proc: MakeProc, processes: tuple[ProcessFacts, ...], expected: Namespace
) -> None:
    assert own_namespace(*make_proc(*processes)) == expected


def test_the_hosts_mounts_are_no_containers(make_proc: MakeProc, tmp_path: Path) -> None:
    processes = (50, (), HOST_PIDNS, 9, 5), (60, (1,), 901, 1, 6)
    procfs, members = make_proc(*processes)
    (tmp_path / "2/ns").mkdir(parents=True)
    (tmp_path / "2/ns/mnt").symlink_to("mnt:[4026531832]")
    (tmp_path / "50/ns/mnt").symlink_to("mnt:[4026532001]")
    assert own_namespace(procfs, members) == HOST
    (tmp_path / "50/ns/mnt").unlink()
    (tmp_path / "50/ns/mnt").symlink_to("mnt:[4026531832]")
    with pytest.raises(Ambiguous):
        own_namespace(procfs, members)


def test_two_that_are_equally_likely(make_proc: MakeProc) -> None:
    with pytest.raises(Ambiguous) as caught:
        own_namespace(*make_proc((70, (), HOST_PIDNS, 9, 6), (60, (1,), 901, 1, 6)))
    assert [candidate.split()[1] for candidate in caught.value.candidates] == [str(HOST_PIDNS), "901"]


@pytest.mark.parametrize("program", ["/usr/bin/runsc", "/usr/bin/runsc (deleted)"])
def test_the_numbers_of_gvisors_kernel_are_not_the_hosts(
    make_proc: MakeProc, tmp_path: Path, program: str
) -> None:
    """PID 1 is the gofer, which serves files; the sandbox and its programs have only host PIDs."""
    procfs, members = make_proc((40, (1,), 900, 9, 4), (41, (), HOST_PIDNS, 9, 5))
    (tmp_path / "40/comm").write_text("exe\n")
    (tmp_path / "40/exe").symlink_to("/usr/bin/another")
    assert own_namespace(procfs, members) == Namespace(900, 1)
    (tmp_path / "40/exe").unlink()
    (tmp_path / "40/exe").symlink_to(program)
    with pytest.raises(CannotKnow, match="gVisor"):
        own_namespace(procfs, members)


def test_those_that_ended_or_are_being_reaped_are_no_members(make_proc: MakeProc, tmp_path: Path) -> None:
    procfs, members = make_proc((40, (1,), 900, 9, 4), (41, (2,), 900, 40, 4))
    assert members_of(procfs, [40, 41, 42]) == members == [Member(40, (40, 1)), Member(41, (41, 2))]
    (tmp_path / "41/status").write_text("Name:\tx\nNSpid:\t0\t0\n")
    assert members_of(procfs, [40, 41]) == members[:1]
    (tmp_path / "40/status").write_text("Name:\tx\nPid:\t40\n")
    with pytest.raises(CannotKnow, match=r"Linux 4\.1"):
        members_of(procfs, [40])


def test_a_container_that_ends_while_it_is_looked_at(make_proc: MakeProc, tmp_path: Path) -> None:
    procfs, members = make_proc((40, (1,), 900, 9, 4))
    (tmp_path / "40/ns/pid").unlink()
    with pytest.raises(ProcessGone):
        own_namespace(procfs, members)


def test_a_namespace_by_its_inode() -> None:
    procfs = Procfs()
    ourselves = members_of(procfs, [os.getpid()])
    inode = os.stat("/proc/self/ns/pid").st_ino
    assert nested_namespace(procfs, ourselves, inode) == Namespace(inode, len(ourselves[0].ns_pids) - 1)
    with pytest.raises(NotFound, match=f"they are in: {inode}"):
        nested_namespace(procfs, ourselves, 1)
