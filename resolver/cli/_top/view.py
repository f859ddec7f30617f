"""Content of the screen: rows in columns, the lines above and below them, and the action of each key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from resolver.base.text import several
from resolver.cli._top.rows import SORTS, Choice, Row, rows_of
from resolver.cli.process_summary import facts_of
from resolver.cli.show import Line, cells, clip, fit

if TYPE_CHECKING:
    from resolver.cli._top.tree import Reading, Tree

_MOST_TITLE = 64
#: A narrower screen has names, utilization and memory only.
_WIDE = 80
#: Cells of the other columns, and the blanks before them.
_PIDS, _PERCENT, _MEMORY = 17, 6, 12
#: Greatest age of a reading; a younger process may have a reused PID.
_READING_SECONDS = 5.0
_SORTS = dict(zip("umni", SORTS, strict=True))
_KEYS = ("q quit", "↑↓ move", "u m n sort", "f fold", "/ filter", "h help")

HELP = """\
arrows, j, k          move; the bottom line has the details of the row
PgUp PgDn Home End    move far
u, m, n               sort by utilization, memory, name; r reverses the order
i                     sort containers by idle time
f                     fold: hide processes, or show them again
/                     filter: names, ids, PIDs and notes that contain the text
q, Ctrl-C             quit; Ctrl-Z: suspend

HOST PID    the process on this node; PID: inside its container
?           not known, never a 0; the bottom line says why
52%         NVML's value; for HAMi's values: resolver explain
≥52%        part of it is not known
2G/4G       memory in use, and HAMi's limit; yellow: over a limit
✓           its slot was repaired, with the reason
no_slot     HAMi's slots do not have it
no_shared_region    a container without HAMi"""


class LiveView:
    """The screen's content: its rows, the cursor, the order and the filter."""

    def __init__(self, node: str) -> None:
        self.choice = Choice()
        self.rows: list[Row] = []
        self.cursor = 0
        self._node = node
        self._drawn: tuple[Tree | None, Choice] = (None, self.choice)
        self._top, self._room = 0, 1
        self._editing = self._help = False

    def press(self, key: str) -> bool:
        """Do the key's action; False to quit."""
        choice = self.choice
        if self._editing:
            self._editing = key not in ("enter", "escape")
            needle = choice.needle + (key if len(key) == 1 else "")
            needle = {"escape": "", "backspace": needle[:-1]}.get(key, needle)
            self.choice = choice._replace(needle=needle)
            return True
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "ppage": -self._room, "npage": self._room}
        moves |= {"home": -len(self.rows), "end": len(self.rows)}
        self._move(self.cursor + moves.get(key, 0))
        if key in _SORTS:
            self.choice = choice._replace(sort=_SORTS[key], reverse=False)
        elif key == "r":
            self.choice = choice._replace(reverse=not choice.reverse)
        elif key == "f":
            self.choice = choice._replace(folded=not choice.folded)
        elif key == "escape" and not self._help:
            self.choice = choice._replace(needle="")
        self._editing = key == "/"
        self._help = not self._help and key in ("h", "?")
        return key != "q"

    def _move(self, number: int) -> None:
        self.cursor = max(min(number, len(self.rows) - 1), 0)

    def lines(self, reading: Reading, width: int, height: int) -> list[Line]:
        """Return the lines of a screen of this size."""
        above = self._above(reading, width, height)
        self._room = room = max(height - len(above) - 2, 1)
        self._list(reading.tree)
        # The cursor is visible, and the list fills the screen.
        self._top = max(min(self._top, self.cursor, len(self.rows) - room), self.cursor - room + 1, 0)
        body: list[Line] = [[(text, "")] for text in HELP.splitlines()]
        if not self._help:
            body = [
                self._row(number, width) for number in range(self._top, min(self._top + room, len(self.rows)))
            ]
            body = body or [[(f"  {_nothing(reading.tree, self.choice.needle)}", "dim")]]
        body = [*body[:room], *[[]] * (room - len(body))]
        lines = (*above, *body, [(self._detail(reading), "dim")], self._bottom(width))
        return [clip(line, width) for line in lines][:height]

    def _above(self, reading: Reading, width: int, height: int) -> list[Line]:
        tree, status = reading.tree, reading.tree.status
        fixed, lost = status.totals.slots_repaired, len(tree.unresolved)
        when = time.strftime("%H:%M:%S", time.localtime(reading.read_at))
        right = f"driver {status.driver.version or '?'}  source {status.source.name}  {when}"
        repaired = (f"  {fixed} repaired", "good" if fixed else "dim")
        unresolved = (f"  {lost} unresolved", "warn" if lost else "dim")
        order = f"by {self.choice.sort}{', reversed' * self.choice.reverse}"
        title, bar = columns_for(width)
        heads = f"{'GPU / CONTAINER / PROCESS'[:title]:{title}}"
        if bar:
            heads += f"{'HOST PID':>9}{'PID':>8} {'UTILIZATION':{bar + _PERCENT}}{'MEMORY':>{_MEMORY}} NOTE"
        else:
            heads += f"{'UTIL':>{_PERCENT}}{'MEMORY':>{_MEMORY}}"
        return [
            _spread([("resolver top", "bold"), (f"  {self._node}", "")], right, width),
            _spread([(several(len(tree.gpus), "GPU"), ""), repaired, unresolved], order, width),
            *([(problem, "bad")] for problem in problems(reading)[: max(height - 8, 1)]),
            [(fit(heads, width), "head")],
        ]

    def _list(self, tree: Tree) -> None:
        """Make the rows again if anything changed; the cursor stays on its row wherever that goes."""
        if self._drawn[0] is tree and self._drawn[1] == self.choice:
            return
        self._drawn = (tree, self.choice)
        key = self.rows[self.cursor].key if self.cursor else ""
        self.rows = rows_of(tree, self.choice)
        self._move(next((number for number, row in enumerate(self.rows) if row.key == key), self.cursor))

    def _row(self, number: int, width: int) -> Line:
        line = row_line(self.rows[number], *columns_for(width))
        if number == self.cursor:
            return [(fit("".join(text for text, _ in line), width), "selected")]
        return line

    def _detail(self, reading: Reading) -> str:
        """Return everything about the row below the cursor, with its process's user, command line and cost."""
        if not self.rows or self._help:
            return ""
        row = self.rows[self.cursor]
        if row.kind == "process" and row.host_pid.isdigit():
            facts = facts_of(int(row.host_pid))
            if facts.started_at is not None and facts.started_at < reading.read_at - _READING_SECONDS:
                words = (f"{name} {text}" for name, text in facts.in_words().items() if text)
                return " · ".join((row.detail, *words))
        return row.detail

    def _bottom(self, width: int) -> Line:
        if self._editing:
            return [(f"filter: {self.choice.needle}_", "bold"), ("   Enter keep  Esc clear", "dim")]
        if self._help:
            return [("any key goes back", "dim")]
        line: Line = []
        if self.choice.needle:
            line = [(f"filter: {self.choice.needle}", "warn"), ("   Esc shows all  ", "dim")]
        for key, _, action in (words.rpartition(" ") for words in _KEYS):
            line += [(key, "bold"), (f" {action}  ", "dim")]
        last = min(self._top + self._room, len(self.rows))
        where = f"{self._top + 1}-{last} of {len(self.rows)}" if len(self.rows) > self._room else ""
        return _spread(line, where, width)


def problems(reading: Reading) -> list[str]:
    """Return reasons to doubt the numbers."""
    since = time.strftime("%H:%M:%S", time.localtime(reading.since))
    stale = [f"no daemon since {since}, retrying; the values shown are from before", reading.error]
    troubles = reading.tree.status.troubles
    doubts = [str(trouble) for trouble in troubles if trouble.grave or trouble.reason == "dry_run"]
    return [*(stale if reading.error else []), *doubts]


def columns_for(width: int) -> tuple[int, int]:
    """Return the widths of title and bar; on a narrow screen the bar has none, and PIDs and notes are left out."""
    if width < _WIDE:
        return max(width - _PERCENT - _MEMORY, 1), 0
    bar, note = min(max((width - 70) // 3, 8), 30), 14 if width < 100 else max(width // 6, 18)
    return min(width - _PIDS - 1 - bar - _PERCENT - _MEMORY - 1 - note, _MOST_TITLE), bar


def row_line(row: Row, title: int, bar: int) -> Line:
    """Return a row in its columns. A row without PIDs has their room for its title."""
    indent, numbers = "  " * row.depth, ""
    if bar and (row.host_pid or row.ns_pid):
        numbers = f" {row.host_pid:>8} {row.ns_pid:>7}"
    elif bar:
        title += _PIDS
    name = fit(row.title, max(title - len(indent), 1), middle=row.kind in ("container", "slot", "file"))
    dim, value = "dim" if row.tone == "dim" else "", row.amount and row.amount.value
    style = dim or {0: "bold", 1: "container"}.get(row.depth, "")
    line: Line = [(indent + name, style), (numbers, dim)]
    if value is None:
        line.append((" " * (bar and bar + 1), ""))
    elif bar:
        filled = min(max(round(value * bar / 100), value > 0), bar)  # a small one is seen all the same
        line += [(" " + "━" * filled, "good"), ("─" * (bar - filled), "dim")]
    tone = "warn" if value is None else "bold" if value else "dim"
    line += [(f"{row.percent():>{_PERCENT}}", tone), (f"{row.memory:>{_MEMORY}}", dim)]
    return [*line, (f" {row.note}", row.tone)] if bar else line


def _nothing(tree: Tree, needle: str) -> str:
    if needle:
        return f"nothing contains {needle!r}: Esc shows all"
    error = tree.status.driver.error
    return f"no GPU: {error}" if error else "no GPU on this node"


def _spread(left: Line, right: str, width: int) -> Line:
    """Return a line with the right part at its end, if there is room for both."""
    used = sum(cells(text) for text, _ in left) + cells(right)
    return left if used + 2 > width else [*left, (" " * (width - used), ""), (right, "dim")]
