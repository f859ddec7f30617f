"""How commands print: plain and aligned into a pipe, with colour for a person at a terminal.

`make view` packs it for Python 3.8.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import unicodedata
from itertools import compress
from typing import TYPE_CHECKING, Any, List, Tuple, Union

from resolver.base.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Cell = Union[str, int, None]
#: Texts, each with the name of its style; `screen` knows how the styles look.
Line = List[Tuple[str, str]]
#: Shown for unknown and missing values.
NONE = "-"
_LABEL = 8  # cells of a label and the blanks after it
_SHORTEST = 12  # cells that a terminal leaves of a name
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


def cells(text: str) -> int:
    """Return how many cells of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        2
        if unicodedata.east_asian_width(character) in "WF"
        else unicodedata.category(character) not in ("Mn", "Me")
        for character in text
    )


def fit(text: str, width: int, *, middle: bool = False, ellipsis: str = "…") -> str:
    """Return the text in exactly ``width`` cells, with an ellipsis for a cut in the middle or at the end."""
    if (length := cells(text)) <= width:
        return text + " " * (width - length)
    if width <= 1:
        return ellipsis[:width]
    end = ""
    for character in reversed(text) if middle else ():
        if cells(character + end) > (width - 1) // 2:
            break
        end = character + end
    start, room = "", width - 1 - cells(end)
    for character in text:
        if cells(start + character) > room:
            break
        start += character
    return start + " " * (room - cells(start)) + ellipsis + end


def clip(line: Line, width: int, left: int = 0) -> Line:
    """Return ``width`` cells of the line from ``left`` on, without characters that a terminal obeys."""
    clipped: Line = []
    at = 0
    for words, style in line:
        shown = ""
        for character in printable(words):
            end = at + cells(character)
            if at >= left and end <= left + width:
                shown += character
            elif end > left > at:  # half of a wide one
                shown += " "
            at = end
        if shown:
            clipped.append((shown, style))
    return clipped


def on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def styled(text: str, style: str) -> str:
    """Style the text, if the terminal shows it and NO_COLOR is not set."""
    if not style or not on_terminal() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def cell(value: Cell) -> str:
    """Format a value for a table: never empty, so that columns can be counted."""
    return NONE if value is None or value == "" else printable(str(value))


def size(count: int | None) -> str:
    """Format bytes in the largest unit with a whole part; ``?`` is unknown."""
    if count is None:
        return "?"
    number, unit = float(count), 0
    while number >= 1024 and unit < 4:
        number, unit = number / 1024, unit + 1
    if not unit:
        return f"{count}B"
    return f"{number:.0f}{'BKMGT'[unit]}" if number >= 100 else f"{number:.1f}{'BKMGT'[unit]}"


def moment(at: float) -> str:
    """Format Unix time in UTC with milliseconds."""
    whole, thousandths = divmod(round(at * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{thousandths:03}Z"


def duration(seconds: float) -> str:
    """Format seconds in their two largest units: ``3d 4h``, ``12m 5s``, ``0.4s``."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f}s"
    left = int(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def since(at: float, now: float) -> str:
    """Format the time since a moment for a person; programs get the moment."""
    return duration(now - at) if on_terminal() else moment(at)


def short_id(container_id: str | None) -> str | None:
    """Shorten an id at a terminal; programs get it whole."""
    return container_id[:12] if container_id and on_terminal() else container_id


def wrapped(text: str, indent: int = 0) -> list[str]:
    """Wrap a text to the terminal's width less ``indent``; into a pipe it stays one line. Words are never broken."""
    room = max(24, shutil.get_terminal_size().columns - indent) if on_terminal() else sys.maxsize
    if len(text) <= room:
        return [text]
    import textwrap

    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)


def print_indented(head: str, indent: int, text: str) -> None:
    """Print a text after its head, wrapped below ``indent`` cells."""
    lines = [line for part in text.splitlines() for line in wrapped(printable(part), indent)]
    print(head + f"\n{'':{indent}}".join(lines))


def print_labelled(indent: int, **texts: str) -> None:
    """Print texts, each after its name and below ``indent`` cells; an empty one not at all."""
    for label, text in texts.items():
        if text:
            print_indented(" " * indent + styled(label.ljust(_LABEL), "dim"), indent + _LABEL, text)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    right: Iterable[str] = (),
    for_programs: Iterable[str] = (),
    shorten: str = "",
) -> None:
    """Print aligned columns. A terminal leaves out those ``for_programs``, and cuts ``shorten`` where it is narrow."""
    ends, person = frozenset(right), on_terminal()
    shown = [not person or column not in frozenset(for_programs) for column in columns]
    table = [list(compress(row, shown)) for row in (columns, *(map(cell, row) for row in rows))]
    widths = [max(map(len, cells)) for cells in zip(*table)]
    if shorten and person:
        at = table[0].index(shorten)
        others = sum(widths) - widths[at] + 2 * (len(widths) - 1)
        widths[at] = min(widths[at], max(shutil.get_terminal_size().columns - others, _SHORTEST))
        for row in table:
            row[at] = fit(row[at], widths[at], middle=True, ellipsis="~").rstrip()
    for number, row in enumerate(table):
        cells = [
            text.rjust(width) if column in ends else text.ljust(width)
            for text, column, width in zip(row, table[0], widths)
        ]
        print(styled("  ".join(cells).rstrip(), "" if number else "bold"))


def print_pairs(pairs: Sequence[tuple[str, Cell] | tuple[str, Cell, str]]) -> None:
    """Print a name and its value on each line, with an optional style."""
    width = max(len(pair[0]) for pair in pairs)
    for name, value, *style in pairs:
        print(f"{styled(name.ljust(width), 'dim')}  {styled(cell(value), *style or [''])}")


def as_json(value: Any) -> Any:
    """Return a record as JSON has it: named tuples and structs become objects, all the way down."""
    fields = value._asdict() if hasattr(value, "_asdict") else value
    if names := getattr(value, "__struct_fields__", ()):
        fields = {name: getattr(value, name) for name in names}
    if isinstance(fields, dict):
        return {name: as_json(value) for name, value in fields.items()}
    return [as_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def print_json(value: object) -> None:
    import json

    print(json.dumps(as_json(value), indent=2))
