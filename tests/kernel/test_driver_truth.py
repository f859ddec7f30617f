"""What the driver really tells a container is measured, and the look into the container is no way out of it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from resolver.base.source_records import SOURCE_RECORDS
from resolver.workers.driver_probe import RIGHTS
from resolver.workers.supervisor import WorkerProcess
from tests.fakes.container import DEFAULT_RIGHTS, Container
from tests.fakes.daemon import Daemon, runs
from tests.fakes.node import Node
from tests.fakes.process import Process, Tenant
from tests.fakes.state import Hang
from tests.kernel.conftest import ROOT, Start, driver, hostpid_of
from tests.kernel.rights import patched, rights, with_nothing_but
from tests.patience import PATIENCE_S, never, until

FAST = ("--interval", "50ms", "--nvml-interval", "200ms", "--source", "scan", "--log-level", "debug")
PROBE = "driver probe"
NOBODY = "65534"


def says(node: Node, version: str) -> dict[str, str]:
    """An environment in which the driver gives that version as its own."""
    return {**node.environment(), "NVML_STANDIN_SAYS": version}


def for_everybody(node: Node) -> dict[str, str]:
    """An environment with a library that nobody can read, as on a real node; the node is in `open_place`."""
    library = node.root / "lib"
    library.mkdir()
    shutil.copy(node.library_dir / "libnvidia-ml.so.1", library)
    return {**node.environment(), "LD_LIBRARY_PATH": str(library)}


def busy(node: Node, load: int = 40, **options: Any) -> tuple[Container, Tenant]:
    container = node.container(rights=DEFAULT_RIGHTS, **options)
    return container, container.tenant(load=load, guess="none")


def spy(container: Container, what: str, name: str = PROBE, uid: str = "0") -> Process:
    """A hostile program in the container, on the watch."""
    as_user = ["/usr/bin/setpriv", "--reuid", uid, "--regid", uid, "--clear-groups"] if uid != "0" else []
    process = container.spawn([*as_user, sys.executable, str(ROOT / "tests/fakes/spy.py"), what, name])
    assert process.read_line() == "ready"
    return process


def measured(daemon: Daemon, namespace: str, timeout_s: float = PATIENCE_S) -> None:
    daemon.wait_for("policy", timeout_s=timeout_s, origin="measured", hostpid_namespace=namespace)


def halt_probes(node: Node, daemon: Daemon, tenant: Tenant) -> None:
    """The next probe stands still in the container, until `goes_on`."""
    daemon.wait_for("repair")
    node.gpu.set_faults(hang=Hang.INIT)
    tenant.set_load(40)


def goes_on(node: Node, daemon: Daemon) -> None:
    node.gpu.set_faults()
    measured(daemon, "host")


# ---- it is measured -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "claims", "namespace"),
    [
        ("535.183.01", None, "host"),
        ("570.86.15", None, "container"),
        # versions that nobody knows, or that lie
        ("535.183.01", "999.1", "host"),
        ("570.86.15", "weird", "container"),
        ("570.86.15", "535.183.01", "container"),
    ],
)
def test_what_the_driver_does_is_measured(
    tmp_path: Path, start: Start, version: str, claims: str | None, namespace: str
) -> None:
    with driver(tmp_path, version) as node:
        container, tenant = busy(node)
        daemon = start(node, *FAST, environment=says(node, claims or version))
        measured(daemon, namespace)
        right = tenant.host_pid if namespace == "host" else tenant.ns_pid
        until(lambda: hostpid_of(container, tenant) == right, "the right number")
        until(lambda: tenant.slot()["sm_util"] == [40], "the load, by the tenant's own watcher")
        assert daemon.said("policy")[-1]["why"].startswith(
            f"driver {claims or version}: samples in a container"
        )
        contradicted = daemon.said("driver_contradicts_version")
        expected = {"999.1": "container", "535.183.01": "host"}.get(claims or "")
        assert [line["by_version"] for line in contradicted] == ([expected] if expected else [])


def test_it_is_known_at_once_after_a_restart_and_anew_for_another_driver(node: Node, start: Start) -> None:
    container, tenant = busy(node)
    first = start(node, *FAST)
    measured(first, "host")
    first.stop()
    kept = first.run_dir / "driver-truth.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    again = start(node, *FAST)
    line = again.wait_for("policy")
    assert (line["origin"], line["hostpid_namespace"]) == ("measured", "host")
    again.stop()
    assert "driver_probes" not in again.counters()
    node.gpu.driver_version = "570.86.15"
    other = start(node, *FAST)
    assert other.wait_for("policy")["origin"] == "by version"
    measured(other, "container")
    until(lambda: hostpid_of(container, tenant) == tenant.ns_pid, "the number of the new driver")
    other.stop()
    assert other.counters()["driver_probes"] >= 2
    assert json.loads(kept.read_text())["driver_version"] == "570.86.15"


def test_a_forced_namespace_is_not_measured(node: Node, start: Start) -> None:
    container, tenant = busy(node)
    daemon = start(node, "--hostpid-namespace", "host", *FAST)
    until(lambda: hostpid_of(container, tenant) == tenant.host_pid, "the repair")
    never(lambda: PROBE in daemon.children(), "a probe", 1.0)
    daemon.stop()
    assert "driver_probes" not in daemon.counters()


# ---- the rights ---------------------------------------------------------------------------------------------------


def test_the_right_to_look_is_kept_until_it_is_measured_and_given_up_for_good(
    node: Node, start: Start
) -> None:
    container = node.container(rights=DEFAULT_RIGHTS)
    tenant = container.tenant(load=0, guess="none")
    daemon = start(node, *FAST)
    daemon.wait_for("repair")
    optional = frozenset({"DAC_OVERRIDE"})
    own = rights(daemon.process.pid)
    assert own.effective == SOURCE_RECORDS["scan"].rights | optional
    assert own.permitted == own.bounding == SOURCE_RECORDS["scan"].rights | optional | RIGHTS
    assert own.no_new_privs
    tenant.set_load(40)
    measured(daemon, "host")
    until(
        lambda: rights(daemon.process.pid).permitted == SOURCE_RECORDS["scan"].rights | optional, "the drop"
    )
    own = rights(daemon.process.pid)
    assert own.effective == own.permitted
    assert own.inheritable == own.ambient == frozenset()
    assert daemon.said("capabilities_kept") == []
    links = {}
    for link in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the daemon closed it between the listing and this look
            links[link.name] = os.readlink(link)
    assert links
    assert not [link for link in links.values() if link.startswith("pid:[")]


def test_without_the_right_it_goes_by_the_version_and_says_so(node: Node, start: Start) -> None:
    container, tenant = busy(node)
    daemon = start(node, *FAST, wrapper=with_nothing_but(SOURCE_RECORDS["scan"].rights))
    until(lambda: hostpid_of(container, tenant) == tenant.host_pid, "the repair")
    (line,) = daemon.said("policy")
    assert line["origin"] == "by version"
    assert line["why"].endswith("; not measured: that takes CAP_SYS_ADMIN")
    daemon.stop()
    assert "driver_probes" not in daemon.counters()


def test_the_documented_rights_are_enough_to_measure(node: Node, start: Start) -> None:
    busy(node)
    daemon = start(node, *FAST, wrapper=with_nothing_but(SOURCE_RECORDS["scan"].rights | RIGHTS))
    measured(daemon, "host")


def test_without_the_rights_to_become_nobody_it_asks_as_root_without_any(node: Node, start: Start) -> None:
    container, tenant = busy(node, load=0)
    look = spy(container, "look")
    daemon = start(node, *FAST, wrapper=with_nothing_but(SOURCE_RECORDS["scan"].rights | {"SYS_ADMIN"}))
    halt_probes(node, daemon, tenant)
    status = json.loads(look.read_line())["status"]
    assert status["Uid"].split() == ["0"] * 4
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    goes_on(node, daemon)


# ---- a hostile tenant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uid", ["0", NOBODY])
def test_no_process_of_the_container_can_reach_into_the_probe(
    open_place: Path, start: Start, uid: str
) -> None:
    """Root with what a container has by default, and one of the probe's own user."""
    with driver(open_place, "535.183.01") as node:
        container, tenant = busy(node, load=0)
        reach, look = spy(container, "reach", uid=uid), spy(container, "look")
        daemon = start(node, *FAST, environment=for_everybody(node))
        halt_probes(node, daemon, tenant)
        ways = json.loads(reach.read_line())
        seen = json.loads(look.read_line())
        goes_on(node, daemon)
        # The table of its mounts is everybody's to read: there is next to nothing in it.
        told = {ways.pop("mountinfo"), ways.pop("mounts")}
        assert told == {"reached"}
        allowed = ("/proc", "/sys", "/dev", "/lib", "/usr", "/etc", str(open_place))
        assert [mount for mount in seen["mounts"] if mount != "/" and not mount.startswith(allowed)] == []
        assert seen["interfaces"] == ["lo"]
        assert len(ways) > 20
        assert set(ways.values()) <= {"EACCES", "EPERM"}, ways
        status = seen["status"]
        assert status["Uid"].split() == status["Gid"].split() == [NOBODY] * 4
        assert status["Groups"].split() == []
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
        assert (status["NoNewPrivs"], status["PPid"]) == ("1", "0")
        # The same program gets into any other process of its own user: the ways are real ones.
        found = json.loads(spy(container, "reach", "tenant").read_line())
        assert [way for way, what in found.items() if what != "reached"] == ["setns"]


@pytest.mark.parametrize("nobody", [True, False])
def test_nor_can_one_with_every_capability_in_a_user_namespace_of_its_own(
    open_place: Path, monkeypatch: pytest.MonkeyPatch, *, nobody: bool
) -> None:
    """Its root is the host's, by number; what it may do, it may do below its own namespace only."""
    # With the host's mounts: below others that lie over /proc, its root could not mount one.
    hostile = ["nsenter", "--mount=/proc/2/ns/mnt"]
    hostile += ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    worker = WorkerProcess(
        PROBE, "resolver.workers.driver_probe", sysconfig.get_paths()["purelib"], timeout=60, rights=RIGHTS
    )
    with driver(open_place, "535.183.01") as node:
        for name, value in for_everybody(node).items():
            monkeypatch.setenv(name, value)
        node.gpu.set_faults(hang=Hang.INIT)
        command = [*hostile, sys.executable, str(ROOT / "tests/fakes/spy.py"), "reach", PROBE]
        tenant = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert tenant.stdout is not None
        assert tenant.stdout.readline() == "ready\n"
        (first,) = Path(f"/proc/{tenant.pid}/task/{tenant.pid}/children").read_text().split()
        namespace = os.open(f"/proc/{first}/ns/pid", os.O_RDONLY)

        async def look() -> tuple[dict[str, str], dict[str, Any]]:
            request = {
                "pidns": os.fstat(namespace).st_ino,
                "uuids": [node.gpu.devices[0].uuid],
                "since": 0,
                "nobody": nobody,
                "seconds": 15.0,
            }
            answer = asyncio.create_task(worker.request(json.dumps(request).encode(), [namespace]))
            assert tenant.stdout is not None
            ways = json.loads(await asyncio.to_thread(tenant.stdout.readline))
            node.gpu.set_faults()
            return ways, json.loads(await answer)

        try:
            ways, answer = asyncio.run(look())
        finally:
            worker.stop()
            os.close(namespace)
            tenant.kill()
            tenant.communicate()
    assert answer["nobody"] is nobody
    assert list(answer["seen"]) == [node.gpu.devices[0].uuid]
    assert {ways.pop("mountinfo"), ways.pop("mounts")} == {"reached"}
    assert set(ways.values()) <= {"EACCES", "EPERM"}, ways


@pytest.mark.parametrize("rights_of", ["SYS_PTRACE", "SYS_ADMIN"])
def test_a_container_that_could_reach_in_is_not_entered(node: Node, start: Start, rights_of: str) -> None:
    bit = {"SYS_PTRACE": 19, "SYS_ADMIN": 21}[rights_of]
    container = node.container(rights=DEFAULT_RIGHTS | 1 << bit)
    container.tenant(load=40, guess="none")
    look = spy(container, "kill")
    daemon = start(node, *FAST)
    line = daemon.wait_for("driver_not_measured", count=2)
    assert f"has, or may get, CAP_{rights_of}" in line["why"]
    look.kill()
    assert look.alive is False
    with pytest.raises(Exception, match="has ended"):
        look.read_line()  # it never saw one
    daemon.stop()
    assert daemon.counters()["driver_probes_refused"] >= 2


#: A daemon that waits for a look for a fifth of the time, and between two of them for a tenth.
IMPATIENT = patched("""
    from resolver.daemon import driver_measurement
    driver_measurement._LOOK_SECONDS, driver_measurement._FIRST_WAIT = 1.0, 0.2
""")
LATE = "it did not answer within 1 s"


def test_a_tenant_that_kills_the_probe_only_puts_it_off(open_place: Path, start: Start) -> None:
    with driver(open_place, "535.183.01") as node:
        container, tenant = busy(node, load=0)
        killer = spy(container, "kill")
        daemon = start(node, *FAST, wrapper=IMPATIENT, environment=for_everybody(node))
        halt_probes(node, daemon, tenant)
        ended = "it was ended from inside the container (signal 9)"
        for count, wait in ((1, 0.2), (2, 0.4), (3, 0.8)):
            line = daemon.wait_for("driver_not_measured", count=count)
            assert (line["why"], line["next_try_seconds"]) == (ended, wait)
        killer.kill()
        goes_on(node, daemon)


def test_a_tenant_that_stops_the_probe_costs_its_time_limit(node: Node, start: Start) -> None:
    container, tenant = busy(node)
    stopper = spy(container, "stop")
    daemon = start(node, *FAST, wrapper=IMPATIENT)
    host_pid = 0

    def stopped() -> bool:
        nonlocal host_pid
        host_pid = next(iter(_inside(daemon)), 0)
        return host_pid != 0 and "State:\tT" in _status(host_pid)

    until(stopped, "a probe that was stopped")
    until(lambda: hostpid_of(container, tenant) == tenant.host_pid, "a repair meanwhile")
    daemon.wait_for("driver_not_measured", why=LATE)
    until(lambda: not runs(host_pid), "its end")
    stopper.kill()
    measured(daemon, "host")


def _inside(daemon: Daemon) -> list[int]:
    """The forked process of the probe: the child of the daemon's child."""
    try:
        worker = daemon.children().get(PROBE)
        if worker is None:
            return []
        return [int(word) for word in Path(f"/proc/{worker}/task/{worker}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _status(host_pid: int) -> str:
    try:
        return Path(f"/proc/{host_pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_daemon_that_is_killed_leaves_nobody_in_the_container(node: Node, start: Start) -> None:
    _, tenant = busy(node, load=0)
    daemon = start(node, *FAST)
    halt_probes(node, daemon, tenant)
    until(lambda: _inside(daemon), "a probe in the container")
    (inside,), worker = _inside(daemon), daemon.children()[PROBE]
    daemon.kill()
    until(lambda: not runs(inside) and not runs(worker), "their end")
