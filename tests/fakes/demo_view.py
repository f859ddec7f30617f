"""How the demo looks: tables and bars, in colour on a terminal."""

import shutil
import sys
from collections.abc import Sequence
from typing import Final

from resolver.cli.show import styled
from tests.fakes.measure import Row

HEAD: Final = (
    "container", "placement", "layout", "pid", "what had happened", "hostpid", "repair", "sm_util", "true", "ms", "",
)  # fmt: skip
RIGHT: Final = {3, 8, 9}
PLACEMENT: Final = 1
STORY: Final = 4
ROOM: Final = {2: 127, 3: 100, STORY: 113, 8: 90}  # smallest terminal width that shows the column
BAR: Final = 10
#: Scheduler of a container, by the directory of its file.
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


def spread(low: int, high: int) -> str:
    """The values that are right."""
    return str(low) if low == high else f"{low}-{high}"


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
        percent(case.load) if case.load is None else spread(*row.truth),
        "-" if moment is None or not (row.reason or zeroed) else f"{moment:.0f}",
        "ok" if row.ok else "WRONG",
    ]


def shown(rows: Sequence[Row], width: int) -> list[int]:
    """The columns that there is room for; who placed the containers only where that differs."""
    alike = len({row.case.container.placed for row in rows}) == 1
    return [i for i in range(len(HEAD)) if width >= ROOM.get(i, 0) and not (alike and i == PLACEMENT)]


def bars(rows: Sequence[Row]) -> list[tuple[str, int, int, str]]:
    """Per container: its names, and what HAMi's monitor reported before, reports after, and should (percent)."""
    sums: dict[str, tuple[int, ...]] = {}
    for row in rows:
        if row.case.load is None:
            continue
        name = f"{row.case.container.name:<8} {WHO[row.case.container.placed]:<11}"
        new = (row.sm_before or 0, row.sm_after or 0, *row.truth)
        sums[name] = tuple(map(sum, zip(sums.get(name, (0, 0, 0, 0)), new, strict=True)))
    return [(name, old, new, spread(*truth)) for name, (old, new, *truth) in sums.items()]


class View:
    """Aligned text, with colour on a terminal unless NO_COLOR is set."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def heading(self, text: str) -> None:
        self.say(styled(f"\n{text}\n", "bold"))

    def progress(self, text: str) -> None:
        self.say(styled(f"  ... {text}", "dim"))

    def table(self, rows: Sequence[Row]) -> None:
        # A file gets all columns, a terminal those that fit.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
        columns = shown(rows, width)
        cells = [list(HEAD), *(_cells(row) for row in rows)]
        widths = {i: max(len(line[i]) for line in cells) for i in columns}
        for number, line in enumerate(cells):
            parts = (
                styled(
                    line[i].rjust(widths[i]) if i in RIGHT else line[i].ljust(widths[i]), _style(i, line[i])
                )
                for i in columns
            )
            text = "  ".join(parts).rstrip()
            self.say("  " + (text if number else styled(text, "bold")))
        for row in rows:
            for text in row.wrong:
                self.say(f"  WRONG: {row.case.container.name}, pid {row.case.tenant.ns_pid}: {text}")

    def picture(self, rows: Sequence[Row]) -> None:
        for name, old, new, true in bars(rows):
            before, after = ("#" * round(value * BAR / 100) for value in (old, new))
            self.say(
                f"  {name} [{styled(f'{before:.<{BAR}}', 'red')}] {old:>3} %  ->  "
                f"[{styled(f'{after:.<{BAR}}', 'green')}] {new:>3} %  (true {true})"
            )

    def result(self, text: str, *, ok: bool) -> None:
        print(styled(text, "green" if ok else "red"), file=sys.stdout if ok else sys.stderr, flush=True)


def _style(column: int, text: str) -> str:
    """The colour of a cell, by what is in it."""
    if column in (5, 7) and " -> " in text:
        before, _, after = text.partition(" -> ")
        return "dim" if before == after else "green"
    return {"ok": "green", "WRONG": "red"}.get(text, {2: "dim", 6: "yellow"}.get(column, ""))
