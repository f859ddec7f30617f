"""Write the tables of the documents that come from the code; with ``--check``, name the stale ones.

A table stands in its document between ``<!-- table: NAME -->`` and ``<!-- /table -->``, in YAML between
``# table: NAME`` and ``# /table``. To add one: a function that returns its lines, an entry in TABLES, the two marks.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resolver.base.event_log import KINDS
from resolver.base.reasons import ReasonWithWords
from resolver.base.version import VERSION
from resolver.config import SETTINGS, text_of
from resolver.doctor import CHECKS
from resolver.hami.hostpid_policy import DRIVERS
from resolver.hami.layout import LAYOUTS
from resolver.metrics.family import FAMILIES, GROUPS
from scripts import openapi, published, samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from resolver.config.settings import Declared

ROOT = Path(__file__).resolve().parent.parent


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Format a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def event_kinds() -> list[str]:
    """List the events that the API serves."""
    return rows(("kind", "meaning"), ((f"`{kind}`", meaning) for kind, meaning in KINDS.items()))


def settings() -> list[str]:
    """List every setting."""
    return rows(
        ("name", "default", "change", "meaning"),
        (
            (
                f"`{name}`",
                _quoted(text_of(setting.default)),
                "SIGHUP" if setting.about.live else "restart",
                setting.about.meaning + _limits(setting),
            )
            for name, setting in SETTINGS.items()
        ),
    )


def _quoted(text: str) -> str:
    return f"`{text}`" if text else ""


def _limits(setting: Declared) -> str:
    limits = setting.limits
    return f"; from {limits.ge} to {limits.le}" if limits is not None and setting.kind is int else ""


#: Settings with a place of their own in the chart, not below ``settings``; defaults that differ from the daemon's; and
#: texts that a pod can have.
CHART_NAMES = {"source"}
CHART_DEFAULTS: dict[str, Any] = {"containers_dir": ("/usr/local/vgpu/containers",), "wait": True}
CHART_PATTERNS = {
    **dict.fromkeys(("run_dir", "pod_logs_dir", "container_logs_dir"), "^/[^:]*$"),
    **dict.fromkeys(("socket", "metrics_tls_cert", "metrics_tls_key", "metrics_token_file"), "^(/[^:]+)?$"),
    "socket_group": "^[0-9]*$",
    "tenant_socket": "^(/[^:]+/[^:]+)?$",
    "metrics_addr": r"^(off|(\[[0-9a-fA-F:.]+\]|[0-9.]*|localhost):[0-9]{1,5})$",
    "broker": "^(/[^:]+/[^:]+/[^:]+)?$",
}


def chart_settings() -> list[str]:
    """List the values below ``settings`` in the chart, each with a comment."""
    return [
        line
        for setting in SETTINGS.values()
        if setting.name not in CHART_NAMES
        for line in _chart_setting(setting)
    ]


def _chart_setting(setting: Declared) -> Iterator[str]:
    says = setting.about.help
    for number, line in enumerate(textwrap.wrap(says[0].upper() + says[1:], 112)):
        yield f"  # {'-- ' if number == 0 else ''}{line}"
    default = CHART_DEFAULTS.get(setting.name, setting.default)
    if isinstance(default, tuple):
        yield from (f"  {setting.name}:", *(f"    - {item}" for item in default))
    else:
        plain = not isinstance(default, str) or bool(setting.choices) or default.startswith("/")
        yield f"  {setting.name}: {text_of(default) if plain else json.dumps(default)}"


def _schema_of(setting: Declared) -> dict[str, Any]:
    """Return a setting's JSON schema."""
    if setting.kind is bool:
        return {"type": "boolean"}
    if setting.kind is float:
        return {"$ref": "#/definitions/duration"}
    if setting.choices:
        return {"enum": list(setting.choices)}
    limits = setting.limits
    if setting.kind is int:
        return {"type": "integer"} | (
            {"minimum": limits.ge, "maximum": limits.le} if limits is not None else {}
        )
    if not isinstance(setting.default, str):
        items = {"$ref": "#/definitions/path"}
        return {"type": "array", "minItems": 1, "uniqueItems": True, "items": items}
    pattern = CHART_PATTERNS.get(setting.name)
    return {"type": "string"} | ({"pattern": pattern} if pattern else {})


def chart_schema(text: str) -> str:
    """Return the chart's schema with the current settings."""
    whole = json.loads(text)
    below: dict[str, Any] = {}
    whole["properties"]["settings"]["properties"] = below
    for name, setting in SETTINGS.items():
        (whole["properties"] if name in CHART_NAMES else below)[name] = _schema_of(setting)
    return json.dumps(whole, indent=2) + "\n"


def layouts() -> list[str]:
    """List the layouts of HAMi's files, and the releases that write them."""
    return rows(
        ("layout", "written by", "has utilization"),
        (
            (f"`{row.name}`", row.released, "no" if row.device_util is None else "yes")
            for row in LAYOUTS.values()
        ),
    )


def drivers() -> list[str]:
    """List the known behaviour of each driver release."""
    body, before = [], None
    for row in DRIVERS:
        if before and before.samples is not row.samples:
            gap = f"between {before.last} and {row.first}"
            body.append((gap, "not known", "not known", "nothing is written", "", ""))
        extent = f"{row.first} to {row.last}" if row.first and row.last else f"up to {row.last}"
        body.append(
            (
                extent if row.last else f"{row.first} and later",
                row.listed,
                row.samples.value if row.samples else "unknown",
                f"the {row.samples.value} PID" if row.samples else "unknown, until watchers show it",
                row.known_from,
                row.measured or "not yet",
            )
        )
        before = row
    head = "driver, process list, utilization samples, `hostpid` must be, known from, measured on hardware"
    return rows(head.split(", "), body)


def reasons(kind: str, *, fixes: bool = True) -> list[str]:
    """List the reasons of a kind with their meaning, and with their fixes if ``fixes``."""
    kinds = {enumeration.__name__: enumeration for enumeration in ReasonWithWords.__subclasses__()}
    body = (
        (f"`{reason}`", _linked(reason.meaning), *([_linked(reason.fix)] if fixes else []))
        for reason in kinds[kind]
    )
    return rows(("reason", "meaning", *(["fix"] if fixes else [])), body)


def checks() -> list[str]:
    """List the checks of ``resolver doctor``."""
    body = ((check.name, (check.look.__doc__ or "").splitlines()[0]) for check in CHECKS)
    return rows(("check", "purpose"), ((f"`{name}`", about.replace("``", "`")) for name, about in body))


def _linked(text: str) -> str:
    """With a link for each page that is named."""
    return re.sub(r"docs/((\S+?\.md)(#[\w-]+)?)", r"[\2](\1)", text)


def labels(section: str) -> list[str]:
    """List the groups of labels."""
    groups = ((group, _joined(members)) for group, members in GROUPS[section].items())
    return rows(("in the table", "labels"), groups)


def _joined(labels: str) -> str:
    return ", ".join(label if label.startswith("*") else f"`{label}`" for label in labels.split(", "))


def metrics(section: str) -> list[str]:
    """List the families of one section."""
    body, before = [], ""
    for family in FAMILIES.values():
        if family.section == section:
            meaning = "the same" if family.help == before else family.help
            its = "" if family.declared == "-" else _joined(family.declared)
            body.append((f"`{family.name}`", family.kind, its, meaning))
            before = family.help
    return rows(("name", "type", "labels", "meaning"), body)


SECTIONS = {family.section for family in FAMILIES.values()}
#: (document, name of the table) -> maker of its lines
TABLES: dict[tuple[str, str], Callable[[], list[str]]] = {
    **{("docs/metrics.md", f"metrics-{table}"): partial(metrics, table) for table in SECTIONS},
    ("docs/metrics.md", "labels"): partial(labels, "containers"),
    ("docs/metrics.md", "hami-labels"): partial(labels, "hami"),
    ("docs/config.md", "settings"): settings,
    ("docs/cli.md", "status"): samples.status_sample,
    ("docs/compatibility.md", "drivers"): drivers,
    ("docs/compatibility.md", "layouts"): layouts,
    ("docs/troubleshooting.md", "slot-reasons"): partial(reasons, "UnresolvedReason"),
    ("docs/troubleshooting.md", "region-reasons"): partial(reasons, "RegionReason"),
    ("docs/troubleshooting.md", "sample-reasons"): partial(reasons, "SampleReason"),
    ("docs/troubleshooting.md", "bypass-reasons"): partial(reasons, "BypassReason"),
    ("docs/how-it-works.md", "repair-reasons"): partial(reasons, "RepairReason", fixes=False),
    ("docs/broker.md", "broker-reasons"): partial(reasons, "BrokerRefusal", fixes=False),
    ("docs/troubleshooting.md", "trouble-reasons"): partial(reasons, "TroubleReason"),
    ("docs/troubleshooting.md", "checks"): checks,
    ("docs/how-it-works.md", "source-reasons"): partial(reasons, "SourceFailure"),
    ("docs/monitoring.md", "gpu-reasons"): partial(reasons, "GpuReason"),
    ("docs/monitoring.md", "event-kinds"): event_kinds,
    ("deploy/chart/resolver/values.yaml", "settings"): chart_settings,
    ("deploy/chart/resolver/Chart.yaml", "address"): published.chart,
    ("deploy/chart/resolver/Chart.yaml", "address-annotations"): published.chart_annotations,
    ("security-insights.yml", "insights"): published.insights,
    ("security-insights.yml", "insights-project"): published.insights_project,
    ("security-insights.yml", "insights-repository"): published.insights_repository,
}
SCHEMA = "deploy/chart/resolver/values.schema.json"
#: Places of the version and of the image's name: pattern of the text, its replacement.
NAMES = tuple(
    (
        re.compile(pattern, re.MULTILINE),
        replacement.format(image=published.published()["IMAGE_NAME"], version=VERSION),
    )
    for pattern, replacement in (
        (r"^(version: |appVersion: )\S+$", r'\1"{version}"'),
        (r'(\.version=|^VERSION = )"[^"]*"', r'\1"{version}"'),
        (r"(newName: )\S+", r"\1{image}"),
        (r"(newTag: )\S+", r'\1"{version}"'),
        (r"(image\.repository[=:] ?|IMAGE_NAME=)[\w.:-]+/[\w./-]+", r"\1{image}"),
        (r"[\w.-]+/[\w./-]*resolver:\d+\.\d+\.\d+", r"{image}:{version}"),
        (r"(kubectl-resolver-|hami_resolver-|resolver +)\d+\.\d+\.\d+(?=[.,-])", r"\g<1>{version}"),
    )
)
#: Files below the root where the version and the image's name stand.
NAMED = (
    "README.md",
    "docs/*.md",
    "deploy/chart/resolver/*.*",
    "deploy/chart/**/_checks.tpl",
    "deploy/image/Dockerfile",
    "deploy/kustomize/**/*.yaml",
    "resolver/kube/kubectl_plugin.py",
)


def written(text: str, name: str, lines: list[str]) -> str:
    """``text`` with the table ``name`` replaced. Raises SystemExit where its marks are missing."""
    marks = re.compile(
        rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- /table -->)|( *# table: {re.escape(name)}\n).*?( *# /table\n)",
        re.DOTALL,
    )
    match = marks.search(text)
    if not match:
        sys.exit(f"tables: no mark '<!-- table: {name} -->' with '<!-- /table -->' after it")
    # A comment of Markdown that touches a table is a part of it; YAML's stand in the list.
    (begin, end), gap = (match.group(1, 2), "\n") if match[1] else (match.group(3, 4), "")
    middle = gap + "\n".join(lines) + "\n" + gap
    return text[: match.start()] + begin + middle + end + text[match.end() :]


def named(text: str) -> str:
    """Return ``text`` with this version and the image's name."""
    for pattern, replacement in NAMES:
        text = pattern.sub(replacement, text)
    return text


def main() -> int:
    """Write every stale file, or name it (exit code 1)."""
    texts = {
        str(path.relative_to(ROOT)): named(path.read_text()) for glob in NAMED for path in ROOT.glob(glob)
    }
    texts |= openapi.files()
    texts[SCHEMA] = chart_schema((ROOT / SCHEMA).read_text())
    for (file, name), lines in TABLES.items():
        texts[file] = written(texts.get(file) or (ROOT / file).read_text(), name, lines())
    stale = [
        file
        for file, text in texts.items()
        if not (ROOT / file).exists() or (ROOT / file).read_text() != text
    ]
    check = "--check" in sys.argv
    for file in stale:
        sys.stdout.write(f"{'stale' if check else 'written'}: {file}\n")
        if not check:
            (ROOT / file).write_text(texts[file])
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
