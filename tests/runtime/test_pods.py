"""The rendered DaemonSet's pod: its privileges and mounts are enough to repair slots, and no more."""

import json
import os
import sys
from pathlib import Path

import pytest

from resolver.base.source_records import SOURCE_RECORDS
from tests.fakes.node import Node
from tests.kernel.rights import rights, works
from tests.manifests import KUSTOMIZE, ROOT, container_of, pod_of, render
from tests.patience import never, until
from tests.runtime.conftest import StartPod, fast
from tests.runtime.pods import confined

RELEASE = os.uname().release
FIXTURES = ROOT / "tests/fixtures/manifests"
#: By manifest: the resulting source, if the runtime's profile knows CAP_BPF, and its path.
PODS = {
    "base": ("bpf", True, KUSTOMIZE / "base"),
    "base under an old runtime": ("scan", False, KUSTOMIZE / "base"),
    "own seccomp profile": ("bpf", False, FIXTURES / "own-seccomp"),
    "scan-only": ("scan", True, KUSTOMIZE / "overlays/scan-only"),
    "netlink": ("netlink", True, KUSTOMIZE / "overlays/netlink"),
    "sidecar": ("bpf", True, FIXTURES / "sidecar"),
}


@pytest.mark.parametrize("what", PODS)
def test_rendered_pod_does_the_whole_job(node: Node, start_pod: StartPod, what: str) -> None:
    source, knows_bpf, directory = PODS[what]
    rendered = pod_of(render(directory))
    given = set(container_of(rendered)["securityContext"]["capabilities"]["add"])
    record = SOURCE_RECORDS[source if knows_bpf else "bpf"]
    assert given == record.rights | record.early
    pod = start_pod(fast(rendered), knows_bpf=knows_bpf, anew=True)
    works(node, pod, source)
    confined(pod, given)
    assert rights(pod.host_pid).effective == SOURCE_RECORDS[source].keeps(RELEASE)
    until(lambda: pod.get("/readyz") == 200, "ready")
    assert pod.get("/healthz") == 200
    refusals = [line["why"] for line in pod.said("source_unavailable", source="bpf")]
    assert len(refusals) == (not knows_bpf and source == "scan")
    assert all("bpf() is forbidden here (EPERM) by the seccomp filter" in why for why in refusals), refusals
    assert pod.said("capabilities_kept") == []
    assert pod.stop() == 0
    assert {path.name for path in pod.run_dir.iterdir()} <= {"bpf-program"}


def test_mounts_suffice_for_lookup_by_container(node: Node, start_pod: StartPod) -> None:
    """The pod has a cgroup namespace and only its mounts."""
    container = node.container()
    tenant = container.tenant(guess="none")
    pod = start_pod(fast(pod_of(render(KUSTOMIZE / "base"))))
    tenant.until_repaired()
    pod.wait_for("source", source="bpf")
    words = f"-m resolver lookup {container.container_id} {tenant.ns_pid} --json".split()

    def answer(socket: str) -> tuple[int, str]:
        found = json.loads(pod.inside("env", f"RESOLVER_SOCKET={socket}", sys.executable, *words))
        return found["host_pid"], found["source"]

    # A client that waits too long for a busy daemon searches by itself.
    until(
        lambda: answer("/run/resolver/resolver.sock") == (tenant.host_pid, "bpf"), "an answer of the daemon"
    )
    assert answer("/nowhere") == (tenant.host_pid, "scan")


def test_dry_run_writes_nothing_and_could_not(node: Node, start_pod: StartPod) -> None:
    container = node.container()
    tenant = container.tenant(guess="wrong")
    before = container.cache.read_bytes()
    pod = start_pod(fast(pod_of(render(KUSTOMIZE / "overlays/dry-run"))))
    would = pod.wait_for("would_repair")
    assert (would["ns_pid"], would["after"]) == (tenant.ns_pid, tenant.host_pid)
    never(lambda: container.cache.read_bytes() != before, "a write")
    lines = Path(f"/proc/{pod.host_pid}/mountinfo").read_text().splitlines()
    (mount,) = [line for line in lines if line.split()[4] == "/usr/local/vgpu/containers"]
    assert mount.split()[5].split(",")[0] == "ro"


@pytest.mark.parametrize("directory", [KUSTOMIZE / "base", FIXTURES / "sidecar"], ids=["base", "sidecar"])
def test_daemon_started_before_hami_repairs_later_slots(
    node: Node, start_pod: StartPod, directory: Path
) -> None:
    """HAMi's containers make the directory; in the sidecar's pod they start after all volumes are mounted."""
    node.containers_dir.rmdir()
    pod = start_pod(fast(pod_of(render(directory))), anew=True)
    until(lambda: pod.get("/readyz") == 200, "ready")
    # A runtime makes it like this for HAMi's monitor, whose volume has no type.
    made = node.containers_dir.stat()
    assert (made.st_uid, made.st_gid, made.st_mode & 0o7777) == (0, 0, 0o755)
    container = node.container()
    container.tenant(guess="none").until_repaired()
    assert pod.stop() == 0
