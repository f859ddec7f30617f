"""The checks of `resolver doctor` on fake kernels, drivers and directories.

tests/kernel/test_doctor.py causes real faults, with namespaces, capabilities and a daemon.
"""

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from resolver.api.status import DaemonTrouble, state_of
from resolver.base import lock_holder
from resolver.base.errors import UsageError
from resolver.cli import in_force
from resolver.cli.in_force import settings_in_force
from resolver.config import HostpidNamespace, Settings
from resolver.doctor import Check, bounded, daemon, gpu, hami
from resolver.doctor.findings import Finding, State, failed, ok, together, warning
from resolver.doctor.node import Node
from tests.fakes import cachefiles
from tests.fakes.command import called, on_terminal
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.pictures import picture
from tests.fakes.state import Answer, Fault, Hang
from tests.patience import PATIENCE_S
from tests.unit.conftest import Driver


def says(finding: Finding, state: str, *, found: str = "", cause: str = "", fix: str = "") -> None:
    """Check a finding's state and words; a problem has both a cause and a fix."""
    assert finding.state == state, finding
    for words, text in ((found, finding.found), (cause, finding.cause), (fix, finding.fix)):
        assert words in text, finding
    assert bool(finding.cause) == bool(finding.fix) == (state != "ok"), finding


def test_several_troubles_are_as_bad_as_the_worst() -> None:
    finding = together("well", [warning("slow", "old", "buy"), failed("dead", "cut", "plug")])
    assert finding == (State.FAILED, "dead; slow", "cut\nold", "plug\nbuy", "")
    assert together("well", []) == ok("well")


def test_a_defect_in_a_check_is_told() -> None:
    def broken(_node: Node) -> Finding:
        raise ZeroDivisionError("division by zero")

    words = "a defect in the check: ZeroDivisionError: division by zero"
    says(bounded(Check("broken", broken), Node()), "failed", found=words, fix="--only broken")


def test_a_check_that_hangs_is_left_behind() -> None:
    release = threading.Event()

    def hangs(_node: Node) -> Finding:
        release.wait(1000)
        return ok("late")

    began = time.monotonic()
    says(bounded(Check("hangs", hangs, 0.1), Node()), "unknown", found="no answer within 0.1 s", fix="wchan")
    assert time.monotonic() - began < PATIENCE_S
    release.set()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Return a node with its own directories and socket, apart from any daemon of this machine."""
    settings = Settings(run_dir=str(tmp_path / "run"), containers_dir=(str(tmp_path / "containers"),))
    return Node(settings, nvml_seconds=10.0)


def test_a_driver_that_is_well(driver: Driver, node: Node) -> None:
    says(gpu.nvml(node), "ok", found="driver 550.54.15")
    says(gpu.nvml(node), "ok", found=f"2 GPUs: {DEFAULT_DEVICES[0].uuid}")
    says(gpu.driver(node), "ok", found="hostpid = host PID, by version")


def test_gpu_without_memory_is_named(driver: Driver, node: Node) -> None:
    unified = replace(DEFAULT_DEVICES[0], errors={Answer.MEMORY: 3})  # NVML_ERROR_NOT_SUPPORTED, as on GB10
    driver.gpu.set_devices([unified, DEFAULT_DEVICES[1]])
    says(gpu.nvml(node), "ok", found=f"{unified.uuid}: no device memory of its own, so its Device object")


def other_library(driver: Driver) -> None:
    driver.gpu.driver_version = "470.42.01"


DRIVERS: dict[str, tuple[Callable[[Driver], object], dict[str, str]]] = {
    "no library": (
        Driver.remove,
        {"found": "LibraryNotFound", "cause": "libnvidia-ml.so.1", "fix": "ldconfig -p"},
    ),
    "no module": (
        lambda driver: driver.gpu.set_faults(Fault.DRIVER_NOT_LOADED),
        {"found": "DriverNotLoaded", "fix": "modprobe nvidia"},
    ),
    "two versions": (other_library, {"found": "LibRmVersionMismatch", "cause": "upgraded", "fix": "reboot"}),
    "hangs": (
        lambda driver: driver.gpu.set_faults(hang=Hang.INIT),
        {"found": "did not answer within", "cause": "hangs", "fix": "nvidia-smi"},
    ),
    "no GPU": (lambda driver: driver.gpu.set_devices([]), {"found": "NVML shows no GPU", "fix": "lspci"}),
    "MIG": (
        lambda driver: driver.gpu.set_devices([replace(DEFAULT_DEVICES[0], mig_enabled=True)]),
        {
            "state": "warning",
            "found": DEFAULT_DEVICES[0].uuid,
            "cause": "never 0",
            "fix": "nvidia-smi -mig 0",
        },
    ),
}


@pytest.mark.parametrize("kind", DRIVERS)
def test_a_driver_that_is_not(driver: Driver, node: Node, kind: str) -> None:
    damage, words = DRIVERS[kind]
    damage(driver)
    node = Node(node.settings, nvml_seconds=1.0 if kind == "hangs" else 10.0)
    says(gpu.nvml(node), **{"state": "failed"} | words)
    if kind == "no library":
        says(gpu.driver(node), "unknown", found="NVML does not answer", fix="the check nvml")


def test_a_lost_gpu_and_a_hot_one(driver: Driver, node: Node) -> None:
    first, second = DEFAULT_DEVICES
    driver.gpu.set_devices([replace(first, lost=True), replace(second, temperature_c=97)])
    finding = gpu.nvml(node)
    says(finding, "failed", fix="dmesg")
    assert second.uuid in finding.found
    assert "lost" in f"{finding.found} {finding.cause}".lower()
    assert "97" in finding.cause


@pytest.mark.parametrize(
    ("version", "forced", "state", "words"),
    [
        ("570.86.15 vGPU", "auto", "ok", "hostpid = host PID, by machine"),
        ("535.104.05", "auto", "ok", "hostpid = host PID, by version"),
        ("570.86.15", "auto", "ok", "hostpid = container PID, by version"),
        ("566.36", "auto", "failed", "not known which PIDs"),
        ("566.36", "host", "ok", "hostpid = host PID, forced"),
    ],
)
def test_driver_rows(driver: Driver, node: Node, version: str, forced: str, state: str, words: str) -> None:
    version, _, vgpu = version.partition(" ")
    driver.install(version)
    driver.gpu.set_faults(Fault.VGPU if vgpu else 0)
    forcing = Settings(run_dir=node.settings.run_dir, hostpid_namespace=HostpidNamespace(forced))
    finding = gpu.driver(Node(forcing))
    says(finding, state, found=words, fix="--hostpid-namespace" if state == "failed" else "")


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
    says(hami.writer(looking_at(containers)), "ok", found="compare-and-swap")


def test_more_regions_than_one_look_opens(containers: Path) -> None:
    for number in range(300):
        cachefiles.container(containers, f"c{number}", "v0-no-util")
    says(hami.regions(looking_at(containers)), "ok", found="300 regions")


def test_no_containers_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hami, "KNOWN_DIRS", (str(tmp_path / "none"),))
    says(hami.containers_dir(Node(Settings())), "failed", found="none of", fix="--containers-dir")
    node = looking_at(tmp_path / "nowhere")
    says(
        hami.containers_dir(node),
        "failed",
        found="does not exist",
        fix="give that directory with --containers-dir",
    )
    monkeypatch.setattr(hami, "KNOWN_DIRS", (str(tmp_path),))
    says(
        hami.containers_dir(node),
        "failed",
        found="does not exist",
        fix=f"there is {tmp_path}: --containers-dir auto",
    )
    says(hami.regions(node), "unknown", fix="containers_dir")
    (tmp_path / "file").touch()
    says(hami.containers_dir(looking_at(tmp_path / "file")), "failed", found="cannot be listed (Not a dir")


def test_one_of_two_directories_is_missing(containers: Path, tmp_path: Path) -> None:
    node = Node(Settings(containers_dir=(str(containers), str(tmp_path / "nowhere"))))
    finding = hami.containers_dir(node)
    says(finding, "failed", found=f"{tmp_path}/nowhere does not exist")
    assert str(containers) not in finding.found
    says(hami.regions(node), "ok", found="none yet")


def _unknown_layout(path: Path) -> None:
    cachefiles.write(path, cachefiles.recorded("v1.2") + b"\0" * 8)


def _symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("damage", "state", "reason", "words"),
    [
        (_unknown_layout, "failed", "unknown_size", "known: v0-no-util"),
        (_symlink, "warning", "symlink", "a tenant did"),
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


def test_a_name_that_would_move_the_cursor_is_printed_harmless(containers: Path) -> None:
    odd = cachefiles.container(containers, "odd")
    odd.rename(odd.with_name("\x1b[2J.cache")).write_bytes(b"short")
    done = resolver("--only", "regions", "--containers-dir", str(containers))
    assert done.returncode == 0, "the file is refused by its name, which is a warning"
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


@pytest.fixture
def place(node: Node) -> str:
    """Make the run directory; return the path of the API's socket in it."""
    os.mkdir(node.settings.run_dir)
    assert len(node.settings.socket_path) < 108
    return node.settings.socket_path


def test_no_socket_and_no_daemon(node: Node) -> None:
    says(daemon.daemon(node), "warning", found="none runs", fix="resolver run")


def test_unit_without_a_journal_says_so(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "journalctl").symlink_to("/bin/false")
    monkeypatch.setattr(lock_holder, "UNIT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    says(daemon.daemon(node), "failed", found="is installed", cause="unknown (journalctl")


def test_doctor_reads_the_settings_of_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "default"
    monkeypatch.setattr(in_force, "UNIT_SETTINGS", str(file))
    assert in_force.environment() == dict(os.environ)
    file.write_text("# a comment\nRESOLVER_INTERVAL='soon'\n\nOTHER=1\n")
    assert in_force.environment() == {"RESOLVER_INTERVAL": "soon", **os.environ}
    with pytest.raises(UsageError, match="soon"):
        settings_in_force(str(tmp_path / "none.sock"))


def test_a_file_in_its_place(node: Node, place: str) -> None:
    Path(place).write_text("precious")
    says(daemon.daemon(node), "failed", found="another kind of file", fix=f"rm {place}")


def _trouble(summary: str, *, grave: bool) -> DaemonTrouble:
    return DaemonTrouble("a_word", grave, summary, "because", "do")


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({}, "ok", "source scan: 0 containers, 0 regions, 0 slots"),
        ({"troubles": [_trouble("not ready", grave=True)]}, "failed", "0 slots; not ready"),
        ({"troubles": [_trouble("it is a dry run", grave=False)]}, "warning", "0 slots; it is a dry run"),
        ({"version": "0.0.1"}, "warning", "this command is"),
    ],
)
def test_troubles_of_a_daemon_are_findings(
    node: Node, changes: dict[str, Any], state: str, words: str
) -> None:
    node.__dict__["status"] = structs.replace(state_of(picture(), {}), **changes)
    says(daemon.daemon(node), state, found=words)
    says(gpu.driver(node), "ok", found="hostpid = host PID, by version")


def here(place: Path) -> tuple[str, ...]:
    """Return options for separate directories, apart from any daemon of this machine."""
    return "--run-dir", str(place), "--containers-dir", str(place / "containers")


def resolver(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return called("doctor", *arguments, **environ)


def test_json_has_an_object_for_each_check(tmp_path: Path) -> None:
    done = resolver("--json", "--only", "view", "--only", "daemon", *here(tmp_path))
    results = json.loads(done.stdout)
    assert [result["check"] + result["state"] for result in results] == ["viewok", "daemonwarning"]
    assert all(list(result) == ["check", "state", "found", "cause", "fix", "detail"] for result in results)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_exit_code_is_by_the_worst(tmp_path: Path) -> None:
    def code(*arguments: str) -> int:
        return resolver(*here(tmp_path), *arguments).returncode

    assert code("--only", "view", "--only", "daemon") == 0  # ok and a warning
    assert code("--only", "regions") == 4
    assert code("--only", "regions", "--only", "containers_dir") == 1


def test_plain_text_is_the_same_for_all_users(tmp_path: Path) -> None:
    none = ("--containers-dir", str(tmp_path / "none"), "--run-dir", str(tmp_path))
    lines = resolver("--only", "containers_dir", "--only", "scan", *none).stdout.splitlines()
    assert lines[0].startswith("ok       scan            found a process that was just made")
    assert lines[1] == f"failed   containers_dir  {tmp_path}/none does not exist"
    assert lines[2].startswith("         cause   HAMi's device plugin")
    assert lines[3].startswith("         fix     kubectl")
    assert lines[4:] == ["", "2 checks: 1 ok, 1 failed"]


def test_a_settings_file_that_is_wrong_is_a_finding(tmp_path: Path) -> None:
    done = resolver("--only", "settings", "--run-dir", str(tmp_path), RESOLVER_INTERVAL="1s")
    assert "interval=1s (environment RESOLVER_INTERVAL), run_dir=" in done.stdout
    assert f"run_dir={tmp_path} (command line)" in done.stdout
    config = tmp_path / "resolver.toml"
    config.write_text("intervall = '1s'\n")
    done = resolver("--only", "settings", "--only", "view", "--json", "--config", str(config))
    first, second = json.loads(done.stdout)
    assert (first["state"], second["state"], done.returncode) == ("failed", "ok", 1)
    assert "intervall" in first["found"]
    assert resolver("--interval", "soon").returncode == 2  # on this command's own line it is a usage error


def test_terminal_shows_colour(tmp_path: Path) -> None:
    arguments = ("--only", "containers_dir", "--containers-dir", str(tmp_path / "none"))
    seen = on_terminal("doctor", *arguments, code=1, NO_COLOR="")
    assert "\x1b[31mfailed" in seen
    plain = re.sub(r"\x1b\[[0-9;]*m", "", seen)
    assert max(map(len, plain.splitlines())) <= 80 + len(str(tmp_path))  # paths are not wrapped
    assert "\x1b[31m" not in on_terminal("doctor", *arguments, code=1, NO_COLOR="1")
    assert "\x1b" not in on_terminal("doctor", *arguments, code=1, TERM="dumb")
