"""Commands that ask a real daemon on a miniature node."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from resolver.config import Settings
from tests.fakes.command import run
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.kernel.conftest import EVERY_SOURCE, ROOT, Start, write_hostpid
from tests.kernel.serving import serving
from tests.patience import until


def command(daemon: Daemon, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    done = run(*words, "--socket", daemon.socket)
    assert done.returncode in codes, done.stderr
    return done.stdout


def test_config_and_events_follow_the_daemon(node: Node, start: Start, source: str, tmp_path: Path) -> None:
    file = tmp_path / "resolver.toml"
    file.write_text('hostpid_namespace = "host"\nwrite_utilization = "never"\n')
    container = node.container()
    tenant = container.tenant()
    daemon = serving(start, node, "--config", str(file))

    def settings() -> dict[str, Any]:
        answer = json.loads(command(daemon, "config", "--json"))
        assert answer["daemon"] == str(daemon.socket)
        return dict(answer["settings"])

    answer = settings()
    assert set(answer) == set(Settings.__struct_fields__)
    assert answer["interval"] == {"value": 0.05, "origin": "command line"}
    assert answer["hostpid_namespace"] == {"value": "host", "origin": f"file {file}"}
    assert answer["source"] == {"value": source, "origin": "environment RESOLVER_SOURCE"}
    assert answer["broker"] == {"value": "", "origin": "default"}
    file.write_text('write_utilization = "always"\nmap_size = 4096\n')
    daemon.signal(signal.SIGHUP)
    daemon.wait_for("settings_reloaded")
    until(lambda: settings()["write_utilization"]["value"] == "always", "the new value")
    answer = settings()
    assert answer["hostpid_namespace"] == {"value": "auto", "origin": "default"}
    assert answer["map_size"] == {"value": 0, "origin": "default"}  # fixed at start, with its origin

    tenant.until_repaired()
    daemon.wait_for("repair")
    first = json.loads(command(daemon, "events", "--json", "--kind", "repair"))
    assert first["fields"]["ns_pid"] == tenant.ns_pid
    words = ["events", "-f", "--json", "--kind", "repair", "--socket", str(daemon.socket)]
    line, pipe = [sys.executable, "-m", "resolver", *words], subprocess.PIPE
    with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as follower:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline()) == first
        write_hostpid(container, tenant, 0)
        second = json.loads(follower.stdout.readline())
        assert (second["kind"], second["fields"]["reason"]) == ("repair", "missing")
        assert second["number"] > first["number"]
        daemon.stop()
        out, err = follower.communicate(timeout=60)
    assert (follower.returncode, out) == (4, "")
    assert "ended" in err


def test_lookup_takes_the_names_that_top_prints(node: Node, start: Start, tmp_path: Path) -> None:
    # Other tests have containers, too: the name must be unique.
    train, serve = node.container(name="only-here"), node.container(name="serve")
    inside = {each.name: each.tenant(load=10) for each in (train, serve)}
    (tmp_path / "pods" / f"research_train-0_{train.pod_uid}" / "only-here").mkdir(parents=True)
    daemon = serving(start, node, "--pod-logs-dir", str(tmp_path / "pods"))
    until(lambda: "research" in command(daemon, "containers"), "the pod's name")
    expected = f"{inside['only-here'].host_pid}\n"
    ns_pid = str(inside["only-here"].ns_pid)
    pod = "research/train-0"
    for name in (pod, f"{pod}/only-here", train.pod_uid, train.pod_uid[:13], "only-here"):
        assert command(daemon, "lookup", name, ns_pid) == expected, name
    command(daemon, "lookup", "research/train-1", ns_pid, codes=(1,))


@EVERY_SOURCE
def test_container_is_listed_named_and_removed(node: Node, start: Start, source: str, tmp_path: Path) -> None:
    daemon, before = serving(start, node, "--pod-logs-dir", str(tmp_path / "pods")), time.time()

    def listed() -> dict[str, dict[str, Any]]:
        answer = json.loads(command(daemon, "containers", "--json"))
        return {each["container_id"]: each for each in answer["containers"]}

    container = node.container()
    until(lambda: container.container_id in listed(), "the container")
    found = listed()[container.container_id]
    assert before - 1 < found["since"] < time.time() + 1
    assert (found["pod_uid"], found["container_name"]) == (container.pod_uid, container.name)
    assert (found["namespace"], found["pod"]) == (None, None)
    assert (found["init_host_pid"], found["pidns"]) == (container.init_host_pid, container.pidns)
    (tmp_path / "pods" / f"ml_train-0_{container.pod_uid}").mkdir(parents=True)
    named = {**found, "namespace": "ml", "pod": "train-0"}.items()
    until(lambda: named <= listed()[container.container_id].items(), "its pod's name")

    # A container that shares a namespace is found by the processes that use its mount.
    sharing = node.container(container.pod_uid, "sharing", pid_namespace=container)
    tenant = sharing.tenant(guess="none").until_repaired()
    until(lambda: sharing.container_id in listed(), "the other one")
    found = listed()[sharing.container_id]
    assert (found["pidns"], found["init_host_pid"], found["pod_uid"]) == (None, None, container.pod_uid)
    tenant.kill()
    until(lambda: sharing.container_id not in listed(), "the end of its use")
    container.stop()
    until(lambda: container.container_id not in listed(), "its end")
    kinds = ["container_started", "container_ended"]
    lines = command(daemon, "events", "--json", *(f"--kind={kind}" for kind in kinds)).splitlines()
    assert [json.loads(line)["kind"] for line in lines if container.container_id in line] == kinds
