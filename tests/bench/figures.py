"""``make figures``: what ``make bench`` measured, as tables in the documents.

    make bench && make figures ARGS=bench.json

With a file its figures are taken over into docs/bench.json first, those of some parts of the bench if it has no more;
the tables are made from there.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.bench import integral, scrape

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
    """The rows of a bench, by the beginning of their names. A row that is set in belongs to the one before it."""

    def __init__(self, measured: dict[str, Any]) -> None:
        self.machine = measured["machine"]
        self.rows = measured["results"]
        self._named: list[tuple[str, dict[str, Any]]] = []
        owner = ""
        for row in self.rows:
            if row["name"].startswith("  "):
                self._named.append((f"{owner} >{row['name'][1:]}", row))
            else:
                owner = row["name"]
                self._named.append((owner, row))

    def row(self, name: str) -> dict[str, Any]:
        """The first row whose name begins like that: ``owner`` or ``owner ... > row``."""
        owner, _, inner = name.partition(" > ")
        for full, row in self._named:
            whose, _, which = full.partition(" > ")
            if whose.startswith(owner) and which.startswith(inner) and bool(inner) == bool(which):
                return row
        raise FigureError(f"{name!r} was not measured: run all of `make bench`")

    def value(self, name: str) -> float:
        value = self.row(name)["value"]
        if value is None:
            raise FigureError(f"{name!r} has no value: {self.row(name)['beside']}")
        return float(value)


def number(value: float) -> str:
    """Three digits that count, no more after the point than a reader needs."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.01 else f"{value:.2g}"


def whole_table(found: Figures) -> str:
    """Every row of the bench that is in no other table."""
    lines = [
        f"On Linux {found.machine['kernel']}, {found.machine['cores']} cores, Python {found.machine['python']}:",
        "",
        "| measured | | aimed at | beside it |",
        "|---|---|---|---|",
    ]
    for group in _groups(found.rows):
        if group[0]["name"].startswith((HOSTILE, "scrape of ", "monitor of ", integral.USE)):
            continue  # these have tables of their own
        lines += map(_line, group)
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    name = row["name"].replace("|", "\\|")
    name = f"… {name.strip()}" if name.startswith("  ") else name
    value = "not measured" if row["value"] is None else f"{number(row['value'])} {row['unit']}".strip()
    bound = "" if row["bound"] is None else f"{number(row['bound'])} or less"
    if row["value"] is not None and row["bound"] is not None and row["value"] > row["bound"]:
        value = f"**{value}**"
    return f"| {name} | {value} | {bound} | {row['beside'].replace('|', chr(92) + '|')} |"


def short_table(found: Figures) -> str:
    def cell(name: str) -> str:
        return number(found.value(name))

    slot = "a slot's appearance"
    rows = {
        "a slot's appearance to its right `hostpid`": f"{cell(slot)} ms; for 99 % {cell(f'{slot} > 99 %')} ms",
        "CPU, 64 quiet containers, 8 GPUs": f"{cell('CPU of a quiet node')} % of a core",
        "memory, with all its children": f"{cell('memory of all of it, idle')} MiB",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())])


def scaling_table(found: Figures) -> str:
    """What nodes send, and what a fleet of the usual one makes of it."""
    lines = ["| a node with | series | a scrape | its making |", "|---|---|---|---|"]
    for shape in scrape.SHAPES:
        name = f"scrape of {scrape.words_of(shape)}"
        size, spent = found.value(f"{name} > text"), found.value(name)
        lines.append(
            f"| {scrape.words_of(shape)} | {series_of(found, shape):,} | {size:.0f} KiB | {number(spent)} ms |"
        )
    series = series_of(found, scrape.USUAL)
    size = found.value(f"scrape of {scrape.words_of(scrape.USUAL)} > text")
    lines += [
        "",
        f"10,000 nodes with {scrape.words_of(scrape.USUAL)} each:",
        "",
        "| scraped every | series | samples a second | network | kept for a day, at 1.5 bytes a sample |",
        "|---|---|---|---|---|",
    ]
    for seconds in (15, 30, 60):
        rate = series * FLEET / seconds
        sent, kept = size * 1024 * FLEET / seconds / 1e6, rate * 86_400 * 1.5 / 1e9
        lines.append(f"| {seconds} s | {series * FLEET:,} | {rate:,.0f} | {sent:.1f} MB/s | {kept:.1f} GB |")
    return "\n".join(lines)


def values_table(found: Figures) -> str:
    """How long upstream's monitors report a wrong value, the worst of them, by what the tenants run and their GPUs."""
    worst: dict[str, dict[str, dict[str, Any]]] = {}
    for row in found.rows:
        if known := re.fullmatch(r"monitor of .+, tenants of (.+), (\d+ GPUs?): .+", row["name"]):
            cells = worst.setdefault(known[1], {})
            cells[known[2]] = max(cells.get(known[2], row), row, key=lambda each: float(each["value"]))
    shapes = list(next(iter(worst.values()), {}))
    lines = [
        f"| tenants of | {' | '.join(shapes)} | aimed at, or less |",
        f"|---|{'---|' * (len(shapes) + 1)}",
    ]
    for tenants, cells in worst.items():
        row_text = " | ".join(_cell([cells[shape]], 2) for shape in shapes)
        lines.append(
            f"| {tenants} | {row_text} | {' / '.join(number(cells[shape]['bound']) for shape in shapes)} |"
        )
    return "\n".join(lines)


def usage_table(found: Figures) -> str:
    """The error of each case of GPU use: before and after a restart, and with NVIDIA's library."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in found.rows:
        if row["name"].startswith(integral.USE):
            run, _, case = row["name"].removeprefix(integral.USE).partition(": ")
            rows.setdefault(case, {})[run] = row
    runs = list(dict.fromkeys(run for cells in rows.values() for run in cells))
    lines = [f"| | {' | '.join(runs)} | aimed at, or less |", f"|---|{'---|' * (len(runs) + 1)}"]
    for case, cells in rows.items():
        row_cells = (
            f"{_cell([cells[run]], 2)} {cells[run]['unit']}".strip() if run in cells else "" for run in runs
        )
        lines.append(f"| {case} | {' | '.join(row_cells)} | {number(next(iter(cells.values()))['bound'])} |")
    return "\n".join(lines)


def hostile_table(found: Figures) -> str:
    """What each attack does to everybody else at its largest size: a line for each, a column for each measure."""
    sizes: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {}  # the later, the larger
    rows: dict[str, dict[str, Any]] = {}
    for row in found.rows:
        if row["name"].startswith(HOSTILE):
            name = row["name"].removeprefix(HOSTILE).partition(": ")[0]
            rows = {"loop": row}
            sizes[re.sub(r"\d[\d,]*", "N", name, count=1)] = (name, rows)
        elif row["name"].startswith("  "):
            rows[row["name"].strip()] = row
    attacks = dict(sizes.values())
    if not attacks:
        return 'Not measured yet: `make bench ARGS="hostile --json hostile.json"`, `make figures ARGS=hostile.json`.'
    lines = [f"| under | {' | '.join(_HOSTILE)} |", f"|---|{'---|' * len(_HOSTILE)}"]
    for name, measured in attacks.items():
        cells = [_cell([measured[each] for each in names]) for names in _HOSTILE.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    bounds = [next(iter(attacks.values()))[names[-1]]["bound"] for names in _HOSTILE.values()]
    aims = " | ".join("" if bound is None else number(bound) for bound in bounds)
    return "\n".join([*lines, f"| *aimed at, or less* | {aims} |"])


def _cell(rows: list[dict[str, Any]], digits: int = 1) -> str:
    """The values; bold if one is above what is aimed at."""
    missed = any(row["bound"] is not None and row["value"] > row["bound"] for row in rows)
    text = " / ".join(number(round(row["value"], digits)) for row in rows)
    return f"**{text}**" if missed else text


def series_of(found: Figures, shape: tuple[int, int, int, int]) -> int:
    """How many series a node of this shape has, by the bench."""
    return int(found.row(f"scrape of {scrape.words_of(shape)}")["beside"].removesuffix(" series"))


#: (document, place) -> the table between `<!-- place -->` and `<!-- /place -->`.
TABLES: Final[dict[tuple[str, str], Callable[[Figures], str]]] = {
    ("docs/performance.md", "bench"): whole_table,
    ("docs/performance.md", "bench: scaling"): scaling_table,
    ("docs/performance.md", "bench: values"): values_table,
    ("docs/performance.md", "bench: usage"): usage_table,
    ("docs/performance.md", "hostile"): hostile_table,
    ("README.md", "bench"): short_table,
}


def with_table(text: str, table: str, place: str) -> str:
    parts = re.split(rf"(?<=<!-- {place} -->\n)(.*?)(?=<!-- /{place} -->)", text, flags=re.DOTALL)
    if len(parts) != 3:
        raise FigureError(f"a document has no place for the figures: <!-- {place} --> and <!-- /{place} -->")
    return f"{parts[0]}\n{table}\n\n{parts[2]}"


def taken_over(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What was measured anew in the place of what it replaces, the rest as it was."""
    rows = {_key(group[0]): group for group in _groups(old["results"])}
    rows |= {_key(group[0]): group for group in _groups(new["results"])}
    groups = sorted(rows.values(), key=lambda group: group[0]["name"].startswith(HOSTILE))  # those come last
    return {"machine": new["machine"], "results": [row for group in groups for row in group]}


def _groups(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Each row with those that are set in below it."""
    groups: list[list[dict[str, Any]]] = []
    for row in rows:
        if row["name"].startswith("  "):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _key(row: dict[str, Any]) -> str:
    """Its name; by how many processes there were more than meant doesn't count."""
    name = str(row["name"])
    name = re.sub(r"\d+(?= in the map| namespaces)", "N", name)
    return re.sub(r"\d+(?= processes$)", lambda found: f"{float(found[0]):.0e}", name)


def main() -> int:
    """Take the figures over, if a file is given, and make all tables anew."""
    try:
        measured = json.loads(DATA.read_text()) if DATA.exists() else {"machine": {}, "results": []}
        if sys.argv[1:]:
            measured = taken_over(measured, json.loads(Path(sys.argv[1]).read_text()))
        found = Figures(measured)
        texts = {name: (ROOT / name).read_text() for name, _ in TABLES}
        for (name, place), table in TABLES.items():
            texts[name] = with_table(texts[name], table(found), place)
        DATA.write_text(json.dumps(measured, indent=1) + "\n")
        for name, text in texts.items():
            (ROOT / name).write_text(text)
    except (OSError, ValueError, KeyError, FigureError) as error:
        print(f"make figures: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
