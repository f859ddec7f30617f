"""The daemon as an operator sees it: start, end, reload, standby, refusals, and messages."""

import asyncio
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from resolver.config import HostpidNamespace, Settings
from resolver.daemon.service import Service
from resolver.linux.procfs import Procfs
from tests.descriptors import links
from tests.fakes.command import run
from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.state import Hang
from tests.kernel.conftest import (
    EVERY_SOURCE,
    FAST,
    NVML,
    STARVED,
    USUAL,
    WRITER,
    Start,
    hand_on,
    with_every_source,
    without_children,
)
from tests.patience import never, until


def once(
    node: Node, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    words = ("--once", "--run-dir", node.root / "run", "--containers-dir", node.containers_dir, *arguments)
    return run("run", *words, env={"RESOLVER_SOURCE": USUAL} | (environment or node.environment()))


@EVERY_SOURCE
def test_once_repairs_and_sums_up(node: Node, source: str, program: Path) -> None:
    hand_on(program, node.root / "run" / program.name)
    container, free, left = node.container(), node.container(name="free", watcher=False), node.container()
    tenant, busy = container.tenant(load=20, guess="none"), free.tenant(load=33, guess="wrong")
    left.tenant(guess="none").kill()
    os.utime(left.cache, (time.time() - 60,) * 2)  # a file changed within a second is not judged
    done = once(node)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["3 regions, 3 slots in use, 1 of them dead", "repaired: 1 missing, 1 stale"]
    assert lines[2] == "hostpid: host (driver 535.183.01: samples carry host PIDs up to 565.77)"
    assert lines[3] == "NVML: driver 535.183.01"
    assert (tenant.hostpid, busy.hostpid) == (tenant.host_pid, busy.host_pid)
    assert busy.sm_util == (33,)
    again = once(node)
    assert again.returncode == 0
    assert "repaired: nothing" in again.stdout.splitlines()


def test_dry_run_lists_slots_and_core_limits_that_begin(node: Node) -> None:
    limited, free = node.container(name="limited", sm_limit=30), node.container(name="free", sm_limit=0)
    missing, guessed = limited.tenant(load=20, guess="none"), limited.tenant(load=3, guess="self")
    wrong = free.tenant(load=33, guess="wrong")
    logs = node.root / "pods"
    (logs / f"research_train-0_{limited.pod_uid}").mkdir(parents=True)
    done = once(node, "--dry-run", "--log-level", "warning", "--pod-logs-dir", str(logs))
    assert done.returncode == 0, done.stderr
    assert "would repair: 1 missing, 1 stale, 1 wrong_namespace" in done.stdout.splitlines()
    table = done.stdout.splitlines()[done.stdout.splitlines().index("") + 1 :]
    rows = [re.split(" {2,}", line) for line in table]
    assert rows[0] == ["CONTAINER", "PID", "HOSTPID -> NEW", "REASON", "CORE LIMIT"]
    begins = "begins at 30 %"
    assert sorted(rows[1:4]) == sorted(
        [name, str(tenant.ns_pid), f"{before} -> {tenant.host_pid}", reason, limit]
        for name, tenant, before, reason, limit in (
            ("research/train-0/limited", missing, 0, "missing", begins),
            ("research/train-0/limited", guessed, guessed.ns_pid, "wrong_namespace", begins),
            (f"{free.pod_uid}/free", wrong, 999999, "stale", "-"),
        )
    )
    assert "In 2 of them a core limit takes effect" in done.stdout
    assert missing.hostpid == 0


def test_once_reports_missing_nvml(node: Node) -> None:
    node.container().tenant(guess="none")
    environment = {k: v for k, v in node.environment().items() if k != "LD_LIBRARY_PATH"}
    done = once(node, environment=environment)
    assert done.returncode == 1
    assert (
        "NVML: NVML Shared Library Not Found (LibraryNotFound): libnvidia-ml.so.1 is not found" in done.stdout
    )
    assert "driver_unknown" in done.stdout


@with_every_source("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_daemon_cleanly(node: Node, start: Start, source: str, number: signal.Signals) -> None:
    tenant = node.container().tenant(guess="none")
    daemon = start(node, *FAST)
    tenant.until_repaired()
    daemon.wait_for("repair")  # the slot is right before the writer's answer has come
    assert daemon.children().keys() >= {WRITER, NVML, "reader"}  # a second reader starts if the first is slow
    childless = without_children(daemon)
    daemon.signal(number)
    assert daemon.wait() == 0
    assert childless()
    assert daemon.lines[-1]["event"] == "stopped"
    assert daemon.lines[-1]["repairs_missing"] == 1


@pytest.mark.parametrize("call", [Hang.INIT, Hang.UTILIZATION])
def test_daemon_ends_while_nvml_hangs(node: Node, start: Start, call: Hang) -> None:
    node.gpu.set_faults(hang=call)
    daemon = start(node, *FAST)
    assert daemon.child(NVML)
    childless = without_children(daemon)
    assert daemon.stop() == 0
    until(childless, "the end of the worker")


def test_daemon_ends_at_any_moment_of_its_start(node: Node, start: Start) -> None:
    chance = random.Random(11)
    node.container(watcher=False).tenant(load=10, guess="none")
    for _ in range(10):
        daemon = start(node, "--interval", "10ms", "--nvml-interval", "10ms")
        daemon.wait_for("started")
        time.sleep(chance.uniform(0, 0.12))
        assert daemon.stop() == 0


def test_reload_takes_good_settings_and_refuses_bad_ones(node: Node, start: Start) -> None:
    node.gpu.driver_version = "566.03"
    tenant = node.container(watcher=False).tenant(load=40, guess="none")
    settings = node.root / "resolver.toml"
    old = 'interval = "50ms"\nnvml-interval = "200ms"\nwrite_utilization = "never"\n'
    settings.write_text(old)
    daemon = start(node, "--config", str(settings))
    daemon.wait_for("policy", hostpid_namespace="unknown", why=_UNKNOWN)
    settings.write_text(f'{old}hostpid_namespace = "host"\n')
    daemon.signal(signal.SIGHUP)
    assert daemon.wait_for("settings_reloaded")["changed"] == ["hostpid_namespace"]
    tenant.until_repaired()
    assert tenant.slot()["sm_util"] == [0]

    for number, bad in enumerate(
        ('interval = "soon"\n', "interval = [\n", "no_such = 1\n", "interval = 0\n"), 1
    ):
        settings.write_text(bad)
        daemon.signal(signal.SIGHUP)
        line = daemon.wait_for("settings_refused", count=number)
        assert str(settings) in line["why"]
    settings.unlink()
    daemon.signal(signal.SIGHUP)
    assert "cannot be read" in daemon.wait_for("settings_refused", count=5)["why"]
    assert tenant.slot()["sm_util"] == [0]

    settings.write_text(
        'interval = "20ms"\nnvml_interval = "200ms"\nmap_size = 4096\nhostpid_namespace = "host"\n'
    )
    daemon.signal(signal.SIGHUP)
    line = daemon.wait_for("settings_reloaded", count=2)
    assert sorted(line["changed"]) == ["interval", "write_utilization"]
    assert line["need_a_restart"] == ["map_size"]
    tenant.until_load(40)
    assert len(daemon.said("settings_reloaded")) == 2


_UNKNOWN = "driver 566.03 lies between those known to differ; set --hostpid-namespace (make gpu-check measures which)"


def test_second_writer_is_refused_and_dry_run_is_not(node: Node, start: Start) -> None:
    container = node.container()
    first = start(node, *FAST)
    first.wait_for("started")
    second = once(node)
    assert second.returncode == 2
    assert second.stdout == ""
    assert f"another resolver (PID {first.process.pid}) already writes on this node" in second.stderr
    assert "--dry-run" in second.stderr
    tenant = container.tenant(guess="none")
    dry = start(node, "--dry-run", *FAST)
    dry.wait_for("started")
    tenant.until_repaired()
    assert first.stop() == 0
    assert once(node).returncode == 0


def test_daemon_waits_for_containers_directory_and_nvml(node: Node, start: Start) -> None:
    container = node.container(watcher=False)
    tenant = container.tenant(load=27, guess="none")
    place, libraries = node.root / "later", node.root / "lib"
    libraries.mkdir()
    environment = {**node.environment(), "LD_LIBRARY_PATH": str(libraries)}
    before = container.cache.read_bytes()
    daemon = start(node, *FAST, containers_dir=place, environment=environment)
    daemon.wait_for("containers_dir_missing", path=str(place))
    daemon.wait_for("nvml_unavailable")
    missing = ("containers_dir_missing", "nvml_unavailable")
    never(lambda: any(len(daemon.said(event)) > 1 for event in missing), "the same said again", 1.5)
    place.symlink_to(node.containers_dir)
    daemon.wait_for("containers_dir_found", path=str(place))
    daemon.wait_for("region_found")
    never(lambda: container.cache.read_bytes() != before, "a write")
    shutil.copy(node.library_dir / "libnvidia-ml.so.1", libraries)
    daemon.wait_for("nvml_available")
    tenant.until_load(27)
    assert tenant.hostpid == tenant.host_pid
    place.unlink()
    daemon.wait_for("containers_dir_missing", count=2)
    daemon.wait_for("region_gone")


def test_container_that_comes_and_goes_is_followed(node: Node, start: Start) -> None:
    daemon = start(node, *FAST)
    daemon.wait_for("source")
    daemon.wait_for("policy")  # the NVML worker has started
    for turn in range(3):
        container = node.container(name=f"turn-{turn}")
        container.tenant(guess="none").until_repaired()
        container.stop()
        shutil.rmtree(container.directory)
        daemon.wait_for("region_gone", container=container.directory.name)
    until(
        lambda: not [link for link in links(daemon.process.pid) if "turn-" in link],
        "no descriptor of their files",
    )
    until(lambda: "anon_inode:[pidfd]" not in links(daemon.process.pid), "none of their processes")


def test_quiet_node_gets_no_log_lines_and_little_work(node: Node, start: Start) -> None:
    containers = [node.container(name=f"c{n}") for n in range(4)]
    tenants = [container.tenant(load=5, guess="none") for container in containers]
    daemon = start(node, "--hostpid-namespace", "host")
    daemon.wait_for("repair", count=len(tenants))
    daemon.wait_for("gpu_found", count=len(node.gpu.devices))
    until(lambda: time.monotonic() - daemon.lines[-1]["at"] > 2, "the end of what it says about its start")
    process = psutil.Process(daemon.process.pid)
    said, before = len(daemon.lines), process.cpu_times()
    never(lambda: {line["event"] for line in daemon.lines[said:]} - STARVED, "a line about nothing", 3.0)
    assert sum(process.cpu_times()[:2]) - sum(before[:2]) < 1  # no busy loop; the bench measures it


def test_daemon_works_with_few_descriptors(node: Node, start: Start) -> None:
    containers = [node.container(name=f"c{n}") for n in range(70)]
    tenants = [container.tenant(guess="none") for container in containers]
    limit = ("prlimit", "--nofile=64:64")
    daemon = start(node, *FAST, "--hostpid-namespace", "host", wrapper=limit)

    def right() -> int:
        return sum(tenant.hostpid == tenant.host_pid for tenant in tenants)

    until(lambda: right() > 1, "some repairs")
    line = daemon.wait_for("out_of_descriptors")
    assert "raise the limit (ulimit -n)" in line["why"]
    never(lambda: daemon.process.poll() is not None, "its end", 1.0)
    assert all(tenant.hostpid in (0, tenant.host_pid) for tenant in tenants)

    def kept(container: Container) -> bool:
        gone = {line["container"] for line in daemon.said("region_gone")}
        return container.directory.name in {line["container"] for line in daemon.said("repair")} - gone

    later: dict[Container, Tenant] = {}

    def repaired_later() -> bool:
        for container in filter(kept, containers):  # on a busy machine the last one kept is repaired last
            if container not in later:
                later[container] = container.tenant(guess="none")
        return any(tenant.hostpid == tenant.host_pid for tenant in later.values())

    until(repaired_later, "a later repair")
    soft, _ = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    assert soft == 64


def test_slots_are_repaired_without_pidfds(node: Node, tmp_path: Path) -> None:
    """Processes are held by their open /proc directories, here and in the writer."""
    container = node.container(watcher=False)
    tenant, victim = container.tenant(load=20, guess="none"), container.tenant(load=30, guess="self")
    settings = Settings(
        containers_dir=(str(node.containers_dir),),
        hostpid_namespace=HostpidNamespace.HOST,
        run_dir=str(tmp_path / "run"),
    )

    async def passes() -> None:
        service = Service(settings, Procfs(use_pidfd=False))
        try:
            for _ in range(3):
                await service.pass_once(patient=False)
            owners = [s.owner for r in service.repairer.regions.values() for s in r.slots.owned.values()]
            assert [owner is not None and owner.is_pidfd for owner in owners] == [False, False]
            assert tenant.hostpid == tenant.host_pid
            assert victim.hostpid == victim.host_pid
            victim.kill()
            for _ in range(3):
                await service.pass_once(patient=False)
            slots = [s for r in service.repairer.reports() for s in r.slots if s.pid == victim.ns_pid]
            assert [slot.dead for slot in slots] == [True]
            container.restart()
            after = container.tenant(guess="none")
            assert after.ns_pid == tenant.ns_pid
            for _ in range(3):
                await service.pass_once(patient=False)
            assert after.hostpid == after.host_pid
        finally:
            service.close()
        assert service.counters["internal_errors"] == 0

    asyncio.run(passes())


def test_full_run_directory_is_named(node: Node, start: Start, tmp_path: Path) -> None:
    """The lock file can be created, but there is no room for its content."""
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(full)], check=True)
    try:
        with (full / "all there is").open("wb", buffering=0) as file:
            file.write(b"x" * 4096)
        daemon = start(node, run_dir=full)
        assert daemon.wait() == 2
        (sentence,) = daemon.other_output
        assert sentence == (
            f"resolver run: the run directory {full} cannot be used (No space left on device): make room there, "
            "or name another with --run-dir"
        )
        assert os.listdir(full) == ["all there is"]
    finally:
        subprocess.run(["umount", str(full)], check=True)
