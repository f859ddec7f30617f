"""`kubectl resolver` with a fake kubectl, pods rendered from our chart, and the daemon's real API."""

import contextlib
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import pytest
import yaml

from resolver.base.version import VERSION
from resolver.cli import COMMANDS
from resolver.kube import kubectl_plugin
from tests import charts
from tests.fakes.chains import CID, POD, whole
from tests.fakes.node import Node
from tests.fakes.served import serving
from tests.fakes.terminal import Terminal
from tests.manifests import KUSTOMIZE, render
from tests.patience import PATIENCE_S

ROOT: Final = Path(__file__).parents[3]
IMAGE: Final = {"image": {"repository": "example.org/resolver"}}


def daemon_pod(daemon_set: dict[str, Any], node: str, **status: Any) -> dict[str, Any]:
    """Return the pod that a DaemonSet has on a node."""
    template = daemon_set["spec"]["template"]
    names = [container["name"] for container in template["spec"]["containers"]]
    running = [{"name": name, "ready": True, "state": {"running": {}}} for name in names]
    return {
        "metadata": {
            **template["metadata"],
            "name": f"{daemon_set['metadata']['name']}-{node}",
            "namespace": daemon_set["metadata"].get("namespace", "kube-system"),
            "ownerReferences": [
                {"kind": "DaemonSet", "name": daemon_set["metadata"]["name"], "controller": True}
            ],
        },
        "spec": {**template["spec"], "nodeName": node},
        "status": {"phase": "Running", "containerStatuses": running, **status},
    }


def user_pod(name: str = "train-0", node: str = "gpu-a", **about: Any) -> dict[str, Any]:
    statuses = [{"name": "main", "containerID": f"containerd://{CID}"}, {"name": "side"}]
    return {
        "metadata": {"name": name, "namespace": "research", "uid": POD, **about},
        "spec": {"nodeName": node, "containers": [{"name": "main"}, {"name": "side"}]},
        "status": {"containerStatuses": statuses},
    }


class Cluster:
    """Two nodes with a daemon each; tests change ``state``, from which the fake kubectl answers."""

    def __init__(self, directory: Path, sockets: dict[str, str]) -> None:
        self.file = directory / "cluster.json"
        self.program = directory / "kubectl"
        self.program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/fakes/kubectl.py "$@"\n')
        self.program.chmod(0o755)
        self.daemon_set = charts.the("DaemonSet", charts.render(IMAGE, namespace="gpu-tools"))
        self.state: dict[str, Any] = {
            "pods": [user_pod(), *(daemon_pod(self.daemon_set, node) for node in sockets)],
            "exec": {f"gpu-tools/resolver-{node}": {"socket": socket} for node, socket in sockets.items()},
        }

    def __call__(
        self, *words: str, out: IO[bytes] | int = subprocess.PIPE, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        self.file.write_text(json.dumps(self.state))
        plugin = self.file.with_name("plugin")
        plugin.unlink(missing_ok=True)
        plugin.symlink_to(ROOT / "resolver/kube/kubectl_plugin.py")
        done = subprocess.run(
            [sys.executable, "-I", plugin, *words],
            env=os.environ
            | {"KUBECTL": str(self.program), "KUBECTL_CLUSTER": str(self.file), "PYTHONPATH": str(ROOT)}
            | environ,
            cwd=self.file.parent,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert "command terminated" not in done.stderr
        return done


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        sockets = {
            node: stack.enter_context(serving(tmp_path / node, group=os.getgid(), **whole())).path
            for node in ("gpu-a", "gpu-b")
        }
        yield Cluster(tmp_path, sockets)


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in text.splitlines()[1:]}


def test_status_has_a_line_for_each_node(cluster: Cluster) -> None:
    done = cluster("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert {node: row[1] for node, row in rows(done.stdout).items()} == {"gpu-a": "yes", "gpu-b": "yes"}
    documents = json.loads(cluster("status", "--json").stdout)
    assert [document["status"]["totals"]["slots"] for document in documents] == [1, 1]


def test_unreachable_node_is_named_and_others_shown(cluster: Cluster) -> None:
    pods = cluster.state["pods"]
    answers = cluster.state["exec"]
    refused = "Error from server: error dialing backend: dial tcp 10.0.0.7:10250: connect: connection refused"
    for node, behavior in (
        ("down", {"error": refused}),
        ("slow", {"hangs": True}),
        ("old", {"socket": "/nonexistent"}),
    ):
        pods.append(daemon_pod(cluster.daemon_set, node))
        answers[f"gpu-tools/resolver-{node}"] = behavior
    crashing = {"name": "resolver", "ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    pods.append(daemon_pod(cluster.daemon_set, "sick", containerStatuses=[crashing]))
    began = time.monotonic()
    done = cluster("status", "--timeout", "5")
    assert time.monotonic() - began < PATIENCE_S
    assert done.returncode == 1
    table = rows(done.stdout)
    nodes = ("gpu-a", "gpu-b", "down", "slow", "sick", "old")
    assert [table[node][1] for node in nodes] == ["yes", "yes", *"????"]
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "connection refused" in lines["down"]
    assert "no answer within 5 s" in lines["slow"]
    assert "CrashLoopBackOff" in lines["sick"]
    assert "there is no such socket" in lines["old"]
    assert cluster("slots", "--node", "sick").returncode == 4


def test_ready_pod_answers_during_an_update(cluster: Cluster) -> None:
    waiting = daemon_pod(cluster.daemon_set, "gpu-a")
    waiting["metadata"]["name"] = "resolver-new"
    waiting["status"]["containerStatuses"][0]["ready"] = False
    for place in (0, len(cluster.state["pods"])):
        cluster.state["pods"].insert(place, waiting)
        assert rows(cluster("status").stdout)["gpu-a"][1] == "yes"


def test_plugin_finds_sidecars_and_ignores_reporters(cluster: Cluster) -> None:
    values = IMAGE | {"reportDevices": {"enabled": True}}
    manifests = charts.render(values, namespace="gpu-tools")
    daemon_sets = [manifest for manifest in manifests if manifest["kind"] == "DaemonSet"]
    assert len(daemon_sets) == 2
    cluster.state["pods"] = [daemon_pod(daemon_set, "gpu-a") for daemon_set in daemon_sets]
    assert rows(cluster("status").stdout)["gpu-a"][1] == "yes"
    (pod,) = [pod for pod in cluster.state["pods"] if pod["metadata"]["name"] == "resolver-gpu-a"]
    pod["metadata"]["labels"] = {"app.kubernetes.io/component": "hami-device-plugin"}
    done = cluster("status")
    assert (done.returncode, "give --selector" in done.stderr) == (4, True)
    assert cluster("status", "--selector", "app.kubernetes.io/component=hami-device-plugin").returncode == 0


def test_top_of_a_pod_shows_no_other_pod(cluster: Cluster) -> None:
    first = cluster("top", "research/train-0", "--", "--once")
    assert (first.returncode, first.stdout.count("process ")) == (0, 1)
    cluster.state["pods"].append(user_pod("other", uid="99999999-2222-3333-4444-555555555555"))
    other = cluster("top", "research/other", "--", "--once")
    assert "process " not in other.stdout


def test_lookup_finds_the_container_and_its_node(cluster: Cluster, tmp_path: Path) -> None:
    with Node(tmp_path, "535.183.01") as node:
        container = node.container(name="main")
        tenant = container.tenant()
        pod = cluster.state["pods"][0]
        pod["status"]["containerStatuses"][0]["containerID"] = f"containerd://{container.container_id}"
        done = cluster("lookup", "train-0", str(tenant.ns_pid), "-n", "research", "-c", "main")
        assert (done.returncode, done.stdout) == (0, f"{tenant.host_pid}\n"), done.stderr
        assert cluster("lookup", "research/train-0", "99999", "-c", "main").returncode == 1
        pod["metadata"]["annotations"] = {"kubectl.kubernetes.io/default-container": "main"}
        assert cluster("lookup", "research/train-0", str(tenant.ns_pid)).stdout == f"{tenant.host_pid}\n"


def test_reverse_asks_the_node_about_its_host_pid(cluster: Cluster) -> None:
    own_pid = str(os.getpid())
    for words in ((own_pid, "--node", "gpu-b"), ("research/train-0", own_pid)):
        answer = json.loads(cluster("reverse", *words, "--json").stdout)
        assert answer["host_pid"] == os.getpid()


def test_question_that_is_not_clear_has_exit_code_and_sentence(cluster: Cluster) -> None:
    debugger = {"name": "debugger-x", "containerID": f"containerd://{'ef' * 32}"}
    cluster.state["pods"][0]["status"]["ephemeralContainerStatuses"] = [debugger]
    for words, code, sentence in (
        ("reverse research/train-0", 2, "reverse takes HOST_PID"),
        ("reverse train-0 --node gpu-b", 2, "reverse takes HOST_PID"),
        ("reverse --node gpu-b", 2, "reverse takes HOST_PID"),
        ("reverse 7241", 2, "--node"),
        ("slots", 2, "give POD or --node"),
        ("slots --node elsewhere", 4, "gpu-a, gpu-b"),
        ("lookup research/train-0 2", 2, "Give -c: main, side"),
        ("lookup research/train-0 2 -c side", 1, "has not started"),
        ("lookup research/train-0 2 -c debugger-x", 1, "no process"),
        ("lookup research/nobody 2", 1, "(NotFound)"),
    ):
        done = cluster(*words.split())
        assert (done.returncode, sentence in done.stderr) == (code, True), (words, done.stderr)


def test_terminal_gets_screen_error_and_exit_code(cluster: Cluster) -> None:
    cluster("status")  # writes the cluster's file
    environ = {
        "KUBECTL": str(cluster.program),
        "KUBECTL_CLUSTER": str(cluster.file),
        "PYTHONPATH": str(ROOT),
        "PLUGIN": f"{sys.executable} -I {cluster.file.with_name('plugin')}",
    }
    with Terminal("PS1= exec sh", 100, 30, environ) as terminal:
        terminal.type("$PLUGIN top research/train-0; echo top ended $?\n")
        terminal.wait(lambda _: terminal.get("alternate_on") == "1")
        terminal.wait("train-0")
        terminal.press("q")
        terminal.wait("top ended 0")
        for words, sentence, code in (
            ("lookup research/train-0 99999 -c main", "no process", 1),
            ("slots --node gpu-a -- --frobnicate", "unrecognized arguments", 2),
            ("bundle --node gpu-a", "give it a file", 2),
        ):
            name = words.split()[0]
            terminal.type(f"clear; $PLUGIN {words}; echo {name} ended $?\n")
            text = terminal.wait(f"{name} ended {code}")
            assert (text.count(sentence), "command terminated" in text) == (1, False), text


def test_kubectl_options_are_passed_on(cluster: Cluster) -> None:
    """The other tests' fake kubectl refuses these options; this one prints its arguments."""
    cluster.program.write_text('#!/bin/sh\necho "$@" >&2\nexit 1\n')
    given = ["--as=eve", "--cluster=c", "--context=x", "--kubeconfig=/k"]
    assert f"kubectl resolver: {' '.join(given)} get pods" in cluster("status", *given).stderr
    assert cluster("--version").stdout == f"kubectl resolver {VERSION}\n"


@pytest.mark.parametrize("command", [("slots",), ("lookup", "2", "-c", "main")])
def test_unreachable_node_exits_with_4(cluster: Cluster, command: tuple[str, ...]) -> None:
    refused = "Error from server: error dialing backend: dial tcp 10.0.0.7:10250: connect: connection refused"
    cluster.state["exec"]["gpu-tools/resolver-gpu-a"] = {"error": refused}
    name, *more = command
    done = cluster(name, "research/train-0", *more)
    assert (done.returncode, refused in done.stderr) == (4, True)


def allowed() -> set[tuple[str, str, str]]:
    return {
        (role["metadata"].get("namespace", ""), resource, verb)
        for role in yaml.safe_load_all((ROOT / "deploy/kubectl-rbac.yaml").read_text())
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_deployed_roles_have_exactly_the_needed_rights(cluster: Cluster) -> None:
    pod = daemon_pod(charts.the("DaemonSet", render(KUSTOMIZE / "base")), "gpu-a")
    cluster.state["pods"][1:] = [pod]
    cluster.state["exec"] = {"resolver/resolver-gpu-a": cluster.state["exec"]["gpu-tools/resolver-gpu-a"]}
    cluster.state["rules"] = sorted(allowed())
    commands = (("status",), ("explain", "research/train-0"), ("containers", "--node", "gpu-a"))
    assert [cluster(*words).returncode for words in commands] == [0, 0, 0]
    for right in allowed():
        cluster.state["rules"] = sorted(allowed() - {right})
        done = [cluster(*words) for words in commands]
        assert 4 in {result.returncode for result in done}, (right, done)
        if "pods/exec" in right:
            outputs = (done[0].stdout, done[1].stderr, done[2].stderr)
            assert all(
                "you lack the right to create pods/exec in the namespace resolver" in text for text in outputs
            )


def test_command_runs_on_the_named_or_the_pods_node(cluster: Cluster, tmp_path: Path) -> None:
    assert "scan" in cluster("doctor", "--node", "gpu-b", "--", "--only", "scan").stdout
    with (tmp_path / "bundle.tar.gz").open("wb") as file:
        done = cluster("bundle", "--node", "gpu-a", "--", "--redact", out=file)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        assert any(name.endswith("/slots.json") for name in archive.getnames())
    done = cluster("explain", "research/train-0")
    assert (done.returncode, "The chain holds" in done.stdout) == (0, True), done.stderr
    document = json.loads(cluster("explain", "research/train-0", "-c", "main", "--json").stdout)
    assert [container["container_id"] for container in document["containers"]] == [CID]


def test_errors_of_kubectl_are_printed_unchanged(cluster: Cluster) -> None:
    cluster.state["rules"] = []
    done = cluster("status")
    assert (done.returncode, 'cannot list resource "pods"' in done.stderr) == (4, True)
    cluster.state["down"] = True
    down = cluster("status").stderr
    assert "did you specify the right host or port" in down
    assert "kubectl config current-context" in down
    assert "memcache.go" not in down
    assert "there is no /nonexistent/kubectl" in cluster("status", KUBECTL="/nonexistent/kubectl").stderr
    assert cluster("status", "--context", "other", "--kubeconfig", "/k").stderr.startswith(
        "kubectl resolver: The conn"
    )


def test_passed_on_commands_exist() -> None:
    assert set(kubectl_plugin.COMMANDS) <= set(COMMANDS)


def test_pod_of_another_owner_is_never_asked(cluster: Cluster) -> None:
    """Any user may give a pod the daemons' labels and a container of that name."""
    trap = daemon_pod(cluster.daemon_set, "gpu-a")
    trap["metadata"] |= {"namespace": "research", "name": "trap", "ownerReferences": []}
    cluster.state["pods"].insert(0, trap)
    cluster.state["exec"]["research/trap"] = {"error": "\x1b]0;trapped\x07"}
    done = cluster("status")
    assert done.returncode == 0, done.stderr
    trap["metadata"]["ownerReferences"] = [{"kind": "DaemonSet", "name": "x", "controller": True}]
    done = cluster("status")
    assert (done.returncode, "--daemon-namespace" in done.stderr) == (2, True)
    assert cluster("status", "--daemon-namespace", "gpu-tools").returncode == 0
    done = cluster("doctor", "--node", "gpu-a", "--daemon-namespace", "research")
    assert "\x1b" not in done.stderr
    assert "trapped" in done.stderr
