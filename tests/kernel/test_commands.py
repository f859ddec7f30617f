"""The commands that ask a daemon, and a real daemon on a miniature node."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from resolver import client
from resolver.config import Settings
from resolver.linux.procfs import Procfs
from resolver.lookup.reverse import reverse
from tests.fakes.node import Node
from tests.kernel.conftest import EVERY_SOURCE, ROOT, Daemon, Start, hostpid_of, until, write_hostpid

FAST = ("--interval", "50ms", "--nvml-interval", "200ms")


def serving(start: Start, node: Node, *arguments: str) -> Daemon:
    """A daemon that answers."""
    daemon = start(node, *FAST, *arguments)
    daemon.wait_for("started")
    until((daemon.run_dir / "resolver.sock").exists, "its socket")
    return daemon


def command(daemon: Daemon, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    """Standard output of the real command."""
    done = subprocess.run(
        [sys.executable, "-m", "resolver", *words, "--socket", str(daemon.run_dir / "resolver.sock")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode in codes, done.stderr
    return done.stdout


def status(daemon: Daemon) -> dict[str, Any]:
    """Also while it is not ready."""
    return dict(json.loads(command(daemon, "status", "--json", codes=(0, 1))))


@EVERY_SOURCE
def test_status_tells_what_is(node: Node, start: Start, source: str) -> None:
    containers = [node.container(name=f"c{n}") for n in range(2)]
    for container in containers:
        container.tenant(load=40)
    daemon = serving(start, node)
    until(
        lambda: (told := status(daemon))["totals"]["slots_repaired"] == 2 and not told["source"]["not_ready"],
        "both slots repaired, and the source ready",
    )
    told = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in command(daemon, "status").splitlines())
    assert told["resolver"].endswith(f"PID {daemon.process.pid}")
    assert told["ready"] == "yes"
    assert told["source"].startswith(f"{source}, ")
    assert told["hostpid is"].startswith("host (")
    assert re.fullmatch(r"driver 535\.183\.01, answered \d\.\ds ago", told["nvml"])
    assert told["slots"].startswith("2 in use, 0 dead")
    assert told["repairs"].startswith("2: ")
    (size,) = re.findall(r"^([0-9.]+) MiB", told["cost"])
    resident = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{daemon.process.pid}/status").read_text())
    assert resident is not None
    assert abs(float(size) - int(resident[1]) / 1024) < 8


def test_containers_are_those_of_the_node(node: Node, start: Start, source: str, tmp_path: Path) -> None:
    containers = [node.container(name=f"c{n}") for n in range(3)]
    containers[0].tenant()
    pods = tmp_path / "pods"
    (pods / f"team-a_train-0_{containers[1].pod_uid}").mkdir(parents=True)
    daemon = serving(start, node, "--pod-logs-dir", str(pods))

    def rows() -> dict[str, list[str]]:
        _head, *lines = command(daemon, "containers").splitlines() or [""]
        return {line.split()[0]: re.split(r"\s{2,}", line) for line in lines}

    wanted = {container.container_id for container in containers}
    until(lambda: wanted <= rows().keys() and rows()[containers[0].container_id][7] == "1", "all of them")
    for container in containers:
        row = rows()[container.container_id]
        named = ["team-a", "train-0"] if container is containers[1] else ["-", "-"]
        assert row[1:4] == [*named, container.name]
        assert row[4:7] == [container.pod_uid, str(container.pidns), str(container.init_host_pid)]
    containers[2].stop()
    until(lambda: containers[2].container_id not in rows(), "the end of one")


def test_events_are_followed_until_the_daemon_ends(node: Node, start: Start, source: str) -> None:
    container = node.container()
    tenant = container.tenant()
    daemon = serving(start, node)
    until(lambda: hostpid_of(container, tenant) == tenant.host_pid, "the first repair")
    (first,) = [
        json.loads(line) for line in command(daemon, "events", "--json", "--kind", "repair").splitlines()
    ]
    assert first["fields"]["ns_pid"] == tenant.ns_pid
    words = ["events", "-f", "--json", "--kind", "repair", "--socket", str(daemon.run_dir / "resolver.sock")]
    with subprocess.Popen(
        [sys.executable, "-m", "resolver", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as follower:
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


def test_an_interrupted_follower_is_130(node: Node, start: Start, source: str) -> None:
    daemon = serving(start, node)
    words = ["events", "--follow", "--socket", str(daemon.run_dir / "resolver.sock")]
    # A shell's background job ignores it, and so would the child.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [sys.executable, "-m", "resolver", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as follower:
        until(lambda: status(daemon)["api"]["connected"] >= 2, "the follower, and who asks for the status")
        follower.send_signal(signal.SIGINT)
        _, err = follower.communicate(timeout=60)
    assert (follower.returncode, err) == (130, "")


def test_config_is_the_daemons_own_and_follows_a_reload(
    node: Node, start: Start, source: str, tmp_path: Path
) -> None:
    file = tmp_path / "resolver.toml"
    file.write_text('hostpid_namespace = "host"\nwrite_utilization = "never"\n')
    daemon = serving(start, node, "--config", str(file))

    def settings() -> dict[str, Any]:
        told = json.loads(command(daemon, "config", "--json"))
        assert told["daemon"] == str(daemon.run_dir / "resolver.sock")
        return dict(told["settings"])

    told = settings()
    assert set(told) == set(Settings.__struct_fields__)
    assert told["interval"] == {"value": 0.05, "origin": "command line"}
    assert told["hostpid_namespace"] == {"value": "host", "origin": f"file {file}"}
    assert told["source"] == {"value": source, "origin": "environment RESOLVER_SOURCE"}
    assert told["broker"] == {"value": "", "origin": "default"}
    file.write_text('write_utilization = "always"\nmap_size = 4096\n')
    daemon.signal(signal.SIGHUP)
    daemon.wait_for("settings_reloaded")
    until(lambda: settings()["write_utilization"]["value"] == "always", "the new value")
    told = settings()
    assert told["hostpid_namespace"] == {"value": "auto", "origin": "default"}
    assert told["map_size"] == {
        "value": 0,
        "origin": "default",
    }  # fixed at start, and so is where it came from


def test_reverse_agrees_with_the_daemons(node: Node, start: Start, source: str) -> None:
    process = node.container().spawn(("/bin/sleep", "1000"), nested=True)
    daemon = serving(start, node)
    path = f"/v1/reverse?host_pid={process.host_pid}"
    told = client.get_json(path, str(daemon.run_dir / "resolver.sock"))
    mine = reverse(Procfs(), process.host_pid).document()
    assert {name: told[name] for name in mine} == mine


def test_lookup_takes_the_names_that_top_prints(node: Node, start: Start, tmp_path: Path) -> None:
    # Tests beside this one have containers, too: the name must be no other's.
    train, serve = node.container(name="only-here"), node.container(name="serve")
    inside = {each.name: each.tenant(load=10) for each in (train, serve)}
    (tmp_path / "pods" / f"research_train-0_{train.pod_uid}" / "only-here").mkdir(parents=True)
    daemon = serving(start, node, "--pod-logs-dir", str(tmp_path / "pods"))
    until(lambda: "research" in command(daemon, "containers"), "the pod's name")
    expected = f"{inside['only-here'].host_pid}\n"
    ns_pid = str(inside["only-here"].ns_pid)
    for name in (
        "research/train-0",
        "research/train-0/only-here",
        train.pod_uid,
        train.pod_uid[:13],
        "only-here",
    ):
        assert command(daemon, "lookup", name, ns_pid) == expected, name
    command(daemon, "lookup", "research/train-1", ns_pid, codes=(1,))
