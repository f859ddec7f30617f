"""The loop: a key, a new reading or another size, and then a new frame. It sleeps in between."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from resolver.cli._top.frame import Shown, body_height, frame
from resolver.cli._top.reading import Reader, Reading
from resolver.cli._top.rows import Choice, Row, rows_of
from resolver.cli._top.screen import Ended, Screen
from resolver.cli.process_summary import facts_of
from resolver.cli.show import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.cli._top.cells import Glyphs, Line
    from resolver.cli._top.tree import Tree

_SORTS = {"u": "utilization", "m": "memory", "n": "name"}
_MOST_TYPED = 100
_YOUNG = 5.0  # seconds: longer than a reading is behind


def watch(socket_path: str | None, interval: float, first: Reading) -> int:
    """Show it until the person has seen enough; returns the exit code."""
    node = os.uname().nodename
    try:
        with Screen() as screen:
            reader = Reader(socket_path, interval, first, screen.wake)
            view = View(screen.glyphs)
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
    except Ended as end:
        return 128 + end.number
    except EOFError:
        return 0


class View:
    """What the person looks at: where, in which order, through which filter."""

    def __init__(self, glyphs: Glyphs) -> None:
        self.choice = Choice()
        self.rows: list[Row] = []
        self._glyphs = glyphs
        self._seen: tuple[Tree | None, Choice] = (None, Choice())
        self._cursor = self._top = 0
        self._room = 1
        self._asked = ("", 0.0, "")
        self._editing = self._helping = False
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
        self._list(reading)
        # The cursor is seen, and the list fills the screen.
        self._top = max(
            min(self._top, self._cursor, len(self.rows) - self._room), self._cursor - self._room + 1, 0
        )
        shown = Shown(
            self._cursor,
            self._top,
            self.choice.sort,
            self.choice.needle,
            self._editing,
            self._helping,
            self._facts(reading),
        )
        return frame(reading, self.rows, shown, size, self._glyphs, node, now)

    def _facts(self, reading: Reading) -> str:
        """Whose the process below the cursor is, and what it runs. Asked only while somebody looks at it."""
        row = self.rows[self._cursor] if self._cursor < len(self.rows) else None
        if row is None or row.kind != "process" or not row.host_pid.isdigit():
            return ""
        if self._asked[:2] != (row.key, reading.read_at):
            facts = facts_of(int(row.host_pid))
            # A younger one may have its number by now; what started before was the one that the daemon saw.
            old = facts.started_at is not None and facts.started_at < reading.read_at - _YOUNG
            text = printable(facts.in_a_line()) if old else ""
            self._asked = (row.key, reading.read_at, text)
        return self._asked[2]

    def _list(self, reading: Reading) -> None:
        """The rows anew, if anything changed; the cursor stays on its row wherever that goes."""
        tree, choice = self._seen
        if tree is reading.tree and choice == self.choice:
            return
        self._seen = (reading.tree, self.choice)
        at = self.rows[self._cursor].key if self._cursor < len(self.rows) else ""
        self.rows = rows_of(reading.tree, self.choice, self._glyphs)
        same = (
            (number for number, row in enumerate(self.rows) if row.key == at) if self._cursor else iter((0,))
        )
        self._cursor = max(min(next(same, self._cursor), len(self.rows) - 1), 0)

    def press(self, key: str) -> bool:
        """Do what the key says; False: it says quit."""
        if self._helping:
            self._helping = False
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
            self._helping = True
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
