"""Writes into the Helm chart what has its place elsewhere, so that nothing is said twice by hand.

    .venv/bin/python scripts/chart.py [DIRECTORY]

These are the alerts and the dashboard (a chart is packed without what is beside it, and GitOps tools do not follow
links), the version, and the table of values in its README, from the comments in values.yaml. A test holds the chart
to it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from resolver import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy/chart/resolver"
COPIES = {
    "files/resolver.rules.yaml": ROOT / "deploy/alerts/resolver.rules.yaml",
    "files/resolver.json": ROOT / "deploy/grafana/resolver.json",
}
BEGIN, END = "<!-- values: written by scripts/chart.py -->\n", "<!-- end of values -->\n"


class Value(NamedTuple):
    """One row: the dotted name, the default as values.yaml has it, and the comment above it."""

    name: str
    default: Any
    meaning: str


def values(text: str) -> Iterator[Value]:
    """The values that have a comment beginning with ``# --``, in the file's order."""
    defaults = yaml.safe_load(text)
    path: list[str] = []
    comment: list[str] | None = None
    for line in text.splitlines():
        told = re.match(r" *# ?(-- )?(.*)", line)
        if told and (told[1] or comment):
            comment = [told[2]] if told[1] else [*(comment or ()), told[2]]
            continue
        key = re.match(r"( *)([A-Za-z_]+):", line)
        if key and comment:
            path[len(key[1]) // 2 :] = [key[2]]
            default = defaults
            for name in path:
                default = default[name]
            yield Value(".".join(path), default, " ".join(comment))
        elif key:
            path[len(key[1]) // 2 :] = [key[2]]
        comment = None


def table(text: str) -> str:
    """The values as a table in Markdown."""
    rows = ["| name | default | meaning |", "|---|---|---|"]
    rows += [
        f"| `{value.name}` | `{json.dumps(value.default)}` | {value.meaning} |".replace('`""`', "")
        for value in values(text)
    ]
    return "\n".join(rows) + "\n"


def written() -> dict[str, str]:
    """Every file that is written, as it should be now, by its path in the chart."""
    chart = (CHART / "Chart.yaml").read_text()
    chart = re.sub(r"(?m)^version: .*$", f"version: {__version__}", chart)
    chart = re.sub(r"(?m)^appVersion: .*$", f'appVersion: "{__version__}"', chart)
    before, _, rest = (CHART / "README.md").read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    rows = table((CHART / "values.yaml").read_text())
    files = {"Chart.yaml": chart, "README.md": f"{before}{BEGIN}{rows}{END}{after}"}
    return files | {name: source.read_text() for name, source in COPIES.items()}


def main() -> int:
    """Write them into the chart, or below the directory that is named."""
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else CHART
    for name, text in written().items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
