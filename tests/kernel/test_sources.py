"""Sources in a running daemon: it uses the best, leaves one that fails, and no repair waits for that."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.daemon import runs
from tests.fakes.node import Node
from tests.kernel.conftest import FAST, Start
from tests.kernel.rights import NO_BTF, with_nothing_but, with_python
from tests.patience import until
from tests.programs import script

AUTO = ("--source", "auto")
#: Without the rights to enter the host's network namespace and to load a program.
NO_RIGHT = with_nothing_but(frozenset({"SYS_PTRACE", "DAC_OVERRIDE", "KILL"}))
ALONE = ("unshare", "--net", *NO_RIGHT)

SAYS = {
    "no bcc": "bcc is not installed: apt-get install python3-bpfcc",
    "no BTF": "this kernel has no BTF: /sys/kernel/btf/none cannot be read",
    "no capability": "CAP_BPF and CAP_PERFMON are missing: run it as root, or give it CAP_BPF and CAP_PERFMON",
    "no network": "the host's network namespace could not be entered (EPERM): ",
}


def descendants(host_pid: int, name: str = "") -> set[int]:
    """Return a process's descendants, or only those with this name."""
    processes = psutil.Process(host_pid).children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        return {process.pid for process in processes if not name or process.name() == name}
    return descendants(host_pid, name)


@pytest.fixture
def orphans() -> Iterator[Callable[[], set[int]]]:
    """Return running processes that this test's programs left behind: they become children of this process."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    before = descendants(os.getpid())
    yield lambda: {host_pid for host_pid in descendants(os.getpid()) - before if runs(host_pid)}
    libc.prctl(36, 0)


@pytest.mark.parametrize("why", ["no bcc", "no BTF", "no capability"])
def test_connector_is_used_without_the_map(node: Node, start: Start, tmp_path: Path, why: str) -> None:
    if why == "no bcc":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    wrappers = {
        "no bcc": with_python(tmp_path / "bare/bin/python"),
        "no BTF": NO_BTF,
        "no capability": NO_RIGHT,
    }
    daemon = start(node, *FAST, *AUTO, wrapper=wrappers[why])
    not_used = daemon.wait_for("source", source="netlink")["not_used"]  # on a busy machine it may climb later
    assert not_used.keys() == {"bpf"}
    assert not_used["bpf"].startswith(SAYS[why])
    assert not_used["bpf"] in [line["why"] for line in daemon.said("source_unavailable")]
    node.container().tenant(guess="none").until_repaired()


def test_scan_is_used_if_no_other_source_works(node: Node, start: Start) -> None:
    tenant = node.container().tenant(guess="none")
    daemon = start(node, *FAST, *AUTO, wrapper=ALONE)
    source = daemon.wait_for("source")
    assert source["source"] == "scan"
    assert source["not_used"]["bpf"].startswith(SAYS["no capability"])
    assert source["not_used"]["netlink"].startswith(SAYS["no network"])
    assert "hostNetwork: true" in source["not_used"]["netlink"]
    tenant.until_repaired()
    assert len(daemon.said("source_unavailable")) == 2


@pytest.mark.parametrize("source", ["auto", "bpf", "netlink", "scan"])
def test_daemon_outside_host_pidns_ends(
    node: Node, start: Start, orphans: Callable[[], set[int]], source: str
) -> None:
    wrapper = ("unshare", "--pid", "--fork", "--mount-proc")
    daemon = start(node, *FAST, "--source", source, wrapper=wrapper)
    assert daemon.wait() == 4
    (sentence,) = daemon.other_output
    assert {line["event"] for line in daemon.lines} <= {"source_unavailable"}
    assert "not in the host's PID namespace" in sentence
    assert "hostPID: true" in sentence
    assert orphans() == set()


@pytest.mark.parametrize("source", ["auto", "bpf"])
def test_daemon_ends_while_the_map_is_made(
    node: Node, start: Start, tmp_path: Path, orphans: Callable[[], set[int]], source: str
) -> None:
    slow = script(tmp_path / "python", "exec sleep 60")
    daemon = start(node, *FAST, "--source", source, wrapper=with_python(slow))
    # The real loader ends with the daemon; this fake doesn't, so the test kills it.
    until(lambda: descendants(daemon.process.pid, "sleep"), "the loader")
    loaders = descendants(daemon.process.pid, "sleep")
    assert daemon.stop() == 0
    for loader in loaders:
        os.kill(loader, signal.SIGKILL)
    until(lambda: orphans() == set(), "the end of all")
