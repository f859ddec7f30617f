"""The guests' results: their lines, the rows of docs/kernels.json, a row's faults, and the documents' table."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from scripts import tables

Line = dict[str, Any]
Row = dict[str, Any]

ROOT: Final = Path(__file__).parent.parent.parent
FILE: Final = ROOT / "docs" / "kernels.json"
PAGE: Final = ROOT / "docs" / "compatibility.md"
#: A plain guest's steps in order, and all.
PLAIN: Final = ("loader", "auto", "doctor", "demo")
STEPS: Final = (*PLAIN, "containers")
#: Kept fields of each step's line.
_KEPT: Final = {
    "variant": ("ok", "said"),
    "loader": ("ok", "why", "detail", "compared", "missed", "seconds"),
    "auto": ("ok", "source", "not_used", "seconds"),
    "doctor": ("ok", "states", "told", "seconds"),
    "demo": ("ok", "seconds"),
    "containers": ("ok", "engines", "seconds"),
}
#: The first kernel that the BPF program can be loaded into: the iterator over tasks came with it.
_FIRST_WITH_BPF: Final = (5, 8)


class Expected(NamedTuple):
    """A guest's required results: if the program loads, the source that ``auto`` takes, and the messages.

    ``why`` is by source, ``told`` by check of doctor: see `tests.vm.variants`.
    """

    loads: bool
    source: str
    why: Mapping[str, str] = {}
    told: Mapping[str, tuple[str, str]] = {}


def expected(release: str) -> Expected:
    """Return the requirements of a stock kernel by its release."""
    found = re.match(r"(\d+)\.(\d+)", release)
    loads = found is not None and (int(found[1]), int(found[2])) >= _FIRST_WITH_BPF
    return Expected(loads, "bpf" if loads else "netlink")


def parse(report: bytes) -> list[Line]:
    """Return the complete lines at the beginning of the report disk; zeros or an incomplete line follow."""
    return [json.loads(text) for text in report.split(b"\0", 1)[0].split(b"\n")[:-1]]


def make_row(about: Row, lines: Sequence[Line], trouble: str) -> Row:
    """Make a row of the file: the guest's settings, its own report of itself, and the result of each step."""
    row = dict(about)
    said = {line["step"]: line for line in lines}
    boot = said.get("boot", {})
    row |= {name: boot[name] for name in ("kernel", "system", "bcc", "python") if name in boot}
    for step, kept in _KEPT.items():
        if step in said:
            row[step] = {name: said[step][name] for name in kept if name in said[step]}
    if not row.get("under"):
        row.get("doctor", {}).pop("told", None)  # counts and seconds, which differ each time
    if trouble:
        row["trouble"] = trouble
    return row


def problems(row: Row, steps: Iterable[str], wish: Expected | None = None) -> list[str]:
    """Return a sentence for each result that is not as required."""
    if row.get("trouble"):
        return [f"the guest did not come to its end: {row['trouble']}"]
    wish = wish or expected(row["kernel"])
    found = []
    for step in steps:
        result = row.get(step)
        if result is None:
            found.append(f"{step}: it was not tried")
        elif step == "loader":
            if result["ok"] != wish.loads:
                found.append(f"loader: {result.get('why') or 'it loads, and was not expected to'}")
        elif step == "auto":
            if result.get("source") != wish.source:
                found.append(f"auto: it took {result.get('source')}: {result.get('not_used')}")
        elif not result["ok"]:
            found.append(f"{step}: {result.get('states') or 'it failed'}")
    if not row.get("variant", {}).get("ok", True):
        found.append(f"variant: {row['variant'].get('said', '')[-300:]}")
    return found + _unsaid(row, wish)


def _unsaid(row: Row, wish: Expected) -> list[str]:
    """Return the required messages that daemon and doctor lack."""
    found = []
    for source, words in wish.why.items() if "auto" in row else ():
        if words not in (said := row["auto"].get("not_used", {}).get(source, "")):
            found.append(f"auto: {source} is not used because {said!r}, which should have {words!r}")
    for check, (state, words) in wish.told.items() if "doctor" in row else ():
        was, said = row["doctor"]["states"].get(check), row["doctor"].get("told", {}).get(check, "")
        if was != state or words not in said:
            found.append(f"doctor: {check} is {was}, {said!r}, which should be {state} with {words!r}")
    return found


def key(row: Row) -> tuple[str, str, str, str]:
    return row["pick"], row["arch"], row["userspace"], row.get("under", "")


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """All rows, the newer in place of the older. What was not tried again stays, if the kernel is the same."""
    rows = {key(row): row for row in old}
    for row in new:
        before = rows.get(key(row), {})
        same = before.get("kernel") == row.get("kernel") and before.get("version") == row.get("version")
        kept: Row = {step: before[step] for step in STEPS if step in before} if same else {}
        rows[key(row)] = {**kept, **row}
    return sorted(rows.values(), key=order)


def order(row: Row) -> tuple[Any, ...]:
    numbers = tuple(int(number) for number in re.findall(r"\d+", row.get("version", ""))[:3])
    return row["arch"] != "x86_64", row["arch"], row.get("under", ""), numbers, row["userspace"]


def load() -> list[Row]:
    rows: list[Row] = json.loads(FILE.read_text())["kernels"]
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    head = (
        "kernel",
        "package",
        "machine",
        "userspace, bcc",
        "program",
        "`auto` takes",
        "demo",
        "doctor on bpf",
    )
    body = []
    for row in rows:
        under = f" with {row['under']}" if row.get("under") else ""
        cells = (
            f"{row.get('kernel', row['pick'])}{under}",
            f"{row.get('version', '')} ({row['suite']})",
            row["arch"],
            f"{row['userspace']}, {row.get('bcc', '?')}",
            _loads(row),
            row.get("auto", {}).get("source") or _untried(row, "auto"),
            ("right" if row["demo"]["ok"] else "**wrong**") if "demo" in row else "not tried",
            row.get("doctor", {}).get("states", {}).get("bpf") or _untried(row, "doctor"),
        )
        body.append(cells)
    return [*tables.rows(head, body), *_containers(rows)]


def _containers(rows: Sequence[Row]) -> list[str]:
    """A second table: containers in scopes that systemd made. A wrong answer ends the step before its row."""
    body = [
        (engine["engine"], row["pick"], f"`{engine['cgroup']}`", "found", "listed", "right")
        for row in rows
        for engine in row.get("containers", {}).get("engines", ())
    ]
    head = (
        "systemd's cgroup driver",
        "kernel",
        "the container's cgroup",
        "`lookup`",
        "`containers`",
        "`reverse`",
    )
    return ["", *tables.rows(head, body)] if body else []


def _untried(row: Row, step: str) -> str:
    return "it failed" if step in row else "not tried"


def _loads(row: Row) -> str:
    if "loader" not in row:
        return "not tried"
    if not row["loader"]["ok"]:
        return f"no: {row['loader'].get('why', '').split(':', 1)[0]}"
    missed = row["loader"].get("missed", 0)
    return f"yes, but {missed} events were missed" if missed else "yes"


def put_table(page: str, rows: Sequence[Row]) -> str:
    return tables.written(page, "kernels", table(rows))


def publish(rows: Sequence[Row]) -> None:
    merged = merge(load(), rows)
    FILE.write_text(json.dumps({"kernels": merged}, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(put_table(PAGE.read_text(), merged))
