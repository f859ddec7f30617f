"""The tenant's view on the tenants' socket: a container's own processes, by its own PIDs, and nothing of others."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from resolver.api.own import visible_numbers
from resolver.containers.namespaces import Namespace
from resolver.linux.cgroup import ContainerCgroup
from resolver.linux.procfs import Procfs
from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.kernel.conftest import Start
from tests.kernel.test_access import IN_A_NAMESPACE_OF_ITS_OWN, OWN_VIEW, PYTHON, Asker, asker, roots
from tests.patience import until


@pytest.fixture
def path(open_place: Path, node: Node, start: Start) -> Path:
    path = open_place / "tenants" / "resolver.sock"
    options = ["--socket", str(roots(path)), "--tenant-socket", str(path)]
    start(node, "--interval", "50ms", "--nvml-interval", "200ms", *options)
    until(lambda: path.exists() and roots(path).exists(), "its sockets")
    return path


class Pair:
    def __init__(self, node: Node) -> None:
        (device, *_) = node.gpu.devices
        self.device = device
        self.mine = node.container(name="mine", devices=[device])
        self.other = node.container(name="other", devices=[device])
        self.first = self.mine.tenant(load=20, devices=[device])
        self.second = self.mine.tenant(load=10, devices=[device])
        self.theirs = self.other.tenant(load=30, devices=[device])

    def secrets(self) -> list[str]:
        host_pids = [each.host_pid for each in (self.first, self.second, self.theirs)]
        return [self.other.container_id, self.other.pod_uid, *map(str, host_pids)]


@pytest.fixture
def pair(node: Node) -> Pair:
    return Pair(node)


def pids(document: Any) -> list[int]:
    return sorted(process["pid"] for process in document["processes"])


def wait_for_processes(ask: Asker, expected: list[int]) -> Any:
    until(lambda: pids(ask("/v1/processes")[1]) == sorted(expected), f"the processes {expected}")
    return ask("/v1/processes")[1]


def test_container_sees_only_its_own_by_own_pids(pair: Pair, node: Node, path: Path) -> None:
    sidecar = node.container(pair.mine.pod_uid, "sidecar", pid_namespace=pair.mine)
    ask, both = asker(pair.mine, path), {pair.first.ns_pid, pair.second.ns_pid}
    seen = wait_for_processes(ask, [*both])
    assert {process["comm"] for process in seen["processes"]} == {"tenant"}
    wait_for_processes(asker(pair.other, path), [pair.theirs.ns_pid])
    until(lambda: {slot["pid"] for slot in ask("/v1/slots")[1]["slots"]} == both
          and not any(slot["unresolved"] for slot in ask("/v1/slots")[1]["slots"]), "its slots")  # fmt: skip
    until(lambda: ask("/v1/usage")[1]["gpus"][0]["sm_util"] == 30, "its use of the GPU")
    (gpu,) = ask("/v1/usage")[1]["gpus"]
    assert gpu["device_uuid"] == pair.device.uuid
    listed = ask("/v1/processes")[1]["processes"]
    assert gpu["memory_used"] == sum(process["memory"] for process in listed) > 0

    # The view has no host PID and no other container.
    for route in (*OWN_VIEW, "/v1/openapi.json"):
        text = json.dumps(ask(route)[1])
        assert [secret for secret in pair.secrets() if f'"{secret}' in text or f" {secret}" in text] == [], (
            route
        )
    described = ask("/v1/openapi.json")[1]["components"]["schemas"]
    assert "host_pid" not in described["OwnProcess"]["properties"]
    assert "hostpid" not in described["OwnSlot"]["properties"]

    # A nested namespace sees the container's slots without PIDs; the pod's other container sees none.
    inner = Asker(pair.mine.spawn([*PYTHON, IN_A_NAMESPACE_OF_ITS_OWN, str(path)]))
    assert inner("/v1/processes")[1]["processes"] == []
    until(lambda: inner("/v1/slots")[1]["slots"], "the container's slots")
    assert {slot["pid"] for slot in inner("/v1/slots")[1]["slots"]} == {None}
    beside = asker(sidecar, path)
    assert beside("/v1/processes")[1]["processes"] == []
    assert beside("/v1/usage")[1]["gpus"] == []

    pair.second.kill()
    wait_for_processes(ask, [pair.first.ns_pid])


def test_process_of_others_or_ended_has_no_number(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's snapshot can be older than the reuse of a PID; a process may end while it is read."""
    own, host_pids = Namespace(pair.mine.pidns, 1), [pair.first.host_pid, pair.theirs.host_pid, os.getpid()]
    procfs = Procfs()
    numbers = visible_numbers(procfs, own, pair.mine.container_id, host_pids)
    assert numbers == {pair.first.host_pid: pair.first.ns_pid}
    assert visible_numbers(procfs, own, pair.other.container_id, host_pids) == {}
    container = procfs.container

    def ends(host_pid: int) -> ContainerCgroup:
        found = container(host_pid)
        pair.first.kill()
        return found

    monkeypatch.setattr(procfs, "container", ends)
    assert visible_numbers(procfs, own, pair.mine.container_id, [pair.first.host_pid]) == {}


def test_hundred_clients_at_once_get_their_own(node: Node, pair: Pair, path: Path) -> None:
    more = [node.container(name=f"c{number}", devices=[pair.device]) for number in range(8)]
    containers = [pair.mine, pair.other, *more]
    tenants = [each.tenant(load=1, devices=[pair.device]) for each in more]
    wanted = [[pair.first.ns_pid, pair.second.ns_pid], *([each.ns_pid] for each in (pair.theirs, *tenants))]
    for container, expected in zip(containers, wanted, strict=True):
        wait_for_processes(asker(container, path), expected)
    askers = [
        (asker(container, path), expected)
        for container, expected in zip(containers, wanted, strict=True)
        for _ in range(10)
    ]
    with ThreadPoolExecutor(len(askers)) as pool:
        answers = pool.map(lambda each: (each[0]("/v1/processes"), each[1]), askers)
        for (status, document), expected in answers:
            assert (status, pids(document)) == (200, sorted(expected))


@pytest.fixture
def packed(root: Path, tmp_path: Path) -> Path:
    subprocess.run(["make", "view", f"DIST={tmp_path}"], cwd=root, check=True, capture_output=True)
    return tmp_path / "resolver-view.pyz"


def inside(container: Container, *command: str) -> subprocess.CompletedProcess[str]:
    process = container.spawn(["/bin/sh", "-c", f"{shlex.join(command)} 2>&1; echo status $?; read -r _"])
    lines = []
    while not (line := process.read_line()).startswith("status "):
        lines.append(line)
    return subprocess.CompletedProcess(command, int(line.split()[1]), "\n".join(lines), "")


def test_commands_in_a_container_show_its_own(pair: Pair, path: Path, packed: Path, open_place: Path) -> None:
    wait_for_processes(asker(pair.mine, path), [pair.first.ns_pid, pair.second.ns_pid])
    program = shutil.copy(packed, open_place / "view.pyz")
    done = inside(pair.mine, sys.executable, str(program), "--socket", str(path))
    assert done.returncode == 0, done.stdout
    head, *rows = done.stdout.split("\n\n")[1].splitlines()
    assert head.split() == ["PID", "GPU", "COMMAND", "CORES", "MEMORY", "NOTE"]
    assert {row.split()[0] for row in rows} == {str(pair.first.ns_pid), str(pair.second.ns_pid)}
    absent = inside(pair.mine, sys.executable, str(program), "--socket", "/nowhere/x.sock")
    assert (absent.returncode, "tenant_socket" in absent.stdout) == (1, True)
    for command in ("top", "usage", "explain"):
        done = inside(pair.mine, sys.executable, "-m", "resolver", command, "--socket", str(path))
        assert done.returncode == 0, done.stdout
        assert pair.other.container_id[:12] not in done.stdout
        assert ("COMMAND" in done.stdout) == (command != "usage")
