"""Write the table of values into the Helm chart's README, from the comments in values.yaml, or pack the chart.

Without an argument it writes the table, which a test compares; with a directory it packs the chart there, with this
commit's version.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from resolver import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy/chart/resolver"
BEGIN, END = "<!-- values: written by scripts/chart.py -->\n", "<!-- end of values -->\n"


class Value(NamedTuple):
    """One row: the dotted name, the default as values.yaml has it, and the comment above it."""

    name: str
    default: Any
    meaning: str


def values(text: str) -> Iterator[Value]:
    """Yield the values with a comment that begins with ``# --``, in the file's order."""
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
    """Format the values as a table in Markdown."""
    rows = ["| name | default | meaning |", "|---|---|---|"]
    rows += [
        f"| `{value.name}` | `{json.dumps(value.default)}` | {value.meaning} |".replace('`""`', "")
        for value in values(text)
    ]
    return "\n".join(rows) + "\n"


def written() -> str:
    """Return the README with the current table."""
    before, _, rest = (CHART / "README.md").read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}{table((CHART / 'values.yaml').read_text())}{END}{after}"


def pack(directory: str) -> None:
    """Pack the chart with this commit's version, which the chart's own form calls 0.2.0-dev.12+g1a2b3c4."""
    helm = Path(sys.executable).with_name("helm")
    version = __version__.replace(".dev", "-dev.")
    command = [helm, "package", "--version", version, "--app-version", __version__]
    subprocess.run([*command, "--destination", directory, CHART], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """Write the table, or pack the chart into the directory that is given."""
    if sys.argv[1:]:
        pack(sys.argv[1])
    else:
        (CHART / "README.md").write_text(written())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
