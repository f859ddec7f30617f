"""`resolver lookup` without a daemon, compared with the kernel, in real namespaces and cgroups."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resolver.base.errors import NotFound, ProcessGone
from resolver.linux.procfs import HOST_PIDNS, ProcessHandle, Procfs
from resolver.lookup.forward import lookup
from tests.fakes import container as container_module
from tests.fakes.cgroups import FORMATS
from tests.fakes.command import run
from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.fakes.pids import reborn
from tests.fakes.process import watched
from tests.kernel.rights import mounted, without
from tests.kernel.serving import SLEEP, THREAD, Orders
from tests.patience import until
from tests.programs import completed

#: Ids that begin alike, and differ from those of other test runs.
_MARK = f"{os.getpid() & 0xFFFFFF:06x}"
A, B, C = ((_MARK + end) * 4 for end in ("d4e5f60718", "ffe5f60718", "cccccccccc"))
UID = str(uuid.uuid4())
NS_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


#: Starts a container with this id; options are those of `Node.container`.
StartAs = Callable[..., Container]


@pytest.fixture
def start_as(node: Node, monkeypatch: pytest.MonkeyPatch) -> StartAs:
    def start(container_id: str, **options: Any) -> Container:
        monkeypatch.setattr(container_module, "secrets", SimpleNamespace(token_hex=lambda _: container_id))
        return node.container(**options)

    return start


def asked(*arguments: str | int, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return run("lookup", *arguments, wrapper=prefix)


def host_pid(*arguments: str | int, prefix: tuple[str, ...] = ()) -> int:
    done = asked(*arguments, prefix=prefix)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout == f"{int(done.stdout)}\n"
    return int(done.stdout)


def refused(code: int, *arguments: str | int, prefix: tuple[str, ...] = ()) -> str:
    done = asked(*arguments, prefix=prefix)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith(("resolver lookup: ", "usage: resolver lookup "))
    return done.stderr


@pytest.mark.parametrize("cgroup_format", FORMATS)
def test_container_of_every_cgroup_format_is_found(node: Node, cgroup_format: str) -> None:
    container = node.container(name="trainer", cgroup_format=cgroup_format)
    process = container.spawn(SLEEP)
    assert lookup(Procfs(), container.container_id, 1).host_pid == container.init_host_pid
    found = lookup(Procfs(), container.container_id, process.ns_pid)._asdict()
    alone = cgroup_format.startswith(("docker-alone", "podman"))
    assert found == {
        "container_id": container.container_id,
        "container_pid": process.ns_pid,
        "host_pid": process.host_pid,
        "pidns": process.pidns,
        "pod_uid": None if alone else container.pod_uid,
        "container_name": None if alone else "trainer",
        "start_time": Procfs().start_time(process.host_pid),
        "comm": "sleep",
        "source": "cgroup",
    }
    with pytest.raises(NotFound, match="has no process 4000"):
        lookup(Procfs(), container.container_id, 4000)


def test_prefix_of_two_containers_is_ambiguous_until_one_ends(start_as: StartAs) -> None:
    first, second = (start_as(each, pod_uid=UID, name="trainer") for each in (A, B))
    for asked_for in (A[:6], f"{UID}/trainer"):  # a prefix, and a name that both have
        complaint = refused(3, asked_for, 1)
        assert A in complaint
        assert B in complaint
    assert host_pid(A[:7], 1) == first.init_host_pid
    assert host_pid(B[:7], 1) == second.init_host_pid
    # The namespace dies with its first process; the cgroup's directory stays.
    with watched(second.init_host_pid) as gone:
        os.kill(second.init_host_pid, signal.SIGKILL)
        until(gone, "its end")
    assert host_pid(A[:6], 1) == first.init_host_pid
    assert "is it running" in refused(1, B, 1)


def test_container_is_found_by_name_and_by_pod_and_name(start_as: StartAs) -> None:
    """With `ctr` and LXC the cgroup's path has a name and no id."""
    name = f"web-{_MARK}"
    container = start_as(name, cgroup_format="docker-alone-cgroupfs")
    start_as(f"other-{_MARK}", cgroup_format="docker-alone-cgroupfs")
    assert host_pid(name, 1) == container.init_host_pid
    assert json.loads(asked(name, 1, "--json").stdout)["container_id"] == name
    assert "too short" in refused(2, name[:4], 1)
    assert "is it running" in refused(1, f"{name}-2", 1)
    trainer, sidecar = start_as(A, pod_uid=UID, name="trainer"), start_as(B, pod_uid=UID, name="sidecar")
    child = trainer.spawn(SLEEP)
    assert host_pid(f"{UID}/trainer", 1) == trainer.init_host_pid
    assert host_pid(f"{UID}/trainer", child.ns_pid) == child.host_pid
    assert host_pid(f"{UID}/sidecar", 1) == sidecar.init_host_pid
    assert "it has: sidecar, trainer" in refused(1, f"{UID}/trainer2", 1)
    assert "is it running" in refused(1, f"{uuid.uuid4()}/trainer", 1)


def test_containers_in_one_pid_namespace_are_distinguished(start_as: StartAs, node: Node) -> None:
    """They share the host's namespace, or their pod's."""
    container = node.container(pid_namespace="host")
    child = container.spawn(SLEEP)
    assert child.ns_pid == child.host_pid
    assert host_pid(container.container_id, child.host_pid) == child.host_pid
    found = json.loads(asked(container.container_id, child.host_pid, "--json").stdout)
    assert found["pidns"] == HOST_PIDNS
    assert "which is in no container" in refused(1, container.container_id, os.getpid())
    sandbox = start_as(C, pod_uid=UID, name="sandbox")
    first, second = (start_as(each, pod_uid=UID, name=each[:8], pid_namespace=sandbox) for each in (A, B))
    children = {container: [container.spawn(SLEEP) for _ in range(3)] for container in (first, second)}
    for container, processes in children.items():
        for process in processes:
            assert host_pid(container.container_id, process.ns_pid) == process.host_pid
    stranger = children[second][0]
    complaint = refused(1, A, stranger.ns_pid)
    assert f"host PID {stranger.host_pid}" in complaint
    assert f"container {B}" in complaint
    assert f"container {C}" in refused(1, A, 1)
    # A namespace that a process of the container makes is not the container's.
    nested = first.spawn(SLEEP, nested=True)
    assert f"host PID {sandbox.init_host_pid}" in refused(1, A, 1)
    assert host_pid(A, 1, "--pidns", nested.pidns) == nested.host_pid


def test_threads_and_dead_processes_are_refused(node: Node) -> None:
    container = node.container()
    cid, threads = container.container_id, container.spawn([sys.executable, "-c", THREAD])
    assert "has no process" in refused(1, cid, threads.read_line())
    assert f": {threads.host_pid} is a host PID; resolver reverse" in refused(1, cid, threads.host_pid)
    order = Orders(container)
    child = order("as 400")
    assert host_pid(cid, 400) == child
    order("zombie 400")
    refused(1, cid, 400)
    order("kill 400")
    assert "has no process 400" in refused(1, cid, 400)


NO_CGROUPFS = mounted("umount -R /sys/fs/cgroup")


def test_scan_answers_without_mounted_cgroups(start_as: StartAs) -> None:
    child = start_as(A, cgroup_format="crio-systemd").spawn(SLEEP)
    assert host_pid(A, child.ns_pid, prefix=NO_CGROUPFS) == child.host_pid
    assert json.loads(asked(A[:8], 1, "--json", prefix=NO_CGROUPFS).stdout)["source"] == "scan"
    assert "is it running" in refused(1, B, 1, prefix=NO_CGROUPFS)


def test_private_cgroup_namespace_is_named_as_the_cause(start_as: StartAs) -> None:
    container, neighbour = start_as(A), start_as(B)
    enter = f"echo $$ >{neighbour.cgroup}/cgroup.procs && "
    private = ("sh", "-c", f'{enter} exec unshare --cgroup "$@"', "sh", *NO_CGROUPFS)
    assert host_pid(A, 1, prefix=private) == container.init_host_pid
    # Paths inside the container don't show its id.
    assert "private cgroup namespace" in refused(4, B, 1, prefix=private)


def test_hidden_process_is_refused_with_its_fix(node: Node) -> None:
    container = node.container()
    for prefix in (("unshare", "--pid", "--fork"), ("unshare", "--pid", "--fork", "--mount-proc")):
        assert "hostPID: true" in refused(4, container.container_id, 1, prefix=prefix)
    hidden = mounted("mount -t proc -o hidepid=2,gid=12345 proc /proc")
    assert host_pid(container.container_id, 1, prefix=hidden) == container.init_host_pid
    assert "hidepid" in refused(4, container.container_id, 1, prefix=(*hidden, *without("SYS_PTRACE")))


#: Other users may be unable to read the checkout, so rights are given up after the imports.
GIVE_UP = {
    "root": ("os.setgroups([]); os.setgid(65534); os.setuid(65534)", "CAP_SYS_PTRACE"),
    "descriptors": ("resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", "the kernel refused"),
}


@pytest.mark.parametrize("what", GIVE_UP)
def test_missing_right_or_descriptor_is_named(node: Node, root: Path, what: str) -> None:
    give_up, complaint = GIVE_UP[what]
    code = (
        "import os, resource, shutil, locale, sys; from resolver import cli; from resolver.cli import lookup;"
        f"{give_up}; raise SystemExit(cli.main(sys.argv[1:]))"
    )
    words = ["lookup", node.container().container_id, "1"]
    done = completed(sys.executable, "-c", code, *words, cwd=root)
    assert (done.returncode, done.stdout) == (4, ""), done
    assert complaint in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [(), (A,), (A, "one"), (A, "0"), (A, "-1"), ("", "1"), ("a1b2", "1"), (f"{UID}/", "1"), ("x//y", "1")],
)
def test_wrong_usage_is_refused(arguments: tuple[str, ...]) -> None:
    refused(2, *arguments)


class Interrupted(Procfs):
    """Calls ``happen`` just before the process is held, or just ``after``."""

    def __init__(self, happen: Callable[[int], object], *, use_pidfd: bool, after: bool = False) -> None:
        super().__init__(use_pidfd=use_pidfd)
        self.happen = happen
        self.after = after

    def open_handle(self, host_pid: int) -> ProcessHandle:
        if self.after:
            handle = super().open_handle(host_pid)
            self.happen(host_pid)
            return handle
        self.happen(host_pid)
        return super().open_handle(host_pid)


@pytest.mark.parametrize("use_pidfd", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_process_that_ends_during_lookup_is_gone(node: Node, *, use_pidfd: bool, after: bool) -> None:
    container = node.container()
    order = Orders(container)
    order("as 400")
    procfs = Interrupted(lambda _: order("kill 400"), use_pidfd=use_pidfd, after=after)
    with pytest.raises(ProcessGone, match=r"process 400 of container .* ended"):
        lookup(procfs, container.container_id, 400)


@pytest.mark.parametrize("use_pidfd", [True, False])
@pytest.mark.parametrize("where", ["nested", "another container"])
def test_reused_host_pid_is_not_returned(node: Node, where: str, *, use_pidfd: bool) -> None:
    """The new process is the first of a namespace, or has the same number in another container."""
    container = node.container()
    order, elsewhere = Orders(container), Orders(node.container(name="other"))
    taken = 0

    def used_again() -> bool:
        """Return False if a foreign process got the number first."""
        first = order("as 400")
        with contextlib.ExitStack() as stack:

            def take_over(host_pid: int) -> None:
                nonlocal taken
                order("kill 400")
                if where == "nested":
                    stack.enter_context(reborn(host_pid))
                    taken = host_pid
                    return
                NS_LAST_PID.write_text(str(host_pid - 1))
                taken = elsewhere("as 400")

            with pytest.raises(ProcessGone):
                lookup(Interrupted(take_over, use_pidfd=use_pidfd), container.container_id, 400)
        if where != "nested":
            elsewhere("kill 400")
        return taken == first

    until(used_again, "its host PID again")
