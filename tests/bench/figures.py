"""``make figures``: what ``make bench`` measured, as tables in the documents.

    make bench && make figures ARGS=bench.json

With a file its figures are taken over into docs/bench.json first, those of some parts of the bench if it has no more;
the tables are made from there.
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
#: First words of an attack's rows; the first row names the loop's figure after a colon.
HOSTILE: Final = "under "
#: Column -> the rows in it.
_HOSTILE: Final = {
    "loop in one go, CPU / wall, ms": ("loop", "and by the wall"),
    "good repair, median / 99 %, ms": (
        "a good container's repair, median",
        "a good container's repair, 99 %",
    ),
    "root's API, median / 99 %, ms": (
        "root's question to the API, median",
        "root's question to the API, 99 %",
    ),
    "longest scrape, ms": ("a scrape, longest",),
    "its CPU, % of a core": ("CPU of the daemon",),
    "memory kept, MiB": ("memory not given back",),
    "log lines/s": ("lines of the log, for one container",),
    "SIGTERM to end, s": ("SIGTERM to its end",),
    "wrong values": ("wrong values",),
}


class FigureError(Exception):
    """A figure of a table was not measured; the sentence says what, and by which part of the bench."""


class Figures:
    """The rows of a bench: groups of a row and those that are set in below it."""

    def __init__(self, measured: dict[str, Any]) -> None:
        self.machine = measured["machine"]
        self.groups: list[list[Row]] = []
        for row in measured["results"]:
            if row["name"].startswith("  "):
                self.groups[-1].append(row)
            else:
                self.groups.append([row])

    def row(self, name: str, inset: str = "") -> Row:
        """The first row whose name begins like that, or one below such a row."""
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
    """Three digits that count, no more after the point than a reader needs."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.01 else f"{value:.2g}"


def whole_table(found: Figures) -> list[str]:
    """Every row of the bench that is in no other table."""
    machine, others = found.machine, (HOSTILE, "scrape of ", "monitor of ", integral.USE)
    lines = [_line(row) for group in found.groups if not group[0]["name"].startswith(others) for row in group]
    return [
        f"On Linux {machine['kernel']}, {machine['cores']} cores, Python {machine['python']}:",
        "",
        *tables.rows(("measured", "", "aimed at", "beside it"), lines),
    ]


def _line(row: Row) -> list[str]:
    name = f"… {row['name'].strip()}" if row["name"].startswith("  ") else row["name"]
    value = "not measured" if row["value"] is None else f"{number(row['value'])} {row['unit']}".strip()
    bound = "" if row["bound"] is None else f"{number(row['bound'])} or less"
    if row["value"] is not None and row["bound"] is not None and row["value"] > row["bound"]:
        value = f"**{value}**"
    return [name.replace("|", "\\|"), value, bound, row["beside"].replace("|", "\\|")]


def short_table(found: Figures) -> list[str]:
    slot = "a slot's appearance"
    soon, late = number(found.value(slot)), number(found.value(slot, "99 %"))
    lines = [
        ("a slot's appearance to its right `hostpid`", f"{soon} ms; for 99 % {late} ms"),
        ("CPU, 64 quiet containers, 8 GPUs", f"{number(found.value('CPU of a quiet node'))} % of a core"),
        ("memory, with all its children", f"{number(found.value('memory of all of it, idle'))} MiB"),
    ]
    return tables.rows(("", ""), lines)


def scaling_table(found: Figures) -> list[str]:
    """What nodes send, and what a fleet of the usual one makes of it."""

    def sizes(shape: tuple[int, int, int, int]) -> tuple[int, float]:
        name = f"scrape of {scrape.words_of(shape)}"
        return int(found.row(name)["beside"].removesuffix(" series")), found.value(name, "text")

    nodes = []
    for words, shape in ((scrape.words_of(shape), shape) for shape in scrape.SHAPES):
        series, size = sizes(shape)
        nodes.append(
            (words, f"{series:,}", f"{size:.0f} KiB", f"{number(found.value(f'scrape of {words}'))} ms")
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
        *tables.rows(("a node with", "series", "a scrape", "its making"), nodes),
        "",
        f"10,000 nodes with {scrape.words_of(scrape.USUAL)} each:",
        "",
        *tables.rows(head, fleet),
    ]


def _pivoted(entries: Iterable[tuple[str, str, Row]]) -> tuple[list[str], dict[str, dict[str, Row]]]:
    """The columns, and the worst row of each line and column."""
    lines: dict[str, dict[str, Row]] = {}
    for line, column, row in entries:
        cells = lines.setdefault(line, {})
        cells[column] = max(cells.get(column, row), row, key=lambda each: float(each["value"]))
    return list(dict.fromkeys(column for cells in lines.values() for column in cells)), lines


def values_table(found: Figures) -> list[str]:
    """How long upstream's monitors report a wrong value, the worst of them, by what the tenants run and their GPUs."""
    pattern = r"monitor of .+, tenants of (.+), (\d+ GPUs?): .+"
    shapes, lines = _pivoted(
        (match[1], match[2], row) for row, *_ in found.groups if (match := re.fullmatch(pattern, row["name"]))
    )
    body = [
        [
            name,
            *(_cell([cells[at]], 2) for at in shapes),
            " / ".join(number(cells[at]["bound"]) for at in shapes),
        ]
        for name, cells in lines.items()
    ]
    return tables.rows(("tenants of", *shapes, "aimed at, or less"), body)


def usage_table(found: Figures) -> list[str]:
    """The error of each case of GPU use: before and after a restart, and with NVIDIA's library."""
    named = [(row["name"], row) for row, *_ in found.groups if row["name"].startswith(integral.USE)]
    parts = [(name.removeprefix(integral.USE).partition(": "), row) for name, row in named]
    runs, lines = _pivoted((case, run, row) for (run, _, case), row in parts)
    body = []
    for case, cells in lines.items():
        texts = (f"{_cell([cells[at]], 2)} {cells[at]['unit']}".strip() if at in cells else "" for at in runs)
        body.append([case, *texts, number(next(iter(cells.values()))["bound"])])
    return tables.rows(("", *runs, "aimed at, or less"), body)


def hostile_table(found: Figures) -> list[str]:
    """What each attack does to everybody else at its largest size: a line for each, a column for each measure."""
    sizes: dict[str, tuple[str, dict[str, Row]]] = {}  # the later, the larger
    for first, *insets in found.groups:
        if first["name"].startswith(HOSTILE):
            name = first["name"].removeprefix(HOSTILE).partition(": ")[0]
            measured = {"loop": first} | {row["name"].strip(): row for row in insets}
            sizes[re.sub(r"\d[\d,]*", "N", name, count=1)] = name, measured
    body = [
        [name, *(_cell([measured[each] for each in names]) for names in _HOSTILE.values())]
        for name, measured in sizes.values()
    ]
    usual = next(iter(sizes.values()))[1]
    bounds = [usual[names[-1]]["bound"] for names in _HOSTILE.values()]
    aims = ["*aimed at, or less*", *("" if bound is None else number(bound) for bound in bounds)]
    return tables.rows(("under", *_HOSTILE), [*body, aims])


def _cell(rows: list[Row], digits: int = 1) -> str:
    """The values; bold if one is above what is aimed at."""
    missed = any(row["bound"] is not None and row["value"] > row["bound"] for row in rows)
    text = " / ".join(number(round(row["value"], digits)) for row in rows)
    return f"**{text}**" if missed else text


#: Document and table, and the lines of it.
TABLES: Final[dict[tuple[str, str], Callable[[Figures], list[str]]]] = {
    ("docs/performance.md", "bench"): whole_table,
    ("docs/performance.md", "bench-scaling"): scaling_table,
    ("docs/performance.md", "bench-values"): values_table,
    ("docs/performance.md", "bench-usage"): usage_table,
    ("docs/performance.md", "bench-hostile"): hostile_table,
    ("README.md", "bench"): short_table,
}


def taken_over(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What was measured anew in the place of what it replaces, the rest as it was."""
    rows = {_key(group[0]): group for measured in (old, new) for group in Figures(measured).groups}
    groups = sorted(rows.values(), key=lambda group: group[0]["name"].startswith(HOSTILE))  # those come last
    return {"machine": new["machine"], "results": [row for group in groups for row in group]}


def _key(row: Row) -> str:
    """Its name; by how many processes there were more than meant doesn't count."""
    name = re.sub(r"\d+(?= in the map| namespaces)", "N", row["name"])
    return re.sub(r"\d+(?= processes$)", lambda found: f"{float(found[0]):.0e}", name)


def main() -> int:
    """Take the figures over, if a file is given, and make all tables anew."""
    try:
        measured = json.loads(DATA.read_text())
        if sys.argv[1:]:
            measured = taken_over(measured, json.loads(Path(sys.argv[1]).read_text()))
        found = Figures(measured)
        texts = {name: (ROOT / name).read_text() for name, _ in TABLES}
        for (name, place), table in TABLES.items():
            texts[name] = tables.written(texts[name], place, table(found))
        DATA.write_text(json.dumps(measured, indent=1) + "\n")
        for name, text in texts.items():
            (ROOT / name).write_text(text)
    except (OSError, ValueError, KeyError, FigureError) as error:
        print(f"make figures: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
