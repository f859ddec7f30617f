"""`resolver bundle` of the demo's node beside a real daemon: its contents, and that --redact leaves no name."""

import json
import re
import socket
import tarfile
from pathlib import Path

from tests.fakes.daemon import free_port
from tests.fakes.node import Node
from tests.fakes.regions import LAYOUTS
from tests.kernel.conftest import Start, command
from tests.kernel.serving import serving
from tests.patience import until


def bundle(node: Node, run_dir: Path, pods: Path, file: Path, *words: str) -> dict[str, str]:
    """Make a bundle; repeat until it has every part, because a part that takes ten seconds is left out."""
    files: dict[str, str] = {}

    def complete() -> bool:
        file.unlink(missing_ok=True)
        done = command(node, run_dir, pods, "bundle", "-o", str(file), *words)
        assert done.returncode == 0, done.stderr
        with tarfile.open(file) as archive:
            parts = {m.name.partition("/")[2]: archive.extractfile(m).read().decode() for m in archive}  # type: ignore[union-attr]
        files.update(parts)
        return not any(part["trouble"] for part in json.loads(files["MANIFEST.json"])["parts"].values())

    until(complete, "a bundle without trouble")
    return files


def test_bundle_has_every_part_and_redacted_no_name(node: Node, start: Start, tmp_path: Path) -> None:
    container = node.container(name="sequencer")
    tenant = container.tenant(load=40)
    pods = tmp_path / "pods"
    (pods / f"genomics_assembly-0_{container.pod_uid}" / "sequencer").mkdir(parents=True)
    metrics = ("--metrics-addr", f"127.0.0.1:{free_port()}", "--pod-logs-dir", str(pods))
    daemon = serving(start, node, *metrics)
    daemon.wait_for("repair")

    files = bundle(node, daemon.run_dir, pods, tmp_path / "b.tar.gz")
    assert {check["check"] for check in json.loads(files["doctor.json"])} >= {"view", "regions", "daemon"}
    assert json.loads(files["config.json"])["settings"]["containers_dir"]["value"] == [
        str(node.containers_dir)
    ]
    (slot,) = json.loads(files["slots.json"])["slots"]
    assert (slot["pid"], slot["hostpid"]) == (tenant.ns_pid, tenant.host_pid)
    (cache,) = json.loads(files["cache-files.json"])
    assert (cache["layout"], cache["file_bytes"]) == (container.layout, LAYOUTS[container.layout].size + 1)
    assert any(json.loads(line)["kind"] == "repair" for line in files["events.jsonl"].splitlines())
    assert re.search(r'^resolver_\w+\{.*pod="assembly-0"', files["metrics.txt"], re.MULTILINE)

    hidden = bundle(node, daemon.run_dir, pods, tmp_path / "r.tar.gz", "--redact")
    assert hidden.keys() == files.keys()
    whole = "\n".join(hidden.values())
    short = container.container_id[:12]
    for name in ("sequencer", "genomics", "assembly", container.pod_uid, short, socket.gethostname()):
        assert name in "\n".join(files.values()) or name == socket.gethostname()
        assert not re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", whole), name
    (slot,) = json.loads(hidden["slots.json"])["slots"]
    assert (slot["pid"], slot["hostpid"]) == (tenant.ns_pid, tenant.host_pid)  # PIDs are not redacted
    (told,) = (  # other tests may run containers meanwhile
        each
        for each in json.loads(hidden["containers.json"])["containers"]
        if each["container_id"] == slot["container_id"]
    )
    assert slot["container_name"] == told["container_name"]
    for label in (f'pod="{told["pod"]}"', f'container="{told["container_name"]}"'):
        assert label in hidden["metrics.txt"]
