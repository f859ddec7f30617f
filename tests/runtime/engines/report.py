"""What was seen under each engine: the rows of docs/runtimes.json, and the documents' table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from scripts import tables

Row = dict[str, Any]

ROOT: Final = Path(__file__).parent.parent.parent.parent
FILE: Final = ROOT / "docs" / "runtimes.json"
PAGE: Final = ROOT / "docs" / "compatibility.md"
#: Fields that identify a row; the others are results.
_KEY: Final = ("engine", "how", "cgroups", "suite")
_ORDER: Final = ("containerd", "containerd, CRI", "Docker", "Podman", "LXC", "systemd-nspawn", "gVisor")
_HEAD: Final = (
    "engine",
    "how",
    "cgroups",
    "the container's cgroup",
    "`lookup`",
    "`containers`",
    "`reverse`",
    "slots",
)


def key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in _KEY)


def load() -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(FILE.read_text())
    return whole


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """All rows, the newer in place of the older; those of another kernel's hierarchies stay."""
    rows = {key(row): row for row in old} | {key(row): row for row in new}
    return sorted(rows.values(), key=lambda row: (row["suite"], _ORDER.index(row["engine"])))


def table(rows: Sequence[Row]) -> list[str]:
    """In Markdown; rows that differ in the hierarchies alone are one."""
    lines: dict[tuple[str, ...], dict[str, None]] = {}
    for row in rows:
        cells: tuple[str, ...] = (
            row["engine"],
            row["how"],
            f"`{row['cgroup']}`" if row["cgroup"] != "none" else "none",
            "found" if row["ids"] else "no",
            row["containers"],
            row["reverse"],
            row["repair"],
        )
        lines.setdefault(cells, {})[row["cgroups"]] = None
    return tables.rows(_HEAD, ((*cells[:2], ", ".join(views), *cells[2:]) for cells, views in lines.items()))


def asked(rows: Sequence[Row]) -> str:
    """Return the engines' commands whose ids were looked up, and the options without an answer."""
    parts = []
    for engine in _ORDER:
        found = dict.fromkeys(each for row in rows if row["engine"] == engine for each in row["ids"])
        refused = dict.fromkeys(
            each for row in rows if row["engine"] == engine for each in row.get("not_by", ())
        )
        if found:
            names = ", ".join(f"`{each}`" for each in found)
            parts.append(f"{engine}: {names}" + "".join(f"; not `{each}`" for each in refused))
    return "`lookup` finds the ids of these commands. " + ". ".join(parts) + "."


def put_table(page: str, whole: Mapping[str, Any]) -> str:
    lines = []
    for suite, versions in sorted(whole["versions"].items()):
        packages = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        rows = [row for row in whole["runtimes"] if row["suite"] == suite]
        lines += [f"**Debian {suite}**: {packages}", "", *table(rows), ""]
    return tables.written(page, "runtimes", [*lines, asked(whole["runtimes"])])


def publish(suite: str, versions: Mapping[str, str], rows: Sequence[Row]) -> None:
    whole = load()
    whole["versions"][suite] = dict(versions)
    whole["runtimes"] = merge(whole["runtimes"], rows)
    FILE.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(put_table(PAGE.read_text(), whole))
