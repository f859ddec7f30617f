"""The chart, rendered by Helm: what the API server would take, and what the DaemonSet in deploy/kustomize has."""

from __future__ import annotations

import copy
import json
import re
import runpy
import shlex
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from resolver import __version__, config
from resolver.linux.capabilities import NUMBERS, TO_START
from tests import manifests
from tests.charts import CHART, FOREIGN, RefusedError, environment, helm, render, the, with_image
from tests.fakes.kube import RULES, Rule, rules_of
from tests.manifests import KUSTOMIZE, ROOT, Manifest, container_of, pod_of

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
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]
            }
        }
    },
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
#: In the place of HAMi's and KAI's monitors.
MONITOR: dict[str, Any] = {"hami_metrics": True, "metrics_addr": ":9394"}
REPORTING: dict[str, Any] = {"reportDevices": {"enabled": True}}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "bpf": {"source": "bpf"},
    "netlink": {"source": "netlink"},
    "scan": {"source": "scan"},
    "measured": {"measureDriver": True},
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
    "devices": REPORTING,
    "devices, with the condition and monitors": {
        "reportDevices": {"enabled": True, "nodeCondition": True},
        "settings": {"run_dir": "/run/other"},
        "podMonitor": {"enabled": True},
        "service": {"enabled": False},
        "imagePullSecrets": [{"name": "registry"}],
    },
}
#: What the chart renders with these values is what kubectl makes of that directory.
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
}


def ours(values: dict[str, Any]) -> Manifest:
    """The one container of the pod."""
    (container,) = pod_of(render(values))["containers"]
    assert isinstance(container, dict)
    return container


@pytest.mark.parametrize("case", CASES)
def test_an_api_server_takes_it(case: str) -> None:
    made = render(CASES[case])
    assert {each["kind"] for each in made} - set(FOREIGN) >= {"DaemonSet"}
    manifests.validate([each for each in made if each["kind"] not in FOREIGN])
    for each in made:
        assert each["apiVersion"] == "monitoring.coreos.com/v1" or each["kind"] not in FOREIGN
        assert len(each["metadata"]["name"]) <= 63


@pytest.mark.parametrize("case", CASES)
def test_helms_own_linter_finds_no_fault(case: str) -> None:
    assert "[ERROR]" not in helm("lint", "--strict", "--quiet", CHART, values=with_image(CASES[case]))


def test_a_profile_for_apparmor_goes_where_new_releases_look(root: Path) -> None:
    made = render({"appArmorProfile": {"type": "Unconfined"}})
    assert container_of(pod_of(made))["securityContext"]["appArmorProfile"] == {"type": "Unconfined"}
    manifests.validate(made, [release for release in manifests.RELEASES if release >= "1.30"])


def comparable(made: list[Manifest]) -> tuple[Manifest, dict[str, str]]:
    """The DaemonSet without its names and labels, and its environment."""
    spec = copy.deepcopy(the("DaemonSet", made)["spec"])
    spec["template"]["metadata"].pop("labels")
    spec.pop("selector")
    spec.setdefault("revisionHistoryLimit", 10)  # what the API server puts in
    (container,) = spec["template"]["spec"]["containers"]
    variables = environment(container)
    del container["env"]
    return spec, variables


@pytest.mark.parametrize("directory", SAME)
def test_it_is_the_same_pod_as_the_kustomizations(directory: str) -> None:
    chart, chart_variables = comparable(render(SAME[directory]))
    other, other_variables = comparable(manifests.render(KUSTOMIZE / directory))
    assert chart == other
    assert config.load(environ=chart_variables) == config.load(environ=other_variables)

    def foreign(variables: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in variables.items() if not name.startswith("RESOLVER_")}

    assert foreign(chart_variables) == foreign(other_variables) != {}


@pytest.mark.parametrize("scheduler", ["", "hami", "volcano", "kai", "dra"])
def test_who_names_directories_or_nodes_has_them_with_any_scheduler(scheduler: str) -> None:
    said = {
        "scheduler": scheduler,
        "settings": {"containers_dir": ["/opt/vgpu/containers"]},
        "nodeSelector": {"gpu": None, "pool": "slices"},
    }
    pod = pod_of(render(said))
    assert pod["nodeSelector"] == {"pool": "slices"}
    assert environment(container_of(pod))["RESOLVER_CONTAINERS_DIR"] == "/opt/vgpu/containers"
    assert container_of(pod)["volumeMounts"][0]["mountPath"] == "/opt/vgpu/containers"


@pytest.mark.parametrize("source", ["auto", "scan"])
def test_it_measures_the_driver_with_the_rights_of_the_component(source: str) -> None:
    where = {"auto": "base", "scan": "overlays/scan-only"}[source]
    component = ROOT / "tests/fixtures/manifests/measure-driver" / where
    chart = comparable(render({"source": source, "measureDriver": True}))[0]
    assert chart == comparable(manifests.render(component))[0]


def test_it_can_have_the_seccomp_profile_of_the_component(tmp_path: Path) -> None:
    both = {
        "resources": [str(KUSTOMIZE / "base")],
        "components": [str(KUSTOMIZE / "components/own-seccomp")],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(both))
    own = {"seccompProfile": {"type": "Localhost", "localhostProfile": "resolver.json"}}
    assert comparable(render(own))[0] == comparable(manifests.render(tmp_path))[0] != comparable(render())[0]


def reporting(values: dict[str, Any]) -> tuple[Manifest, frozenset[Rule]]:
    """The reporter's pod, and what its roles allow."""
    made = render(values)
    return pod_of(made, "report-devices"), frozenset(rules_of(made))


def test_the_reporter_is_the_components() -> None:
    pod, rules = reporting(REPORTING)
    (directory,) = [Path("tests/fixtures/manifests/report-devices")]
    other = pod_of(manifests.render(manifests.ROOT / directory), "report-devices")
    assert pod == other
    assert rules == RULES
    pod, rules = reporting({"reportDevices": {"enabled": True, "nodeCondition": True}})
    assert rules == RULES | {Rule("", "nodes/status", "patch")}
    assert pod["containers"][0]["args"] == ["report-devices", "--node-condition"]


def test_the_reporter_finds_the_daemons_socket() -> None:
    pod, _ = reporting({"reportDevices": {"enabled": True}, "settings": {"run_dir": "/run/other"}})
    variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert variables["RESOLVER_SOCKET"] == "/run/other/resolver.sock"
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/run/other"


def test_the_daemons_objects_do_not_take_the_reporters_pods_for_theirs() -> None:
    made = render(REPORTING)
    daemon, reporter = [each for each in made if each["kind"] == "DaemonSet"]
    labels = reporter["spec"]["template"]["metadata"]["labels"]
    (service,) = [each for each in made if each["kind"] == "Service"]
    for selector in (daemon["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert not selector.items() <= labels.items()
    daemons = daemon["spec"]["template"]["metadata"]["labels"]
    assert not reporter["spec"]["selector"]["matchLabels"].items() <= daemons.items()


def test_nobody_is_given_a_right_in_the_cluster() -> None:
    made = render(EVERYTHING)
    assert {each["kind"] for each in made} == {
        "ServiceAccount",
        "Service",
        "DaemonSet",
        "ServiceMonitor",
        "PrometheusRule",
        "ConfigMap",
    }
    assert the("ServiceAccount", made)["automountServiceAccountToken"] is False
    assert pod_of(made)["automountServiceAccountToken"] is False


@pytest.mark.parametrize("source", ["auto", *TO_START])
def test_it_has_the_capabilities_of_its_source_and_no_more(source: str) -> None:
    needed = TO_START["bpf" if source == "auto" else source]
    context = ours({"source": source})["securityContext"]
    assert context["capabilities"]["drop"] == ["ALL"]
    assert sorted(context["capabilities"]["add"]) == sorted(needed)
    assert context["privileged"] is context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    more = ours({"source": source, "extraCapabilities": ["NET_ADMIN", "DAC_OVERRIDE"]})["securityContext"]
    assert sorted(more["capabilities"]["add"]) == sorted(needed | {"NET_ADMIN", "DAC_OVERRIDE"})


def test_more_capabilities_are_those_that_the_daemon_knows() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    optional = set(schema["properties"]["extraCapabilities"]["items"]["enum"])
    assert optional == set(NUMBERS) - {"SYS_PTRACE", "BPF", "PERFMON"}


def test_the_network_is_the_hosts_only_for_netlink() -> None:
    assert pod_of(render({"source": "netlink"}))["hostNetwork"] is True
    assert "hostNetwork" not in pod_of(render({"source": "auto"}))
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
def test_two_pods_share_a_node_only_where_both_can_live(values: dict[str, Any], surge: int) -> None:
    strategy = the("DaemonSet", render(values))["spec"]["updateStrategy"]
    assert strategy == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": surge, "maxUnavailable": 1 - surge},
    }


def test_a_selector_holds_on_to_what_never_changes() -> None:
    hostile = {"app.kubernetes.io/name": "other", "app.kubernetes.io/instance": "other"}
    made = render({"commonLabels": hostile, "podLabels": hostile, "image": {"tag": "2.0.0"}})
    spec = the("DaemonSet", made)["spec"]
    assert spec["selector"] == the("DaemonSet", render())["spec"]["selector"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert the("Service", made)["spec"]["selector"] == spec["selector"]["matchLabels"]


def test_two_releases_have_nothing_in_common() -> None:
    one, two = render({"dashboard": {"enabled": True}}, release="a"), render(release="b")
    names = [{(each["kind"], each["metadata"]["name"]) for each in made} for made in (one, two)]
    assert not names[0] & names[1]
    assert the("Service", one)["spec"]["selector"] != the("Service", two)["spec"]["selector"]
    assert names[0] == {
        (kind, name)
        for kind, name in names[0]
        if name == ("a-resolver-dashboard" if kind == "ConfigMap" else "a-resolver")
    }


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "gpu-resolver"),
        ({"nameOverride": "hami"}, "gpu-hami"),
        ({"fullnameOverride": "x" * 63}, "x" * 63),
    ],
)
def test_names_can_be_chosen(values: dict[str, Any], name: str) -> None:
    made = render(values | {"dashboard": {"enabled": True}}, release="gpu", namespace="other")
    for each in made:
        assert each["metadata"]["namespace"] == "other"
        expected = f"{name[:53]}-dashboard" if each["kind"] == "ConfigMap" else name
        assert each["metadata"]["name"] == expected
    assert pod_of(made)["serviceAccountName"] == name


@pytest.mark.parametrize(
    ("image", "rendered"),
    [
        ({}, f"resolver:{__version__}"),
        ({"repository": "r.example.com:5000/a/b", "tag": "1-x"}, "r.example.com:5000/a/b:1-x"),
        (EVERYTHING["image"] | {"tag": "1"}, f"registry.example.com:5000/gpu/resolver@sha256:{'a' * 64}"),
    ],
)
def test_the_image_can_be_chosen(image: dict[str, str], rendered: str) -> None:
    assert ours({"image": image})["image"] == rendered


def test_resources_are_those_that_were_measured_with_what_is_said_on_top() -> None:
    measured = {"requests": {"cpu": "20m", "memory": "96Mi"}, "limits": {"memory": "384Mi"}}
    assert ours({})["resources"] == measured
    assert ours(EVERYTHING)["resources"] == {
        "requests": {"memory": "96Mi"},
        "limits": {"memory": "1Gi", "cpu": 1},
    }
    free = ours({"source": "scan", "resources": {"limits": {"memory": None}, "requests": {"x.com/y": 1}}})
    assert free["resources"] == {"requests": {"cpu": "20m", "memory": "96Mi", "x.com/y": 1}, "limits": {}}


def test_what_is_given_arrives() -> None:
    """Each value of `EVERYTHING` that is handed through unchanged."""
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


def test_what_the_settings_name_is_mounted() -> None:
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
    [
        ("serviceMonitor", "ServiceMonitor", "endpoints"),
        ("podMonitor", "PodMonitor", "podMetricsEndpoints"),
    ],
)
def test_monitors_find_the_pods_and_keep_the_tenants_names(value: str, kind: str, endpoints: str) -> None:
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


def test_the_alerts_are_those_of_the_alerts_directory(root: Path) -> None:
    alerts = yaml.safe_load((root / "deploy/alerts/resolver.rules.yaml").read_text())["groups"]
    assert the("PrometheusRule", render({"prometheusRule": {"enabled": True}}))["spec"]["groups"] == alerts
    names = [rule["alert"] for group in alerts for rule in group["rules"]]
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
    ]
    assert [rule["alert"] for rule in rules] == names[2:]
    for rule in rules:
        assert rule["labels"].items() >= {"severity": "page", "team": "gpu"}.items()
        page = f"docs/runbooks/{rule['alert']}.md"
        assert rule["annotations"]["runbook"] == page
        assert rule["annotations"]["runbook_url"] == f"https://example.com/{page}"


def test_a_base_of_runbooks_needs_no_slash_at_its_end() -> None:
    both = [
        the("PrometheusRule", render({"prometheusRule": {"enabled": True, "runbookBase": base}}))
        for base in ("https://example.com/a", "https://example.com/a/")
    ]
    assert both[0] == both[1]
    for group in both[0]["spec"]["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["runbook_url"].startswith("https://example.com/a/docs/runbooks/")


def test_an_alert_that_is_not_there_cannot_be_left_out() -> None:
    with pytest.raises(
        RefusedError, match="has Nothing, and there is no such alert; there are ResolverAbsent"
    ):
        render({"prometheusRule": {"enabled": True, "disabled": ["Nothing"]}})


def test_the_dashboard_is_that_of_the_grafana_directory(root: Path) -> None:
    made = the("ConfigMap", render({"dashboard": {"enabled": True}}))
    assert made["data"] == {"resolver.json": (root / "deploy/grafana/resolver.json").read_text()}
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_what_has_its_place_elsewhere_is_up_to_date(root: Path) -> None:
    for name, text in runpy.run_path(str(root / "scripts/chart.py"))["written"]().items():
        assert (CHART / name).read_text() == text, f"{name} in the chart is not what it should be: make chart"


def packed(place: Path) -> Path:
    helm("package", CHART, "--destination", place)
    (archive,) = place.glob("*.tgz")
    assert archive.name == f"resolver-{__version__}.tgz"
    return archive


def test_the_packed_chart_renders_the_same(tmp_path: Path) -> None:
    archive = packed(tmp_path)
    with tarfile.open(archive) as files:
        names = {name.removeprefix("resolver/") for name in files.getnames()}
    assert names == {
        str(path.relative_to(CHART))
        for path in CHART.rglob("*")
        if path.is_file() and path.name != ".helmignore"
    } | {".helmignore"}
    assert render(EVERYTHING, chart=archive) == render(EVERYTHING)


def notes(values: dict[str, Any], place: Path) -> str:
    """NOTES.txt as Helm would show it. It is shown by an installation only, so it is rendered inside of an object."""
    chart = Path(shutil.copytree(CHART, place / "chart"))
    text = (chart / "templates/NOTES.txt").read_text()
    (chart / "templates/notes.yaml").write_text(
        f'{{{{- define "notes" }}}}{text}{{{{ end -}}}}\n'
        'kind: Notes\nmetadata: {name: notes}\ntext: {{ include "notes" . | toJson }}\n'
    )
    rendered = the("Notes", render(values, chart=chart))["text"]
    shutil.rmtree(chart)
    assert isinstance(rendered, str)
    return rendered


def test_the_notes_say_what_to_do_next(tmp_path: Path) -> None:
    first = notes({}, tmp_path)
    assert f"resolver {__version__} on every node with gpu=on" in first
    assert "kubectl -n resolver rollout status daemonset/resolver\n" in first
    assert "pod-security.kubernetes.io/enforce=privileged" in first
    assert "port 9395 of each pod" in first
    assert "without serviceMonitor.enabled or podMonitor.enabled" in first
    assert "dry_run" not in first
    other = notes({"source": "netlink", "settings": {"dry_run": True}, "nodeSelector": None}, tmp_path)
    assert "on every node with any labels" in other
    assert "port 9395 of each node" in other
    assert "settings.dry_run is on: nothing is written" in other
    assert "etrics" not in notes({"settings": {"metrics_addr": "off"}}, tmp_path)


def commands(text: str) -> list[list[str]]:
    """Helm's command lines in the console examples of a page, without the word helm."""
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[2:] for line in lines if line.startswith("$ helm ")]


@pytest.mark.parametrize("page", ["docs/helm.md", "deploy/chart/resolver/README.md"])
def test_the_commands_of_the_pages_are_helms(page: str, root: Path) -> None:
    told = commands((root / page).read_text())
    assert "install" in [words[0] for words in told]
    for words in told:
        known = helm(words[0], "--help")
        for word in words:
            assert not word.startswith("--") or f" {word} " in known
        if words[0] in ("install", "upgrade"):
            assert words[1:3] == ["resolver", "deploy/chart/resolver"]
            (image,) = [each["image"] for each in pod_of(render(None, *words[3:]))["containers"]]
            assert image == f"registry.example.com/resolver:{__version__}"


def test_the_examples_of_the_page_render(root: Path) -> None:
    examples = re.findall(
        r"^```yaml\n(.*?)^```", (root / "docs/helm.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(examples) >= 9
    for example in examples:
        made = render(yaml.safe_load(example))
        assert made != render()
        new = "appArmorProfile" in example  # since this release
        manifests.validate(
            [each for each in made if each["kind"] not in FOREIGN],
            [release for release in manifests.RELEASES if release >= "1.30" or not new],
        )
