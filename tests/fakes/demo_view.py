"""How the demo looks: tables and bars in colour on a terminal, the same in plain text when piped."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Final

from tests.fakes.measure import Row

HEAD: Final = (
    "container", "placement", "layout", "pid", "what had happened", "hostpid", "repair", "sm_util", "true", "ms", "",
)  # fmt: skip
RIGHT: Final = {3, 8, 9}
PLACEMENT: Final = 1
STORY: Final = 4
ROOM: Final = {2: 127, 3: 100, STORY: 113, 8: 90}  # from which width of a terminal on a column is shown
BAR: Final = 10
#: Who put HAMi-core into a container, by where its file is.
WHO: Final = {
    "hami": "HAMi",
    "volcano": "Volcano",
    "koordinator": "Koordinator",
    "kai": "KAI",
    "dra": "DRA claim",
    "bare": "bare /tmp",
}


def percent(value: int | None) -> str:
    """A dash where the layout has no such field."""
    return "-" if value is None else str(value)


def _cells(row: Row) -> list[str]:
    case = row.case
    zeroed = case.ended or case.idles
    moment = row.true_ms if zeroed else row.repaired_ms
    return [
        case.container.name,
        WHO[case.container.placed],
        case.container.layout,
        str(case.tenant.ns_pid),
        case.story,
        f"{row.hostpid_before} -> {row.hostpid_after}",
        row.reason or ("zeroed" if zeroed else "-"),
        f"{percent(row.sm_before)} -> {percent(row.sm_after)}",
        percent(case.load),
        "-" if moment is None or not (row.reason or zeroed) else f"{moment:.0f}",
        "ok" if row.ok else "WRONG",
    ]


def shown(rows: Sequence[Row], width: int) -> list[int]:
    """The columns that there is room for; who placed the containers only where that differs."""
    alike = len({row.case.container.placed for row in rows}) == 1
    return [i for i in range(len(HEAD)) if width >= ROOM.get(i, 0) and not (alike and i == PLACEMENT)]


def bars(rows: Sequence[Row]) -> list[tuple[str, int, int, int]]:
    """Per container: its names, and what HAMi's monitor reported before, reports after, and should (percent)."""
    sums: dict[str, tuple[int, int, int]] = {}
    for row in rows:
        if row.case.load is None:
            continue
        name = f"{row.case.container.name:<8} {WHO[row.case.container.placed]:<11}"
        old = sums.get(name, (0, 0, 0))
        new = (row.sm_before or 0, row.sm_after or 0, row.case.load)
        sums[name] = (old[0] + new[0], old[1] + new[1], old[2] + new[2])
    return [(name, *values) for name, values in sums.items()]


class Plain:
    """Aligned text for a pipe or a file."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def heading(self, text: str) -> None:
        self.say(f"\n{text}\n")

    def progress(self, text: str) -> None:
        self.say(f"  ... {text}")

    def table(self, rows: Sequence[Row]) -> None:
        # To a file everything; NO_COLOR on a terminal what it has room for.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
        columns = shown(rows, width)
        cells = [list(HEAD), *(_cells(row) for row in rows)]
        widths = {i: max(len(line[i]) for line in cells) for i in columns}
        for line in cells:
            parts = [line[i].rjust(widths[i]) if i in RIGHT else line[i].ljust(widths[i]) for i in columns]
            self.say("  " + "  ".join(parts).rstrip())
        self._complaints(rows)

    def picture(self, rows: Sequence[Row]) -> None:
        for name, old, new, true in bars(rows):
            before, after = ("#" * round(value * BAR / 100) for value in (old, new))
            self.say(
                f"  {name} [{before:.<{BAR}}] {old:>3} %  ->  [{after:.<{BAR}}] {new:>3} %  (true {true})"
            )

    def result(self, text: str, *, ok: bool) -> None:
        print(text, file=sys.stdout if ok else sys.stderr, flush=True)

    def _complaints(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for text in row.wrong:
                self.say(f"  WRONG: {row.case.container.name}, pid {row.case.tenant.ns_pid}: {text}")


class Coloured(Plain):
    """The same for a terminal, by rich."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def heading(self, text: str) -> None:
        self._console.print(f"\n[bold]{text}[/]\n")

    def progress(self, text: str) -> None:
        self._console.print(f"  [dim]{text}[/]")

    def table(self, rows: Sequence[Row]) -> None:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        columns = shown(rows, self._console.width)
        for i in columns:
            justify: Any = "right" if i in RIGHT else "left"
            table.add_column(HEAD[i], justify=justify, no_wrap=i != STORY)
        for row in rows:
            cells = _cells(row)
            cells[0] = f"[cyan]{cells[0]}[/]"
            cells[2] = f"[dim]{cells[2]}[/]"
            for i in (5, 7):
                old, new = cells[i].split(" -> ")
                shade = "[dim]" if old == new else "[red]"
                cells[i] = f"{shade}{old}[/] -> [green]{new}[/]"
            cells[6] = f"[yellow]{cells[6]}[/]"
            cells[10] = "[bold green]ok[/]" if row.ok else "[bold red]WRONG[/]"
            table.add_row(*(cells[i] for i in columns))
        self._console.print(table)
        self._complaints(rows)

    def picture(self, rows: Sequence[Row]) -> None:
        for name, old, new, true in bars(rows):
            before, after = (
                f"[{colour}]{'█' * round(value * BAR / 100)}[/][dim]{'░' * (BAR - round(value * BAR / 100))}[/]"
                for value, colour in ((old, "red"), (new, "green"))
            )
            self._console.print(
                f"  [cyan]{name}[/] {before} {old:>3} %  ->  {after} {new:>3} %  [dim]true {true}[/]"
            )

    def result(self, text: str, *, ok: bool) -> None:
        self._console.print(text, style="bold green" if ok else "bold red", markup=False)


def make_view() -> Plain:
    """Colour on a terminal, unless NO_COLOR is set; plain text otherwise."""
    return Coloured() if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else Plain()
