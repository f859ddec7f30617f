"""The chart's settings are the daemon's: their names, defaults and limits, and what arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
import yaml

from resolver import config
from resolver.config import SETTINGS, Settings
from tests.charts import CHART, RefusedError, environment, render
from tests.manifests import container_of, pod_of

#: The chart's own defaults, where they differ. A pod waits for the one before it; nobody else starts daemons there. It
#: searches what is mounted, and nothing else can be found.
OTHER_DEFAULTS: dict[str, Any] = {"wait": True, "containers_dir": ("/usr/local/vgpu/containers",)}
#: Another value than its default, as in the chart's values, for each setting that takes any text: all can be together.
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
    "metrics_without": ["resolver_gpu_info", "resolver_children"],
    "broker": "/var/run/hami/hostpid/broker.sock",
    "pod_logs_dir": "/srv/log/pods",
    "container_logs_dir": "/srv/log/containers",
}


def other(name: str) -> tuple[Any, Any]:
    """Another value than the chart's default: as in the chart's values, and as the daemon has it."""
    setting = SETTINGS[name]
    default = OTHER_DEFAULTS.get(name, setting.default)
    if setting.kind is bool:
        return not default, not default
    if setting.kind is float:
        return "1m", 60.0
    if setting.kind is int:
        assert setting.limits is not None
        return setting.limits.le, setting.limits.le
    if setting.choices:
        return setting.choices[-1], setting.choices[-1]
    given = TEXTS[name]
    return given, tuple(given) if isinstance(given, list) else given


#: Values that the daemon takes and the chart does not, because of what a pod is.
NOT_IN_A_POD: dict[str, list[Any]] = {
    "containers_dir": ["relative"],
    "run_dir": ["relative"],
    "pod_logs_dir": ["relative"],
    "container_logs_dir": ["relative"],
    "socket": ["relative.sock", "/elsewhere/resolver.sock"],
    "tenant_socket": ["/elsewhere/tenants/resolver.sock"],
    "socket_group": ["operators"],  # the node's names are not the image's
    "broker": ["/broker.sock", "/run/hami/broker.sock"],
    "metrics_addr": ["192.0.2.1:9395", "localhost:9395"],  # without the host's network
}


def values_of(name: str, value: Any) -> dict[str, Any]:
    return {"source": value} if name == "source" else {"settings": {name: value}}


def arrived(values: dict[str, Any]) -> dict[str, str]:
    return environment(container_of(pod_of(render(values))))


@cache
def untouched() -> Settings:
    """The daemon's settings with no value changed."""
    return config.load(environ=arrived({}))


def defaults() -> dict[str, Any]:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    return {"source": values["source"], **values["settings"]}


def schema() -> dict[str, Any]:
    whole = json.loads((CHART / "values.schema.json").read_text())
    properties = whole["properties"]
    settings: dict[str, Any] = {"source": properties["source"], **properties["settings"]["properties"]}
    return settings


def test_every_setting_of_the_daemon_is_one_of_the_chart() -> None:
    assert defaults().keys() == schema().keys() == set(SETTINGS)


def test_the_defaults_are_the_daemons() -> None:
    told = untouched()
    assert msgspec.structs.asdict(told) == msgspec.structs.asdict(Settings()) | OTHER_DEFAULTS
    for name, default in defaults().items():
        assert config.load({name: default}) == config.load({name: getattr(told, name)}), name


def test_every_setting_arrives() -> None:
    others = {name: other(name) for name in SETTINGS}
    settings = {name: given for name, (given, _) in others.items()}
    source = settings.pop("source")
    told = msgspec.structs.asdict(config.load(environ=arrived({"source": source, "settings": settings})))
    before = msgspec.structs.asdict(untouched())
    assert told == {name: expected for name, (_, expected) in others.items()}
    assert [name for name in told if told[name] == before[name]] == []


def test_a_setting_that_is_taken_away_is_the_daemons_default() -> None:
    variables = arrived({"settings": {"interval": None, "wait": None, "map_size": None}})
    assert {"RESOLVER_INTERVAL", "RESOLVER_WAIT", "RESOLVER_MAP_SIZE"} & variables.keys() == set()
    assert config.load(environ=variables) == Settings(containers_dir=OTHER_DEFAULTS["containers_dir"])


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), pairs(NOT_IN_A_POD))
def test_what_a_pod_cannot_have_is_refused(name: str, value: Any) -> None:
    assert getattr(config.load({name: value}), name) is not None
    with pytest.raises(RefusedError, match=name):
        render(values_of(name, [value] if name == "containers_dir" else value))


def closed(schema: dict[str, Any], definitions: dict[str, Any], path: str = "") -> Iterator[str]:
    """Every name that the schema knows, where it knows them all; the objects of Kubernetes are named, not entered."""
    schema = definitions[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
    kubernetes = path.endswith(("Probe", "Profile", "updateStrategy", "resources"))
    if schema.get("additionalProperties") is False and not kubernetes:
        for name, below in schema["properties"].items():
            yield from closed(below, definitions, f"{path}.{name}" if path else name)
    else:
        yield path


def explained(text: str) -> Iterator[str]:
    """The dotted name below each comment that begins with ``# --``."""
    path: list[str] = []
    for comment, indent, name in re.findall(r"(?m)((?:^ *#.*\n)*)^( *)(\w+):", text):
        path[len(indent) // 2 :] = [name]
        if re.search(r"# -- \S", comment):
            yield ".".join(path)


def test_schema_and_values_name_the_same_and_every_value_is_explained() -> None:
    whole = json.loads((CHART / "values.schema.json").read_text())
    known = set(closed(whole, whole["definitions"])) - {"global"}  # Helm's own, for charts in charts
    names = list(explained((CHART / "values.yaml").read_text()))
    assert len(names) > 80
    assert len(names) == len(set(names))
    assert set(names) == known
