"""How commands print: plain and aligned into a pipe, with colour for a person at a terminal.

Plain text and escape sequences only: a library that draws takes longer to load than a short command to run.
"""

from __future__ import annotations

import os
import sys
from itertools import compress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Cell = str | int | None

#: For what is not known, or not there.
NONE = "-"
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


def on_terminal() -> bool:
    """Whether a person reads this."""
    return sys.stdout is not None and sys.stdout.isatty()


def styled(text: str, style: str) -> str:
    """The text in a style, if there is a terminal that shows it and nobody minds (NO_COLOR)."""
    if not style or not on_terminal() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def printable(text: str) -> str:
    """Tenants choose names of files and processes, so no control character of one may reach a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def cell(value: Cell) -> str:
    """A value as it stands in a table: always something, so that columns can be counted."""
    return NONE if value is None or value == "" else printable(str(value))


def size(count: int) -> str:
    """Bytes in the largest unit that leaves a whole part."""
    number, unit = float(count), 0
    while number >= 1024 and unit < 4:
        number, unit = number / 1024, unit + 1
    if not unit:
        return f"{count}B"
    return f"{number:.0f}{'BKMGT'[unit]}" if number >= 100 else f"{number:.1f}{'BKMGT'[unit]}"


def short_id(container_id: str | None) -> str | None:
    """An id as people know it, at a terminal only: programs get it whole."""
    return container_id[:12] if container_id and on_terminal() else container_id


def shorten(text: str, width: int) -> str:
    """A name in at most so many cells: names differ at their ends, so the middle is left out."""
    if len(text) <= width:
        return text
    tail = max(width - 1, 0) * 2 // 3
    return f"{text[: max(width - 1 - tail, 0)]}~{text[len(text) - tail :]}"


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    right: Iterable[str] = (),
    without: Iterable[str] = (),
) -> None:
    """Columns two or more blanks apart; those in ``right`` end at one place, those in ``without`` are left out."""
    ends, shown = frozenset(right), [column not in frozenset(without) for column in columns]
    table = [list(compress(row, shown)) for row in (columns, *(map(cell, row) for row in rows))]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    for number, row in enumerate(table):
        cells = [
            text.rjust(width) if column in ends else text.ljust(width)
            for text, column, width in zip(row, table[0], widths, strict=True)
        ]
        print(styled("  ".join(cells).rstrip(), "" if number else "bold"))


def print_pairs(pairs: Sequence[tuple[str, Cell] | tuple[str, Cell, str]]) -> None:
    """A name and its value on each line, and perhaps the value's style."""
    width = max(len(pair[0]) for pair in pairs)
    for name, value, *style in pairs:
        print(f"{styled(name.ljust(width), 'dim')}  {styled(cell(value), *style or [''])}")


def print_json(value: Any) -> None:
    """One JSON value, for programs."""
    import json

    print(json.dumps(value, indent=2))
