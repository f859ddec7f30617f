"""The chart's settings equal the daemon's: names, defaults, limits, and values in the container."""

import json
from functools import cache
from typing import Any

import msgspec
import yaml

from resolver import config
from resolver.config import SETTINGS, Settings
from scripts.tables import CHART_DEFAULTS
from tests.charts import CHART, environment, render
from tests.manifests import container_of, pod_of

#: A value other than the default for each setting that takes any text; all are valid together.
TEXTS: dict[str, Any] = {
    "containers_dir": ["/a/containers", "/b/containers"],
    "run_dir": "/run/other",
    "socket": "/run/other/other.sock",
    "socket_group": "1000",
    "tenant_socket": "/run/other/tenants/resolver.sock",
    "metrics_addr": "0.0.0.0:9400",
    "metrics_tls_cert": "/etc/a.crt",
    "metrics_tls_key": "/etc/a.key",
    "metrics_token_file": "/etc/token",
    "broker": "/var/run/hami/hostpid/broker.sock",
    "pod_logs_dir": "/srv/log/pods",
    "container_logs_dir": "/srv/log/containers",
}


def other(name: str) -> tuple[Any, Any]:
    """Return a value that is not the chart's default, as in the chart's values and as in the daemon's settings."""
    setting = SETTINGS[name]
    default = CHART_DEFAULTS.get(name, setting.default)
    if setting.kind is bool:
        return not default, not default
    if setting.kind is float:
        return "1m", 60.0
    if setting.kind is int:
        assert setting.limits is not None, f"{name}: a number declares msgspec.Meta(ge=..., le=...)"
        return setting.limits.le, setting.limits.le
    if setting.choices:
        return setting.choices[-1], setting.choices[-1]
    assert name in TEXTS, f"{name}: TEXTS in this test needs another value of a setting that takes any text"
    given = TEXTS[name]
    return given, tuple(given) if isinstance(given, list) else given


def arrived(values: dict[str, Any]) -> dict[str, str]:
    return environment(container_of(pod_of(render(values))))


@cache
def untouched() -> Settings:
    return config.load(environ=arrived({}))[0]


def defaults() -> dict[str, Any]:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    return {"source": values["source"], **values["settings"]}


def schema() -> dict[str, Any]:
    whole = json.loads((CHART / "values.schema.json").read_text())
    properties = whole["properties"]
    settings: dict[str, Any] = {"source": properties["source"], **properties["settings"]["properties"]}
    return settings


def test_chart_has_all_settings_of_the_daemon() -> None:
    assert defaults().keys() == schema().keys() == set(SETTINGS)


def test_chart_defaults_equal_the_daemons() -> None:
    loaded = untouched()
    assert msgspec.structs.asdict(loaded) == msgspec.structs.asdict(Settings()) | CHART_DEFAULTS
    for name, default in defaults().items():
        assert config.load({name: default})[0] == config.load({name: getattr(loaded, name)})[0], name


def test_chart_settings_reach_the_daemon() -> None:
    others = {name: other(name) for name in SETTINGS}
    settings = {name: given for name, (given, _) in others.items()}
    source = settings.pop("source")
    loaded = msgspec.structs.asdict(config.load(environ=arrived({"source": source, "settings": settings}))[0])
    before = msgspec.structs.asdict(untouched())
    assert loaded == {name: expected for name, (_, expected) in others.items()}
    assert [name for name in loaded if loaded[name] == before[name]] == []


def test_removed_setting_becomes_the_default() -> None:
    variables = arrived({"settings": {"interval": None, "wait": None, "map_size": None}})
    assert {"RESOLVER_INTERVAL", "RESOLVER_WAIT", "RESOLVER_MAP_SIZE"} & variables.keys() == set()
    assert config.load(environ=variables)[0] == Settings(containers_dir=CHART_DEFAULTS["containers_dir"])
