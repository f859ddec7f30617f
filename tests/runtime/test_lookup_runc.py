"""`resolver lookup` in real containers, against what the kernel says of their processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.linux.procfs import HOST_PIDNS, Procfs
from resolver.lookup.forward import lookup
from tests.runtime.conftest import Start
from tests.runtime.runc import RuncContainer, Told, cgroup_mounts

RESOLVER = Path(sys.executable).with_name("resolver")
A, B = "a1b2c3d4e5f60718" * 4, "a1b2c3ffe5f60718" * 4
UID = "0a1b2c3d-1111-4222-8333-444455556666"
UID_ = UID.replace("-", "_")
SLICE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice"
POD = f"/kubepods/burstable/pod{UID}"

FORMATS = {
    "containerd, systemd": (f"{SLICE}/cri-containerd-{A}.scope", UID),
    "containerd, cgroupfs": (f"{POD}/{A}", UID),
    "containerd, cgroupfs, guaranteed": (f"/kubepods/pod{UID}/{A}", UID),
    "crio, systemd": (f"{SLICE}/crio-{A}.scope", UID),
    "crio, systemd, child": (f"{SLICE}/crio-{A}.scope/container", UID),
    "crio, cgroupfs": (f"{POD}/crio-{A}", UID),
    "docker, systemd": (f"{SLICE}/docker-{A}.scope", UID),
    "docker, cgroupfs": (f"{POD}/{A}", UID),
    "docker alone, systemd": (f"/system.slice/docker-{A}.scope", None),
    "docker alone, cgroupfs": (f"/docker/{A}", None),
    "drivers mixed up": (f"{SLICE}:cri-containerd:{A}", UID),
    "kind in docker": (f"/docker/{B}/kubelet{POD}/{A}", UID),
}


#: Start times have 10 ms; processes that are further apart have different ones.
TICK = 0.03


def run(*arguments: str | int, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The real command."""
    command = [*prefix, str(RESOLVER), "lookup", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def host_pid(*arguments: str | int, prefix: tuple[str, ...] = ()) -> int:
    """The answer, which must be there, alone on standard output."""
    done = run(*arguments, prefix=prefix)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout == f"{int(done.stdout)}\n"
    return int(done.stdout)


def refused(code: int, *arguments: str | int, prefix: tuple[str, ...] = ()) -> str:
    """What is said on standard error when the answer is refused with this exit code."""
    done = run(*arguments, prefix=prefix)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith(("resolver lookup: ", "usage: resolver lookup "))
    return done.stderr


def start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])


def pidns_of(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


@pytest.mark.parametrize(("cgroup_path", "pod_uid"), FORMATS.values(), ids=FORMATS)
def test_every_format(start: Start, cgroup_path: str, pod_uid: str | None) -> None:
    container = start(A, cgroup_path)
    for told in [container.main, *container.order("fork 2", "child", 2)]:
        assert host_pid(A, told.ns_pid) == told.host_pid
        done = run(A, told.ns_pid, "--json")
        assert done.returncode == 0
        assert json.loads(done.stdout) == {
            "container_id": A,
            "container_pid": told.ns_pid,
            "host_pid": told.host_pid,
            "pidns": pidns_of(told.host_pid),
            "pod_uid": pod_uid,
            "container_name": None,
            "start_time": start_time(told.host_pid),
            "comm": "tester",
            "source": "cgroup",
        }
    assert "has no process 4000" in refused(1, A, 4000)


def test_every_way_to_write_an_id(start: Start) -> None:
    container = start(A, FORMATS["containerd, systemd"][0])
    for text in (A, A[:6], A[:12], f"containerd://{A}", f"docker://{A[:12]}", f"cri-o://{A}"):
        assert host_pid(text, 1) == container.main.host_pid, text


def test_a_prefix_that_fits_two_containers(start: Start) -> None:
    first = start(A, f"{POD}/{A}")
    second = start(B, f"/docker/{B}")
    complaint = refused(3, A[:6], 1)
    assert A in complaint
    assert B in complaint
    assert host_pid(A[:7], 1) == first.main.host_pid
    assert host_pid(B[:7], 1) == second.main.host_pid


def test_a_container_that_ended_left_its_cgroup_and_fits_no_more(start: Start) -> None:
    left_over = start(B, f"/docker/{B}")
    container = start(A, f"/docker/{A}")
    # The namespace dies with its first process, and nobody removes the directory.
    os.kill(left_over.main.host_pid, 9)
    assert host_pid(A[:6], 1) == container.main.host_pid
    assert "is it running" in refused(1, B, 1)


def test_by_the_name_of_runc_alone(start: Start) -> None:
    container = start("nginx", "/default/nginx")
    start("other", "/default/other")
    assert host_pid("nginx", 1) == container.main.host_pid
    assert json.loads(run("nginx", 1, "--json").stdout)["container_id"] == "nginx"
    assert "too short" in refused(2, "ngin", 1)
    assert "is it running" in refused(1, "nginx-2", 1)


def test_a_name_in_two_places(start: Start) -> None:
    start("one/nginx", "/one/nginx")
    start("two/nginx", "/two/nginx")
    complaint = refused(3, "nginx", 1)
    assert "/one/nginx" in complaint
    assert "/two/nginx" in complaint


def test_a_directory_of_containers_is_no_container(start: Start) -> None:
    start("web", "/default/web")
    start("db", "/default/db")
    assert "--pidns" in refused(3, "default", 1)


# -- pod and container name ------------------------------------------------------------------------


@pytest.fixture
def pod(start: Start, tmp_path: Path) -> tuple[RuncContainer, RuncContainer, RuncContainer]:
    """A pod: its sandbox, a container with HAMi's directory, and one with only what kubelet mounts."""
    vgpu = tmp_path / f"vgpu/containers/{UID}_trainer"
    vgpu.mkdir(parents=True)
    log = tmp_path / f"kubelet/pods/{UID}/containers/sidecar/0a1b2c3d"
    log.parent.mkdir(parents=True)
    log.touch()
    return (
        start("c" * 64, f"{SLICE}/cri-containerd-{'c' * 64}.scope"),
        start(A, f"{SLICE}/cri-containerd-{A}.scope", binds=((vgpu, "/usr/local/vgpu"),)),
        start(B, f"{SLICE}/cri-containerd-{B}.scope", binds=((log, "/dev/termination-log"),)),
    )


def test_by_pod_and_name(pod: tuple[RuncContainer, RuncContainer, RuncContainer]) -> None:
    _, trainer, sidecar = pod
    child = trainer.order("fork 1", "child")[0]
    assert host_pid(f"{UID}/trainer", 1) == trainer.main.host_pid
    assert host_pid(f"{UID}/trainer", child.ns_pid) == child.host_pid
    assert host_pid(f"{UID}/sidecar", 1) == sidecar.main.host_pid
    assert json.loads(run(A, child.ns_pid, "--json").stdout)["container_name"] == "trainer"
    assert json.loads(run(B, 1, "--json").stdout)["container_name"] == "sidecar"
    assert "it has: sidecar, trainer (and 1 without a name" in refused(1, f"{UID}/trainer2", 1)
    assert "is it running" in refused(1, f"{UID[:-1]}0/trainer", 1)


def test_a_container_and_its_successor_have_the_same_name(start: Start, tmp_path: Path) -> None:
    vgpu = tmp_path / f"containers/{UID}_trainer"
    vgpu.mkdir(parents=True)
    for container_id in (A, B):
        start(container_id, f"{POD}/{container_id}", binds=((vgpu, "/usr/local/vgpu"),))
    complaint = refused(3, f"{UID}/trainer", 1)
    assert A in complaint
    assert B in complaint


# -- namespaces ------------------------------------------------------------------------------------


def test_a_container_in_the_host_namespace(start: Start) -> None:
    container = start(A, f"{POD}/{A}", pidns="host")
    child = container.order("fork 1", "child")[0]
    assert child.ns_pid == child.host_pid
    assert host_pid(A, child.host_pid) == child.host_pid
    assert json.loads(run(A, child.host_pid, "--json").stdout)["pidns"] == HOST_PIDNS
    assert "which is in no container" in refused(1, A, os.getpid())
    thread = container.order("thread", "thread")[0]
    assert f"a thread of its process {container.main.host_pid}" in refused(1, A, thread.ns_pid)


def test_a_namespace_made_inside_a_container_of_the_host_namespace(start: Start) -> None:
    container = start(A, f"{POD}/{A}", pidns="host")
    nested = container.order("nest", "nested-child")[0]
    assert host_pid(A, nested.host_pid) == nested.host_pid
    assert "which is in no container" in refused(1, A, nested.ns_pid)  # the host's own process 2
    assert host_pid(A, nested.ns_pid, "--pidns", pidns_of(nested.host_pid)) == nested.host_pid


def test_a_pod_with_one_pid_namespace(start: Start) -> None:
    sandbox = start("c" * 64, f"{SLICE}/cri-containerd-{'c' * 64}.scope")
    shared = f"/proc/{sandbox.main.host_pid}/ns/pid"
    first = start(A, f"{SLICE}/cri-containerd-{A}.scope", pidns=shared)
    second = start(B, f"{SLICE}/cri-containerd-{B}.scope", pidns=shared)
    children = {container: container.order("fork 3", "child", 3) for container in (first, second)}
    for container in (first, second):
        for told in [container.main, *children[container]]:
            assert host_pid(container.container_id, told.ns_pid) == told.host_pid
    stranger = children[second][0]
    complaint = refused(1, A, stranger.ns_pid)
    assert f"host PID {stranger.host_pid}" in complaint
    assert f"container {B}" in complaint
    assert f"container {'c' * 64}" in refused(1, A, 1)
    # A namespace that one of them makes for itself is not the container's own.
    nested = first.order("nest", "nested-child")[0]
    assert host_pid(A, first.main.ns_pid) == first.main.host_pid
    assert f"host PID {sandbox.main.host_pid}" in refused(1, A, 1)
    assert host_pid(A, 2, "--pidns", pidns_of(nested.host_pid)) == nested.host_pid


def test_nested_namespaces(start: Start) -> None:
    container = start(A, f"{POD}/{A}")
    nested = container.order("nest", "nested-child")[0]
    init = container.wait("nested-init", 1)[0]
    inner = pidns_of(nested.host_pid)
    assert host_pid(A, 1) == container.main.host_pid
    assert host_pid(A, 1, "--pidns", inner) == init.host_pid
    assert host_pid(A, nested.ns_pid, "--pidns", inner) == nested.host_pid
    # The nested processes have numbers of the container's own namespace as well.
    assert host_pid(A, ns_pids_of(nested)[1]) == nested.host_pid
    assert f"ask for it with --pidns {inner}" in refused(1, A, nested.ns_pid)
    assert f"they are in: {pidns_of(container.main.host_pid)}" in refused(1, A, 1, "--pidns", 4026531999)


def ns_pids_of(told: Told) -> list[int]:
    """The kernel's own numbers of a process, outermost first."""
    for line in Path(f"/proc/{told.host_pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return [int(number) for number in line.split()[1:]]
    raise AssertionError("no NSpid")


@contextlib.contextmanager
def host_process() -> Iterator[int]:
    """A process that no container has started."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_host_process_moved_into_the_cgroup(start: Start) -> None:
    with host_process() as older:
        time.sleep(TICK)
        container = start(A, f"{POD}/{A}")
        time.sleep(TICK)
        # While it is the younger one (an exec in the making), the container's namespace stays its own.
        with host_process() as younger:
            move(younger, container)
            assert host_pid(A, 1) == container.main.host_pid
        # An older one might be the main process of a container that has entered the host's namespaces.
        move(older, container)
        own = pidns_of(container.main.host_pid)
        complaint = refused(3, A, 1)
        assert f"--pidns {own} " in complaint
        assert f"--pidns {HOST_PIDNS} " in complaint
        assert host_pid(A, 1, "--pidns", own) == container.main.host_pid
        assert host_pid(A, older, "--pidns", HOST_PIDNS) == older


def move(pid: int, container: RuncContainer) -> None:
    for mount in cgroup_mounts():
        (mount / container.cgroup_path.lstrip("/") / "cgroup.procs").write_text(str(pid))


def test_threads_and_the_dead_are_no_processes(start: Start) -> None:
    container = start(A, f"{POD}/{A}")
    thread = container.order("thread", "thread")[0]
    assert "a thread of its process 1" in refused(1, A, thread.ns_pid)
    zombie = container.order("zombie", "zombie")[0]
    refused(1, A, zombie.ns_pid)
    child = container.order("as 400", "as")[0]
    assert host_pid(A, 400) == child.host_pid
    container.order("kill 400", "killed")
    assert "has no process 400" in refused(1, A, 400)


def test_a_thousand_processes(start: Start) -> None:
    container = start(A, f"{SLICE}/cri-containerd-{A}.scope")
    children = container.order("fork 1000", "child", 1000)
    assert len({told.ns_pid for told in children}) == 1000
    procfs = Procfs()
    for told in children[::100]:
        assert lookup(procfs, A, told.ns_pid).host_pid == told.host_pid
    assert host_pid(A[:8], children[-1].ns_pid) == children[-1].host_pid
    found = lookup(procfs, A, children[0].ns_pid, cgroup_roots=[])
    assert (found.host_pid, found.source) == (children[0].host_pid, "scan")


# -- what can be seen ------------------------------------------------------------------------------

NO_CGROUPFS = ("unshare", "--mount", "sh", "-c", 'umount -R /sys/fs/cgroup && exec "$@"', "sh")


def test_by_a_scan_where_no_cgroup_is_mounted(start: Start) -> None:
    container = start(A, f"{SLICE}/crio-{A}.scope")
    child = container.order("fork 1", "child")[0]
    assert host_pid(A, child.ns_pid, prefix=NO_CGROUPFS) == child.host_pid
    assert json.loads(run(A[:8], 1, "--json", prefix=NO_CGROUPFS).stdout)["source"] == "scan"
    assert "is it running" in refused(1, B, 1, prefix=NO_CGROUPFS)


def test_from_a_private_cgroup_namespace(start: Start) -> None:
    container = start(A, f"{POD}/{A}")
    neighbour = start(B, f"{POD}/{B}")
    where = [str(mount / neighbour.cgroup_path.lstrip("/") / "cgroup.procs") for mount in cgroup_mounts()]
    enter = "".join(f"echo $$ >{path} && " for path in where)
    private = ("sh", "-c", f'{enter} exec unshare --cgroup "$@"', "sh", *NO_CGROUPFS)
    assert host_pid(A, 1, prefix=private) == container.main.host_pid
    # Paths of one's own container do not tell its id there.
    assert "private cgroup namespace" in refused(4, B, 1, prefix=private)


def test_from_another_pid_namespace(start: Start) -> None:
    start(A, f"{POD}/{A}")
    for prefix in (("unshare", "--pid", "--fork"), ("unshare", "--pid", "--fork", "--mount-proc")):
        assert "hostPID: true" in refused(4, A, 1, prefix=prefix)


def test_with_hidepid_and_without_the_capability(start: Start) -> None:
    container = start(A, f"{POD}/{A}")
    hidden = ("unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh")
    assert host_pid(A, 1, prefix=hidden) == container.main.host_pid
    drop = ("setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace")
    assert "hidepid" in refused(4, A, 1, prefix=(*hidden, *drop))


# The checkout may be where others than root have no way to it: things are given up after the imports.
GIVE_UP = {
    "root": ("os.setgroups([]); os.setgid(65534); os.setuid(65534)", "CAP_SYS_PTRACE"),
    "descriptors": ("resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", "the kernel refused"),
}


@pytest.mark.parametrize("what", GIVE_UP)
def test_without(start: Start, root: Path, what: str) -> None:
    start(A, f"{POD}/{A}")
    give_up, complaint = GIVE_UP[what]
    code = (
        "import os, resource, shutil, locale, sys; from resolver import cli; from resolver.cli import lookup;"
        f"{give_up}; raise SystemExit(cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "lookup", A, "1"], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (4, ""), done
    assert complaint in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [(), (A,), (A, "one"), (A, "0"), (A, "-1"), ("", "1"), ("a1b2", "1"), (f"{UID}/", "1"), ("x//y", "1")],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    refused(2, *arguments)
