"""An upgrade, a rollback and the removal, as a DaemonSet with maxSurge does them: two versions on one node."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Self

import pytest

from tests.fakes.container import Container
from tests.fakes.daemon import children_of
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.kernel.conftest import ROOT, hostpid_of, write_hostpid
from tests.manifests import KUSTOMIZE, Manifest, pod_of, render
from tests.patience import until
from tests.runtime.conftest import StartPod, fast
from tests.runtime.pods import Pod

#: Between two passes, in seconds: the default.
INTERVAL = 0.25
#: What a tenant, or another writer, may have made of its slot before it is repaired.
WRONG = 1


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two releases of the program, each in a directory of its own."""
    made = {}
    for version in ("1.2.3", "1.3.0"):
        place = made[version] = tmp_path_factory.mktemp(version)
        for package in ("resolver", "bpf"):
            shutil.copytree(ROOT / package, place / package)
        module = place / "resolver/__init__.py"
        module.write_text(f'{module.read_text()}\n__version__ = "{version}"\n')
    return made


class Watch:
    """Looks at slots without pause. Whatever is neither nobody's, nor wrong already, nor the owner's, is in `bad`."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._known: dict[int, int] = {}
        self._over = threading.Event()
        self.bad: list[tuple[int, int]] = []
        self.looks = 0
        self._thread = threading.Thread(target=self._look)

    def add(self, tenant: Tenant) -> Tenant:
        self._known[tenant.ns_pid] = tenant.host_pid
        return tenant

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.is_set():
            known = dict(self._known)
            for slot in self._container.region().slots:
                if slot.hostpid not in (0, WRONG, known.get(slot.pid, slot.hostpid)):
                    self.bad.append((slot.pid, slot.hostpid))
            self.looks += 1
            self._over.wait(0.002)


def on_the_node(*places: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below: mode, owner and size by path."""
    found = {}
    for place in places:
        for path in (place, *place.rglob("*")):
            info = path.lstat()
            found[str(path)] = (info.st_mode, info.st_uid, info.st_size if path.is_file() else 0)
    return found


def version_of(pod: Pod) -> str:
    """Of the daemon that answers at the node's socket, asked by a program in that pod."""
    told: str = json.loads(pod.inside(sys.executable, "-m", "resolver", "status", "--json"))["version"]
    return told


def ready(pod: Pod) -> None:
    until(lambda: pod.get("/readyz") == 200, f"ready: {pod.tail()}")
    assert pod.get("/healthz") == 200


def replace(old: Pod, new: Pod, container: Container, tenants: list[Tenant]) -> float:
    """What the DaemonSet's controller does; returns how long after the end of the old one the new one began."""
    assert new.wait_for("waiting")["holder"] == str(old.host_pid)
    ready(new)  # only now is the old one ended
    assert new.said("repair") == new.said("region_found") == []
    assert "slot writer" not in children_of(new.host_pid)
    assert old.stop() == 0
    write_hostpid(container, tenants[0], WRONG)
    until(
        lambda: all(hostpid_of(container, each) == each.host_pid for each in tenants), "the new one's repairs"
    )
    began = new.wait_for("region_found")  # by its first pass
    return float(began["at"] - old.said("stopped")[0]["at"])


@pytest.fixture
def pod() -> Manifest:
    return fast(pod_of(render(KUSTOMIZE / "base")), RESOLVER_INTERVAL=f"{INTERVAL}s")


@pytest.mark.long
def test_upgrade_rollback_and_removal(
    node: Node, node_paths: dict[str, Path], start_pod: StartPod, versions: dict[str, Path], pod: Manifest
) -> None:
    container = node.container()
    tenants = [container.tenant(load=5, guess="none") for _ in range(3)]
    places = list(node_paths.values())
    before = on_the_node(*[place for place in places if place.exists()], node_paths["/run/resolver"].parent)
    first, second = versions
    with Watch(container) as watch:
        for tenant in tenants:
            watch.add(tenant)
        old = start_pod(pod, source=versions[first])
        until(lambda: all(hostpid_of(container, each) == each.host_pid for each in tenants), "repairs")
        ready(old)
        new = start_pod(pod, source=versions[second])
        taken = [replace(old, new, container, tenants)]
        tenants.append(
            watch.add(container.tenant(guess="none"))
        )  # of a slot that only the new one has ever seen
        until(lambda: hostpid_of(container, tenants[-1]) == tenants[-1].host_pid, "a repair")
        assert version_of(new) == second
        back = start_pod(pod, source=versions[first])
        taken.append(replace(new, back, container, tenants))
        assert version_of(back) == first
        assert back.stop() == 0
    assert [each.said("started")[0]["version"] for each in (old, new, back)] == [first, second, first]
    assert watch.looks > 100
    assert watch.bad == []
    print(f"at work {', '.join(f'{each:.3f}' for each in taken)} s after the other one's last word")
    assert max(taken) < INTERVAL
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


def test_a_new_version_that_fails_leaves_the_old_one_at_work(
    node: Node, start_pod: StartPod, versions: dict[str, Path], pod: Manifest, tmp_path: Path
) -> None:
    container = node.container()
    tenant = container.tenant(guess="none")
    old = start_pod(pod)
    until(lambda: hostpid_of(container, tenant) == tenant.host_pid, "a repair")
    broken = start_pod(fast(pod, RESOLVER_INTERVAL="never"))
    assert broken.wait() == 2
    assert any("RESOLVER_INTERVAL" in text for text in broken.other_output)
    broken.other_output.clear()
    write_hostpid(container, tenant, WRONG)
    until(lambda: hostpid_of(container, tenant) == tenant.host_pid, "a repair")
    assert old.stop() == 0
