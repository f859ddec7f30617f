"""Values that the chart refuses: unknown, invalid, or in conflict."""

from typing import Any

import pytest

from resolver import config
from tests.charts import RefusedError, render
from tests.manifests import container_of, pod_of

OFF = {"metrics_addr": "off"}


#: Values, and the schema's message that refuses them.
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"sorce": "bpf"}, "Additional property sorce is not allowed"),
    ({"settings": {"intervall": "1s"}}, "Additional property intervall is not allowed"),
    ({"settings": {"run_dir": None}}, "run_dir is required"),
    ({"settings": {"containers_dir": ["/a", "/a"]}}, "settings.containers_dir"),
    ({"settings": {"containers_dir": ["relative"]}}, "settings.containers_dir.0"),
    ({"settings": {"run_dir": "relative"}}, "settings.run_dir"),
    ({"settings": {"socket": "relative.sock"}}, "settings.socket"),
    (
        {"settings": {"socket_group": "operators"}},
        "settings.socket_group",
    ),  # the image lacks the node's group names
    ({"settings": {"broker": "/broker.sock"}}, "settings.broker"),
    ({"scheduler": "yunikorn"}, "scheduler must be one of the following"),
    ({"source": "ebpf"}, "source must be one of the following"),
    ({"hostPID": "yes"}, "hostPID: Invalid type"),
    ({"image": {"repository": "resolver:latest"}}, "image.repository"),
    ({"image": {"digest": "sha256:abc"}}, "image.digest"),
    ({"image": {"pullPolicy": "Sometimes"}}, "image.pullPolicy"),
    ({"imagePullSecrets": ["registry"]}, "imagePullSecrets.0: Invalid type"),
    ({"fullnameOverride": "Resolver"}, "fullnameOverride: Does not match pattern"),
    ({"extraCapabilities": ["SYS_MODULE"]}, "extraCapabilities.0 must be one of the following"),
    ({"seccompProfile": {"type": "Localhost"}}, "localhostProfile is required"),
    ({"nodeSelector": {"gpu": True}}, "nodeSelector.gpu: Invalid type"),
    ({"podAnnotations": {"a": 1}}, "podAnnotations.a: Invalid type"),
    ({"resources": {"limit": {}}}, "Additional property limit is not allowed"),
    ({"livenessProbe": {"httpGet": {}}}, "Additional property httpGet is not allowed"),
    ({"livenessProbe": {"periodSeconds": 0}}, "livenessProbe.periodSeconds"),
    ({"updateStrategy": {"type": "Recreate"}}, "updateStrategy.type"),
    ({"terminationGracePeriodSeconds": 0}, "terminationGracePeriodSeconds"),
    ({"extraEnv": [{"value": "x"}]}, "name is required"),
    ({"service": {"port": 70000}}, "service.port"),
    ({"metricsSecrets": {"tls": "A"}}, "metricsSecrets.tls: Does not match pattern"),
    ({"serviceMonitor": {"interval": "15"}}, "serviceMonitor.interval"),
]

#: Values that the schema accepts, and the message with the reason for their conflict.
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"hostPID": False}, "hostPID is off: in a separate PID namespace the daemon sees no tenant"),
    ({"source": "netlink", "hostNetwork": False}, "source is netlink and hostNetwork is off"),
    ({"settings": {"interval": "2h"}}, 'settings.interval is "2h": write a duration from 10ms to 1h'),
    ({"settings": {"nvml_interval": 0}}, 'settings.nvml_interval is "0": write a duration from 10ms to 1h'),
    ({"settings": {"interval": "1 day"}}, 'is "1 day": write a duration such as 250ms, 1s, 2m or 1h'),
    ({"settings": {"metrics_addr": ":0"}}, "a port is a number from 1 to 65535"),
    ({"settings": {"metrics_addr": ":65536"}}, "a port is a number from 1 to 65535"),
    ({"settings": {"metrics_addr": "127.0.0.1:9395"}}, "Write :9395, or set hostNetwork: true"),
    ({"settings": OFF, "serviceMonitor": {"enabled": True}}, "serviceMonitor is enabled, and"),
    ({"settings": OFF, "dashboard": {"enabled": True}}, "dashboard is enabled, and"),
    (
        {
            "hostNetwork": True,
            "settings": {"metrics_addr": "127.0.0.1:9395"},
            "podMonitor": {"enabled": True},
        },
        "Prometheus would find nothing",
    ),
    ({"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}, "scraped twice"),
    ({"serviceMonitor": {"enabled": True}, "service": {"enabled": False}}, "nothing to scrape through"),
    (
        {"settings": {"metrics_token_file": "/a"}, "metricsSecrets": {"tls": "tls"}},
        "name files that you mount yourself",
    ),
    (
        {"source": "netlink", "updateStrategy": {"rollingUpdate": {"maxSurge": 1}}},
        "the new pod can't have the old one's port 9395",
    ),
    (
        {"settings": {"wait": False}, "updateStrategy": {"rollingUpdate": {"maxSurge": "50%"}}},
        "the new pod would exit at once",
    ),
    ({"settings": {"pod_logs_dir": "//"}}, "settings.pod_logs_dir is the root directory"),
    ({"settings": {"containers_dir": ["/usr/.."]}}, "settings.containers_dir has the root directory"),
    ({"settings": {"socket": "/run/resolver/../a.sock"}}, "outside of settings.run_dir"),
    ({"settings": {"tenant_socket": "/run/tenants/a.sock"}}, "a separate one below settings.run_dir"),
    ({"settings": {"tenant_socket": "/run/resolver/a.sock"}}, "a separate one below settings.run_dir"),
    ({"settings": {"broker": "/var/run/x/broker.sock"}}, "nothing else may be in it"),
    ({"settings": {"broker": "/a/../b/../broker.sock"}}, "nothing else may be in it"),
    ({"extraEnv": [{"name": "RESOLVER_SOURCE", "value": "bpf"}]}, "write source instead"),
    ({"extraEnv": [{"name": "RESOLVER_DRY_RUN", "value": "1"}]}, "write settings.dry_run instead"),
    ({"extraEnv": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"}]}, "which is in driverEnv"),
    ({"extraEnv": [{"name": "RESOLVER_DRYRUN", "value": "1"}]}, "there is no such setting"),
    ({"extraEnv": [{"name": "RESOLVER_CONTAINER_DIR", "value": "/a"}]}, "settings.containers_dir"),
    ({"extraArgs": ["--source=bpf"]}, "write source instead"),
    ({"image": {"repository": ""}}, "image.repository is empty: no image of resolver is published"),
    ({"extraArgs": ["--metrics-addr", ":1"]}, "write settings.metrics_addr instead"),
    ({"tenantsView": {"policy": True}}, "set it to /run/resolver/tenants/resolver.sock"),
]


def refused(values: dict[str, Any], words: str) -> str:
    with pytest.raises(RefusedError) as caught:
        render(values)
    assert words in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("values", "words"), IMPOSSIBLE, ids=str)
def test_schema_refuses_value(values: dict[str, Any], words: str) -> None:
    assert "values don't meet the specifications of the schema" in refused(values, words)


@pytest.mark.parametrize(("values", "words"), TOGETHER, ids=str)
def test_combination_is_refused_with_a_message(values: dict[str, Any], words: str) -> None:
    text = refused(values, words)
    assert "The chart can't be rendered with these values:\n- " in text
    assert text.count("\n- ") == 1


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(RefusedError) as refused:
        render({"hostPID": False, "source": "netlink", "hostNetwork": False, "extraArgs": ["--wait"]})
    assert str(refused.value).count("\n- ") == 3


def test_unknown_disabled_alert_is_refused() -> None:
    values = {"prometheusRule": {"enabled": True, "disabled": ["Nothing"]}}
    refused(values, "has Nothing, and there is no such alert; there are ResolverAbsent")


def test_environment_that_is_no_setting_is_accepted() -> None:
    given = [{"name": name, "value": "x"} for name in sorted(config.OTHER_VARIABLES)]
    given.append({"name": "TZ", "value": "UTC"})
    assert container_of(pod_of(render({"extraEnv": given})))["env"][-len(given) :] == given
