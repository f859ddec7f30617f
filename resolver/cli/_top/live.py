"""The loop: a key, a new reading or another size, and then a new frame. It sleeps in between."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING

from resolver.cli._top.costs import Costs
from resolver.cli._top.frame import Shown, body_height, frame, help_pages
from resolver.cli._top.reading import EVERYTHING, Reader, Reading
from resolver.cli._top.rows import Choice, Row, container_key, rows_of
from resolver.cli._top.screen import EndedBySignal, Screen
from resolver.cli.show import printable, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.cli._top.cells import Glyphs, Line
    from resolver.cli._top.choose import ScreenPart
    from resolver.cli._top.tree import Tree

_SORTS = {"u": "utilization", "m": "memory", "n": "name"}
_MOST_TYPED = 100
#: Readings that a history goes back at most; more has no room in any terminal.
_REMEMBERED = 60


def watch(socket_path: str | None, interval: float, first: Reading, part: ScreenPart = EVERYTHING) -> int:
    """Show it until the person has seen enough; returns the exit code."""
    node = os.uname().nodename
    try:
        with Screen() as screen:
            reader = Reader(socket_path, interval, first, screen.wake, part)
            view = LiveView(screen.glyphs)
            reader.start()
            try:
                while reader.failure is None:
                    now = time.time()
                    screen.show(view.frame(reader.latest, screen.size, node, now))
                    for key in screen.wait():
                        if not view.press(key):
                            return 0
                raise reader.failure
            finally:
                reader.stop()
    except EndedBySignal as end:
        return 128 + end.number
    except EOFError:
        return 0


class LiveView:
    """What is on the screen: from which line on, in which order, through which filter."""

    def __init__(self, glyphs: Glyphs) -> None:
        self.choice = Choice()
        self.rows: list[Row] = []
        self._glyphs = glyphs
        self._seen: tuple[Tree | None, Choice] = (None, Choice())
        self._cursor = self._top = 0
        self._room = 1
        self._costs = Costs()
        self._history: dict[str, deque[int | None]] = {}
        self._editing = self._commands = False
        self._help_page, self._help_pages = 0, 1  # 0: no help is shown
        self._moves: dict[str, Callable[[], int]] = {
            "up": lambda: self._cursor - 1,
            "k": lambda: self._cursor - 1,
            "down": lambda: self._cursor + 1,
            "j": lambda: self._cursor + 1,
            "page up": lambda: self._cursor - self._room,
            "page down": lambda: self._cursor + self._room,
            "home": lambda: 0,
            "g": lambda: 0,
            "end": lambda: len(self.rows) - 1,
            "G": lambda: len(self.rows) - 1,
        }

    def frame(self, reading: Reading, size: tuple[int, int], node: str, now: float) -> list[Line]:
        """The lines of the screen."""
        self._room = body_height(reading, size[1], now)
        self._help_pages = len(help_pages(size[0], self._room, self._glyphs))
        self._help_page = min(self._help_page, self._help_pages)
        self._list(reading)
        # The cursor is seen, and the list fills the screen.
        self._top = max(
            min(self._top, self._cursor, len(self.rows) - self._room), self._cursor - self._room + 1, 0
        )
        shown = Shown(
            cursor=self._cursor,
            top=self._top,
            sort=self.choice.sort,
            needle=self.choice.needle,
            editing=self._editing,
            help_page=self._help_page,
            facts=self._facts(reading),
        )
        rows = self.rows
        if self._commands:
            seen = range(self._top, min(self._top + self._room, len(rows)))
            rows = [self._with_command(row, reading) if at in seen else row for at, row in enumerate(rows)]
        return frame(reading, rows, shown, size, self._glyphs, node, now)

    def _facts(self, reading: Reading) -> str:
        """Owner and command line of the process below the cursor. Read only while it is shown."""
        row = self.rows[self._cursor] if self._cursor < len(self.rows) else None
        cost = self._costs.of(row, reading.read_at) if row is not None else None
        return printable(cost.in_a_line()) if cost is not None else ""

    def _with_command(self, row: Row, reading: Reading) -> Row:
        """A process's row with its user and command line, and what it costs the node, in the place of the notes."""
        cost = self._costs.of(row, reading.read_at)
        if cost is None:
            return row
        facts = cost.facts
        words = printable(" ".join(filter(None, (facts.user, facts.command)))) or row.title
        cpu = "" if cost.cpu_percent is None else f"CPU {cost.cpu_percent}%"
        memory = "" if facts.memory is None else size(facts.memory)
        return row._replace(title=words, note=" ".join(filter(None, (cpu, memory))), tone="dim")

    def _list(self, reading: Reading) -> None:
        """The rows anew, if anything changed; the cursor stays on its row wherever that goes."""
        tree, choice = self._seen
        if tree is reading.tree and choice == self.choice:
            return
        if tree is not reading.tree:
            self._remember(reading.tree)
        self._seen = (reading.tree, self.choice)
        at = self.rows[self._cursor].key if self._cursor < len(self.rows) else ""
        self.rows = [
            row._replace(history=tuple(self._history.get(row.key, ()))) if row.kind == "container" else row
            for row in rows_of(reading.tree, self.choice, self._glyphs)
        ]
        same = (
            (number for number, row in enumerate(self.rows) if row.key == at) if self._cursor else iter((0,))
        )
        self._cursor = max(min(next(same, self._cursor), len(self.rows) - 1), 0)

    def _remember(self, tree: Tree) -> None:
        """A container's utilization now, after those before; of one that is gone nothing is kept."""
        before, self._history = self._history, {}
        for gpu in tree.gpus:
            for each in gpu.containers:
                key = container_key(gpu, each)
                values = before.get(key) or deque(maxlen=_REMEMBERED)
                values.append(each.utilization.value)
                self._history[key] = values

    def press(self, key: str) -> bool:
        """Do what the key says; False: it says quit."""
        if self._help_page:
            self._help_page = 0 if key == "escape" else (self._help_page + 1) % (self._help_pages + 1)
            return key != "q"
        if self._editing:
            self._edit(key)
            return True
        if key in self._moves:
            self._cursor = max(min(self._moves[key](), len(self.rows) - 1), 0)
        elif key in _SORTS:
            self.choice = self.choice._replace(sort=_SORTS[key])
        elif key == "/":
            self._editing = True
        elif key == "escape":
            self.choice = self.choice._replace(needle="")
        elif key in ("h", "?"):
            self._help_page = 1
        elif key == "c":
            self._commands = not self._commands
        elif key in (" ", "enter"):
            self._fold()
        elif key == "f":
            self._fold_all()
        return key != "q"

    def _edit(self, key: str) -> None:
        needle = self.choice.needle
        if key in ("enter", "escape"):
            self._editing = False
            needle = needle if key == "enter" else ""
        elif key == "backspace":
            needle = needle[:-1]
        elif key == "clear":
            needle = ""
        elif len(key) == 1 and len(needle) < _MOST_TYPED:
            needle += key
        self.choice = self.choice._replace(needle=needle)

    def _fold(self) -> None:
        if self._cursor < len(self.rows) and self.rows[self._cursor].folded is not None:
            self.choice = self.choice._replace(folded=self.choice.folded ^ {self.rows[self._cursor].key})

    def _fold_all(self) -> None:
        """All containers that are seen, or none if all are folded."""
        there = {row.key for row in self.rows if row.kind == "container" and row.folded is not None}
        folded = self.choice.folded
        self.choice = self.choice._replace(folded=folded - there if there <= folded else folded | there)
