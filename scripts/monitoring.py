"""Writes the Grafana dashboard, and the alerts once more as the Prometheus operator wants them.

    .venv/bin/python scripts/monitoring.py [DIRECTORY]

In the directory, by default deploy: grafana/resolver.json, and alerts/prometheusrule.yaml out of
alerts/resolver.rules.yaml.

Panels are listed in the order in which they are read; their places follow from their sizes. A test holds the files to
what this writes, and every query to the metrics that there are and to a Prometheus that scrapes a node in miniature.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from resolver import __version__

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 41  # Grafana 11.6 and 12 write it; later ones read it
WIDTH = 24  # columns of Grafana's grid

NODE = 'node=~"$node"'
POD = 'node=~"$node",namespace=~"$namespace",pod=~"$pod"'
#: The scrape targets that are a resolver, for metrics that every target has.
OURS = f"and on (job, instance) resolver_build_info{{{NODE}}}"
MOST = 32  # series of a panel that could have one for each container of a fleet

GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "text"

Json = dict[str, Any]

PROMETHEUS_RULE = """\
# resolver.rules.yaml beside this as an object of the Prometheus operator. Written by scripts/monitoring.py: change that
# file, then `make monitoring`. Your operator may look for a label of its own: add it under metadata.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: resolver
  labels:
    app.kubernetes.io/name: resolver
spec:
"""


# ---- the parts that panels are made of ----------------------------------------------------------------------------


def query(expression: str, legend: str = "", *, table: bool = False) -> Json:
    """One query. ``table``: only what is now, as rows."""
    kind: Json = {"instant": True, "range": False, "format": "table"} if table else {"range": True}
    return {
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "expr": expression,
        "legendFormat": legend or "__auto",
        "editorMode": "code",
        **kind,
    }


def panel(kind: str, title: str, about: str, queries: list[Json], size: tuple[int, int], **more: Any) -> Json:
    """A panel of that size in grid units; ``more``: ``unit``, ``defaults``, ``overrides``, ``options``, and others."""
    defaults: Json = {"unit": more.pop("unit", "short"), **more.pop("defaults", {})}
    width, height = size
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "targets": [{"refId": chr(ord("A") + number), **each} for number, each in enumerate(queries)],
        "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": more.pop("overrides", [])},
        "options": more.pop("options", {}),
        **more,
    }


def steps(*colours: tuple[float | None, str]) -> Json:
    """Colours from a value on; the first value is None."""
    return {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in colours]}


def stat(title: str, about: str, expression: str, colours: Json, unit: str = "short") -> Json:
    """One big number."""
    return panel(
        "stat",
        title,
        about,
        [query(expression)],
        (3, 4),
        unit=unit,
        defaults={"thresholds": colours, "color": {"mode": "thresholds"}, "noValue": "not known"},
        options={
            "colorMode": "value",
            "graphMode": "area",
            "justifyMode": "center",
            "textMode": "value",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    )


def lines(
    title: str,
    about: str,
    queries: list[Json],
    size: tuple[int, int] = (8, 8),
    *,
    look: str = "",
    **more: Any,
) -> Json:
    """Curves over time. ``look``: ``stacked`` areas or ``bars``; ``table``: a legend with values, the largest first."""
    words = look.split()
    custom: Json = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False}
    if "stacked" in words or "bars" in words:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 60}
    if "bars" in words:
        custom |= {"drawStyle": "bars", "lineWidth": 0, "fillOpacity": 80}
    legend: Json = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    if "table" in words:
        legend |= {"displayMode": "table", "placement": "right", "calcs": ["lastNotNull"]}
        legend |= {"sortBy": "Last *", "sortDesc": True}
    defaults = {"custom": custom, "min": 0, "color": {"mode": "palette-classic"}, **more.pop("defaults", {})}
    options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    return panel("timeseries", title, about, queries, size, defaults=defaults, options=options, **more)


def timeline(
    title: str, about: str, queries: list[Json], size: tuple[int, int], names: dict[int, tuple[str, str]]
) -> Json:
    """A band for each series, in the colour and with the name of its value."""
    options = {
        str(value): {"text": text, "color": colour, "index": index}
        for index, (value, (text, colour)) in enumerate(names.items())
    }
    return panel(
        "state-timeline",
        title,
        about,
        queries,
        size,
        defaults={
            "custom": {"fillOpacity": 75, "lineWidth": 0},
            "mappings": [{"type": "value", "options": options}],
            "color": {"mode": "thresholds"},
            "thresholds": steps((None, GREY)),
        },
        options={
            "showValue": "never",
            "mergeValues": True,
            "rowHeight": 0.8,
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "single", "sort": "none"},
        },
    )


def table(
    title: str,
    about: str,
    queries: list[Json],
    size: tuple[int, int],
    columns: dict[str, str],
    sort: list[str],
) -> Json:
    """Rows of now. ``columns``: what is shown of the queries' labels and values, in order, and under which name."""
    organize: Json = {
        "indexByName": {name: index for index, name in enumerate(columns)},
        "renameByName": columns,
        "excludeByName": {"Time": True},
        "includeByName": {},
    }
    # Grafana sorts by one column at a time, and keeps the order of what is equal.
    sorting = [{"id": "sortBy", "options": {"fields": {}, "sort": [{"field": name}]}} for name in sort[::-1]]
    return panel(
        "table",
        title,
        about,
        queries,
        size,
        defaults={"custom": {"align": "auto", "cellOptions": {"type": "auto"}}, "noValue": "-"},
        options={"showHeader": True, "cellHeight": "sm"},
        transformations=[
            {"id": "merge", "options": {}},
            {"id": "organize", "options": organize},
            *sorting,
        ],
    )


def override(name: str, **properties: Any) -> Json:
    """What is otherwise for the field of that name."""
    told = [{"id": each.replace("__", "."), "value": value} for each, value in properties.items()]
    return {"matcher": {"id": "byName", "options": name}, "properties": told}


def row(title: str) -> Json:
    """A heading."""
    return {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"w": WIDTH, "h": 1}}


# ---- the panels ---------------------------------------------------------------------------------------------------

_BAD_FROM_1 = steps((None, GREEN), (1, RED))
_PLAIN = steps((None, BLUE))


def now() -> list[Json]:
    """The first line, which tells whether all is well."""
    return [
        stat("Nodes", "Nodes on which resolver answers.", f"count(resolver_build_info{{{NODE}}})", _PLAIN),
        stat(
            "Not ready",
            "Nodes on which the source of PIDs in use has not found its canary.",
            f"sum(1 - resolver_ready{{{NODE}}})",
            _BAD_FROM_1,
        ),
        stat(
            "Without NVML",
            "Nodes whose driver does not answer: nothing about their GPUs is known now.",
            f"sum(1 - resolver_nvml_up{{{NODE}}})",
            _BAD_FROM_1,
        ),
        stat(
            "GPUs unhealthy",
            "GPUs with which something is wrong, of those whose driver answers.",
            f"sum(1 - resolver_gpu_healthy{{{NODE}}})",
            _BAD_FROM_1,
        ),
        stat(
            "Containers", "Containers that run on these nodes.", f"sum(resolver_containers{{{NODE}}})", _PLAIN
        ),
        stat(
            "GPUs in use",
            "SM utilization by the chosen pods, as a share of all GPUs of the chosen nodes.",
            f"sum(resolver_container_utilization_ratio{{{POD}}}) / count(resolver_gpu_info{{{NODE}}})",
            _PLAIN,
            "percentunit",
        ),
        stat(
            "Slots unresolved",
            "Slots in use of which the owner is not known, as a share.",
            f'sum(resolver_slots{{{NODE},state="unresolved"}})'
            f' / sum(resolver_slots{{{NODE},state=~"resolved|unresolved"}})',
            steps((None, GREEN), (0.01, YELLOW), (0.1, RED)),
            "percentunit",
        ),
        stat(
            "Slots repaired",
            "Times that a slot's hostpid was put right since the daemons started.",
            f"sum(resolver_repairs_total{{{NODE}}})",
            _PLAIN,
        ),
    ]


def _by_its_id(series: str) -> str:
    """A container that no other name tells from all others has its id's first digits as its name."""
    return f'label_replace({series}, "container", "$1", "container_id", "(.{{12}}).*")'


def _named(expression: str, *labels: str) -> str:
    """With the label ``who``: these labels with a slash between them. What has no known pod is no slash alone."""
    quoted = ", ".join(f'"{label}"' for label in labels)
    joined = f'label_join({expression}, "who", "/", {quoted})'
    return f'label_replace(label_replace({joined}, "who", "$1", "who", "/(.+)"), "who", "no known pod", "who", "/")'


def utilization() -> list[Json]:
    """GPU > pod > container."""
    of, memory, core_limit, memory_limit = (
        _by_its_id(f"resolver_container_{name}{{{POD}}}")
        for name in ("utilization_ratio", "memory_bytes", "core_limit_ratio", "memory_limit_bytes")
    )
    share: Json = {"unit": "percentunit"}
    tree = "node, device_index, namespace, pod, container"
    return [
        row("Utilization: GPU > pod > container"),
        lines(
            "By GPU",
            "SM utilization of each GPU by all its containers of the chosen pods. Dashed: how much of the time NVML"
            " saw at least one kernel on it, which says less.",
            [
                query(
                    f"topk({MOST}, sum by (node, device_index) ({of}))",
                    "{{node}} GPU {{device_index}}",
                ),
                query(
                    f"topk({MOST}, max by (node, device_index) (resolver_gpu_utilization_ratio{{{NODE}}}))",
                    "{{node}} GPU {{device_index}} busy",
                ),
            ],
            overrides=[
                {
                    "matcher": {"id": "byFrameRefID", "options": "B"},
                    "properties": [
                        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [6, 6]}},
                        {"id": "custom.fillOpacity", "value": 0},
                    ],
                }
            ],
            defaults={"max": 1},
            **share,
        ),
        lines(
            "By pod",
            f"SM utilization of the {MOST} busiest pods, in GPUs: 100 % is one whole GPU.",
            [query(_named(f"topk({MOST}, sum by (namespace, pod) ({of}))", "namespace", "pod"), "{{who}}")],
            look="stacked",
            **share,
        ),
        lines(
            "By container",
            f"SM utilization of the {MOST} busiest pairs of container and GPU.",
            [
                query(
                    _named(f"topk({MOST}, sum by ({tree}) ({of}))", "pod", "container"),
                    "{{who}} on {{node}} GPU {{device_index}}",
                )
            ],
            **share,
        ),
        table(
            "Who uses what now",
            "Every container on every GPU that it uses or may use. What is not known is not here:"
            " see 'Values not known'.",
            [
                query(f"sum by ({tree}) ({of})", table=True),
                query(f"sum by ({tree}) ({memory})", table=True),
                query(f"sum by ({tree}) ({core_limit})", table=True),
                query(f"sum by ({tree}) ({memory_limit})", table=True),
            ],
            (16, 9),
            {
                "node": "Node",
                "device_index": "GPU",
                "namespace": "Namespace",
                "pod": "Pod",
                "container": "Container",
                "Value #A": "Utilization",
                "Value #C": "Core limit",
                "Value #B": "Memory",
                "Value #D": "Memory limit",
            },
            ["Node", "GPU", "Namespace", "Pod", "Container"],
        ),
        lines(
            "Memory by container",
            f"GPU memory held by the processes of the {MOST} largest containers.",
            [
                query(
                    _named(f"topk({MOST}, sum by ({tree}) ({memory}))", "pod", "container"),
                    "{{who}} on {{node}} GPU {{device_index}}",
                )
            ],
            (8, 9),
            look="stacked",
            unit="bytes",
        ),
    ]


def repairs() -> list[Json]:
    """Before and after."""
    hami, legacy = "hami_container_device_utilization_ratio", "Device_utilization_desc_of_container"
    other = 'job!~".*resolver.*"'
    reported = (
        f'sum({hami}{{{POD},{other}}}) / 100 or sum({legacy}{{node=~"$node",podnamespace=~"$namespace",'
        f'podname=~"$pod",{other}}}) / 100'
    )

    def increase(name: str) -> str:
        return f"sum by (reason) (increase({name}{{{NODE}}}[$__rate_interval]))"

    return [
        row("Before and after: what HAMi reports, and what is repaired"),
        lines(
            "What HAMi reports, and what is",
            "Utilization summed over the chosen pods, 100 % is one whole GPU: as HAMi's own monitor reports it from its"
            " cache files, and as it is. Where slots are repaired the two are one line. Needs HAMi's monitor to be"
            " scraped as well, by a job whose name does not contain 'resolver'.",
            [
                query(f"sum(resolver_container_utilization_ratio{{{POD}}})", "true"),
                query(reported, "reported by HAMi's monitor"),
            ],
            (12, 8),
            unit="percentunit",
            overrides=[
                override("true", color={"mode": "fixed", "fixedColor": GREEN}),
                override(
                    "reported by HAMi's monitor",
                    color={"mode": "fixed", "fixedColor": ORANGE},
                    custom__lineWidth=2,
                    custom__fillOpacity=0,
                ),
            ],
        ),
        lines(
            "Repairs",
            "How often a slot's hostpid was written, by what was wrong with it; in a dry run, how often it would have"
            " been. A daemon that starts repairs before it is first scraped: 'Slots repaired' above has these, too.",
            [
                query(increase("resolver_repairs_total"), "{{reason}}"),
                query(increase("resolver_dry_run_repairs_total"), "dry run: {{reason}}"),
            ],
            (6, 8),
            look="bars",
        ),
        lines(
            "Slots",
            "Slots in use, by what is known of their owner.",
            [query(f"sum by (state) (resolver_slots{{{NODE}}})", "{{state}}")],
            (6, 8),
            look="stacked",
            overrides=[
                override("resolved", color={"mode": "fixed", "fixedColor": GREEN}),
                override("unresolved", color={"mode": "fixed", "fixedColor": RED}),
                override("dead", color={"mode": "fixed", "fixedColor": GREY}),
            ],
        ),
    ]


def unknown() -> list[Json]:
    """What is not known, and why."""

    def by(name: str, *labels: str) -> str:
        return f"sum by ({', '.join(labels)}) ({name}{{{NODE}}})"

    def happened(name: str) -> str:
        return f"sum(increase({name}{{{NODE}}}[$__rate_interval]))"

    return [
        row("What is not known, and why"),
        lines(
            "Unresolved slots by reason",
            "Slots that nothing can be said about. Each reason: docs/troubleshooting.md.",
            [query(by("resolver_unresolved_slots", "reason"), "{{reason}}")],
            (6, 8),
            look="stacked table",
        ),
        lines(
            "Samples without a slot",
            "Utilization samples of processes that have no slot. not_in_container: of the node itself.",
            [query(by("resolver_unresolved_samples", "reason"), "{{reason}}")],
            (6, 8),
            look="stacked table",
        ),
        lines(
            "Values not known",
            "Pairs of container and GPU without a value. Each reason: docs/metrics.md.",
            [query(by("resolver_container_unknown_values", "value", "reason"), "{{value}}: {{reason}}")],
            (6, 8),
            look="stacked table",
        ),
        lines(
            "Trouble with cache files",
            "Files skipped now, and what went wrong with writing lately.",
            [
                query(f"sum(resolver_rejected_regions{{{NODE}}})", "no cache file"),
                query(f"sum(resolver_quarantined_regions{{{NODE}}})", "in quarantine"),
                query(f"sum(resolver_stuck_slots{{{NODE}}})", "slots stuck"),
                query(happened("resolver_conflicts_total"), "conflicts"),
                query(happened("resolver_writes_undone_total"), "writes undone"),
                query(happened("resolver_writes_missed_total"), "writes missed"),
            ],
            (6, 8),
            look="table",
        ),
    ]


def gpus() -> list[Json]:
    """The GPUs and their driver."""
    each, legend = "node, device_index", "{{node}} GPU {{device_index}}"

    def top(name: str) -> list[Json]:
        return [query(f"topk({MOST}, max by ({each}) ({name}{{{NODE}}}))", legend)]

    return [
        row("GPUs and driver"),
        timeline(
            "Health",
            f"The GPUs of the chosen nodes, {MOST} at most, the unhealthy ones first. Nothing while NVML is silent.",
            [query(f"bottomk({MOST}, min by ({each}) (resolver_gpu_healthy{{{NODE}}}))", legend)],
            (10, 6),
            {1: ("healthy", GREEN), 0: ("unhealthy", RED)},
        ),
        table(
            "What is wrong",
            "Each GPU that is unhealthy, why, and since when. Each reason: docs/gpus.md.",
            [
                query(
                    f"max by ({each}, device_uuid, reason)"
                    f" (resolver_gpu_unhealthy_since_timestamp_seconds{{{NODE}}}) * 1000",
                    table=True,
                )
            ],
            (7, 6),
            {
                "node": "Node",
                "device_index": "GPU",
                "reason": "Reason",
                "Value": "Since",
                "device_uuid": "UUID",
            },
            ["Node", "GPU"],
        ),
        table(
            "Drivers",
            "Each driver, whose PIDs hostpid must be there, and how that is known.",
            [
                query(
                    "count by (version, resolver_hostpid_namespace, resolver_hostpid_namespace_origin) ("
                    f"(resolver_hostpid_namespace{{{NODE}}} == 1)"
                    " * on (job, instance) group_left (resolver_hostpid_namespace_origin)"
                    f" (resolver_hostpid_namespace_origin{{{NODE}}} == 1)"
                    f" * on (job, instance) group_left (version) resolver_driver_info{{{NODE}}})",
                    table=True,
                )
            ],
            (7, 6),
            {
                "version": "Driver",
                "resolver_hostpid_namespace": "hostpid of",
                "resolver_hostpid_namespace_origin": "Known",
                "Value": "Nodes",
            },
            ["Driver"],
        ),
        lines(
            "Temperature",
            "Unhealthy above 95 °C.",
            top("resolver_gpu_temperature_celsius"),
            (6, 7),
            unit="celsius",
        ),
        lines("Power", "What each GPU draws.", top("resolver_gpu_power_watts"), (6, 7), unit="watt"),
        lines(
            "Memory in use",
            "Of each GPU, by everybody.",
            [
                query(
                    f"topk({MOST}, max by ({each}) (resolver_gpu_memory_used_bytes{{{NODE}}}"
                    f" / resolver_gpu_memory_bytes{{{NODE}}}))",
                    legend,
                )
            ],
            (6, 7),
            unit="percentunit",
            defaults={"max": 1},
        ),
        lines(
            "Age of NVML's last answer",
            "The oldest of the chosen nodes, and the median. It grows while a driver hangs.",
            [
                query(f"max(resolver_nvml_sample_age_seconds{{{NODE}}})", "oldest"),
                query(f"quantile(0.5, resolver_nvml_sample_age_seconds{{{NODE}}})", "median"),
            ],
            (6, 7),
            unit="s",
        ),
    ]


def daemon() -> list[Json]:
    """The daemon: its passes and its source."""

    def quantile(share: float) -> Json:
        buckets = f"sum by (le) (rate(resolver_pass_duration_seconds_bucket{{{NODE}}}[$__rate_interval]))"
        return query(f"histogram_quantile({share}, {buckets})", f"p{share * 100:g}")

    return [
        row("The daemon"),
        lines(
            "Duration of a pass over the slots",
            "Of all passes on the chosen nodes.",
            [quantile(0.5), quantile(0.9), quantile(0.99)],
            (8, 8),
            unit="s",
        ),
        lines(
            "Source of PIDs",
            "Nodes by the source in use: bpf is the best, scan the last resort.",
            [query(f"sum by (resolver_source) (resolver_source{{{NODE}}})", "{{resolver_source}}")],
            (5, 8),
            look="stacked",
            overrides=[
                override("bpf", color={"mode": "fixed", "fixedColor": GREEN}),
                override("netlink", color={"mode": "fixed", "fixedColor": YELLOW}),
                override("scan", color={"mode": "fixed", "fixedColor": ORANGE}),
            ],
        ),
        lines(
            "Processes in the map",
            "The node with most, and the smallest room that there is.",
            [
                query(f"max(resolver_map_processes{{{NODE}}})", "most"),
                query(f"min(resolver_map_capacity_processes{{{NODE}}})", "room"),
            ],
            (5, 8),
        ),
        lines(
            "What the sources lost, missed and mended",
            "Each event: docs/sources.md.",
            [
                query(
                    f"sum by (event) (increase(resolver_map_events_total{{{NODE}}}[$__rate_interval]))",
                    "{{event}}",
                )
            ],
            (6, 8),
            look="table",
        ),
    ]


def costs() -> list[Json]:
    """What resolver itself costs a node."""

    def worst_and_median(expression: str, what: str) -> list[Json]:
        return [
            query(f"max({expression})", f"{what}, dearest node"),
            query(f"quantile(0.5, {expression})", f"{what}, median"),
        ]

    def failures(name: str, by: str = "") -> str:
        return f"sum{f' by ({by})' if by else ''} (increase({name}{{{NODE}}}[$__rate_interval]))"

    return [
        row("What resolver itself costs"),
        lines(
            "CPU",
            "100 % is one core.",
            [
                *worst_and_median(
                    f"rate(process_cpu_seconds_total{{{NODE}}}[$__rate_interval]) {OURS}", "daemon"
                ),
                *worst_and_median(
                    f"rate(resolver_children_cpu_seconds_total{{{NODE}}}[$__rate_interval])", "children"
                ),
            ],
            (6, 7),
            unit="percentunit",
        ),
        lines(
            "Memory",
            "Resident.",
            [
                *worst_and_median(f"process_resident_memory_bytes{{{NODE}}} {OURS}", "daemon"),
                *worst_and_median(f"resolver_children_resident_memory_bytes{{{NODE}}}", "children"),
            ],
            (6, 7),
            unit="bytes",
        ),
        lines(
            "Scrapes",
            "How long Prometheus waits for an answer, and the series that it gets from all the chosen nodes.",
            [
                query(f"max(scrape_duration_seconds{{{NODE}}} {OURS})", "slowest"),
                query(f"sum(scrape_samples_scraped{{{NODE}}} {OURS})", "series"),
            ],
            (6, 7),
            unit="s",
            overrides=[override("series", unit="short", custom__axisPlacement="right")],
        ),
        lines(
            "Failures survived",
            "Children that died, hung or spoke nonsense, and defects of the daemon itself.",
            [
                query(failures("resolver_worker_failures_total", "worker"), "{{worker}}"),
                query(failures("resolver_writer_failures_total"), "write requests"),
                query(failures("resolver_internal_errors_total"), "defects: please report"),
                query(failures("resolver_out_of_descriptors_total"), "out of descriptors"),
            ],
            (6, 7),
        ),
    ]


# ---- the whole ----------------------------------------------------------------------------------------------------


def variable(name: str, label: str, values: str) -> Json:
    """A choice of label values; "All" is also what has no such label."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"qryType": 1, "query": values, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
    }


def placed(panels: list[Json]) -> list[Json]:
    """Each with its number and its place: side by side as long as there is room, then below the tallest."""
    x = y = tallest = 0
    for number, each in enumerate(panels, start=1):
        width, height = each["gridPos"]["w"], each["gridPos"]["h"]
        if x + width > WIDTH:
            x, y, tallest = 0, y + tallest, 0
        each["id"] = number
        each["gridPos"] |= {"x": x, "y": y}
        x, tallest = x + width, max(tallest, height)
    return panels


def _release() -> int:
    """The version as Grafana wants it: a number that grows."""
    major, minor, patch = (int("".join(filter(str.isdigit, part))) for part in __version__.split(".")[:3])
    return (major * 1000 + minor) * 1000 + patch


def dashboard() -> Json:
    """The dashboard as Grafana imports it."""
    of = f"resolver_container_utilization_ratio{{{NODE}"
    panels = [*now(), *utilization(), *repairs(), *unknown(), *gpus(), *daemon(), *costs()]
    for each in panels:
        if each["title"] == "Who uses what now":
            bar = {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}
            each["fieldConfig"]["overrides"] = [
                override("Utilization", unit="percentunit", min=0, max=1, custom__cellOptions=bar),
                override("Memory", unit="bytes"),
                override("Core limit", unit="percentunit"),
                override("Memory limit", unit="bytes"),
            ]
        if each["title"] == "What is wrong":
            each["fieldConfig"]["overrides"] = [override("Since", unit="dateTimeFromNow")]
    return {
        "uid": "hami-resolver",
        "title": "HAMi resolver",
        "description": f"True GPU utilization by GPU, pod and container, and how resolver {__version__} knows it.",
        "tags": ["gpu", "hami", "resolver"],
        "version": _release(),
        "schemaVersion": SCHEMA,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "fiscalYearStartMonth": 0,
        "templating": {
            "list": [
                {
                    "type": "datasource",
                    "name": "datasource",
                    "label": "Prometheus",
                    "query": "prometheus",
                    "refresh": 1,
                    "current": {},
                    "options": [],
                    "includeAll": False,
                    "multi": False,
                },
                variable("node", "Node", "label_values(resolver_build_info, node)"),
                variable("namespace", "Namespace", f"label_values({of}}}, namespace)"),
                variable("pod", "Pod", f'label_values({of},namespace=~"$namespace"}}, pod)'),
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": placed(panels),
    }


def rules(base: str = "") -> str:
    """The alerts. ``base`` is where this repository can be read: each has the link to its page then, too."""
    text = (ROOT / "deploy/alerts/resolver.rules.yaml").read_text()
    link = rf"\g<0>\n\1runbook_url: {base.rstrip('/')}/\2"
    return re.sub(r"(?m)^( *)runbook: (\S+)$", link, text) if base else text


def prometheus_rule(rules: str) -> str:
    """The alerts as an object of the Prometheus operator, comments and all."""
    groups = rules[rules.index("groups:") :].splitlines()
    return PROMETHEUS_RULE + "".join(f"  {line}".rstrip() + "\n" for line in groups)


def main() -> int:
    """Writes the files. The alerts with links to their pages go beside those without, never in their place."""
    parser = argparse.ArgumentParser(description="Write the dashboard and the alerts.")
    parser.add_argument("target", nargs="?", type=Path, default=ROOT / "deploy", metavar="DIRECTORY")
    parser.add_argument("--runbook-base", default="", metavar="URL", help="where this repository can be read")
    given = parser.parse_args()
    target, alerts = given.target, rules(given.runbook_base)
    if given.runbook_base and target == ROOT / "deploy":
        parser.error("--runbook-base wants a DIRECTORY of its own: the files of deploy have no links")
    written = {
        "grafana/resolver.json": json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n",
        "alerts/prometheusrule.yaml": prometheus_rule(alerts),
    }
    if given.runbook_base:
        written["alerts/resolver.rules.yaml"] = alerts
    for name, text in written.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
