"""gVisor, alone and as a runtime of Docker: nothing is written, no number is made up, and the reason is said."""

import contextlib
import json
import secrets
import uuid
from collections.abc import Iterable
from pathlib import Path

from tests.fakes.cgroups import cgroup_path
from tests.fakes.command import run
from tests.fakes.node import Node
from tests.kernel.conftest import Start
from tests.patience import never
from tests.runtime.engines.checks import FAST, answer, cgroup_of
from tests.runtime.engines.conftest import Row, Tell
from tests.runtime.engines.docker import Docker
from tests.runtime.engines.engine import Tenants
from tests.runtime.engines.gvisor import GVisor
from tests.runtime.engines.machine import Machine


def refused(tenants: Tenants, ids: Iterable[str], *options: object) -> None:
    """Assert that no id gives an answer for any PID, not even for 1, which a process of gVisor has on the host."""
    for each in ids:
        for slot in tenants.slots():
            done = run("lookup", each, slot.pid, *options)
            assert (done.returncode, done.stdout) == (4, ""), done
            assert "gVisor" in done.stderr


def unwritten(tenants: Tenants, start: Start) -> Row:
    assert tenants.unseen().pid == 1
    tenants.unseen()
    ids = tenants.engine.ids(tenants.name)
    container_id = next(iter(ids.values()))
    refused(tenants, ids.values())
    gofer, sandbox = processes(container_id)
    found = answer("reverse", gofer)
    assert (found["container_id"], found["container_pid"]) == (container_id, None)
    before = tenants.file.read_bytes()
    daemon = start(tenants.node, *FAST)
    daemon.wait_for("source", timeout_s=20)
    never(lambda: daemon.said("repair") or tenants.file.read_bytes() != before, "a write", 2.0)
    socket = ("--socket", daemon.socket)
    refused(tenants, ids.values(), *socket)
    unresolved = answer("status", *socket)["unresolved"]["slots"]
    assert unresolved == {"not_mapped": 1, "no_such_process": 1}
    assert container_id not in json.dumps(answer("containers", *socket))
    row = {
        "cgroup": cgroup_of(tenants, sandbox),
        "ids": [],
        "containers": "not listed",
        "reverse": "the sandbox's container",
        "repair": "not written: `not_mapped`, `no_such_process`",
    }
    tenants.stop()
    return row


def processes(container_id: str) -> tuple[int, int]:
    """Return the host PIDs of the container's gofer and sandbox by their names."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if container_id in (each / "cgroup").read_text():
                found[(each / "cmdline").read_bytes().split(b"\0")[0]] = int(each.name)
    return found[b"runsc-gofer"], found[b"runsc-sandbox"]


def test_alone(machine: Machine, node: Node, start: Start, tell: Tell) -> None:
    container_id, pod_uid = secrets.token_hex(32), str(uuid.uuid4())
    path = cgroup_path("containerd-cgroupfs", "burstable", pod_uid, container_id)
    tenants = Tenants(node, GVisor(machine), f"/{path}", name=container_id, pod_uid=pod_uid)
    tell("gVisor", "`runsc` in a pod's cgroup", unwritten(tenants, start))


def test_under_docker(machine: Machine, node: Node, start: Start, tell: Tell) -> None:
    tenants = Tenants(node, Docker(machine), "--runtime=runsc")
    tell("gVisor", "Docker, `--runtime=runsc`", unwritten(tenants, start))
