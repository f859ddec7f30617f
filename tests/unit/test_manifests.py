"""The manifests: rendered as kustomize renders them, valid for every server, and no wider than what the code needs."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from resolver import __version__
from resolver.config import Settings, load_with_origins
from resolver.linux.capabilities import NUMBERS, TO_START
from resolver.workers.driver_probe import RIGHTS as PROBE_RIGHTS
from tests.fakes.kube import RULES, rules_of
from tests.manifests import (
    KUSTOMIZE,
    RELEASES,
    ROOT,
    Manifest,
    ManifestError,
    container_of,
    load,
    merge,
    pod_of,
    render,
    validate,
)

FIXTURES = ROOT / "tests/fixtures/manifests"
BASE = KUSTOMIZE / "base"
SIDECAR = KUSTOMIZE / "overlays/sidecar"
#: The directory that each scheduler's overlay mounts; `hami` is the only one that goes by HAMi's label of nodes.
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
    "measure-driver": FIXTURES / "measure-driver/base",
}
REPORTING = FIXTURES / "report-devices"
EVERY = DAEMONSETS | {"sidecar": FIXTURES / "sidecar", "report-devices": REPORTING}


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path; entries of a list that have a name go by it."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from flat(each, f"{path}.{name}")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, each in enumerate(value):
            yield from flat(each, f"{path}[{each.get('name') or each.get('mountPath') or index}]")
    else:
        yield path, value


def leaves(manifests: list[Manifest]) -> dict[str, Any]:
    return {
        f"{each['kind']}{path}".replace("DaemonSet.spec.template.spec", "pod"): value
        for each in manifests
        for path, value in flat(each)
    }


def the_real_ones() -> list[list[str]]:
    """Commands that render a kustomization; none on a machine without."""
    commands = {"kubectl": ["kubectl", "kustomize"], "kustomize": ["kustomize", "build"]}
    return [command for name, command in commands.items() if shutil.which(name)]


CONTAINER = "pod.containers[resolver]"
#: What the component `hami-metrics` changes, and what is gone with it.
HAMI_METRICS = {
    f"{CONTAINER}.env[RESOLVER_HAMI_METRICS].name": "RESOLVER_HAMI_METRICS",
    f"{CONTAINER}.env[RESOLVER_HAMI_METRICS].value": "true",
    f"{CONTAINER}.env[RESOLVER_METRICS_ADDR].name": "RESOLVER_METRICS_ADDR",
    f"{CONTAINER}.env[RESOLVER_METRICS_ADDR].value": ":9394",
    f"{CONTAINER}.env[NODE_NAME].name": "NODE_NAME",
    f"{CONTAINER}.env[NODE_NAME].valueFrom.fieldRef.fieldPath": "spec.nodeName",
    f"{CONTAINER}.ports[metrics].containerPort": 9394,
}


def nodes_and_directory(directory: str) -> dict[str, Any]:
    """What the overlay of a scheduler with another directory than HAMi's changes."""
    return {
        "pod.nodeSelector.nvidia.com/gpu.present": "true",
        f"{CONTAINER}.env[RESOLVER_CONTAINERS_DIR].value": directory,
        f"{CONTAINER}.volumeMounts[containers].mountPath": directory,
        "pod.volumes[containers].hostPath.path": directory,
    }


OVERLAYS = {
    "hami": HAMI_METRICS,
    "volcano": HAMI_METRICS | nodes_and_directory("/usr/local/vgpu/vgpu/containers"),
    "koordinator": {"pod.nodeSelector.nvidia.com/gpu.present": "true"},
    "kai": HAMI_METRICS
    | {
        "pod.nodeSelector.nvidia.com/gpu.present": "true",
        f"{CONTAINER}.env[RESOLVER_MAPPED_REGIONS].name": "RESOLVER_MAPPED_REGIONS",
        f"{CONTAINER}.env[RESOLVER_MAPPED_REGIONS].value": "true",
    },
    "dra": HAMI_METRICS | nodes_and_directory("/usr/local/vgpu/claims"),
    "scan-only": {
        "pod.containers[resolver].env[RESOLVER_SOURCE].value": "scan",
        "pod.containers[resolver].resources.limits.memory": "192Mi",
        "pod.containers[resolver].securityContext.capabilities.add": ["SYS_PTRACE"],
    },
    "netlink": {
        "pod.containers[resolver].env[RESOLVER_SOURCE].value": "netlink",
        "pod.containers[resolver].resources.limits.memory": "192Mi",
        "pod.containers[resolver].securityContext.capabilities.add": ["SYS_PTRACE", "NET_ADMIN"],
        "pod.hostNetwork": True,
        "DaemonSet.spec.updateStrategy.rollingUpdate.maxSurge": 0,
        "DaemonSet.spec.updateStrategy.rollingUpdate.maxUnavailable": 1,
    },
    "dry-run": {
        "pod.containers[resolver].env[RESOLVER_DRY_RUN].name": "RESOLVER_DRY_RUN",
        "pod.containers[resolver].env[RESOLVER_DRY_RUN].value": "true",
        "pod.containers[resolver].volumeMounts[containers].readOnly": True,
    },
    "measure-driver": {
        "pod.containers[resolver].securityContext.capabilities.add": [
            *("SYS_PTRACE", "BPF", "PERFMON"),
            *("SYS_ADMIN", "SETUID", "SETGID"),
        ],
    },
    "own-seccomp": {
        "pod.containers[resolver].securityContext.seccompProfile.type": "Localhost",
        "pod.containers[resolver].securityContext.seccompProfile.localhostProfile": "resolver.json",
    },
}


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_changes_this_and_nothing_else(name: str) -> None:
    base, overlay = leaves(render(BASE)), leaves(render(DAEMONSETS[name]))
    gone = {"pod.nodeSelector.gpu"} if name in SCHEDULERS and name != "hami" else set()
    assert base.keys() - overlay.keys() == gone
    assert {path: value for path, value in overlay.items() if base.get(path) != value} == OVERLAYS[name]


@pytest.mark.parametrize("name", EVERY)
def test_it_is_rendered_as_kustomize_does_and_every_server_takes_it(name: str) -> None:
    manifests = render(EVERY[name])
    validate(manifests)
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
    assert len(by_name) == len(manifests)
    for command in the_real_ones():
        text = subprocess.run([*command, EVERY[name]], capture_output=True, check=True, text=True).stdout
        theirs = list(kubernetes_yaml(text))
        assert {(each["kind"], each["metadata"]["name"]): each for each in theirs} == by_name


def kubernetes_yaml(text: str) -> Iterator[Manifest]:
    import yaml

    yield from yaml.safe_load_all(text)


def test_what_a_server_would_refuse_is_refused() -> None:
    """The validation is one: a field that does not exist, a wrong type, a release that has no schema."""
    manifests = render(BASE)
    (daemonset,) = [each for each in manifests if each["kind"] == "DaemonSet"]
    for change in ({"hostPid": True}, {"hostPID": "yes"}, {"containers": [{"image": "x"}]}):
        wrong = copy.deepcopy(daemonset)
        wrong["spec"]["template"]["spec"] |= change
        with pytest.raises(kubernetes_validate.ValidationError):
            validate([wrong])
    assert len(set(RELEASES)) == 5


@pytest.mark.parametrize("name", EVERY)
def test_privileges_are_what_the_source_takes_and_no_more(name: str) -> None:
    pod = pod_of(render(EVERY[name]))
    container = container_of(pod)
    security = container["securityContext"]
    source = {"scan-only": "scan", "netlink": "netlink"}.get(name, "bpf")
    to_measure = PROBE_RIGHTS if name == "measure-driver" else frozenset[str]()
    assert sorted(security["capabilities"]["add"]) == sorted(TO_START[source] | to_measure)
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


@pytest.mark.parametrize("name", EVERY)
def test_the_settings_in_it_are_settings(name: str) -> None:
    container = container_of(pod_of(render(EVERY[name])))
    assert container["image"] == f"resolver:{__version__}"
    assert container["args"] == ["run"]
    environment = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    settings, origins = load_with_origins({}, None, environment)
    if name in SCHEDULERS:
        assert settings.containers_dir == (SCHEDULERS[name],)
        assert settings.hami_metrics is (name != "koordinator")
    ours = {variable for variable in environment if variable.startswith("RESOLVER_")}
    assert {origin.removeprefix("environment ") for origin in origins.values() if origin != "default"} == ours
    assert settings.wait
    (port,) = container["ports"]
    assert settings.metrics_addr == f":{port['containerPort']}"
    probes = {each: container[each]["httpGet"] for each in container if each.endswith("Probe")}
    assert all(probe["port"] == port["name"] for probe in probes.values())
    assert probes["livenessProbe"]["path"] == "/healthz"
    # A pod that is not ready would take HAMi's monitor out of its service.
    assert ("readinessProbe" in probes) is (name != "sidecar")


def test_an_update_waits_for_the_new_pod_before_it_ends_the_old_one() -> None:
    (daemonset,) = [each for each in render(BASE) if each["kind"] == "DaemonSet"]
    assert daemonset["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert not any("hostPort" in port for port in container_of(pod_of([daemonset]))["ports"])


def test_nothing_can_call_the_api_server() -> None:
    manifests = render(BASE)
    assert sorted(each["kind"] for each in manifests) == ["DaemonSet", "Namespace", "ServiceAccount"]
    (account,) = [each for each in manifests if each["kind"] == "ServiceAccount"]
    assert (
        account["automountServiceAccountToken"] is pod_of(manifests)["automountServiceAccountToken"] is False
    )


def test_every_privilege_and_mount_says_why() -> None:
    lines = (BASE / "daemonset.yaml").read_text().splitlines()
    why = re.compile(r"^\s*#")
    wanted = (
        *("hostPID:", "priorityClassName:", "nodeSelector:", "tolerations:", "updateStrategy:", "limits:"),
        *("livenessProbe:", "readinessProbe:", "runAsUser:", "readOnlyRootFilesystem:", "seccompProfile:"),
        *("- SYS_PTRACE", "- BPF", "requests:", "- name: RESOLVER_WAIT", "- name: NVIDIA_VISIBLE_DEVICES"),
    )
    for word in wanted:
        (at,) = [index for index, line in enumerate(lines) if line.strip().startswith(word)]
        assert why.match(lines[at - 1]), f"{word} does not say why"
    mounts = lines[lines.index("          volumeMounts:") : lines.index("      volumes:")]
    for index, line in enumerate(mounts):
        if line.strip().startswith("- name:"):
            assert why.match(mounts[index - 1]), f"{line.strip()} does not say why"


# ---- the reporter -------------------------------------------------------------------------------------------------


def test_the_reporter_may_do_what_it_does_and_no_more() -> None:
    """The stand-in API server refuses the rest: every test of the reporter runs with just these rights."""
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


def test_the_reporter_has_the_socket_of_the_host_and_nothing_else() -> None:
    manifests = render(REPORTING)
    pod = pod_of(manifests, "report-devices")
    container = container_of(pod, "report-devices")
    assert container["image"] == f"resolver:{__version__}"
    assert container["args"] == ["report-devices"]
    assert pod["serviceAccountName"] == "resolver-report-devices"
    assert [each["hostPath"]["path"] for each in pod["volumes"]] == [Settings().run_dir]
    assert container["volumeMounts"] == [{"name": "run", "mountPath": Settings().run_dir, "readOnly": True}]
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)
    assert security["readOnlyRootFilesystem"] is True
    assert not pod.get("hostNetwork", False)
    # The daemon is as it was, and its DaemonSet does not take these pods for its own.
    daemon = pod_of(manifests)
    assert daemon == pod_of(render(BASE))
    assert daemon["automountServiceAccountToken"] is False
    selectors = [each["spec"]["selector"]["matchLabels"] for each in manifests if each["kind"] == "DaemonSet"]
    assert selectors[0] != selectors[1]


# ---- the sidecar --------------------------------------------------------------------------------------------------


def test_the_sidecar_is_the_base_s_container() -> None:
    base, sidecar = (container_of(pod_of(render(EVERY[name]))) for name in ("base", "sidecar"))
    probes = {each for each in base if each.endswith("Probe")}
    same = base.keys() - probes - {"ports", "volumeMounts"}
    assert {name: sidecar[name] for name in same} == {name: base[name] for name in same}
    # Nothing may say that HAMi's pod is not ready, or not started.
    assert sidecar.keys() == base.keys() - {"readinessProbe", "startupProbe"}


def test_the_sidecar_leaves_hami_as_it_is_and_can_be_taken_out_again() -> None:
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
    assert merge(patched, out) == before


# ---- the renderer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"namePrefix": "x-"}, "does not know"),
        ({"patches": [{"patch": "inline"}]}, "a patch is a file"),
        ({"patches": [{"path": "p.yaml", "target": {"kind": "Pod"}}]}, "a target has"),
        ({"images": [{"name": "resolver", "digest": "sha256:0"}]}, "an image has"),
        ({"patches": [{"path": "nobody.yaml"}]}, "nothing is there"),
        ({"patches": [{"path": "list.yaml"}]}, "merged or replaced"),
        ({"patches": [{"path": "delete.yaml"}]}, "is not there"),
        ({"components": ["../base"]}, "is no component"),
    ],
)
def test_what_the_renderer_does_not_know_is_an_error(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    shutil.copytree(BASE, tmp_path / "base")
    over = tmp_path / "over"
    over.mkdir()
    head = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "resolver", "namespace": "resolver"},
    }
    patches = {
        "p": head,
        "nobody": {**head, "metadata": {"name": "other"}},
        "list": {**head, "spec": {"template": {"spec": {"hostAliases": [{"ip": "1.2.3.4"}]}}}},
        "delete": {**head, "spec": {"template": {"spec": {"volumes": [{"name": "x", "$patch": "delete"}]}}}},
    }
    for name, patch in patches.items():
        (over / f"{name}.yaml").write_text(json.dumps(patch))
    (over / "kustomization.yaml").write_text(
        json.dumps({"kind": "Kustomization", "resources": ["../base"], **change})
    )
    with pytest.raises(ManifestError, match=complaint):
        render(over)


# ---- seccomp ------------------------------------------------------------------------------------------------------


def test_the_seccomp_profile_allows_bpf_and_otherwise_less_than_a_runtime_does() -> None:
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
    # Every CLONE_NEW* of include/uapi/linux/sched.h but that of time namespaces, which clone() does not know.
    assert clone["args"] == [{"index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]


# ---- the page -----------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs/kubernetes.md").read_text()
EXAMPLES = re.findall(r"```yaml\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_every_example_on_the_page_is_rendered_and_valid(tmp_path: Path, index: int) -> None:
    """A kustomization with the patch that follows it, and every patch alone."""
    shutil.copytree(KUSTOMIZE, tmp_path / "deploy/kustomize")
    path, text = EXAMPLES[index]
    place = tmp_path / path.partition("/")[0]
    place.mkdir()
    (place / "kustomization.yaml").write_text(
        "resources: [../deploy/kustomize/base]\npatches: [{path: patch.yaml}]\n"
    )
    shutil.copy(FIXTURES / "sidecar/hami.yaml", place)
    (tmp_path / path).write_text(text)
    if path.endswith("kustomization.yaml") and "patches:" in text:
        (tmp_path / EXAMPLES[index + 1][0]).write_text(EXAMPLES[index + 1][1])
    rendered = render(place)
    validate(rendered, [release for release in RELEASES if "appArmorProfile" not in text or release > "1.30"])
    assert rendered not in (render(BASE), load(FIXTURES / "sidecar/hami.yaml"))


def test_the_page_s_table_is_what_is_rendered() -> None:
    table = PAGE.partition("## Install")[2].partition("## ")[0]
    rows = {
        name: row
        for names, row in re.findall(r"^\| ((?:`[\w/-]+`(?:, )?)+) \|(.*)\|$", table, re.MULTILINE)
        for name in re.findall(r"`(?:overlays/)?([\w-]+)`", names)
    }
    for name in ("base", *OVERLAID):
        cells = [cell.strip() for cell in rows[name].split("|")]
        pod = pod_of(render(DAEMONSETS[name]))
        added = container_of(pod)["securityContext"]["capabilities"]["add"]
        told = cells[1] if cells[1] != "as `base`" else rows["base"].split("|")[1]
        assert re.findall(r"`(\w+)`", told) == added
        assert cells[2] == ("the node's" if pod.get("hostNetwork") else "the pod's")
    for path in re.findall(r"`((?:overlays|components)/[\w-]+)`", PAGE):
        assert (KUSTOMIZE / path / "kustomization.yaml").exists()
    assert {each.name for each in (KUSTOMIZE / "overlays").iterdir()} <= set(re.findall(r"[\w-]+", PAGE))


def test_the_page_counts_system_calls_and_releases_rightly() -> None:
    own = json.loads((ROOT / "deploy/seccomp/resolver.json").read_text())
    allowed = [
        name for rule in own["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]
    ]
    assert f"It allows {len(set(allowed))} system calls" in PAGE
    assert f"Kubernetes {RELEASES[0]} to {'.'.join(RELEASES[-1].split('.')[:2])}" in PAGE
