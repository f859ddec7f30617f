"""The documented rights and system calls are enough for each source, and a daemon keeps no others."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from resolver.base.source_records import SOURCE_RECORDS
from resolver.linux.procfs import Procfs
from resolver.linux.seccomp import DANGEROUS
from resolver.workers.canary import is_first
from tests.fakes.halted import stopped_in_its_exit
from tests.fakes.node import Node
from tests.kernel.conftest import EVERY_SOURCE, FAST, NVML, ROOT, WRITER, Start
from tests.kernel.rights import FRAGILE, held, patched, rights, with_nothing_but, works
from tests.kernel.serving import answer
from tests.patience import until

RELEASE = os.uname().release
#: Listening to the proc connector takes CAP_NET_ADMIN before this release.
OLD = tuple(map(int, RELEASE.split(".")[:2])) < (6, 6)


def documented(source: str) -> frozenset[str]:
    return SOURCE_RECORDS[source].rights if OLD else SOURCE_RECORDS[source].rights - {"NET_ADMIN"}


#: On SIGUSR1, makes calls whose arguments fail if the filter lets them through.
ASKED = """
import ctypes, json, os, signal, sys
from resolver.linux.seccomp import DANGEROUS
libc = ctypes.CDLL(None, use_errno=True)
column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
answers = sys.argv[1]
def ask(*_):
    found = {}
    for name in ("process_vm_readv", "open_by_handle_at", "keyctl", "setns", "unshare", "bpf"):
        first = {"keyctl": 99, "setns": -1, "bpf": 0}.get(name, 0)
        failed = libc.syscall(DANGEROUS[name][column], first, 0, 0, 0, 0, 0) < 0
        found[name] = ctypes.get_errno() if failed else 0
    with open(answers + ".new", "w") as file:
        json.dump(found, file)
    os.rename(answers + ".new", answers)
signal.signal(signal.SIGUSR1, ask)
"""


@EVERY_SOURCE
@pytest.mark.parametrize("given", ["documented", "everything"])
def test_given_rights_are_enough_and_unneeded_ones_dropped(
    node: Node, start: Start, source: str, tmp_path: Path, given: str
) -> None:
    record, answers = SOURCE_RECORDS[source], tmp_path / "answers"
    only = given == "documented"
    needed = documented(source) if only else record.rights | {"DAC_OVERRIDE"}
    wrapper = patched(ASKED, str(answers))
    daemon = start(node, *FAST, wrapper=(*with_nothing_but(needed), *wrapper) if only else wrapper, anew=only)
    works(node, daemon, source)
    until(lambda: rights(daemon.process.pid).filtered, "a filter")
    own = rights(daemon.process.pid)
    optional = needed & {"DAC_OVERRIDE"}
    assert own.effective == record.keeps(RELEASE) | optional
    assert own.permitted == needed  # to start a child again
    assert own.bounding == needed or not only
    assert own.inheritable == own.ambient == frozenset()
    assert own.no_new_privs
    for name, kept in ((WRITER, optional), (NVML, frozenset[str]())):
        child = rights(daemon.child(name))
        assert child.effective == child.permitted == kept
        assert child.inheritable == child.ambient == frozenset()
        assert child.bounding <= own.bounding
        assert child.no_new_privs
        assert child.filtered
    daemon.signal(signal.SIGUSR1)
    until(answers.exists, "its answers")
    refused = {name for name, error in json.loads(answers.read_text()).items() if error == errno.EPERM}
    assert ("setns" in refused) == (source != "netlink")
    assert refused >= {"process_vm_readv", "open_by_handle_at", "keyctl"}
    assert "unshare" not in refused  # the canary needs it
    assert ("bpf" in refused) == (source != "bpf")
    for event in ("capabilities_kept", "source_unavailable", "source_failed"):
        assert daemon.said(event) == []


def test_calls_for_children_are_among_the_dangerous() -> None:
    calls = {"unshare", "pidfd_getfd"}.union(*(each.calls for each in SOURCE_RECORDS.values()))
    assert DANGEROUS.keys() >= calls


def test_repairs_and_dropped_rights_wait_for_no_map(node: Node, start: Start, tmp_path: Path) -> None:
    """With ``auto`` the first source may take seconds; tenants and scrapers are served from the beginning."""
    tenant, go = node.container().tenant(guess="none"), tmp_path / "go"
    tenants = tmp_path / "tenants" / "resolver.sock"
    options = ("--source", "auto", "--tenant-socket", str(tenants))
    daemon = start(node, *FAST, *options, "--metrics-addr", "127.0.0.1:0", wrapper=held(go), anew=False)
    daemon.wait_for("repair")
    daemon.wait_for("metrics_on")
    until(lambda: tenants.exists() and daemon.socket.exists(), "the sockets")
    own = rights(daemon.process.pid)
    assert daemon.said("source") == []  # no source runs yet
    needed = frozenset().union(*(each.rights for each in SOURCE_RECORDS.values()), {"DAC_OVERRIDE"})
    assert own.effective == SOURCE_RECORDS["bpf"].keeps(RELEASE) | {"DAC_OVERRIDE"}
    # The opener may have to enter the host's network namespace.
    assert own.permitted == own.bounding == needed | {"SYS_ADMIN"}
    assert own.no_new_privs  # programs that it starts gain no rights
    go.touch()
    assert daemon.wait_for("source", source="bpf")["not_used"] == {}
    until(lambda: rights(daemon.process.pid).permitted == needed, "the drop")
    assert answer(daemon, "status")["source"]["map_size"] >= 32_768
    assert tenant.hostpid == tenant.host_pid


#: Forbids new namespaces, as a runtime's seccomp profile does.
CONFINED = (
    *("unshare", "--user", "--map-root-user"),
    *("sh", "-c", 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"', "sh"),
    *("setpriv", "--inh-caps", "-all", "--bounding-set", "-sys_admin"),
)
NARROW = """
import asyncio, sys
from resolver.linux.procfs import Procfs
from resolver.pids.ladder import find_canary
from resolver.pids.scan import ScanSource
class Narrow(ScanSource):
    def candidates(self, ns_pid, pidns=None):
        found = super().candidates(ns_pid, pidns)
        if sys.argv[1] == "blind":
            return []
        return [each for each in found if each == ns_pid or sys.argv[1] == "sound"]
print(*asyncio.run(find_canary(Narrow(Procfs()))))
"""


@pytest.mark.parametrize(
    ("eyes", "said"),
    [("sound", ""), ("blind", "it did not see process"), ("host only", "in its PID namespace")],
)
def test_other_namespaces_stand_in_for_the_canary(node: Node, eyes: str, said: str) -> None:
    """Any process of this machine may stand in; if it ends before the search, the canary reports nothing."""
    node.container()
    command = [*CONFINED, sys.executable, "-c", NARROW, eyes]

    def trouble() -> str:
        return subprocess.check_output(command, cwd=ROOT, text=True).strip()

    if said:
        until(lambda: said in trouble(), said)
    else:
        assert trouble() == ""


def test_ending_namespace_gives_no_canary(node: Node) -> None:
    """A hung process stays alive in a namespace that the map no longer has (`bury`)."""
    tenant = node.container().tenant(guess="none")
    init = psutil.Process(tenant.host_pid).ppid()
    assert (is_first(init), is_first(tenant.host_pid), is_first(os.getpid())) == (True, False, False)
    with stopped_in_its_exit(tenant.host_pid):
        assert not is_first(init)
        with Procfs().hold(init) as held:
            assert held.alive()


def test_remaining_rights_suffice_to_fall_and_climb(node: Node, start: Start) -> None:
    """The loader and the opener are root's children: they get the permitted capabilities."""
    container = node.container()
    daemon = start(node, *FAST, "--source", "auto", wrapper=FRAGILE, anew=False)
    daemon.wait_for("source", source="bpf")
    for count in (1, 2):
        daemon.signal(signal.SIGUSR1)
        failed = daemon.wait_for("source_failed", count=count)
        assert failed["why"].startswith("the map cannot be read")
        daemon.wait_for("source", source="scan", count=count)
        daemon.wait_for("source", source="bpf", count=count + 1)
        container.tenant(guess="none").until_repaired()
