"""The checks of `resolver doctor` on kernels, drivers and directories that a fixture stands in for, or a stand-in is.

What can be broken for real, with namespaces, capabilities and a daemon, is in tests/kernel/test_doctor.py.
"""

from __future__ import annotations

import json
import os
import pty
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resolver.config import HostpidNamespace, Settings, from_status
from resolver.doctor import (
    CHECKS,
    Check,
    bounded,
    daemon,
    gpu,
    hami,
    kernel,
    limits,
    permissions,
    ports,
    sockets,
)
from resolver.doctor.findings import Finding, State, failed, ok, together, warning, worst
from resolver.doctor.limits import Clocks, judge_clocks
from resolver.doctor.node import Node
from resolver.doctor.others import Other, flags_in, runs_daemon
from resolver.linux.procfs import Procfs
from resolver.reasons import RegionReason
from tests.fakes import cachefiles
from tests.fakes.command import called
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.state import Fault, Hang
from tests.unit.conftest import Driver


def settings(**changes: Any) -> Settings:
    return Settings(**changes)


def says(finding: Finding, state: str, *, found: str = "", cause: str = "", fix: str = "") -> None:
    """The finding has this state, and these words; what is not well has both a cause and a fix."""
    assert finding.state == state, finding
    for words, text in ((found, finding.found), (cause, finding.cause), (fix, finding.fix)):
        assert words in text, finding
    assert bool(finding.cause) == bool(finding.fix) == (state != "ok"), finding


# ---- findings and how checks are run ------------------------------------------------------------------------------


def test_several_troubles_are_as_bad_as_the_worst() -> None:
    finding = together("well", [warning("slow", "old", "buy"), failed("dead", "cut", "plug")])
    assert finding == (State.FAILED, "dead; slow", "cut\nold", "plug\nbuy", "")
    assert together("well", []) == ok("well")
    assert worst([]) == "ok"
    assert worst([State.OK, State.WARNING, State.FAILED, State.UNKNOWN]) == "failed"


def test_a_defect_in_a_check_is_told() -> None:
    def broken(_node: Node) -> Finding:
        raise ZeroDivisionError("division by zero")

    says(
        bounded(Check("broken", broken), Node()),
        "failed",
        found="a defect in the check: ZeroDivisionError: division by zero",
        fix="--only broken",
    )


def test_a_check_that_hangs_is_left_behind() -> None:
    release = threading.Event()

    def hangs(_node: Node) -> Finding:
        release.wait(30)
        return ok("late")

    began = time.monotonic()
    says(bounded(Check("hangs", hangs, 0.1), Node()), "unknown", found="no answer within 0.1 s", fix="wchan")
    assert time.monotonic() - began < 25
    release.set()


def test_every_check_has_a_name_of_its_own_and_a_sentence() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) > 25
    assert all(re.fullmatch(r"Wh[a-z]+ .*\.", check.about) for check in CHECKS)


def test_every_check_and_state_is_told(root: Path) -> None:
    text = (root / "docs/doctor.md").read_text()
    states, checks = (
        re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:3]
    )
    assert set(states) == {state.value for state in State}
    assert checks == [check.name for check in CHECKS]


# ---- kernels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uname", "source", "state", "words"),
    [
        (("6.8.0-40-generic", "x86_64"), "auto", "ok", ""),
        (("5.12.0", "aarch64"), "bpf", "ok", ""),
        (("5.11.22+rpt", "x86_64"), "auto", "warning", "before Linux 5.12"),
        (("5.11.22", "x86_64"), "bpf", "failed", "before Linux 5.12"),
        (("5.4.0-150-generic", "x86_64"), "scan", "ok", ""),
        (("4.4.0", "x86_64"), "auto", "warning", "NS_GET_PARENT"),
        (("3.10.0-1160.el7.x86_64", "x86_64"), "auto", "failed", "NSpid"),
        (("6.1.0", "riscv64"), "auto", "warning", "x86_64 and aarch64"),
        (("mainline", "x86_64"), "auto", "unknown", ""),
        (("6.rc1", "x86_64"), "auto", "unknown", ""),
    ],
)
def test_kernel(uname: tuple[str, str], source: str, state: str, words: str) -> None:
    node = Node(settings(source=source), uname=uname)
    says(kernel.kernel(node), state, found=uname[0], cause=words)


@pytest.mark.parametrize(
    ("content", "state", "words"),
    [
        (b"\x9f\xeb\x01\x00" + bytes(2048), "ok", ""),
        (b"\xeb\x9f\x01\x00", "ok", ""),
        (b"\x7fELF", "warning", "is not BTF"),
        (b"", "warning", "is not BTF"),
        (None, "warning", "No such file"),
    ],
)
def test_btf(tmp_path: Path, content: bytes | None, state: str, words: str) -> None:
    (tmp_path / "kernel/btf").mkdir(parents=True)
    if content is not None:
        (tmp_path / "kernel/btf/vmlinux").write_bytes(content)
    finding = kernel.btf(Node(sys=str(tmp_path)))
    says(finding, state, found=words, fix="" if state == "ok" else "CONFIG_DEBUG_INFO_BTF=y")


def test_bcc_under_no_python(tmp_path: Path) -> None:
    for name, script in (
        ("mute", "exit 3"),
        ("wordy", "echo 'Traceback' >&2; echo 'No bcc here' >&2; exit 1"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    pythons = (str(tmp_path / "mute"), str(tmp_path / "wordy"), str(tmp_path / "none"))
    finding = kernel.bcc(Node(pythons=pythons))
    says(finding, "warning", found="cannot import it", fix="apt-get install python3-bpfcc")
    for words in ("mute: code 3", "wordy: No bcc here", "none: No such file"):
        assert words in finding.cause
    says(kernel.bcc(Node(settings(source="bpf"), pythons=pythons)), "failed", fix="source = auto")
    says(kernel.bcc(Node(settings(source="netlink"), pythons=pythons)), "ok", found="not needed")


@pytest.mark.parametrize(
    ("modes", "source", "state"),
    [
        ("[none] integrity confidentiality", "auto", "ok"),
        ("none [integrity] confidentiality", "auto", "ok"),
        ("none integrity [confidentiality]", "auto", "warning"),
        ("none integrity [confidentiality]", "bpf", "failed"),
        (None, "auto", "ok"),
    ],
)
def test_lockdown(tmp_path: Path, modes: str | None, source: str, state: str) -> None:
    (tmp_path / "kernel/security").mkdir(parents=True)
    if modes is not None:
        (tmp_path / "kernel/security/lockdown").write_text(modes + "\n")
    finding = kernel.lockdown(Node(settings(source=source), sys=str(tmp_path)))
    says(finding, state, fix="" if state == "ok" else "lockdown=integrity")


def test_no_cgroup_hierarchy(proc: Path) -> None:
    (proc / "1").mkdir()
    (proc / "1/cgroup").write_text("0::/init.scope\n")
    says(kernel.cgroups(Node(proc=str(proc))), "warning", found="no hierarchy", fix="mount -t cgroup2")
    (proc / "1/cgroup").unlink()
    says(kernel.cgroups(Node(proc=str(proc))), "failed", found="/1/cgroup cannot be read")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with one process in it: this one."""
    proc = tmp_path / "proc"
    for name in ("self", str(os.getpid())):
        (proc / name / "ns").mkdir(parents=True)
        (proc / name / "ns/cgroup").touch()
        (proc / name / "mountinfo").write_text("25 1 0:5 / /dev rw - devtmpfs udev rw\n")
        (proc / name / "cgroup").write_text("0::/box/inner\n")
    (proc / "meminfo").write_text("MemTotal: 8000000 kB\nMemAvailable:    4096000 kB\n")
    return proc


# ---- rights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "release", "source", "state"),
    [
        ("", "6.8.0", "auto", "ok"),
        ("SYS_PTRACE", "6.8.0", "auto", "failed"),
        ("SYS_PTRACE", "6.8.0", "scan", "failed"),
        ("BPF", "6.8.0", "auto", "warning"),
        ("BPF", "6.8.0", "bpf", "failed"),
        ("BPF", "6.8.0", "scan", "ok"),
        ("PERFMON", "6.8.0", "auto", "warning"),
        ("NET_ADMIN", "6.5.0", "auto", "warning"),
        ("NET_ADMIN", "6.5.0", "netlink", "failed"),
        ("NET_ADMIN", "6.6.0", "auto", "ok"),
        ("DAC_OVERRIDE", "6.8.0", "bpf", "warning"),
    ],
)
def test_each_capability(
    monkeypatch: pytest.MonkeyPatch, lost: str, release: str, source: str, state: str
) -> None:
    every = {"SYS_PTRACE", "BPF", "PERFMON", "NET_ADMIN", "DAC_OVERRIDE"}
    monkeypatch.setattr("resolver.linux.capabilities.held", lambda: frozenset(every - {lost}))
    finding = permissions.capabilities(Node(settings(source=source), uname=(release, "x86_64")))
    says(finding, state)
    if state == "ok":
        assert "CAP_SYS_ADMIN" in finding.found
        assert "nothing is measured" in finding.found
    else:
        assert finding.found == f"CAP_{lost} is missing"
        assert f"capabilities.add: [{lost}]" in finding.fix


def test_the_old_great_capability_is_enough_for_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    have = frozenset({"SYS_PTRACE", "SYS_ADMIN", "NET_ADMIN", "DAC_OVERRIDE"})
    monkeypatch.setattr("resolver.linux.capabilities.held", lambda: have)
    says(permissions.capabilities(Node()), "ok")


# ---- limits and clocks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "source", "state"),
    [("max", "auto", "ok"), (1 << 30, "auto", "ok"), (200 << 20, "auto", "warning"), (200 << 20, "scan", "ok"),
     (64 << 20, "auto", "failed"), (64 << 20, "scan", "failed")],
)  # fmt: skip
def test_memory_limit_of_a_cgroup_above(
    tmp_path: Path, proc: Path, limit: object, source: str, state: str
) -> None:
    (tmp_path / "cgroup/box/inner").mkdir(parents=True)
    (tmp_path / "cgroup/box/memory.max").write_text(f"{limit}\n")
    (tmp_path / "cgroup/box/inner/memory.max").write_text("max\n")
    (proc / "self/mountinfo").write_text(f"30 1 0:26 / {tmp_path}/cgroup rw - cgroup2 cgroup2 rw\n")
    finding = limits.memory(Node(settings(source=source), proc=str(proc)))
    says(finding, state, fix="" if state == "ok" else "resources.limits.memory")
    assert ("box/memory.max" in finding.found) == (limit != "max")


def test_memory_limit_of_the_old_hierarchy(tmp_path: Path, proc: Path) -> None:
    (tmp_path / "memory/pod").mkdir(parents=True)
    (tmp_path / "memory/pod/memory.limit_in_bytes").write_text(f"{96 << 20}\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (proc / str(os.getpid()) / "cgroup").write_text("5:cpu,cpuacct:/pod\n4:memory:/pod\n")
    mount = f"31 1 0:27 / {tmp_path}/memory rw - cgroup cgroup rw,memory\n"
    (proc / "self/mountinfo").write_text(mount)
    says(
        limits.memory(Node(proc=str(proc))), "failed", found="the limit is 96 MiB", cause="kills one of them"
    )


def test_a_node_short_of_memory(proc: Path) -> None:
    (proc / "meminfo").write_text("MemAvailable:    40960 kB\n")
    says(limits.memory(Node(proc=str(proc))), "warning", found="40 MiB are available", fix="ps axo")
    (proc / "meminfo").write_text("MemTotal:    40960 kB\n")
    says(limits.memory(Node(proc=str(proc))), "unknown", found="no MemAvailable")


NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("wall", "later", "battery", "state", "words"),
    [
        (NOW, NOW + 0.25, None, "ok", ""),
        (NOW, NOW + 0.25, NOW + 3600, "ok", ""),
        (86400.0, 86400.25, None, "failed", "1970-01-02"),
        (NOW, NOW + 5.25, None, "warning", "jumped by +5.000 s"),
        (NOW, NOW - 59.75, None, "warning", "jumped by -60.000 s"),
        (NOW, NOW + 0.25, NOW - 10 * 86400, "warning", "the machine's own 2027-01-05"),
    ],
)
def test_wall_clock(
    tmp_path: Path, wall: float, later: float, battery: float | None, state: str, words: str
) -> None:
    if battery is not None:
        (tmp_path / "class/rtc/rtc0").mkdir(parents=True)
        (tmp_path / "class/rtc/rtc0/since_epoch").write_text(f"{battery:.0f}\n")
    node = Node(sys=str(tmp_path), proc=str(tmp_path))
    finding = judge_clocks(node, Clocks(wall, 100.0, 200.0), Clocks(later, 100.25, 200.25))
    says(finding, state, found=words, fix="" if state == "ok" else "timedatectl")


# ---- the driver ---------------------------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """With directories and a socket of its own, so that no daemon of this machine is meant."""
    places = {"run_dir": str(tmp_path / "run"), "containers_dir": (str(tmp_path / "containers"),)}
    return Node(settings(**places), nvml_seconds=10.0)


def again(node: Node) -> Node:
    """The same, not asked yet."""
    return Node(node.settings, nvml_seconds=node.nvml_seconds)


def test_a_driver_that_is_well(driver: Driver, node: Node) -> None:
    says(gpu.nvml(node), "ok", found="driver 550.54.15")
    says(gpu.gpus(node), "ok", found=f"2 GPUs: {DEFAULT_DEVICES[0].uuid}")
    says(gpu.driver(node), "ok", found="hostpid = host PID, by version")
    says(gpu.sample_clock(node), "ok", found="no samples")


def test_no_library(driver: Driver, node: Node) -> None:
    driver.remove()
    says(gpu.nvml(node), "failed", found="LibraryNotFound", cause="libnvidia-ml.so.1", fix="ldconfig -p")
    for look in (gpu.gpus, gpu.driver, gpu.sample_clock):
        says(look(node), "unknown", found="NVML does not answer", fix="the check nvml")


def test_kernel_module_not_loaded(driver: Driver, node: Node) -> None:
    driver.gpu.set_faults(Fault.DRIVER_NOT_LOADED)
    says(gpu.nvml(node), "failed", found="DriverNotLoaded", fix="modprobe nvidia")


def test_library_and_module_of_two_versions(driver: Driver, node: Node) -> None:
    driver.gpu.driver_version = "470.42.01"
    says(gpu.nvml(node), "failed", found="LibRmVersionMismatch", cause="upgraded", fix="reboot")


def test_a_driver_that_hangs(driver: Driver, node: Node) -> None:
    driver.gpu.set_faults(hang=Hang.INIT)
    began = time.monotonic()
    node = Node(node.settings, nvml_seconds=1.0)
    says(gpu.nvml(node), "failed", found="did not answer within", cause="hangs", fix="nvidia-smi")
    assert time.monotonic() - began < 20


def test_no_gpu(driver: Driver, node: Node) -> None:
    driver.gpu.set_devices([])
    says(gpu.gpus(node), "failed", found="NVML shows no GPU", fix="lspci")


def test_a_lost_gpu_and_a_hot_one(driver: Driver, node: Node) -> None:
    first, second = DEFAULT_DEVICES
    driver.gpu.set_devices([replace(first, lost=True), replace(second, temperature_c=97)])
    finding = gpu.gpus(node)
    says(finding, "failed", fix="dmesg")
    assert second.uuid in finding.found
    assert "lost" in f"{finding.found} {finding.cause}".lower()
    assert "97" in finding.cause


def test_a_gpu_in_mig_mode(driver: Driver, node: Node) -> None:
    driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], mig_enabled=True), DEFAULT_DEVICES[1]])
    says(gpu.gpus(node), "warning", found=DEFAULT_DEVICES[0].uuid, cause="never 0", fix="nvidia-smi -mig 0")


@pytest.mark.parametrize(
    ("version", "forced", "state", "words"),
    [
        ("535.104.05", "auto", "ok", "hostpid = host PID, by version"),
        ("570.86.15", "auto", "ok", "hostpid = container PID, by version"),
        ("566.36", "auto", "failed", "not known which PIDs"),
        ("566.36", "host", "ok", "hostpid = host PID, forced"),
    ],
)
def test_driver_rows(driver: Driver, node: Node, version: str, forced: str, state: str, words: str) -> None:
    driver.install(version)
    told = Settings(run_dir=node.settings.run_dir, hostpid_namespace=HostpidNamespace(forced))
    finding = gpu.driver(Node(told))
    says(finding, state, found=words, fix="--hostpid-namespace" if state == "failed" else "")


def test_samples_from_the_future(driver: Driver, node: Node) -> None:
    driver.sample(4711, 50, age_s=3)
    says(gpu.sample_clock(node), "ok", found="s old")
    driver.sample(4711, 50, age_s=-3600)
    says(gpu.sample_clock(again(node)), "failed", found="ahead of this clock", fix="timedatectl")


# ---- HAMi's files -------------------------------------------------------------------------------------------------


@pytest.fixture
def containers(tmp_path: Path) -> Path:
    path = tmp_path / "containers"
    path.mkdir()
    return path


def looking_at(containers: Path, **more: Any) -> Node:
    return Node(Settings(containers_dir=(str(containers),), **more))


def test_regions_that_are_well(containers: Path) -> None:
    for name in cachefiles.NAMES:
        cachefiles.container(containers, name.replace(".", ""), name)
    finding = hami.regions(looking_at(containers))
    says(finding, "ok", found="5 regions: 1 of layout v0, 1 of layout v0-no-util")
    says(hami.containers_dir(looking_at(containers)), "ok", found=str(containers))


def test_more_regions_than_one_look_opens(containers: Path) -> None:
    for number in range(300):
        cachefiles.container(containers, f"c{number}", "v0-no-util")
    says(hami.regions(looking_at(containers)), "ok", found="300 regions")


def test_no_containers_directory(tmp_path: Path) -> None:
    node = looking_at(tmp_path / "nowhere")
    says(hami.containers_dir(node), "failed", found="does not exist", fix="--containers-dir")
    says(hami.regions(node), "unknown", fix="containers_dir")
    (tmp_path / "file").touch()
    says(hami.containers_dir(looking_at(tmp_path / "file")), "failed", found="is no directory")


def test_one_of_two_directories_is_missing(containers: Path, tmp_path: Path) -> None:
    node = Node(Settings(containers_dir=(str(containers), str(tmp_path / "nowhere"))))
    finding = hami.containers_dir(node)
    says(finding, "failed", found=f"{tmp_path}/nowhere does not exist")
    assert str(containers) not in finding.found
    says(hami.regions(node), "ok", found="none yet")


def _unknown_layout(path: Path) -> None:
    cachefiles.write(path, cachefiles.recorded("v1.2") + b"\0" * 8)


def _unknown_version(path: Path) -> None:
    cachefiles.poke(path, 4, "II", 7, 3)


def _symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def _hard_link(path: Path) -> None:
    os.link(path, path.parent.parent / "other-name")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _crowd(path: Path) -> None:
    for number in range(80):
        (path.parent / f"junk-{number}").touch()


def _magic(path: Path) -> None:
    cachefiles.poke(path, 0, "I", 0)


@pytest.mark.parametrize(
    ("damage", "state", "reason", "words"),
    [
        (_unknown_layout, "failed", "unknown_size", "known: v0-no-util"),
        (_unknown_version, "failed", "unknown_version", "a newer HAMi"),
        (_symlink, "warning", "symlink", "a tenant did"),
        (_hard_link, "warning", "hard_link", "more than one name"),
        (_fifo, "warning", "not_regular", "no plain file"),
        (_crowd, "warning", "too_many_entries", "more entries"),
        (_magic, "warning", "not_initialized", "magic number"),
    ],
)
def test_a_file_that_is_left_alone(
    containers: Path, damage: Callable[[Path], None], state: str, reason: str, words: str
) -> None:
    cachefiles.container(containers, "well")
    path = cachefiles.container(containers, "odd")
    damage(path)
    finding = hami.regions(looking_at(containers))
    says(finding, state, found=f"skipped, {reason}", cause=words, fix="_odd")
    assert "region: 1 of layout v1.2" in finding.found or "2 of layout v1.2" in finding.found


def test_every_reason_has_a_cause_and_a_remedy() -> None:
    assert set(hami.REFUSALS) == set(RegionReason)
    for state, cause, fix in hami.REFUSALS.values():
        assert state in (State.WARNING, State.FAILED)
        assert cause
        assert "/a path" in fix.format("/a path")


def test_a_name_that_would_move_the_cursor_is_printed_harmless(containers: Path) -> None:
    odd = cachefiles.container(containers, "odd").rename(
        containers / f"{cachefiles.POD_UID}_odd/\x1b[2J.cache"
    )
    odd.write_bytes(b"short")
    done = resolver("--only", "regions", "--containers-dir", str(containers))
    assert done.returncode == 1
    assert "\x1b" not in done.stdout
    assert "\\x1b[2J.cache" in done.stdout


def test_names_of_pods(containers: Path, tmp_path: Path) -> None:
    cachefiles.container(containers)
    logs = tmp_path / "pods"
    node = looking_at(containers, pod_logs_dir=str(logs))
    says(hami.pod_names(node), "warning", found="does not exist", cause="stay empty", fix="--pod-logs-dir")
    (logs / "default_other_0d4b0b0e-0000-4b8a-9a36-3d6f2b7d1c01").mkdir(parents=True)
    says(hami.pod_names(node), "warning", found="none of those with regions")
    (logs / f"team_train_{cachefiles.POD_UID}").mkdir()
    says(hami.pod_names(node), "ok", found="2 pods named")


def test_the_slot_writer(node: Node) -> None:
    says(hami.writer(node), "ok", found="compare-and-swap")


# ---- the socket, the port, the broker -----------------------------------------------------------------------------


@pytest.fixture
def place(node: Node) -> str:
    """Where the API's socket is to be, in a directory that is there."""
    os.mkdir(node.settings.run_dir)
    assert len(node.settings.socket_path) < 108
    return node.settings.socket_path


def test_no_socket_and_no_daemon(node: Node) -> None:
    says(sockets.api(node), "ok", found="no daemon that would make it")
    says(daemon.daemon(node), "warning", found="none runs", fix="resolver run")
    says(daemon.instances(node), "ok", found="the lock is free")


def test_a_socket_that_was_left_behind(node: Node, place: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
    says(sockets.api(node), "warning", found="nobody listens", cause="killed", fix="next start")


def test_a_file_in_its_place(node: Node, place: str) -> None:
    Path(place).write_text("precious")
    says(sockets.api(node), "failed", found="is no socket", fix=f"rm {place}")


def test_a_socket_of_somebody_else(node: Node, place: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        os.chown(place, 12345, 12345)
        says(sockets.api(node), "failed", found="belongs to user 12345", fix="keep others out")


def test_a_listener_that_accepts_nobody(node: Node, place: str) -> None:
    """Its queue is full: a connection would wait for ever."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(place)
        listener.listen(0)
        waiting.connect(place)
        says(sockets.api(node), "failed", found="does not answer", fix="ss -xlp")


@pytest.mark.parametrize(
    "answer",
    [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}",
     b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull"],
)  # fmt: skip
def test_a_listener_that_is_no_resolver(node: Node, place: str, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()

        def serve() -> None:
            for _ in range(2):  # asked twice: whether it accepts, and how it is
                connection, _ = listener.accept()
                with connection, suppress(BrokenPipeError):  # the first goes away without a word
                    connection.settimeout(60)
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        says(sockets.api(node), "failed", found="does not answer")
        thread.join(60)


STATUS = {
    "at": 0.0,
    "version": "",
    "started_at": 0.0,
    "host_pid": 4242,
    "dry_run": False,
    "source": {"name": "bpf", "not_ready": None, "incomplete": None},
    "driver": {"error": None},
    "policy": {"namespace": "container", "why": "seen", "origin": "measured"},
    "totals": {"containers": 3, "regions": 2, "slots": 5, "slots_unresolved": 0},
    "counters": {},
}


def told(node: Node, **changes: Any) -> Node:
    """A node whose daemon says this."""
    from resolver import __version__

    node.__dict__["status"] = {**STATUS, "at": time.time(), "version": __version__} | changes
    return node


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({}, "ok", "source bpf: 3 containers, 2 regions, 5 slots"),
        ({"at": 1_700_000_000.0}, "failed", "its last pass was"),
        ({"source": {**STATUS["source"], "not_ready": "blind"}}, "failed", "not ready: blind"),  # type: ignore[dict-item]
        ({"source": {**STATUS["source"], "incomplete": "full"}}, "warning", "its map is incomplete"),  # type: ignore[dict-item]
        ({"driver": {"error": "gone"}}, "warning", "NVML does not answer it"),
        ({"dry_run": True}, "warning", "it is a dry run"),
        ({"totals": {**STATUS["totals"], "slots_unresolved": 2}}, "warning", "2 slots unresolved"),  # type: ignore[dict-item]
        ({"counters": {"over_budget": 2}}, "warning", "a container went over its budget 2 times"),
        ({"counters": {"out_of_descriptors": 1}}, "warning", "ran out of descriptors"),
        ({"counters": {"internal_errors": 1}}, "warning", "1 internal error"),
        ({"version": "0.0.1"}, "warning", "this command is"),
    ],
)
def test_what_a_daemon_is_not_content_with(
    node: Node, changes: dict[str, Any], state: str, words: str
) -> None:
    says(daemon.daemon(told(node, **changes)), state, found=words)


def test_what_the_daemon_measured_counts(node: Node) -> None:
    says(gpu.driver(told(node)), "ok", found="hostpid = container PID, measured")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def serving(node: Node, address: str) -> Node:
    return Node(Settings(run_dir=node.settings.run_dir, metrics_addr=address))


def test_a_free_port_and_no_metrics(node: Node) -> None:
    says(ports.metrics(serving(node, f":{free_port()}")), "ok", found="is free")
    says(ports.metrics(serving(node, "off")), "ok", found="off")
    says(ports.metrics(serving(node, ":0")), "ok", found="the kernel chooses")


@pytest.mark.parametrize(
    ("family", "bound", "asked"),
    [
        (socket.AF_INET, "0.0.0.0", ""),  # noqa: S104 - every address is what the default takes
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "127.0.0.1", ""),
        (socket.AF_INET6, "::1", "[::1]"),
    ],
)
def test_a_port_that_another_has(node: Node, family: socket.AddressFamily, bound: str, asked: str) -> None:
    with closing(socket.create_server((bound, 0), family=family)) as other:
        port = other.getsockname()[1]
        finding = ports.metrics(serving(node, f"{asked}:{port}"))
        says(finding, "failed", found=f"PID {os.getpid()}", cause="metrics_off", fix="ss -ltnp")
        assert node.procfs.comm(os.getpid()) in finding.found


def test_a_port_that_another_has_on_another_address(node: Node) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        says(ports.metrics(serving(node, f"127.0.0.2:{other.getsockname()[1]}")), "ok", found="is free")


def test_the_tenants_socket(node: Node, tmp_path: Path) -> None:
    says(sockets.tenants(node), "ok", found="off")
    path = tmp_path / "tenants" / "resolver.sock"
    node = Node(Settings(run_dir=str(tmp_path), tenant_socket=str(path)))
    says(sockets.tenants(node), "ok", found="no daemon that would make it")
    path.parent.mkdir(mode=0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        says(sockets.tenants(node), "warning", found="nobody listens")
        listener.listen()
        says(sockets.tenants(node), "ok", found="connected in")
        path.chmod(0o660)
        says(sockets.tenants(node), "failed", found="0660", cause="cannot connect", fix=f"chmod 0666 {path}")
        path.chmod(0o666)
        path.parent.chmod(0o700)
        says(sockets.tenants(node), "failed", found="0700", cause="cannot connect")
        path.parent.chmod(0o777)
        says(sockets.tenants(node), "failed", found="0777", cause="of their own", fix="chmod 0755")
        path.parent.chmod(0o755)
        os.chown(path, 12345, 12345)
        says(sockets.tenants(node), "failed", found="belongs to user 12345")


HOLDER = """
import sys
from resolver.linux import capabilities, seccomp
from resolver.linux.node_lock import NodeLock
with NodeLock(sys.argv[1]):
    if sys.argv[2] == "filtered":
        capabilities.limit(frozenset())
        seccomp.forbid(seccomp.DANGEROUS)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(("how", "state"), [("filtered", "ok"), ("open", "warning")])
def test_the_filter_of_system_calls(tmp_path: Path, how: str, state: str) -> None:
    def node() -> Node:
        return Node(Settings(run_dir=str(tmp_path)))

    says(permissions.system_calls(node()), "ok", found="no daemon runs")
    command = [sys.executable, "-c", HOLDER, str(tmp_path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        says(permissions.system_calls(node()), state, found=f"PID {holder.pid} has")
        assert holder.stdin is not None
        holder.stdin.close()


def test_a_machine_without_a_filter() -> None:
    says(permissions.system_calls(Node(uname=("6.1", "riscv64"))), "warning", found="no filters")


def test_the_brokers_directory(tmp_path: Path) -> None:
    says(sockets.broker(Node()), "ok", found="off")
    path = tmp_path / "hostpid" / "broker.sock"
    node = Node(Settings(broker=str(path)))
    says(sockets.broker(node), "warning", found="No such file")
    path.parent.mkdir(mode=0o711)
    path.parent.chmod(0o777)
    says(sockets.broker(node), "failed", found="mode 0777", fix="chmod 0711")
    path.parent.chmod(0o711)
    says(sockets.broker(node), "warning", found="is not there", fix=f"--broker {path}")
    path.touch()
    says(sockets.broker(node), "ok")


# ---- who is a daemon ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        ("/usr/bin/resolver run", True),
        ("/srv/.venv/bin/python /srv/.venv/bin/resolver run --interval 1s", True),
        ("python3.11 -I -m resolver run", True),
        ("python3 -m resolver lookup abc 1", False),
        ("sudo resolver run", False),  # its child is the one
        ("vi resolver run", False),
        ("python3 -I -S /srv/resolver/workers/child.py resolver.workers.slot_writer", False),
        ("resolver", False),
        ("", False),
    ],
)
def test_command_lines(command: str, *, is_one: bool) -> None:
    assert runs_daemon(command.split()) == is_one


def test_settings_on_a_command_line() -> None:
    words = "resolver run --containers-dir /a --containers-dir=/b --dry-run --source scan --run /r --once --config c"
    assert flags_in(words.split()) == {
        "containers_dir": ["/a", "/b"],
        "dry_run": True,
        "source": "scan",
        "run_dir": "/r",
        "config": "c",
    }


def test_who_looks_after_the_same_files() -> None:
    def other(*directories: str) -> Other:
        return Other(("resolver", "run"), Settings(containers_dir=directories))

    ours = Settings(containers_dir=("/a", "/b/"))
    assert other("/c", "/b").same_files(ours)
    assert not other("/c").same_files(ours)
    assert Other(("resolver", "run"), None).same_files(ours)  # it might


def test_settings_as_a_daemon_tells_them() -> None:
    plain = {"interval": 1.0, "source": "scan"}
    as_list = [{"name": name, "value": value, "origin": "default"} for name, value in plain.items()]
    as_dict = {name: {"value": value, "origin": "default"} for name, value in plain.items()}
    for form in (plain, as_list, as_dict):
        assert from_status({"settings": form}) == plain
    assert from_status({}) == {}


# ---- the command --------------------------------------------------------------------------------------------------


def here(place: Path) -> tuple[str, ...]:
    """Directories of its own, so that no daemon of this machine is meant."""
    return "--run-dir", str(place), "--containers-dir", str(place / "containers")


def resolver(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return called("doctor", *arguments, **environ)


def test_json_has_an_object_for_each_check(tmp_path: Path) -> None:
    done = resolver("--json", "--only", "kernel", "--only", "daemon", *here(tmp_path))
    results = json.loads(done.stdout)
    assert [(result["check"], result["state"]) for result in results] == [
        ("kernel", "ok"),
        ("daemon", "warning"),
    ]
    assert all(list(result) == ["check", "state", "found", "cause", "fix", "detail"] for result in results)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_exit_code_is_by_the_worst(tmp_path: Path) -> None:
    def code(*arguments: str) -> int:
        return resolver(*here(tmp_path), *arguments).returncode

    assert code("--only", "kernel", "--only", "daemon") == 0  # ok and a warning
    assert code("--only", "regions") == 4
    assert code("--only", "regions", "--only", "containers_dir") == 1


def test_plain_text_is_the_same_for_everybody(tmp_path: Path) -> None:
    done = resolver(
        "--only", "containers_dir", "--only", "broker", "--containers-dir", str(tmp_path / "none")
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"failed   containers_dir  {tmp_path}/none does not exist"
    assert lines[1].startswith("         cause   HAMi's device plugin")
    assert lines[2].startswith("         fix     kubectl")
    assert lines[3:] == ["ok       broker          off", "", "2 checks: 1 ok, 1 failed"]


def test_a_check_that_is_not_there() -> None:
    done = resolver("--only", "knee")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("resolver doctor: there is no check 'knee'; there are: settings, root")


def test_the_list_of_checks() -> None:
    lines = resolver("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [check.name for check in CHECKS]


def test_a_settings_file_that_is_wrong_is_a_finding(tmp_path: Path) -> None:
    config = tmp_path / "resolver.toml"
    config.write_text("intervall = '1s'\n")
    done = resolver("--only", "settings", "--only", "kernel", "--json", "--config", str(config))
    first, second = json.loads(done.stdout)
    assert (first["state"], second["state"], done.returncode) == ("failed", "ok", 1)
    assert "intervall" in first["found"]
    assert resolver("--interval", "soon").returncode == 2  # on this very command line it is wrong usage


def test_where_the_settings_come_from(tmp_path: Path) -> None:
    done = resolver("--only", "settings", "--run-dir", str(tmp_path), RESOLVER_INTERVAL="1s")
    assert "interval by environment RESOLVER_INTERVAL" in done.stdout
    assert "run_dir by command line" in done.stdout


def on_terminal(*arguments: str, **environ: str) -> str:
    """What a terminal of 80 columns is sent."""
    ours, theirs = pty.openpty()
    os.set_inheritable(theirs, True)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", **environ}
    environment = {name: value for name, value in environment.items() if value}
    command = [sys.executable, "-m", "resolver", "doctor", *arguments]
    child = subprocess.Popen(command, stdout=theirs, stdin=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # EIO: the child has closed its end
        pass
    finally:
        os.close(ours)
    child.wait(30)
    return seen.decode()


def test_on_a_terminal_it_shows_what_it_looks_at_and_has_colour(tmp_path: Path) -> None:
    arguments = ("--only", "containers_dir", "--containers-dir", str(tmp_path / "none"))
    seen = on_terminal(*arguments, NO_COLOR="")
    assert "...      containers_dir\r\x1b[K" in seen
    assert "\x1b[31mfailed" in seen
    plain = re.sub(r"\x1b\[[0-9;]*[mK]", "", seen).replace("\r\n", "\n").split("\r")[-1]
    assert max(map(len, plain.splitlines())) <= 80 + len(str(tmp_path))  # no path is broken
    assert "\x1b[31m" not in on_terminal(*arguments, NO_COLOR="1")
    assert "\x1b" not in on_terminal(*arguments, TERM="dumb")


# ---- whose files are where -----------------------------------------------------------------------------------------


def test_which_schedulers_files_were_found_where(tmp_path: Path) -> None:
    plugin, claims = tmp_path / "containers", tmp_path / "claims"
    cachefiles.container(plugin, "a")
    cachefiles.container(plugin, "b")
    claim = "7d0c6e3e-2f6d-4e0b-9b57-0d3c8f4b5a12"
    cachefiles.write(claims / claim / "a.cache", cachefiles.recorded("v1.2"))
    node = Node(Settings(containers_dir=(str(plugin), str(claims))))
    says(hami.containers_dir(node), "ok", found=f"{plugin} (2 of hami), {claims} (1 of dra)")


def test_auto_without_any_schedulers_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hami, "KNOWN_DIRS", (str(tmp_path / "none"),))
    says(hami.containers_dir(Node(Settings())), "failed", found="none of", fix="--containers-dir")


@pytest.mark.parametrize(
    ("hook", "expected"),
    [("/tmp/vgpu", True), ("/usr/local/vgpu", False), ("/usr/local/vgpu/vgpu", False), ("", False)],  # noqa: S108
)
def test_volcanos_monitor_reads_another_directory(tmp_path: Path, hook: str, expected: bool) -> None:  # noqa: FBT001
    process = tmp_path / "4711"
    process.mkdir()
    (process / "comm").write_text("volcano-vgpu-mo\n")
    (process / "environ").write_bytes(b"PATH=/bin\0" + f"HOOK_PATH={hook}\0".encode())
    finding = hami.volcano_mismatch(["/usr/local/vgpu/vgpu/containers"], Procfs(str(tmp_path)))
    assert (finding is not None) is expected
    if finding is not None:
        says(finding, "warning", found="PID 4711", cause="HOOK_PATH", fix="HOOK_PATH=/usr/local/vgpu/vgpu")
    assert hami.volcano_mismatch(["/usr/local/vgpu/containers"], Procfs(str(tmp_path))) is None
