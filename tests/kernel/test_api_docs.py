"""Every question in docs/api.md is asked of a real daemon, as it stands there, and the answers have that shape."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

from resolver import client
from resolver.api.problems import Reason
from tests.fakes.node import Node
from tests.kernel.conftest import Start, until

CID = "931072da1f44272bcbee5e1c8a22d0c6437c6d05c734f3c3e00d3c2173520dee"


def examples(root: Path) -> list[tuple[str, str]]:
    """Each command of the page, and what is shown as its answer."""
    blocks = re.findall(r"```console\n(.*?)```", (root / "docs/api.md").read_text(), re.DOTALL)
    found = []
    for block in blocks:
        for text in block.split("$ ")[1:]:
            lines = text.replace("\\\n", " ").split("\n")
            found.append((lines[0], "\n".join(lines[1:]).strip()))
    return found


def shape(value: object) -> object:
    """Field names of objects, and of the first one of each list; of an event's fields, which differ, nothing."""
    if isinstance(value, dict):
        return {name: None if name == "fields" else shape(each) for name, each in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else None


def test_the_page_asks_for_every_route(root: Path) -> None:
    asked = " ".join(command for command, _ in examples(root))
    page = (root / "docs/api.md").read_text()
    for name in (
        "lookup",
        "reverse",
        "containers",
        "regions",
        "slots",
        "processes",
        "gpus",
        "unresolved",
        "status",
        "events",
    ):
        assert f"/v1/{name}" in asked
        assert f"GET /v1/{name}" in page


def test_every_reason_is_told(root: Path) -> None:
    section = (root / "docs/api.md").read_text().split("## Refusals")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \| \d", section, re.MULTILINE)) == {str(reason) for reason in Reason}


def test_every_example_is_answered_like_that(
    node: Node, start: Start, source: str, root: Path, tmp_path: Path
) -> None:
    container = node.container(name="serve")
    tenant = container.tenant(load=40, guess="none")
    tenants = tmp_path / "tenants" / "resolver.sock"
    options = ("--interval", "50ms", "--nvml-interval", "200ms", "--tenant-socket", str(tenants))
    daemon = start(node, *options)
    path = daemon.run_dir / "resolver.sock"
    daemon.wait_for("repair")
    until(lambda: client.get_json("/v1/processes", str(path))["processes"], "a process on a GPU")
    for command, shown in examples(root):
        told = command.removeprefix("sudo ").replace("/run/resolver/resolver.sock", str(path))
        told = told.replace(CID, container.container_id).replace(CID[:12], container.container_id[:12])
        told = told.replace("pid=2'", f"pid={tenant.ns_pid}'").replace('", 2]', f'", {tenant.ns_pid}]')
        told = told.replace("10960", str(tenant.host_pid))
        if "lookup?pid=" in told:  # what a process in a container asks
            asked = told.replace(str(path), str(tenants))
            ours = container.spawn(["/bin/sh", "-c", f"{asked} | tr -d '\\n'; echo"])
            assert json.loads(ours.read_line())["host_pid"] == tenant.host_pid
            continue
        done = subprocess.run(shlex.split(told), capture_output=True, text=True, check=False)
        assert done.returncode in ((0, 28) if "--max-time" in told else (0,)), (told, done.stderr)
        if not shown:
            assert json.loads(done.stdout), told
        elif shown.startswith("{"):
            wanted, found = json.loads(shown), json.loads(done.stdout)
            if "answers" in wanted:
                _compare_batch(found, tenant.host_pid)
            assert shape(found) == shape(wanted), told
        elif shown.startswith(":"):
            for line in ("id: ", "event: repair", 'data: {"number":'):
                assert f"\n{line}" in done.stdout
        else:
            assert done.stdout == f"{tenant.host_pid}\n"


def _compare_batch(found: Any, host_pid: int) -> None:
    first, second = found["answers"]
    assert (first["host_pid"], second) == (host_pid, {"reason": "no_such_process"})
