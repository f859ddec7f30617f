"""The chart, rendered by Helm: valid for API servers, and the same as the kustomizations."""

import copy
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from resolver import config
from resolver.base.source_records import SOURCE_RECORDS
from resolver.base.version import VERSION
from tests import manifests
from tests.charts import CHART, environment, helm, render, the, with_image
from tests.fakes.kube import CORDON_RULE, RULES, Rule, rules_of
from tests.manifests import FOREIGN, KUSTOMIZE, ROOT, Manifest, container_of, pod_of
from tests.programs import completed

EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.example.com:5000/gpu/resolver", "digest": f"sha256:{'a' * 64}"},
    "imagePullSecrets": [{"name": "registry"}],
    "commonLabels": {"team": "gpu"},
    "settings": {
        "containers_dir": ["/usr/local/vgpu/containers", "/srv/vgpu/containers"],
        "metrics_addr": "[::]:9400",
        "map_size": 4194304,
        "broker": "/var/run/hami/hostpid/broker.sock",
        "socket_group": "1000",
    },
    "extraCapabilities": ["DAC_OVERRIDE", "SYS_ADMIN"],
    "seccompProfile": {"type": "Localhost", "localhostProfile": "resolver.json"},
    "podSecurityContext": {"supplementalGroups": [1000]},
    "serviceAccount": {"annotations": {"a": "b"}},
    "driverEnv": {"NVIDIA_VISIBLE_DEVICES": "all"},
    "runtimeClassName": "nvidia",
    "startupProbe": {"failureThreshold": 30, "periodSeconds": 2},
    "resources": {"limits": {"memory": "1Gi", "cpu": 1}, "requests": {"cpu": None}},
    "nodeSelector": {"gpu": None, "nvidia.com/gpu.present": "true"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "10%", "maxUnavailable": 0}},
    "podLabels": {"a": "b"},
    "podAnnotations": {"a": "b"},
    "annotations": {"a": "b"},
    "extraEnv": [{"name": "TZ", "value": "UTC"}, {"name": "LD_LIBRARY_PATH", "value": "/nvidia/lib64"}],
    "extraEnvFrom": [{"configMapRef": {"name": "more", "optional": True}}],
    "extraArgs": ["--config=/etc/resolver/resolver.toml"],
    "extraVolumes": [{"name": "config", "configMap": {"name": "resolver"}}],
    "extraVolumeMounts": [{"name": "config", "mountPath": "/etc/resolver", "readOnly": True}],
    "service": {"port": 80, "annotations": {"a": "b"}, "labels": {"a": "b"}},
    "serviceMonitor": {
        "enabled": True,
        "namespace": "monitoring",
        "labels": {"release": "prometheus"},
        "interval": "15s",
        "scrapeTimeout": "5s",
        "relabelings": [{"targetLabel": "cluster", "replacement": "one"}],
        "metricRelabelings": [{"action": "labeldrop", "regex": "pod_uid"}],
    },
    "prometheusRule": {"enabled": True, "namespace": "monitoring"},
    "dashboard": {"enabled": True, "namespace": "monitoring", "annotations": {"grafana_folder": "GPU"}},
}
#: The daemon replaces HAMi's and KAI's monitors.
MONITOR: dict[str, Any] = {"hami_metrics": True, "metrics_addr": ":9394"}
REPORTING: dict[str, Any] = {"reportDevices": {"enabled": True}}
NVIDIA: dict[str, Any] = {
    "runtimeClassName": "nvidia",
    "nodeSelector": {"gpu": None, "nvidia.com/gpu.present": "true"},
}
READ_ONLY_USR: dict[str, Any] = {"settings": {"containers_dir": ["/var/lib/hami/vgpu/containers"]}}
#: The rows of docs/kubernetes.md#platforms, by the kustomization of the same platform.
PLATFORMS: dict[str, dict[str, Any]] = {
    "gke": {"resourceQuota": {"enabled": True}},
    "openshift": {"openshift": {"enabled": True}} | NVIDIA,
    "bottlerocket": READ_ONLY_USR,
    "talos": READ_ONLY_USR | NVIDIA,
    "nvidia-runtime": NVIDIA,
}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "bpf": {"source": "bpf"},
    "netlink": {"source": "netlink"},
    "scan": {"source": "scan"},
    "dry run": {"settings": {"dry_run": True}},
    "no metrics": {"settings": {"metrics_addr": "off"}},
    "on one address of the node": {"hostNetwork": True, "settings": {"metrics_addr": "127.0.0.1:9395"}},
    "on delete": {"updateStrategy": {"type": "OnDelete"}},
    "no probes": {"livenessProbe": None, "readinessProbe": None},
    "bare": {
        "serviceAccount": {"create": False},
        "service": {"enabled": False},
        "driverEnv": None,
        "nodeSelector": {"gpu": None},
        "tolerations": [],
        "priorityClassName": "",
        "seccompProfile": None,
    },
    "pod monitor": {"podMonitor": {"enabled": True}, "service": {"enabled": False}},
    "everything": EVERYTHING,
    **PLATFORMS,
    "devices": REPORTING,
    "devices, with the condition and monitors": {
        "reportDevices": {"enabled": True, "nodeCondition": True},
        "settings": {"run_dir": "/run/other"},
        "podMonitor": {"enabled": True},
        "service": {"enabled": False},
        "imagePullSecrets": [{"name": "registry"}],
    },
}
#: Chart values, with the same output as `kubectl kustomize` of the directory.
SAME: dict[str, dict[str, Any]] = {
    "base": {},
    "overlays/scan-only": {"source": "scan"},
    "overlays/netlink": {"source": "netlink"},
    "overlays/dry-run": {"settings": {"dry_run": True}},
    "overlays/hami": {"scheduler": "hami", "settings": MONITOR},
    "overlays/volcano": {"scheduler": "volcano", "settings": MONITOR},
    "overlays/koordinator": {"scheduler": "koordinator"},
    "overlays/kai": {"scheduler": "kai", "settings": MONITOR | {"mapped_regions": True}},
    "overlays/dra": {"scheduler": "dra", "settings": MONITOR},
    "../../tests/fixtures/manifests/own-seccomp": {"seccompProfile": EVERYTHING["seccompProfile"]},
    **{f"../../tests/fixtures/manifests/{name}": values for name, values in PLATFORMS.items()},
}


def ours(values: dict[str, Any]) -> Manifest:
    (container,) = pod_of(render(values))["containers"]
    assert isinstance(container, dict)
    return container


@pytest.mark.parametrize("case", CASES)
def test_api_servers_accept_the_rendered_chart(case: str) -> None:
    made = render(CASES[case])
    assert {each["kind"] for each in made} - set(FOREIGN) >= {"DaemonSet"}
    manifests.validate(made)
    for each in made:
        foreign = each["apiVersion"] in ("monitoring.coreos.com/v1", "security.openshift.io/v1")
        assert foreign is (each["kind"] in FOREIGN)
        assert len(each["metadata"]["name"]) <= 63


@pytest.mark.parametrize("case", ["default", "everything"])
def test_helms_linter_accepts_the_chart(case: str) -> None:
    assert "[ERROR]" not in helm("lint", "--strict", "--quiet", CHART, values=with_image(CASES[case]))


def comparable(made: list[Manifest]) -> tuple[Manifest, dict[str, str]]:
    """Return the DaemonSet without names and labels, its volumes sorted, and its environment."""
    spec = copy.deepcopy(the("DaemonSet", made)["spec"])
    spec["template"]["metadata"].pop("labels")
    spec.pop("selector")
    spec.setdefault("revisionHistoryLimit", 10)  # default of the API server
    (container,) = spec["template"]["spec"]["containers"]
    variables = environment(container)
    del container["env"]
    container["volumeMounts"].sort(key=lambda each: str(each["name"]))
    spec["template"]["spec"]["volumes"].sort(key=lambda each: str(each["name"]))
    return spec, variables


@pytest.mark.parametrize("directory", SAME)
def test_chart_pod_equals_the_kustomizations(directory: str) -> None:
    chart, chart_variables = comparable(render(SAME[directory]))
    other, other_variables = comparable(manifests.render(KUSTOMIZE / directory))
    assert chart == other
    assert config.load(environ=chart_variables)[0] == config.load(environ=other_variables)[0]

    def foreign(variables: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in variables.items() if not name.startswith("RESOLVER_")}

    assert foreign(chart_variables) == foreign(other_variables) != {}


@pytest.mark.parametrize("scheduler", ["", "hami", "volcano", "kai", "dra"])
def test_named_directories_and_nodes_fit_any_scheduler(scheduler: str) -> None:
    said = {
        "scheduler": scheduler,
        "settings": {"containers_dir": ["/opt/vgpu/containers"]},
        "nodeSelector": {"gpu": None, "pool": "slices"},
    }
    pod = pod_of(render(said))
    assert pod["nodeSelector"] == {"pool": "slices"}
    assert environment(container_of(pod))["RESOLVER_CONTAINERS_DIR"] == "/opt/vgpu/containers"
    assert container_of(pod)["volumeMounts"][0]["mountPath"] == "/opt/vgpu/containers"


@pytest.mark.parametrize(
    ("name", "kind"), [("gke", "ResourceQuota"), ("openshift", "SecurityContextConstraints")]
)
def test_platform_has_the_same_object_as_the_component(name: str, kind: str) -> None:
    component = the(kind, manifests.render(ROOT / "tests/fixtures/manifests" / name))
    made = the(kind, render(PLATFORMS[name]))
    for manifest in (component, made):
        del manifest["metadata"]
    if kind == "SecurityContextConstraints":
        assert set(made["volumes"]) > set(component["volumes"])
        assert set(made["users"]) < set(component["users"])
        component |= {"volumes": made["volumes"], "users": made["users"]}
    assert made == component


def test_driver_directory_is_mounted_and_searched() -> None:
    container = ours({"driverDir": "/home/kubernetes/bin/nvidia/lib64"})
    assert environment(container)["LD_LIBRARY_PATH"] == "/home/kubernetes/bin/nvidia/lib64"
    mounted = {mount["mountPath"]: mount.get("readOnly") for mount in container["volumeMounts"]}
    assert mounted["/home/kubernetes/bin/nvidia/lib64"] is True


def test_notes_and_troubleshooting_quote_refused_pods() -> None:
    notes = (CHART / "templates/NOTES.txt").read_text()
    page = (ROOT / "docs/troubleshooting.md").read_text()
    for words in (
        "insufficient quota to match these scopes",
        "unable to validate against any security context",
    ):
        assert words in notes
        assert words in page


def test_chart_has_the_components_tls_and_token() -> None:
    """Both apply to the daemon, kubelet's probes and both monitors."""
    secrets = {"tls": "resolver-metrics-tls", "token": "resolver-metrics-token"}
    values: dict[str, Any] = {"metricsSecrets": secrets, "serviceMonitor": {"enabled": True}}
    made, other = render(values), manifests.render(ROOT / "tests/fixtures/manifests/metrics-tls")
    manifests.validate([*other, *made])
    (chart, variables), (component, theirs) = comparable(made), comparable(other)
    assert chart == component
    settings, _ = config.load(environ=variables)
    assert settings == config.load(environ=theirs)[0]
    mounted = {each["mountPath"] for each in ours(values)["volumeMounts"]}
    for path in (settings.metrics_tls_cert, settings.metrics_tls_key, settings.metrics_token_file):
        assert str(Path(path).parent) in mounted
    probes = [each["httpGet"] for name, each in ours(values).items() if name.endswith("Probe")]
    assert [each["scheme"] for each in probes] == ["HTTPS"] * 3
    (endpoint,) = the("ServiceMonitor", made)["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    ca = {"secret": {"name": secrets["tls"], "key": "ca.crt"}}
    assert endpoint["tlsConfig"] == {"ca": ca, "serverName": "resolver.resolver.svc"}
    assert endpoint["authorization"] == {"credentials": {"name": secrets["token"], "key": "token"}}
    own = {"enabled": True, "tlsConfig": {"insecureSkipVerify": True}}
    pods = the("PodMonitor", render({"metricsSecrets": secrets, "podMonitor": own}))
    assert pods["spec"]["podMetricsEndpoints"][0]["tlsConfig"] == own["tlsConfig"]


def reporting(values: dict[str, Any]) -> tuple[Manifest, frozenset[Rule]]:
    made = render(values)
    return pod_of(made, "report-devices"), frozenset(rules_of(made))


def test_chart_reporter_equals_the_components() -> None:
    pod, rules = reporting(REPORTING)
    component = manifests.render(ROOT / "tests/fixtures/manifests/report-devices")
    assert pod == pod_of(component, "report-devices")
    assert rules == RULES
    more = {"nodeCondition": True, "hamiCordon": True, "podEvents": "off"}
    pod, rules = reporting({"reportDevices": {"enabled": True, **more}})
    of_pods = {Rule("", "events", verb) for verb in ("get", "create", "patch")}
    assert rules == (RULES | {Rule("", "nodes/status", "patch"), CORDON_RULE}) - of_pods
    args = ["report-devices", "--pod-events=off", "--node-condition", "--hami-cordon"]
    assert pod["containers"][0]["args"] == args


def test_tenants_view_policy_is_the_components() -> None:
    socket = "/run/resolver/tenants/resolver.sock"
    made = render({"settings": {"tenant_socket": socket}, "tenantsView": {"policy": True}})
    component = manifests.render(ROOT / "tests/fixtures/manifests/tenants-view")
    manifests.validate(
        [each for each in component if each["kind"].startswith("Mutating")], ("1.36", manifests.RELEASES[-1])
    )
    specs = {each["kind"]: each["spec"] for each in component if each["kind"].startswith("Mutating")}
    assert {each["kind"]: each["spec"] for each in made if each["kind"] in specs} == specs
    assert {"name": "RESOLVER_TENANT_SOCKET", "value": socket} in the("DaemonSet", component)["spec"][
        "template"
    ]["spec"]["containers"][0]["env"]


def test_daemon_selectors_exclude_reporter_pods() -> None:
    made = render(REPORTING)
    daemon, reporter = [each for each in made if each["kind"] == "DaemonSet"]
    labels = reporter["spec"]["template"]["metadata"]["labels"]
    (service,) = [each for each in made if each["kind"] == "Service"]
    for selector in (daemon["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert not selector.items() <= labels.items()
    daemons = daemon["spec"]["template"]["metadata"]["labels"]
    assert not reporter["spec"]["selector"]["matchLabels"].items() <= daemons.items()


def test_daemon_has_no_cluster_rights() -> None:
    made = render(EVERYTHING)
    kinds = "ServiceAccount Service DaemonSet ServiceMonitor PrometheusRule ConfigMap"
    assert {each["kind"] for each in made} == set(kinds.split())
    assert the("ServiceAccount", made)["automountServiceAccountToken"] is False
    assert pod_of(made)["automountServiceAccountToken"] is False


@pytest.mark.parametrize("source", ["auto", *SOURCE_RECORDS])
def test_extra_capabilities_add_to_the_sources(source: str) -> None:
    """`SAME` and test_manifests check the source's capabilities, and that all others are dropped."""
    record = SOURCE_RECORDS["bpf" if source == "auto" else source]
    needed = record.rights | record.early
    more = ours({"source": source, "extraCapabilities": ["NET_ADMIN", "DAC_OVERRIDE"]})["securityContext"]
    assert sorted(more["capabilities"]["add"]) == sorted(needed | {"NET_ADMIN", "DAC_OVERRIDE"})


def test_only_netlink_uses_the_host_network() -> None:
    entering = {"source": "netlink", "hostNetwork": False, "extraCapabilities": ["SYS_ADMIN"]}
    assert "hostNetwork" not in pod_of(render(entering))
    own = render({"hostNetwork": True, "settings": {"metrics_addr": "[::1]:9395"}})
    assert pod_of(own)["hostNetwork"] is True
    assert container_of(pod_of(own))["livenessProbe"]["httpGet"]["host"] == "::1"
    assert "Service" not in {each["kind"] for each in own}


@pytest.mark.parametrize(
    ("values", "surge"),
    [
        ({}, 1),
        ({"settings": {"wait": False}}, 0),
        ({"settings": {"wait": False, "dry_run": True}}, 1),
        ({"hostNetwork": True}, 0),
        ({"hostNetwork": True, "settings": {"metrics_addr": "off"}}, 1),
    ],
)
def test_update_surges_only_if_two_pods_can_run(values: dict[str, Any], surge: int) -> None:
    strategy = the("DaemonSet", render(values))["spec"]["updateStrategy"]
    rolling = {"maxSurge": surge, "maxUnavailable": 1 - surge}
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": rolling}


def test_selectors_use_only_constant_labels() -> None:
    hostile = {"app.kubernetes.io/name": "other", "app.kubernetes.io/instance": "other"}
    made = render({"commonLabels": hostile, "podLabels": hostile, "image": {"tag": "2.0.0"}})
    spec = the("DaemonSet", made)["spec"]
    assert spec["selector"] == the("DaemonSet", render())["spec"]["selector"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert the("Service", made)["spec"]["selector"] == spec["selector"]["matchLabels"]


def test_chart_values_reach_the_container() -> None:
    """Covers each value of `EVERYTHING` that the chart passes on unchanged."""
    made = render(EVERYTHING)
    daemon_set = the("DaemonSet", made)
    pod, container = pod_of(made), container_of(pod_of(made))
    assert daemon_set["spec"]["updateStrategy"] == EVERYTHING["updateStrategy"]
    assert daemon_set["metadata"]["annotations"] == {"a": "b"}
    assert daemon_set["spec"]["template"]["metadata"]["annotations"]["a"] == "b"
    assert daemon_set["spec"]["template"]["metadata"]["labels"]["a"] == "b"
    for name in ("imagePullSecrets", "runtimeClassName", "tolerations", "affinity"):
        assert pod[name] == EVERYTHING[name]
    assert pod["securityContext"] == EVERYTHING["podSecurityContext"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["volumes"][-1] == EVERYTHING["extraVolumes"][0]
    assert container["volumeMounts"][-1] == EVERYTHING["extraVolumeMounts"][0]
    assert container["env"][-2:] == EVERYTHING["extraEnv"]
    assert container["envFrom"] == EVERYTHING["extraEnvFrom"]
    assert container["args"] == ["run", *EVERYTHING["extraArgs"]]
    assert container["securityContext"]["seccompProfile"] == EVERYTHING["seccompProfile"]
    assert container["startupProbe"]["failureThreshold"] == 30
    assert container["startupProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert all(each["metadata"]["labels"]["team"] == "gpu" for each in made)


def test_directories_in_settings_are_mounted() -> None:
    pod = pod_of(render(EVERYTHING))
    volumes = {each["name"]: each.get("hostPath") for each in pod["volumes"]}
    mounted = {
        each["mountPath"]: (volumes[each["name"]], each.get("readOnly", False))
        for each in container_of(pod)["volumeMounts"]
        if volumes[each["name"]]
    }
    for path, (source, _) in mounted.items():
        kind = "Directory" if path == "/var/log/pods" else "DirectoryOrCreate"
        assert source == {"path": path, "type": kind}
    assert {path: read_only for path, (_, read_only) in mounted.items()} == {
        "/usr/local/vgpu/containers": False,
        "/srv/vgpu/containers": False,
        "/run/resolver": False,
        "/var/run/hami": False,
        "/var/log/pods": True,
        "/var/log/containers": True,
    }


@pytest.mark.parametrize(
    ("value", "kind", "endpoints"),
    [("serviceMonitor", "ServiceMonitor", "endpoints"), ("podMonitor", "PodMonitor", "podMetricsEndpoints")],
)
def test_monitors_select_pods_and_keep_tenant_names(value: str, kind: str, endpoints: str) -> None:
    said = EVERYTHING["serviceMonitor"]
    made = render({value: said})
    monitor = the(kind, made)
    assert monitor["metadata"]["namespace"] == "monitoring"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"].keys() == {"namespaceSelector", "selector", endpoints}
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["resolver"]}
    chosen = the("Service", made)["metadata"] if kind == "ServiceMonitor" else None
    chosen = chosen or the("DaemonSet", made)["spec"]["template"]["metadata"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= chosen["labels"].items()
    (endpoint,) = monitor["spec"][endpoints]
    assert endpoint == {
        "port": "metrics",
        "path": "/metrics",
        "honorLabels": True,
        "interval": "15s",
        "scrapeTimeout": "5s",
        "relabelings": [
            {"targetLabel": "job", "replacement": "resolver"},
            {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"},
            *said["relabelings"],
        ],
        "metricRelabelings": said["metricRelabelings"],
    }
    ports = [the("Service", made)["spec"]["ports"], container_of(pod_of(made))["ports"]]
    assert [[port["name"] for port in each] for each in ports] == [["metrics"], ["metrics"]]
    assert ports[0][0]["targetPort"] == "metrics"


def test_prometheus_rule_has_the_same_alerts() -> None:
    alerts = yaml.safe_load((CHART / "files/resolver.rules.yaml").read_text())["groups"]
    assert the("PrometheusRule", render({"prometheusRule": {"enabled": True}}))["spec"]["groups"] == alerts
    names = [rule["alert"] for group in alerts for rule in group["rules"] if "alert" in rule]
    changed = {
        "enabled": True,
        "disabled": names[:2],
        "ruleLabels": {"severity": "page", "team": "gpu"},
        "runbookBase": "https://example.com/",
    }
    rules = [
        rule
        for group in the("PrometheusRule", render({"prometheusRule": changed}))["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert [rule["alert"] for rule in rules] == names[2:]
    for rule in rules:
        assert rule["labels"].items() >= {"severity": "page", "team": "gpu"}.items()
        page = f"docs/monitoring.md#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook"] == page
        assert rule["annotations"]["runbook_url"] == f"https://example.com/{page}"


def test_packed_chart_renders_the_same(tmp_path: Path) -> None:
    completed("make", "--old-file=setup-dev", "chart", f"DIST={tmp_path}", cwd=ROOT, check=True)
    (archive,) = tmp_path.glob("*.tgz")
    assert archive.name == f"resolver-{VERSION}.tgz"
    with tarfile.open(archive) as files:
        names = {name.removeprefix("resolver/") for name in files.getnames()}
    assert names == {
        str(path.relative_to(CHART))
        for path in CHART.rglob("*")
        if path.is_file() and path.name != ".helmignore"
    } | {".helmignore"}
    label = "app.kubernetes.io/version"
    rendered = render(EVERYTHING, chart=archive)
    assert {manifest["metadata"]["labels"][label] for manifest in rendered} == {VERSION}
    assert rendered == render(EVERYTHING)
    image = container_of(pod_of(render({"image": {"repository": "r"}}, chart=archive)))["image"]
    assert image == f"r:{VERSION}"
