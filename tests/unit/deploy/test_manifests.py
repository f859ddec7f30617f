"""The manifests: rendered as kustomize renders them, valid for every server, and without superfluous rights."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from resolver import config
from resolver.base.source_records import SOURCE_RECORDS
from resolver.config import Settings
from resolver.kube.device import API_VERSION
from resolver.kube.pod_events import DEFAULT
from resolver.kube.reporter import CONDITION, DEVICES
from resolver.linux.capabilities import NUMBERS
from tests.fakes.kube import RULES, rules_of
from tests.manifests import IMAGE, KUSTOMIZE, ROOT, container_of, load, merged, pod_of, render, validate
from tests.programs import script

FIXTURES = ROOT / "tests/fixtures/manifests"
BASE = KUSTOMIZE / "base"
SIDECAR = KUSTOMIZE / "overlays/sidecar"
#: The directory that each scheduler's overlay mounts; only `hami` selects nodes by HAMi's label.
SCHEDULERS = {
    "hami": "/usr/local/vgpu/containers",
    "volcano": "/usr/local/vgpu/vgpu/containers",
    "koordinator": "/usr/local/vgpu/containers",
    "kai": "/usr/local/vgpu/containers",
    "dra": "/usr/local/vgpu/claims",
}
OF_GPU_DISCOVERY = {"nvidia.com/gpu.present": "true"}
OVERLAID = ("scan-only", "netlink", "dry-run", *SCHEDULERS)
DAEMONSETS = {name: KUSTOMIZE / "overlays" / name for name in OVERLAID} | {
    "base": BASE,
    "own-seccomp": FIXTURES / "own-seccomp",
}
REPORTING = FIXTURES / "report-devices"
PLATFORMS = {
    name: FIXTURES / name for name in ("gke", "openshift", "bottlerocket", "talos", "nvidia-runtime")
}
EVERY = DAEMONSETS | {"sidecar": FIXTURES / "sidecar", "report-devices": REPORTING}


@pytest.mark.parametrize("name", EVERY | PLATFORMS)
def test_manifests_render_and_validate_on_all_servers(name: str) -> None:
    validate(render((EVERY | PLATFORMS)[name]))


@pytest.mark.parametrize("name", EVERY)
def test_privileges_equal_the_needs_of_the_source(name: str) -> None:
    pod = pod_of(render(EVERY[name]))
    container = container_of(pod)
    security = container["securityContext"]
    source = {"scan-only": "scan", "netlink": "netlink"}.get(name, "bpf")
    record = SOURCE_RECORDS[source]
    assert sorted(security["capabilities"]["add"]) == sorted(record.rights | record.early)
    assert set(security["capabilities"]["add"]) <= NUMBERS.keys()
    assert security["capabilities"]["drop"] == ["ALL"]
    assert security["seccompProfile"]["type"] == ("Localhost" if name == "own-seccomp" else "RuntimeDefault")
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)
    assert security["readOnlyRootFilesystem"] is True
    assert pod["hostPID"] is True
    assert pod.get("hostNetwork", False) is (name == "netlink")
    assert not pod.get("hostIPC", False)
    assert pod["priorityClassName"] == "system-node-critical"
    elsewhere = name in SCHEDULERS and name != "hami"
    assert pod["nodeSelector"] == (OF_GPU_DISCOVERY if elsewhere else {"gpu": "on"})
    volumes = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
    mounts = {
        (volumes[each["name"]], each["mountPath"], each.get("readOnly", False))
        for each in container["volumeMounts"]
    }
    settings = Settings()
    directory = SCHEDULERS.get(name, "/usr/local/vgpu/containers")
    assert mounts == {
        (directory, directory, name == "dry-run"),
        (settings.run_dir, settings.run_dir, False),
        (settings.pod_logs_dir, settings.pod_logs_dir, True),
        (settings.container_logs_dir, settings.container_logs_dir, True),
    }


def test_namespace_allows_the_pod() -> None:
    namespace = load(BASE / "namespace.yaml")[0]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


@pytest.mark.parametrize("name", EVERY)
def test_manifest_variables_are_settings(name: str) -> None:
    container = container_of(pod_of(render(EVERY[name])))
    assert container["image"] == IMAGE
    assert container["args"] == ["run"]
    environment = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    settings, origins = config.load({}, None, environment)
    if name in SCHEDULERS:
        assert settings.containers_dir == (SCHEDULERS[name],)
        assert settings.hami_metrics is (name != "koordinator")
    ours = {variable for variable in environment if variable.startswith("RESOLVER_")}
    assert {origin.removeprefix("environment ") for origin in origins.values() if origin != "default"} == ours
    assert settings.wait
    (port,) = container["ports"]
    assert "hostPort" not in port  # during an update two pods share the node
    assert settings.metrics_addr == f":{port['containerPort']}"
    probes = {each: container[each]["httpGet"] for each in container if each.endswith("Probe")}
    assert all(probe["port"] == port["name"] for probe in probes.values())
    assert probes["livenessProbe"]["path"] == "/healthz"
    # A pod that is not ready would take HAMi's monitor out of its service.
    assert ("readinessProbe" in probes) is (name != "sidecar")


def test_reporter_rights_equal_its_requests() -> None:
    """The fake API server refuses all other requests, so the reporter's tests need just these rights."""
    manifests = render(REPORTING)
    assert frozenset(rules_of(manifests)) == RULES
    (account,) = [
        each
        for each in manifests
        if each["kind"] == "ServiceAccount" and each["metadata"]["name"] != "resolver"
    ]
    whose = {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "resolver"}
    bindings = [
        each
        for each in manifests
        if each["kind"].endswith("RoleBinding") or each["kind"] == "ClusterRoleBinding"
    ]
    assert [each["subjects"] for each in bindings] == [[whose]] * 2
    assert {each["roleRef"]["kind"] for each in bindings} == {"Role", "ClusterRole"}


def test_reporter_mounts_only_the_socket() -> None:
    manifests = render(REPORTING)
    pod = pod_of(manifests, "report-devices")
    container = container_of(pod, "report-devices")
    assert container["image"] == IMAGE
    assert container["args"] == ["report-devices", f"--pod-events={DEFAULT}"]
    assert pod["serviceAccountName"] == "resolver-report-devices"
    assert [each["hostPath"]["path"] for each in pod["volumes"]] == [Settings().run_dir]
    assert container["volumeMounts"] == [{"name": "run", "mountPath": Settings().run_dir, "readOnly": True}]
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)
    assert security["readOnlyRootFilesystem"] is True
    assert not pod.get("hostNetwork", False)
    # The daemon is unchanged, and its DaemonSet doesn't select these pods.
    daemon = pod_of(manifests)
    assert daemon == pod_of(render(BASE))
    assert daemon["automountServiceAccountToken"] is False
    selectors = [each["spec"]["selector"]["matchLabels"] for each in manifests if each["kind"] == "DaemonSet"]
    assert selectors[0] != selectors[1]


def test_cleanup_removes_only_the_daemons_files(tmp_path: Path) -> None:
    manifests = render(KUSTOMIZE / "uninstall")
    validate(manifests)
    (pod,) = [each["spec"]["template"]["spec"] for each in manifests]
    (remove,) = pod["initContainers"]
    assert pod["containers"][0]["image"] == IMAGE
    assert remove["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    run = tmp_path / "run"
    for name in ("resolver/bpf-program", "resolver/tenant/x", "hami/hostpid/broker.sock"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    command = [*remove["command"], *remove["args"]]
    for left in ([], ["containerd.sock", "hami", "hami/other"]):
        for name in left:
            (run / name).mkdir()
        subprocess.run(command, env={"PATH": os.environ["PATH"], "RUN": str(run)}, check=True)
        assert sorted(str(path.relative_to(run)) for path in run.rglob("*")) == left


def test_page_removes_the_reporters_objects(tmp_path: Path) -> None:
    """Run the page's loop against a kubectl that records its arguments."""
    page = (ROOT / "docs/kubernetes.md").read_text()
    loop = page[page.index("for node in $(kubectl") :].partition("```")[0]
    asked = tmp_path / "asked"
    kubectl = f'[ "$1" != get ] || exec printf "node/a\\nnode/b\\n"\nprintf "%s\\n" "$*" >>{asked}'
    script(tmp_path / "kubectl", kubectl)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-ec", loop], env=path, check=True)
    resource = DEVICES.rsplit("/", 1)[1] + "." + API_VERSION.partition("/")[0]
    gone = json.dumps(
        {"status": {"conditions": [{"type": CONDITION, "$patch": "delete"}]}}, separators=(",", ":")
    )
    assert asked.read_text().splitlines() == [
        line
        for node in "ab"
        for line in (
            f"delete --ignore-not-found {resource}/{node}",
            f"patch node/{node} --subresource=status --type=strategic -p {gone}",
        )
    ]


def test_sidecar_keeps_hami_and_can_be_removed() -> None:
    (before,) = load(FIXTURES / "sidecar/hami.yaml")
    (patched,) = render(FIXTURES / "sidecar")
    for name in ("device-plugin", "vgpu-monitor"):
        assert container_of(patched["spec"]["template"]["spec"], name) == container_of(
            before["spec"]["template"]["spec"], name
        )
    names = [
        port["name"]
        for each in patched["spec"]["template"]["spec"]["containers"]
        for port in each.get("ports", ())
    ]
    assert len(names) == len(set(names)) == 2
    (out,) = load(SIDECAR / "remove.yaml")
    assert merged(patched, out) == before
    base, sidecar = (container_of(pod_of(render(EVERY[name]))) for name in ("base", "sidecar"))
    # No probe of ours may mark HAMi's pod as not ready or not started.
    assert sidecar.keys() == base.keys() - {"readinessProbe", "startupProbe"}
    same = sidecar.keys() - {"livenessProbe", "ports", "volumeMounts"}
    assert {name: sidecar[name] for name in same} == {name: base[name] for name in same}


def test_seccomp_profile_allows_bpf_and_less_than_default() -> None:
    own = json.loads((ROOT / "deploy/seccomp/resolver.json").read_text())
    assert own["defaultAction"] == "SCMP_ACT_ERRNO"
    rules = [rule for rule in own["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW"]
    allowed = {name for rule in rules for name in rule["names"]}
    assert "bpf" in allowed
    from tests.runtime.pods import distribution_profile

    default = json.loads(distribution_profile().read_text())
    runtime = {
        name for rule in default["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]
    }
    assert allowed - runtime == {"bpf"} - runtime
    never = {
        *("add_key", "clone3", "delete_module", "finit_module", "fsmount", "init_module", "io_uring_setup"),
        *("kexec_load", "keyctl", "mount", "move_mount", "open_by_handle_at", "open_tree", "perf_event_open"),
        *("pivot_root", "process_vm_readv", "process_vm_writev", "ptrace", "reboot", "setns", "swapon"),
        *("umount2", "unshare", "userfaultfd"),
    }
    assert allowed & never == set()
    (clone,) = [rule for rule in rules if "clone" in rule["names"]]
    # Every CLONE_NEW* of include/uapi/linux/sched.h except CLONE_NEWTIME, which clone() does not support.
    assert clone["args"] == [{"index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]
