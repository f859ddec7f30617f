"""Content of the screen: rows in columns, the lines above and below them, and the action of each key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from resolver.base.text import printable, several
from resolver.cli._top.costs import Costs
from resolver.cli._top.rows import Choice, Row, rows_of
from resolver.cli.cells import ASCII, Glyphs, Line, cells, clip, fit
from resolver.cli.show import size

if TYPE_CHECKING:
    from resolver.cli._top.reading import Reading
    from resolver.cli._top.tree import Amount, Tree

_MOST_TYPED = 100
_MOST_TITLE = 64
_SORTS = {"u": "utilization", "m": "memory", "n": "name"}
_MARKS = {"warn": "!", "bad": "!"}

KEYS = (
    ("up down j k", "move"),
    ("PgUp PgDn Home End", "move far"),
    ("space enter", "fold, unfold; f folds all containers"),
    ("u m n", "sort by utilization, memory, name"),
    ("c", "command lines: a process's user, CPU and memory"),
    ("/", "filter: names, ids and PIDs that contain the text"),
    ("Esc", "no filter"),
    ("h ?", "this page"),
    ("q Ctrl-C", "quit; Ctrl-Z: later"),
    ("HOST PID", "the process on this node; PID: inside its container"),
    ("?", "not known, never a 0; the bottom line says why"),
    ("52%", "NVML's value; resolver explain has the sums of HAMi's monitors, by rule"),
    ("{0.at_least}52%", "part of it is not known"),
    ("2G/4G", "memory in use, and HAMi's limit; yellow: over or close"),
    ("{0.repaired}", "its slot was repaired, with the reason"),
    ("no_slot", "HAMi's slots do not have it"),
    ("no_shared_region", "a container without HAMi"),
)


class Widths(NamedTuple):
    """Widths of the columns, 0 for a hidden one. ``note`` of 1 has room for a mark only."""

    title: int
    host_pid: int
    ns_pid: int
    bar: int
    percent: int
    memory: int
    note: int


def columns_for(width: int) -> Widths:
    """Return the columns that fit side by side."""
    if width >= 80:
        note = 14 if width < 100 else min(max(width // 6, 18), 40)
        others = (8, 7, min(max((width - 70) // 3, 8), 30), 5, 11, note)
    else:
        others = (8, 0, 6, 5, 11, 1) if width >= 56 else (0, 0, 0, 5, 0, 0)
    room = max(width - sum(others) - sum(map(bool, others)), 1)
    title = min(room, _MOST_TITLE)
    return Widths(title, *others[:-1], note=others[-1] + room - title)


class LiveView:
    """The screen's content: its rows, the cursor, the order and the filter."""

    def __init__(self, glyphs: Glyphs, node: str) -> None:
        self.choice = Choice()
        self.rows: list[Row] = []
        self.cursor = 0
        self._glyphs, self._node = glyphs, node
        self._seen: tuple[Tree | None, Choice] = (None, self.choice)
        self._top, self._room = 0, 1
        self._costs = Costs()
        self._editing = self._commands = False
        self._help: int | None = None  # the first line of the help, while it is shown
        self._help_end = 0

    # ---- keys ----------------------------------------------------------------------------------------------------

    def press(self, key: str) -> bool:
        """Do the key's action; False to quit."""
        if self._help is not None:
            after = self._help + self._room
            self._help = None if key == "escape" or after >= self._help_end else after
            return key != "q"
        if self._editing:
            self._edit(key)
            return True
        far = {
            "up": -1,
            "k": -1,
            "down": 1,
            "j": 1,
            "page up": -self._room,
            "page down": self._room,
            **dict.fromkeys(("home", "g"), -len(self.rows)),
            **dict.fromkeys(("end", "G"), len(self.rows)),
        }
        if key in far:
            self.cursor = max(min(self.cursor + far[key], len(self.rows) - 1), 0)
        elif key in _SORTS:
            self.choice = self.choice._replace(sort=_SORTS[key])
        elif key == "escape":
            self.choice = self.choice._replace(needle="")
        elif key in (" ", "enter", "f"):
            self._fold(every=key == "f")
        self._editing = key == "/"
        self._commands ^= key == "c"
        self._help = 0 if key in ("h", "?") else None
        return key != "q"

    def _edit(self, key: str) -> None:
        needle = self.choice.needle
        self._editing = key not in ("enter", "escape")
        if key in ("escape", "clear"):
            needle = ""
        elif key == "backspace":
            needle = needle[:-1]
        elif len(key) == 1 and len(needle) < _MOST_TYPED:
            needle += key
        self.choice = self.choice._replace(needle=needle)

    def _fold(self, *, every: bool) -> None:
        """Fold or unfold the row below the cursor, or all containers; these unfold if all are folded."""
        folded = self.choice.folded
        if every:
            there = {row.key for row in self.rows if row.kind == "container" and row.folded is not None}
            folded = folded - there if there <= folded else folded | there
        elif self.rows and self.rows[self.cursor].folded is not None:
            folded ^= {self.rows[self.cursor].key}
        self.choice = self.choice._replace(folded=folded)

    # ---- the screen ----------------------------------------------------------------------------------------------

    def lines(self, reading: Reading, width: int, height: int) -> list[Line]:
        """Return the lines of a screen of this size."""
        above = self._above(reading, width, height)
        below = 2 if height >= 12 else 1 if height >= 8 else 0
        self._room = room = max(height - len(above) - below, 1)
        self._list(reading)
        # The cursor is visible, and the list fills the screen.
        self._top = max(min(self._top, self.cursor, len(self.rows) - room), self.cursor - room + 1, 0)
        body = self._rows(reading, width) if self._help is None else self._help_lines(width)
        body = [*body[:room], *[[]] * (room - len(body))]
        ends: list[Line] = [[(self._detail(reading), "dim")], self._bottom(width)]
        return [
            clip(line, width, self._glyphs) for line in (*above, *body, *(ends[-below:] if below else ()))
        ][:height]

    def _above(self, reading: Reading, width: int, height: int) -> list[Line]:
        tree, status = reading.tree, reading.tree.status
        when = time.strftime("%H:%M:%S", time.localtime(reading.read_at))
        right = f"driver {status.driver_version or '?'}  source {status.source}  {when}"
        lines = [_spread([("resolver top", "bold"), (f"  {self._node}", "")], right, width)]
        if height >= 12:
            lines.append(_spread(_counts(tree), f"by {self.choice.sort}", width))
        lines += [[problem] for problem in problems(reading)][: max(height - 4, 1)]
        if height >= 6:
            lines.append([(fit(_heads(columns_for(width)), width, self._glyphs), "head")])
        return lines

    def _list(self, reading: Reading) -> None:
        """Make the rows again if anything changed; the cursor stays on its row wherever that goes."""
        tree, choice = self._seen
        if tree is reading.tree and choice == self.choice:
            return
        self._seen = (reading.tree, self.choice)
        at = self.rows[self.cursor].key if self.cursor else ""
        self.rows = rows_of(reading.tree, self.choice, self._glyphs)
        same = (number for number, row in enumerate(self.rows) if row.key == at)
        self.cursor = max(min(next(same, self.cursor), len(self.rows) - 1), 0)

    def _rows(self, reading: Reading, width: int) -> list[Line]:
        if not self.rows:
            return [[(f"  {_nothing(reading.tree, self.choice.needle)}", "dim")]]
        columns, lines = columns_for(width), []
        for number, row in enumerate(self.rows[self._top : self._top + self._room], self._top):
            shown = self._with_command(row, reading) if self._commands else row
            line = row_line(shown, columns, self._glyphs)
            if number == self.cursor:
                line = [(fit("".join(text for text, _ in line), width, self._glyphs), "selected")]
            lines.append(line)
        return lines

    def _with_command(self, row: Row, reading: Reading) -> Row:
        """Show a process's user, command line, CPU and memory in the place of its name and notes."""
        cost = self._costs.of(row, reading.read_at)
        if cost is None:
            return row
        facts, cpu = cost
        words = printable(" ".join(filter(None, (facts.user, facts.command)))) or row.title
        memory = "" if facts.memory is None else size(facts.memory)
        return row._replace(title=words, note=" ".join(filter(None, (cpu, memory))), tone="dim")

    def _detail(self, reading: Reading) -> str:
        """Return everything about the row below the cursor, with its process's user and command line."""
        if not self.rows or self._help is not None:
            return ""
        row = self.rows[self.cursor]
        facts, cpu = self._costs.of(row, reading.read_at) or (None, "")
        return f" {self._glyphs.dot} ".join(filter(None, (row.detail, facts and facts.in_a_line(), cpu)))

    def _bottom(self, width: int) -> Line:
        if self._editing:
            return [(f"filter: {self.choice.needle}_", "bold"), ("   Enter keep  Esc clear", "dim")]
        if self._help is not None:
            return [("any key", "bold"), (" on  ", "dim"), ("q", "bold"), (" quit", "dim")]
        line: Line = []
        if self.choice.needle:
            line = [(f"filter: {self.choice.needle}", "warn"), ("   Esc shows all  ", "dim")]
        arrows = "jk" if self._glyphs is ASCII else "↑↓"
        for words in ("q quit", f"{arrows} move", "space fold", "u/m/n sort", "/ filter", "h help"):
            key, _, does = words.partition(" ")
            line += [(key.replace("/", " ") if len(key) > 1 else key, "bold"), (f" {does}  ", "dim")]
        last = min(self._top + self._room, len(self.rows))
        where = f"{self._top + 1}-{last} of {len(self.rows)}" if len(self.rows) > self._room else ""
        return _spread(line, where, width)

    def _help_lines(self, width: int) -> list[Line]:
        import textwrap

        texts: list[str] = []
        for name, text in KEYS:
            first = f"  {name.format(self._glyphs):18} " if width >= 60 else f" {name.format(self._glyphs)}: "
            indent = " " * (len(first) if width >= 60 else 4)
            texts += textwrap.wrap(first + text, max(width, 12), subsequent_indent=indent)
        self._help_end = len(texts)
        return [[(text, "")] for text in texts[self._help or 0 :]]


# ---- the parts ----------------------------------------------------------------------------------------------------


def problems(reading: Reading) -> list[tuple[str, str]]:
    """Return reasons to doubt the numbers, each with its tone."""
    found = []
    if reading.error:
        since = time.strftime("%H:%M:%S", time.localtime(reading.since))
        found.append((f"no daemon since {since}, retrying; the values shown are from before", "bad"))
        found.append((reading.error, "bad"))
    return found + [(text, "bad") for text in reading.tree.status.troubles]


def row_line(row: Row, columns: Widths, glyphs: Glyphs) -> Line:
    """Return a row in its columns. A row without PIDs has their room for its title."""
    fold = "  " if row.folded is None else f"{glyphs.closed if row.folded else glyphs.open} "
    indent = "  " * row.depth + fold
    room, numbers = columns.title, ""
    for text, width in ((row.host_pid, columns.host_pid), (row.ns_pid, columns.ns_pid)):
        if row.host_pid or row.ns_pid:
            numbers += " " + text.rjust(width)[-width:] if width else ""
        elif width:
            room += width + 1
    middle = row.kind in ("container", "slot", "file")
    title = fit(row.title, max(room - len(indent), 1), glyphs, middle=middle)
    dim = "dim" if row.tone == "dim" else ""
    style = {0: "bold", 1: "container"}.get(row.depth, "")
    line: Line = [(indent, "dim"), (title, dim or style), (numbers, dim), *_bar(row, columns.bar, glyphs)]
    unknown = row.amount is None or row.amount.value is None
    tone = "warn" if unknown else "bold" if row.amount and row.amount.value else "dim"
    line.append((" " + percent(row.amount, glyphs).rjust(columns.percent), tone))
    if columns.memory:
        line.append((" " + row.memory.rjust(columns.memory)[: columns.memory], dim))
    if columns.note > 1:
        line.append((" " + fit(row.note, columns.note, glyphs).rstrip(), row.tone))
    elif columns.note:
        line.append((" " + (glyphs.repaired if row.tone == "good" else _MARKS.get(row.tone, "")), row.tone))
    return line


def _bar(row: Row, width: int, glyphs: Glyphs) -> Line:
    """Return the utilization as a bar."""
    if not width:
        return []
    if row.amount is None or row.amount.value is None:
        return [(" " * (width + 1), "")]
    steps = 2 if glyphs.half else 1
    filled = min(round(row.amount.value * width * steps / 100), width * steps)
    filled = max(filled, 1 if row.amount.value else 0)
    full = glyphs.full * (filled // steps) + (glyphs.half if filled % steps else "")
    return [(" " + full, "good"), (glyphs.rest * (width - len(full)), "dim")]


def percent(amount: Amount | None, glyphs: Glyphs) -> str:
    """Return a utilization in at most five letters; ``?`` is unknown."""
    if amount is None or amount.value is None:
        return "" if amount is None else "?"
    return f"{glyphs.at_least if amount.at_least else ''}{amount.value}%"


def _counts(tree: Tree) -> Line:
    every = [each for gpu in tree.gpus for each in gpu.containers]
    containers = {each.container_id or each.pod_uid + each.container_name for each in every} - {""}
    processes = {process.host_pid for each in every for process in each.processes}
    repaired, lost = tree.status.repaired, len(tree.unresolved)
    parts = (several(len(tree.gpus), "GPU"), several(len(containers), "container"))
    return [
        ("  ".join((*parts, several(len(processes), "process", "processes"))), ""),
        (f"  {repaired} repaired", "good" if repaired else "dim"),
        (f"  {lost} unresolved", "warn" if lost else "dim"),
    ]


def _heads(columns: Widths) -> str:
    titles = ("GPU / CONTAINER / PROCESS", "GPU / CONTAINER", "NAME", "")
    use = columns.bar + bool(columns.bar) + columns.percent
    parts = (
        (columns.title, next(each for each in titles if len(each) <= columns.title).ljust(columns.title)),
        (columns.host_pid, "HOST PID".rjust(columns.host_pid)),
        (columns.ns_pid, "PID".rjust(columns.ns_pid)),
        (use, ("UTILIZATION" if use > 12 else "UTIL").ljust(use) if columns.bar else "UTIL".rjust(use)),
        (columns.memory, "MEMORY".rjust(columns.memory)),
        (columns.note > 1, "NOTE"),
    )
    return " ".join(text for width, text in parts if width)


def _nothing(tree: Tree, needle: str) -> str:
    if needle:
        return f"nothing contains {needle!r}: Esc shows all"
    return f"no GPU: {tree.status.driver_error}" if tree.status.driver_error else "no GPU on this node"


def _spread(left: Line, right: str, width: int) -> Line:
    """Return a line with the right part at its end, if there is room for both."""
    used = sum(cells(text) for text, _ in left) + cells(right)
    return left if used + 2 > width else [*left, (" " * (width - used), ""), (right, "dim")]
