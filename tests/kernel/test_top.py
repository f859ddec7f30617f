"""`resolver top` with the real daemon on a miniature node: what it shows is what the kernel and the driver say."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.fakes.terminal import Terminal
from tests.kernel.conftest import Daemon, Start, hostpid_of, until

FAST = ("--interval", "50ms", "--nvml-interval", "200ms")


def command(daemon: Daemon, *options: str) -> list[str]:
    where = daemon.run_dir / "resolver.sock"
    return [sys.executable, "-m", "resolver", "top", "--socket", str(where), *options]


def as_json(daemon: Daemon) -> dict[str, object]:
    done = subprocess.run(command(daemon, "--json"), capture_output=True, text=True, check=True, timeout=60)
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def title(container: Container) -> str:
    return f"{container.pod_uid[:8]}/{container.name}"


def test_a_repaired_slot_on_the_screen(node: Node, start: Start, source: str) -> None:
    busy, idle = node.container(name="train"), node.container(name="serve")
    tenant = busy.tenant(guess="none", load=62)
    other = idle.tenant(load=0)
    daemon = start(node, *FAST)
    daemon.wait_for("repair", ns_pid=tenant.ns_pid)
    until(lambda: hostpid_of(busy, tenant) == tenant.host_pid, "the repair")
    until((daemon.run_dir / "resolver.sock").exists, "its socket")
    with Terminal(" ".join(["exec", *command(daemon, "--interval", "200ms")]), 120, 40) as terminal:
        line = rf"^ +\S+ +{tenant.host_pid} +{tenant.ns_pid} [━╸─]+ +62% .*✓ missing$"
        text = terminal.wait(lambda text: re.search(line, text, re.MULTILINE))
        assert re.search(rf"^  ▾ {title(busy)} +[━╸─▁-█]+ +62% ", text, re.MULTILINE), text
        assert re.search(rf"^ +\S+ +{other.host_pid} +{other.ns_pid} ─+ +0% ", text, re.MULTILINE), text
        tenant.kill()
        terminal.wait(lambda text: f" {tenant.host_pid} " not in text)
        daemon.stop()
        terminal.wait("no daemon since ")
        again = start(node, *FAST)
        terminal.wait(lambda text: "no daemon since " not in text and title(idle) in text)
        assert again.process.poll() is None


def test_what_programs_get_is_what_the_kernel_says(node: Node, start: Start, source: str) -> None:
    container = node.container(name="train")
    tenants = [container.tenant(guess="none", load=load) for load in (30, 10)]
    daemon = start(node, *FAST)
    until((daemon.run_dir / "resolver.sock").exists, "its socket")

    def shown() -> list[tuple[int, int, int | None, str | None]]:
        gpus = as_json(daemon)["gpus"]
        assert isinstance(gpus, list)
        return sorted(
            (each["host_pid"], each["ns_pid"], each["utilization"], each["repaired"])
            for gpu in gpus
            for one in gpu["containers"]
            if one["container_id"] == container.container_id
            for each in one["processes"]
        )

    wanted = sorted(
        (tenant.host_pid, tenant.ns_pid, load, "missing")
        for tenant, load in zip(tenants, (30, 10), strict=True)
    )
    until(lambda: shown() == wanted, f"{wanted}; shown is {shown()}")
