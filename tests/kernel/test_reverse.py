"""`resolver reverse`, compared with the kernel's credentials and the miniature node."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resolver.base.errors import NotFound, ProcessGone, UsageError
from resolver.linux.procfs import HOST_PIDNS, Procfs, parse_ns_pids
from resolver.lookup.forward import lookup
from resolver.lookup.reverse import reverse
from tests.fakes.bpf.lives import child_of
from tests.fakes.command import run
from tests.fakes.node import Node
from tests.kernel.rights import UNPRIVILEGED, mounted
from tests.kernel.serving import SLEEP, THREAD

#: Above the kernel's highest PID.
NEVER = 2**22 + 7
HOSTILE = """
import time
open("/proc/self/comm", "w").write("\\x1b[2Jx")
print(flush=True)
time.sleep(1000)
"""


def command(*arguments: object, wrapper: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return run("reverse", *arguments, wrapper=wrapper)


def as_json(host_pid: int) -> dict[str, Any]:
    done = command("--json", host_pid)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_reverse_lists_every_level_and_leads_back(node: Node) -> None:
    first = node.container(name="first")
    plain, nested = first.spawn(SLEEP), first.spawn(SLEEP, nested=True)
    found = reverse(Procfs(), plain.host_pid)
    assert [msgspec.structs.astuple(level) for level in found.levels] == [
        (plain.host_pid, HOST_PIDNS),
        (plain.ns_pid, first.pidns),
    ]
    assert (found.container_pid, found.comm, found.tid) == (plain.ns_pid, "sleep", None)
    assert found.start_time == Procfs().start_time(plain.host_pid)
    found = reverse(Procfs(), nested.host_pid)
    assert [level.pidns for level in found.levels] == [HOST_PIDNS, first.pidns, nested.pidns]
    assert [level.ns_pid for level in found.levels] == list(Procfs().ns_pids(nested.host_pid))
    assert found.container_pid == found.levels[1].ns_pid != found.levels[2].ns_pid
    sharing = node.container(first.pod_uid, "sharing", pid_namespace=first)
    on_host = node.container(name="on-host", pid_namespace="host")
    other = node.container(name="other", cgroup_format="crio-systemd")
    for container in (first, sharing, on_host, other):
        for inside in (False, True):
            process = container.spawn(SLEEP, nested=inside)
            found = reverse(Procfs(), process.host_pid)
            assert found.container_id == container.container_id
            assert found.pod_uid == container.pod_uid
            assert found.container_name == container.name
            assert found.no_container is None
            assert found.container_pid is not None
            assert lookup(Procfs(), container.container_id, found.container_pid).host_pid == process.host_pid


def test_reverse_prints_one_line_per_pid_with_names(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = node.container()
    process = container.spawn(SLEEP)
    (tmp_path / "pods" / f"team-a_train-0_{container.pod_uid}").mkdir(parents=True)
    monkeypatch.setenv("RESOLVER_POD_LOGS_DIR", str(tmp_path / "pods"))
    done = command(process.host_pid)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert dict(line[:2] for line in lines[-5:]).keys() == {"user", "command", "started", "cpu", "memory"}
    assert ["command", *SLEEP] in lines
    assert lines[:-5] == [
        ["host_pid", str(process.host_pid)],
        ["container_id", container.container_id],
        ["container_pid", str(process.ns_pid)],
        ["pod_uid", container.pod_uid],
        ["container_name", container.name],
        ["namespace", "team-a"],
        ["pod", "train-0"],
        ["runtime", "containerd"],
        ["comm", "sleep"],
        ["start_time", str(Procfs().start_time(process.host_pid))],
        ["ns_pids", str(process.host_pid), str(process.ns_pid)],
        ["pidns", str(HOST_PIDNS), str(container.pidns)],
    ]
    monkeypatch.setenv("RESOLVER_POD_LOGS_DIR", str(tmp_path / "nothing"))
    unnamed = as_json(process.host_pid)
    assert (unnamed["namespace"], unnamed["pod"]) == (None, None)
    assert unnamed["levels"][1] == {"ns_pid": process.ns_pid, "pidns": container.pidns}


def test_a_thread_is_its_processes(node: Node) -> None:
    process = node.container().spawn((sys.executable, "-c", THREAD))
    ns_tid = int(process.read_line())
    tids = {
        parse_ns_pids(Procfs().status_text(int(tid)))[-1]: int(tid)
        for tid in os.listdir(f"/proc/{process.host_pid}/task")
    }
    tid = tids[ns_tid]
    assert tid != process.host_pid
    done = command(tid)
    assert done.returncode == 0
    assert f"resolver reverse: {tid} is a thread of process {process.host_pid}\n" in done.stderr
    assert f"tid             {tid}\n" in done.stdout
    found = as_json(tid)
    assert (found["host_pid"], found["tid"]) == (process.host_pid, tid)
    assert found["container_pid"] == process.ns_pid


def test_a_process_of_the_host_is_in_no_container() -> None:
    tid = threading.get_native_id()
    found = reverse(Procfs(), tid)
    assert found.container_id is None
    assert (found.host_pid, found.container_pid, found.pod_uid) == (os.getpid(), None, None)
    assert found.no_container is not None
    assert found.no_container.startswith("no container: its cgroup is /")
    done = command(os.getpid())
    assert done.returncode == 0
    assert "container_id    -\n" in done.stdout
    assert "no_container    no container" in done.stdout


def test_namespace_without_container_is_unknown() -> None:
    code = "import os, time; print(flush=True); time.sleep(1000)"
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as outer:
        assert outer.stdout is not None
        outer.stdout.readline()
        inner = child_of(outer.pid)
        found = reverse(Procfs(), inner)
        outer.kill()
    assert [level.ns_pid for level in found.levels] == [inner, 1]
    assert found.container_id is None
    assert "a PID namespace of its own" in str(found.no_container)


def test_missing_pids_exit_1_and_wrong_numbers_2() -> None:
    with subprocess.Popen(["/bin/true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessGone, match="has not waited"):
            reverse(Procfs(), ended.pid)
        assert command(ended.pid).returncode == 1
    with pytest.raises(NotFound, match=str(NEVER)):
        reverse(Procfs(), NEVER)
    done = command(NEVER)
    assert (done.returncode, done.stdout) == (1, "")
    assert command(10**30).returncode == 1
    with pytest.raises(UsageError):
        reverse(Procfs(), 0)
    for words in (("0",), ("--", "-3"), ("x",), (), ("1", "2")):
        done = command(*words)
        assert (done.returncode, done.stdout) == (2, ""), words


def hidden(level: int) -> tuple[str, ...]:
    """Mount a new /proc, because a remount would change the whole machine's."""
    return (*mounted(f"mount -t proc -o hidepid={level} proc /proc"), *UNPRIVILEGED)


@pytest.mark.parametrize(
    ("wrapper", "why"),
    [
        (("unshare", "--pid", "--fork", "--mount-proc"), "host's PID namespace"),
        (("unshare", "--cgroup"), "--cgroupns=host"),
        (hidden(1), "hidepid"),
        (hidden(2), "hidepid"),
    ],
)
def test_process_out_of_sight_is_not_called_gone(node: Node, wrapper: tuple[str, ...], why: str) -> None:
    host_pid = node.container().spawn(SLEEP).host_pid if why == "hidepid" else os.getpid()
    done = command(1 if "--pid" in wrapper else host_pid, wrapper=wrapper)
    assert (done.returncode, done.stdout, why in done.stderr) == (4, "", True)


def test_reverse_without_rights_says_unknown(node: Node) -> None:
    container = node.container()
    process = container.spawn(SLEEP)
    done = command("--json", process.host_pid, wrapper=UNPRIVILEGED)
    assert done.returncode == 4
    assert "hidden from this user: ask as root" in done.stderr
    found = json.loads(done.stdout)
    assert (found["container_id"], found["pod_uid"]) == (container.container_id, container.pod_uid)
    assert found["levels"] == [
        {"ns_pid": process.host_pid, "pidns": HOST_PIDNS},
        {"ns_pid": process.ns_pid, "pidns": None},
    ]
    assert (found["container_name"], found["container_pid"]) == (container.name, None)


def test_a_process_that_ends_meanwhile_is_gone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    process = node.container().spawn(SLEEP)
    procfs = Procfs()
    comm = procfs.comm

    def kill_then_tell(host_pid: int) -> str:
        name = comm(host_pid)
        process.kill()
        return name

    monkeypatch.setattr(procfs, "comm", kill_then_tell)
    with pytest.raises(ProcessGone, match=str(process.host_pid)):
        reverse(procfs, process.host_pid)


def test_a_hostile_name_does_not_reach_the_terminal(node: Node) -> None:
    process = node.container().spawn((sys.executable, "-c", HOSTILE))
    process.read_line()
    done = command(process.host_pid)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "comm            \\x1b[2Jx\n" in done.stdout
