"""An upgrade, a rollback and the removal, as a DaemonSet with maxSurge does them: two versions on one node."""

import shutil
from pathlib import Path

import pytest

from tests.fakes.container import Container
from tests.fakes.daemon import children_of
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.kernel.conftest import ROOT, write_hostpid
from tests.manifests import KUSTOMIZE, Manifest, pod_of, render
from tests.patience import until
from tests.runtime.conftest import StartPod, fast
from tests.runtime.pods import Pod

#: States of a slot before its repair.
WRONG = 1


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two releases of the program, each in a directory of its own."""
    made = {}
    for version in ("1.2.3", "1.3.0"):
        place = made[version] = tmp_path_factory.mktemp(version)
        for package in ("resolver", "bpf"):
            shutil.copytree(ROOT / package, place / package)
        module = place / "resolver/base/version.py"
        module.write_text(f'{module.read_text()}\nVERSION = "{version}"\n')
    return made


def on_the_node(*places: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for place in places:
        for path in (place, *place.rglob("*")):
            info = path.lstat()
            found[str(path)] = (info.st_mode, info.st_uid, info.st_size if path.is_file() else 0)
    return found


def ready(pod: Pod) -> None:
    until(lambda: pod.get("/readyz") == 200, f"ready: {pod.tail()}")
    assert pod.get("/healthz") == 200


def repaired(container: Container, tenants: list[Tenant]) -> None:
    until(lambda: all(each.hostpid == each.host_pid for each in tenants), "the repairs")


def replace(old: Pod, new: Pod, container: Container, tenants: list[Tenant]) -> None:
    assert new.wait_for("waiting")["holder"] == str(old.host_pid)
    ready(new)  # only now is the old one ended
    assert new.said("repair") == new.said("region_found") == []
    assert "slot writer" not in children_of(new.host_pid)
    assert old.stop() == 0
    write_hostpid(container, tenants[0], WRONG)
    repaired(container, tenants)


@pytest.fixture
def pod() -> Manifest:
    return fast(pod_of(render(KUSTOMIZE / "base")))


@pytest.mark.long
def test_upgrade_rollback_and_removal(
    node: Node, node_paths: dict[str, Path], start_pod: StartPod, versions: dict[str, Path], pod: Manifest
) -> None:
    container = node.container()
    tenants = [container.tenant(load=5, guess="none") for _ in range(3)]
    places = list(node_paths.values())
    before = on_the_node(*[place for place in places if place.exists()], node_paths["/run/resolver"].parent)
    pods = [start_pod(pod, source=versions["1.2.3"])]
    repaired(container, tenants)
    ready(pods[0])
    for version in ("1.3.0", "1.2.3"):
        pods.append(start_pod(pod, source=versions[version]))
        replace(pods[-2], pods[-1], container, tenants)
        tenants.append(container.tenant(guess="none"))  # a slot that only this daemon has seen
        repaired(container, tenants)
    assert pods[-1].stop() == 0
    assert [each.said("started")[0]["version"] for each in pods] == ["1.2.3", "1.3.0", "1.2.3"]
    written = {(line["ns_pid"], line["after"]) for each in pods for line in each.said("repair")}
    assert written == {(tenant.ns_pid, tenant.host_pid) for tenant in tenants}
    # The kubelet's directory for the lock, the socket and the compiled probes stays, in memory: the node's next start
    # is without it.
    after = on_the_node(*[place for place in places if place.exists()])
    run_dir = str(node_paths["/run/resolver"])
    stays = {run_dir, f"{run_dir}/bpf-program"}
    assert run_dir in after
    assert {path for path in after if path.startswith(run_dir)} <= stays
    after |= on_the_node(node_paths["/run/resolver"].parent)
    after = {path: each for path, each in after.items() if path not in stays}
    assert after == before
