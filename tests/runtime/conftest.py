"""Pods on a node, which leave no container and no cgroup behind."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import cgroups
from tests.fakes.node import Node
from tests.kernel.conftest import DRIVER, ROOT, hand_on
from tests.manifests import Manifest, container_of
from tests.runtime.pods import CGROUP_TOP, Pod, cgroup_mounts, runtime_default

#: Starts a pod's container, which ends with the test; see `start_pod`.
StartPod = Callable[..., Pod]


def fast(pod: Manifest, **environment: str) -> Manifest:
    pace = {"RESOLVER_INTERVAL": "50ms", "RESOLVER_NVML_INTERVAL": "200ms", **environment}
    pod = copy.deepcopy(pod)
    container = container_of(pod)
    container["env"] = [each for each in container["env"] if each["name"] not in pace]
    container["env"] += [{"name": name, "value": value} for name, value in pace.items()]
    return pod


@pytest.fixture
def node(open_place: Path) -> Iterator[Node]:
    """A node whose driver makes every guess of HAMi's wrong."""
    with Node(open_place / "node", DRIVER) as node:
        yield node


@pytest.fixture
def node_paths(tmp_path: Path, node: Node) -> dict[str, Path]:
    """The test's paths in place of the node's paths that pods mount."""
    (tmp_path / "pods").mkdir()
    (tmp_path / "containers").mkdir()
    (tmp_path / "tmpfs").mkdir()
    return {
        "/usr/local/vgpu/containers": node.containers_dir,
        "/run/resolver": tmp_path / "tmpfs" / "resolver",
        "/var/log/pods": tmp_path / "pods",
        "/var/log/containers": tmp_path / "containers",
    }


@pytest.fixture
def start_pod(tmp_path: Path, node: Node, node_paths: dict[str, Path], program: Path) -> Iterator[StartPod]:
    """Starts pods on the node: ``start_pod(pod, knows_bpf=False)``, with options as of `Pod`.

    ``anew``: with nothing kept of an earlier one. Otherwise the checkout's finds its compiled probes.
    """
    started: list[Pod] = []

    def start_one(pod: Manifest, *, knows_bpf: bool = True, anew: bool = False, **options: Any) -> Pod:
        if options.get("source", ROOT) == ROOT and options.get("image") is None:
            of_the_checkout.append(kept)
            if not anew:
                hand_on(program, kept)
        seccomp = {
            "RuntimeDefault": runtime_default(tmp_path, knows_bpf=knows_bpf),
            "resolver.json": ROOT / "deploy/seccomp/resolver.json",
        }
        new = Pod(node, pod, tmp_path / "runc", paths=node_paths, seccomp=seccomp, **options)
        started.append(new)
        return new

    kept, of_the_checkout = node_paths["/run/resolver"] / program.name, list[Path]()
    yield start_one
    problems: list[object] = []
    for pod in started:
        pod.close()
        problems += [line for line in pod.lines if line["event"] == "internal_error"]
        # runc complains of a cgroup that it has to remove twice, as the last child of a daemon is still on its way out.
        problems += [text for text in pod.other_output if "level=warning" not in text and "rmdir" not in text]
    for path in of_the_checkout[:1]:
        hand_on(path, program)
    for mount in cgroup_mounts():
        cgroups.remove(mount / CGROUP_TOP)
    assert problems == []
