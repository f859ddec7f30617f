"""One frame: rows and what stands around them, laid out for a terminal's width and height.

A line is a list of pairs of a text and the name of a style; `screen` knows what the styles look like.
"""

from __future__ import annotations

import textwrap
import time
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len, set_cell_size

from resolver.cli._top.cells import ASCII, Glyphs, Line, clip, fit, printable

if TYPE_CHECKING:
    from resolver.cli._top.reading import Reading
    from resolver.cli._top.rows import Row
    from resolver.cli._top.tree import Amount, Tree

_STALE_SECONDS = 10.0
_MOST_TITLE = 64
_PERCENT, _MEMORY, _HOST_PID, _NS_PID = 5, 11, 8, 7
_TITLES = ("GPU / CONTAINER / PROCESS", "GPU / CONTAINER", "NAME")
_MARKS = {"good": "", "warn": "!", "bad": "!"}

_KEYS = (
    ("up down j k", "move"),
    ("PgUp PgDn Home End", "move far"),
    ("space enter", "fold, unfold; f folds all containers"),
    ("u m n", "sort by utilization, memory, name"),
    ("c", "command lines: whose a process is, its CPU and memory"),
    ("/", "filter: names, ids and PIDs that contain the text"),
    ("Esc", "no filter"),
    ("h ?", "this page"),
    ("q Ctrl-C", "quit; Ctrl-Z: later"),
)
_SIGNS = (
    ("HOST PID", "the process on this node; PID: inside its container"),
    ("?", "not known, never a 0; the bottom line says why"),
    ("{at_least}52%", "part of it is not known"),
    ("{levels}", "a container's utilization so far, the newest last"),
    ("2G/4G", "memory in use, and HAMi's limit; yellow: over or close"),
    ("{repaired}", "its slot was repaired, and what was wrong with it"),
    ("no_slot", "HAMi's slots do not have it"),
    ("no_shared_region", "a container without HAMi"),
)


class Widths(NamedTuple):
    """Of the columns, 0 for one that is not shown. ``mark`` stands for a note that has no room."""

    title: int
    host_pid: int
    ns_pid: int
    bar: int
    percent: int
    memory: int
    note: int
    mark: int


class Shown(NamedTuple):
    """What is to be drawn beside the rows. ``cursor`` and ``top`` are numbers of rows; None: no cursor."""

    cursor: int | None = None
    top: int = 0
    sort: str = "utilization"
    needle: str = ""
    editing: bool = False
    help_page: int = 0  # 0: no help
    facts: str = ""  # of the process that the cursor is on


def widths(width: int) -> Widths:
    """What fits side by side."""
    if width >= 80:
        bar = min(max((width - 70) // 3, 8), 30)
        note = 14 if width < 100 else min(max(width // 6, 18), 40)
        left = width - _HOST_PID - _NS_PID - bar - _PERCENT - _MEMORY - note - 6
        title = min(left, _MOST_TITLE)
        return Widths(
            title=title,
            host_pid=_HOST_PID,
            ns_pid=_NS_PID,
            bar=bar,
            percent=_PERCENT,
            memory=_MEMORY,
            note=note + left - title,
            mark=0,
        )
    if width >= 56:
        left = width - _HOST_PID - 6 - _PERCENT - _MEMORY - 1 - 5
        return Widths(
            title=left, host_pid=_HOST_PID, ns_pid=0, bar=6, percent=_PERCENT, memory=_MEMORY, note=0, mark=1
        )
    if width >= 36:
        return Widths(
            title=width - _PERCENT - _MEMORY - 1 - 3,
            host_pid=0,
            ns_pid=0,
            bar=0,
            percent=_PERCENT,
            memory=_MEMORY,
            note=0,
            mark=1,
        )
    return Widths(
        title=max(width - _PERCENT - 1, 1),
        host_pid=0,
        ns_pid=0,
        bar=0,
        percent=_PERCENT,
        memory=0,
        note=0,
        mark=0,
    )


def body_height(reading: Reading, height: int, now: float) -> int:
    """How many rows there is room for."""
    return max(height - len(_above(reading, 80, height, now, "", Shown())) - _below_height(height), 1)


def frame(
    reading: Reading,
    rows: list[Row],
    shown: Shown,
    size: tuple[int, int],
    glyphs: Glyphs,
    node: str,
    now: float,
) -> list[Line]:
    """The lines of a whole screen of ``size`` (width, height)."""
    width, height = size
    above = _above(reading, width, height, now, node, shown)
    room = max(height - len(above) - _below_height(height), 1)
    pages = help_pages(width, room, glyphs) if shown.help_page else []
    body = (
        pages[min(shown.help_page, len(pages)) - 1]
        if pages
        else _body(reading.tree, rows, shown, room, width, glyphs)
    )
    body = body[:room] + [[]] * (room - len(body))
    return [
        clip(line, width, glyphs)
        for line in (above + body + _below(rows, shown, room, size, glyphs, len(pages)))[:height]
    ]


def page(reading: Reading, rows: list[Row], width: int, glyphs: Glyphs, node: str, now: float) -> list[Line]:
    """All rows, however many, and no keys: what ``--once`` prints."""
    above = _above(reading, width, 1000, now, node, Shown())
    body = _body(reading.tree, rows, Shown(), len(rows), width, glyphs)
    return [clip(line, width, glyphs) for line in above + body]


# ---- above the rows -----------------------------------------------------------------------------------------------


def _above(reading: Reading, width: int, height: int, now: float, node: str, shown: Shown) -> list[Line]:
    tree, status = reading.tree, reading.tree.status
    when = time.strftime("%H:%M:%S", time.localtime(reading.read_at))
    driver = f"driver {status.driver_version or '?'}"
    right = f"{driver}  source {status.source}  {when}"
    lines: list[Line] = [_spread([("resolver top", "name"), (f"  {node}", "")], [(right, "dim")], width)]
    lines += [[(problem, tone)] for problem, tone in problems(reading, now)][: max(height - 4, 1)]
    if height >= 12:
        lines.insert(1, _spread(_counts(tree), [(f"by {shown.sort}", "dim")], width))
    if height >= 6:
        lines.append(_columns(widths(width), width))
    return lines


def problems(reading: Reading, now: float) -> list[tuple[str, str]]:
    """What a person has to know before any number, each with its tone."""
    status = reading.tree.status
    found = []
    if reading.error:
        since = time.strftime("%H:%M:%S", time.localtime(reading.since))
        found.append((f"no daemon since {since}, retrying; what is shown is from before", "bad"))
        found.append((reading.error, "bad"))
    elif now - status.at > _STALE_SECONDS:
        found.append(
            (f"the daemon has made no pass for {now - status.at:.0f} s: what is shown is old", "bad")
        )
    if status.driver_error:
        found.append((f"NVML: {status.driver_error}", "bad"))
    if status.not_ready:
        found.append((f"source {status.source}: {status.not_ready}", "warn"))
    if status.dry_run:
        found.append(("--dry-run: nothing is repaired", "warn"))
    return [(printable(text), tone) for text, tone in found]


def _counts(tree: Tree) -> Line:
    containers = {
        each.container_id or each.pod_uid + each.container_name
        for gpu in tree.gpus
        for each in gpu.containers
    } - {""}
    processes = {
        process.host_pid for gpu in tree.gpus for each in gpu.containers for process in each.processes
    }
    repaired = tree.status.repaired
    line = [
        (f"{len(tree.gpus)} GPU{'' if len(tree.gpus) == 1 else 's'}  ", ""),
        (f"{len(containers)} container{'' if len(containers) == 1 else 's'}  ", ""),
        (f"{len(processes)} process{'' if len(processes) == 1 else 'es'}  ", ""),
        (f"{repaired} repaired  ", "good" if repaired else "dim"),
    ]
    lost = len(tree.unresolved)
    return [*line, (f"{lost} unresolved", "warn" if lost else "dim")]


def _columns(column: Widths, width: int) -> Line:
    text = " ".join(
        filter(
            None,
            (
                next((each for each in _TITLES if len(each) <= column.title), "").ljust(column.title),
                "HOST PID".rjust(column.host_pid) if column.host_pid else "",
                "PID".rjust(column.ns_pid) if column.ns_pid else "",
                ("UTILIZATION" if column.bar + column.percent > 11 else "UTIL").ljust(
                    column.bar + 1 + column.percent
                )
                if column.bar
                else "UTIL".rjust(column.percent),
                "MEMORY".rjust(column.memory) if column.memory else "",
                "NOTE" if column.note else "",
            ),
        )
    )
    return [(set_cell_size(text, width), "head")]


# ---- the rows -----------------------------------------------------------------------------------------------------


def _body(tree: Tree, rows: list[Row], shown: Shown, room: int, width: int, glyphs: Glyphs) -> list[Line]:
    if not rows:
        return [[(f"  {_nothing(tree, shown.needle)}", "dim")]]
    column = widths(width)
    lines = []
    for number, row in enumerate(rows[shown.top : shown.top + room], shown.top):
        line = row_line(row, column, glyphs)
        if number == shown.cursor:
            text = "".join(text for text, _ in line)
            line = [(set_cell_size(text, width), "selected")]
        lines.append(line)
    return lines


def _nothing(tree: Tree, needle: str) -> str:
    if needle:
        return f"nothing contains {needle!r}: Esc shows all"
    why = tree.status.driver_error
    return f"no GPU: {printable(why)}" if why else "no GPU on this node"


def row_line(row: Row, column: Widths, glyphs: Glyphs) -> Line:
    """A row in its columns. One without PIDs has their room for its title."""
    fold = "  " if row.folded is None else f"{glyphs.closed if row.folded else glyphs.open} "
    indent = "  " * row.depth + fold
    room = column.title
    numbers = ""
    if row.host_pid or row.ns_pid:
        for text, size in ((row.host_pid, column.host_pid), (row.ns_pid, column.ns_pid)):
            numbers += " " + text.rjust(size)[-size:] if size else ""
    else:
        room += sum(size + 1 for size in (column.host_pid, column.ns_pid) if size)
    middle = row.kind in ("container", "slot", "file")
    title = fit(row.title, max(room - len(indent), 1), glyphs, middle=middle)
    dim = row.tone == "dim"
    style = {0: "gpu", 1: "container"}.get(row.depth, "")
    line: Line = [(indent, "dim"), (title, "dim" if dim else style), (numbers, "dim" if dim else "number")]
    line += _utilization(row, column, glyphs)
    if column.memory:
        line.append((" " + row.memory.rjust(column.memory)[: column.memory], "dim" if dim else ""))
    if column.note:
        line += [(" ", ""), (fit(row.note, column.note, glyphs).rstrip(), row.tone)]
    elif column.mark:
        mark = glyphs.repaired if row.tone == "good" else _MARKS.get(row.tone, "")
        line += [(" ", ""), (mark, row.tone)]
    return line


def _utilization(row: Row, column: Widths, glyphs: Glyphs) -> Line:
    line: Line = []
    amount = row.amount
    if column.bar:
        line.append((" ", ""))
        line += (
            [(_history(row.history, column.bar, glyphs), "bar")]
            if len(row.history) > 1
            else _bar(amount, column.bar, glyphs)
        )
    return [*line, (" " + percent(amount, glyphs).rjust(column.percent), _busy(amount))]


def _bar(amount: Amount | None, width: int, glyphs: Glyphs) -> Line:
    if amount is None or amount.value is None:
        return [(" " * width, "")]
    steps = 2 if glyphs.half else 1
    filled = min(round(amount.value * width * steps / 100), width * steps)
    filled = max(filled, 1 if amount.value else 0)
    full = glyphs.full * (filled // steps) + (glyphs.half if filled % steps else "")
    return [(full, "bar"), (glyphs.rest * (width - len(full)), "rest")]


def _history(values: tuple[int | None, ...], width: int, glyphs: Glyphs) -> str:
    """A sign for each reading, the newest at the right; what was not known is a gap."""
    steps = len(glyphs.levels) - 1
    signs = [
        " " if value is None else glyphs.levels[min(-(-value * steps // 100), steps)] for value in values
    ]
    return "".join(signs[-width:]).rjust(width)


def percent(amount: Amount | None, glyphs: Glyphs) -> str:
    """A utilization in at most five letters; empty where it is unknown."""
    if amount is None:
        return ""
    if amount.value is None:
        return "?"
    return f"{glyphs.at_least if amount.at_least else ''}{amount.value}%"


def _busy(amount: Amount | None) -> str:
    if amount is None or amount.value is None:
        return "warn"
    return "busy" if amount.value else "dim"


# ---- below the rows -----------------------------------------------------------------------------------------------


def _below_height(height: int) -> int:
    return 2 if height >= 12 else 1 if height >= 8 else 0


def _below(
    rows: list[Row], shown: Shown, room: int, size: tuple[int, int], glyphs: Glyphs, pages: int
) -> list[Line]:
    """``pages``: of the help, if it is shown."""
    width, height = size
    lines: list[Line] = []
    if _below_height(height) == 2:
        chosen = rows[shown.cursor] if shown.cursor is not None and shown.cursor < len(rows) else None
        detail = f" {glyphs.dot} ".join(filter(None, (chosen.detail, shown.facts))) if chosen else ""
        lines.append([("" if pages else detail, "detail")])
    if _below_height(height):
        if shown.editing:
            keys: Line = [(f"filter: {shown.needle}", "name"), ("_", "name")]
            keys.append(("   Enter keep  Esc clear", "dim"))
        elif pages:
            at_end = shown.help_page >= pages
            keys = [
                ("any key", "key"),
                (" back  " if at_end else f" page {shown.help_page + 1} of {pages}  ", "dim"),
            ]
            keys += [("q", "key"), (" quit", "dim")]
        elif shown.needle:
            keys = [(f"filter: {shown.needle}", "warn"), ("   Esc shows all  ", "dim"), *_keys(glyphs)]
        else:
            keys = _keys(glyphs)
        last = min(shown.top + room, len(rows))
        where = f"{shown.top + 1}-{last} of {len(rows)}" if len(rows) > room and not pages else ""
        lines.append(_spread(keys, [(where, "dim")], width))
    return lines


def _keys(glyphs: Glyphs) -> Line:
    arrows = "jk" if glyphs is ASCII else "↑↓"
    pairs = (
        ("q", "quit"),
        (arrows, "move"),
        ("space", "fold"),
        ("u m n", "sort"),
        ("/", "filter"),
        ("h", "help"),
    )
    line: Line = []
    for key, does in pairs:
        line += [(key, "key"), (f" {does}  ", "dim")]
    return line


def help_pages(width: int, room: int, glyphs: Glyphs) -> list[list[Line]]:
    """The help in pages of at most ``room`` lines; nothing of it is cut."""
    indent = 20 if width >= 60 else 4
    levels = glyphs.levels[::2]
    lines: list[Line] = []
    for name, text in (*_KEYS, *_SIGNS):
        word = name.format(at_least=glyphs.at_least, repaired=glyphs.repaired, levels=levels)
        first = f"{word:<{indent - 2}}" if indent > 4 else f"{word}:"
        folded = textwrap.wrap(
            f"{first} {text}", max(width - 2, 8), subsequent_indent=" " * (indent - 1), break_on_hyphens=False
        )
        lines += [[("  "[: width - 1] + each, "")] for each in folded]
    return [lines[at : at + room] for at in range(0, len(lines), room)]


def _spread(left: Line, right: Line, width: int) -> Line:
    """Left and right of a line; the right goes where there is no room for both."""
    used = sum(cell_len(text) for text, _ in [*left, *right])
    if used + 2 > width:
        return left
    return [*left, (" " * (width - used), ""), *right]
