"""``make figures``: write the measurements of ``make bench`` as tables in the documents.

    make bench && make figures ARGS=bench.json

The tables come from docs/bench.json. Figures of a given file replace those there first; a file may have only some
parts of the bench.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from scripts import tables
from tests.bench import integral, scrape

Row = dict[str, Any]

ROOT: Final = Path(__file__).parent.parent.parent
DATA: Final = ROOT / "docs/bench.json"
FLEET: Final = 10_000
#: Start of an attack's first row, which names its figure, the loop's time, after a colon.
HOSTILE: Final = "under "
#: Rows by column of the attacks' table.
_HOSTILE: Final = {
    "longest step of the loop, CPU / wall clock, ms": ("loop", "and by the wall"),
    "repair for others, median / 99 %, ms": (
        "a good container's repair, median",
        "a good container's repair, 99 %",
    ),
    "root's API request, median / 99 %, ms": (
        "root's question to the API, median",
        "root's question to the API, 99 %",
    ),
    "longest scrape, ms": ("a scrape, longest",),
    "CPU of the daemon, % of a core": ("CPU of the daemon",),
    "memory kept, MiB": ("memory not given back",),
    "log lines/s": ("lines of the log, for one container",),
    "SIGTERM to end, s": ("SIGTERM to its end",),
    "wrong values": ("wrong values",),
}


class FigureError(Exception):
    """A figure of a table is missing; the message names it and the part of the bench that measures it."""


class Figures:
    """The rows of a bench in groups: a row, and the indented rows below it."""

    def __init__(self, measured: dict[str, Any]) -> None:
        self.machine = measured["machine"]
        self.groups: list[list[Row]] = []
        for row in measured["results"]:
            if row["name"].startswith("  "):
                self.groups[-1].append(row)
            else:
                self.groups.append([row])

    def row(self, name: str, inset: str = "") -> Row:
        """Return the first row whose name starts with ``name``, or with ``inset`` the indented row below it."""
        for first, *insets in self.groups:
            for row in (insets if inset else [first]) if first["name"].startswith(name) else ():
                if row["name"].startswith(f"  {inset}" if inset else name):
                    return row
        raise FigureError(f"{name!r} was not measured: run all of `make bench`")

    def value(self, name: str, inset: str = "") -> float:
        row = self.row(name, inset)
        if row["value"] is None:
            raise FigureError(f"{row['name']!r} has no value: {row['beside']}")
        return float(row["value"])


def number(value: float) -> str:
    """Format a figure with three significant digits, two below 0.01."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.01 else f"{value:.2g}"


def whole_table(figures: Figures) -> list[str]:
    """Every row of the bench that is in no other table."""
    machine, others = figures.machine, (HOSTILE, "scrape of ", "monitor of ", integral.USE)
    groups = (group for group in figures.groups if not group[0]["name"].startswith(others))
    lines = [_line(row) for group in groups for row in group]
    return [
        f"On Linux {machine['kernel']}, {machine['cores']} cores, Python {machine['python']}:",
        "",
        *tables.rows(("figure", "", "target", "details"), lines),
    ]


def _line(row: Row) -> list[str]:
    name = f"… {row['name'].strip()}" if row["name"].startswith("  ") else row["name"]
    value = "not measured" if row["value"] is None else f"{number(row['value'])} {row['unit']}".strip()
    bound = "" if row["bound"] is None else f"{number(row['bound'])} or less"
    if row["value"] is not None and row["bound"] is not None and row["value"] > row["bound"]:
        value = f"**{value}**"
    return [name.replace("|", "\\|"), value, bound, row["beside"].replace("|", "\\|")]


def short_table(figures: Figures) -> list[str]:
    slot = "a slot's appearance"
    soon, late = number(figures.value(slot)), number(figures.value(slot, "99 %"))
    lines = [
        ("a slot's appearance to its right `hostpid`", f"{soon} ms; 99 % within {late} ms"),
        ("CPU, 64 quiet containers, 8 GPUs", f"{number(figures.value('CPU of a quiet node'))} % of a core"),
        ("memory, with all its children", f"{number(figures.value('memory of all of it, idle'))} MiB"),
    ]
    return tables.rows(("", ""), lines)


def scaling_table(figures: Figures) -> list[str]:
    """Sizes of nodes' scrapes, and the load that 10,000 usual nodes put on Prometheus."""

    def sizes(shape: tuple[int, int, int, int]) -> tuple[int, float]:
        name = f"scrape of {scrape.words_of(shape)}"
        return int(figures.row(name)["beside"].removesuffix(" series")), figures.value(name, "text")

    nodes = []
    for words, shape in ((scrape.words_of(shape), shape) for shape in scrape.SHAPES):
        series, size = sizes(shape)
        nodes.append(
            (words, f"{series:,}", f"{size:.0f} KiB", f"{number(figures.value(f'scrape of {words}'))} ms")
        )
    (series, size), fleet = sizes(scrape.USUAL), []
    for seconds in (15, 30, 60):
        rate = series * FLEET / seconds
        sent, kept = size * 1024 * FLEET / seconds / 1e6, rate * 86_400 * 1.5 / 1e9
        fleet.append(
            (f"{seconds} s", f"{series * FLEET:,}", f"{rate:,.0f}", f"{sent:.1f} MB/s", f"{kept:.1f} GB")
        )
    head = ("scraped every", "series", "samples a second", "network", "kept for a day, at 1.5 bytes a sample")
    return [
        *tables.rows(("a node with", "series", "a scrape", "time to build it"), nodes),
        "",
        f"10,000 nodes with {scrape.words_of(scrape.USUAL)} each:",
        "",
        *tables.rows(head, fleet),
    ]


def _pivoted(entries: Iterable[tuple[str, str, Row]]) -> tuple[list[str], dict[str, dict[str, Row]]]:
    """Return the columns, and the worst row by line and column."""
    lines: dict[str, dict[str, Row]] = {}
    for line, column, row in entries:
        cells = lines.setdefault(line, {})
        cells[column] = max(cells.get(column, row), row, key=lambda candidate: float(candidate["value"]))
    return list(dict.fromkeys(column for cells in lines.values() for column in cells)), lines


def values_table(figures: Figures) -> list[str]:
    """Longest time for which a monitor of HAMi reports a wrong value, by the tenants' library and number of GPUs."""
    pattern = r"monitor of .+, tenants of (.+), (\d+ GPUs?): .+"
    matches = ((re.fullmatch(pattern, row["name"]), row) for row, *_ in figures.groups)
    shapes, lines = _pivoted((match[1], match[2], row) for match, row in matches if match)
    body = [
        [
            name,
            *(_cell([cells[at]], 2) for at in shapes),
            " / ".join(number(cells[at]["bound"]) for at in shapes),
        ]
        for name, cells in lines.items()
    ]
    return tables.rows(("tenants of", *shapes, "target, at most"), body)


def usage_table(figures: Figures) -> list[str]:
    """The error of each case of GPU use: before and after a restart, and with NVIDIA's library."""
    named = [(row["name"], row) for row, *_ in figures.groups if row["name"].startswith(integral.USE)]
    parts = [(name.removeprefix(integral.USE).partition(": "), row) for name, row in named]
    runs, lines = _pivoted((case, run, row) for (run, _, case), row in parts)
    body = []
    for case, cells in lines.items():
        texts = (f"{_cell([cells[at]], 2)} {cells[at]['unit']}".strip() if at in cells else "" for at in runs)
        body.append([case, *texts, number(next(iter(cells.values()))["bound"])])
    return tables.rows(("", *runs, "target, at most"), body)


def hostile_table(figures: Figures) -> list[str]:
    """Effect of each attack, at its largest size, on the node's other users: a line per attack, a column per figure."""
    sizes: dict[str, tuple[str, dict[str, Row]]] = {}  # the later, the larger
    for first, *insets in figures.groups:
        if first["name"].startswith(HOSTILE):
            name = first["name"].removeprefix(HOSTILE).partition(": ")[0]
            measured = {"loop": first} | {row["name"].strip(): row for row in insets}
            sizes[re.sub(r"\d[\d,]*", "N", name, count=1)] = name, measured
    body = [
        [name, *(_cell([measured[row_name] for row_name in names]) for names in _HOSTILE.values())]
        for name, measured in sizes.values()
    ]
    usual = next(iter(sizes.values()))[1]
    bounds = [usual[names[-1]]["bound"] for names in _HOSTILE.values()]
    aims = ["*target, at most*", *("" if bound is None else number(bound) for bound in bounds)]
    return tables.rows(("attack", *_HOSTILE), [*body, aims])


def _cell(rows: list[Row], digits: int = 1) -> str:
    """Format the values; bold if one is above its bound."""
    missed = any(row["bound"] is not None and row["value"] > row["bound"] for row in rows)
    text = " / ".join(number(round(row["value"], digits)) for row in rows)
    return f"**{text}**" if missed else text


#: Builder of a table's lines, by document and table.
TABLES: Final[dict[tuple[str, str], Callable[[Figures], list[str]]]] = {
    ("docs/performance.md", "bench"): whole_table,
    ("docs/performance.md", "bench-scaling"): scaling_table,
    ("docs/performance.md", "bench-values"): values_table,
    ("docs/performance.md", "bench-usage"): usage_table,
    ("docs/performance.md", "bench-hostile"): hostile_table,
    ("README.md", "bench"): short_table,
}


def with_replaced_groups(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the old figures, with the groups of rows that were measured again replaced."""
    rows = {_key(group[0]): group for measured in (old, new) for group in Figures(measured).groups}
    groups = sorted(rows.values(), key=lambda group: group[0]["name"].startswith(HOSTILE))  # attacks last
    return {"machine": new["machine"], "results": [row for group in groups for row in group]}


def _key(row: Row) -> str:
    """Return a row's name, without the part of its number of processes that varies from run to run."""
    name = re.sub(r"\d+(?= in the map| namespaces)", "N", row["name"])
    return re.sub(r"\d+(?= processes$)", lambda count: f"{float(count[0]):.0e}", name)


def main() -> int:
    """Replace the figures of a given file, and write all tables."""
    try:
        measured = json.loads(DATA.read_text())
        if sys.argv[1:]:
            measured = with_replaced_groups(measured, json.loads(Path(sys.argv[1]).read_text()))
        figures = Figures(measured)
        texts = {name: (ROOT / name).read_text() for name, _ in TABLES}
        for (name, place), table in TABLES.items():
            texts[name] = tables.written(texts[name], place, table(figures))
        DATA.write_text(json.dumps(measured, indent=1) + "\n")
        for name, text in texts.items():
            (ROOT / name).write_text(text)
    except (OSError, ValueError, KeyError, FigureError) as error:
        print(f"make figures: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
