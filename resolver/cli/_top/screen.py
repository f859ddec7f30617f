"""The terminal: a frame of rows, painted by curses, and the action of each key, until the user quits."""

import contextlib
import curses
import locale
import os
import signal
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Final, NamedTuple, NoReturn

from resolver.api.status import Status
from resolver.base.errors import ResolverError
from resolver.base.retry import started
from resolver.base.text import several
from resolver.cli._top.rows import SORTS, Choice, Row, chosen, no_gpu
from resolver.cli.show import Line, cells, clip, fit

_POLL_MILLISECONDS: Final = 100
#: Cells: the least width without sideways scrolling, that of each column there, and of one scrolling step.
_LEAST, _TITLE, _BAR, _PIDS, _PERCENT, _MEMORY, _STEP = 80, 21, 8, 17, 6, 12, 8
#: Attribute and colour of each style; -1 is the terminal's colour. Other styles have neither.
_STYLES: Final = {
    "bold": (curses.A_BOLD, -1),
    "dim": (curses.A_DIM, -1),
    "head": (curses.A_UNDERLINE, -1),
    "selected": (curses.A_REVERSE, -1),
    "container": (curses.A_NORMAL, curses.COLOR_CYAN),
    "good": (curses.A_NORMAL, curses.COLOR_GREEN),
    "warn": (curses.A_NORMAL, curses.COLOR_YELLOW),
    "bad": (curses.A_BOLD, curses.COLOR_RED),
}
_SORTS: Final = dict(zip("umni", SORTS, strict=True))
_BACKSPACE: Final = ("\x7f", "\x08", "KEY_BACKSPACE")
_BOTTOM: Final = "q quit  ↑↓←→ move  u m n i sort  r reverse  f fold  / filter  Ctrl-Z suspend"


class Reading(NamedTuple):
    """The last successful reading; ``error`` of later attempts, ``since`` their begin (Unix time)."""

    status: Status
    rows: list[Row]
    read_at: float
    error: str = ""
    since: float = 0.0

    def next(self, read: Callable[[], tuple[Status, list[Row]]], interval: float) -> "Reading":
        """Return the reading after a pause: this one with an error if the daemon does not answer."""
        time.sleep(interval)
        now = time.time()
        try:
            return Reading(*read(), now)
        except ResolverError as error:
            return self._replace(error=str(error), since=self.since or now)

    def problems(self) -> list[str]:
        """Return reasons to doubt the numbers."""
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        stale = [f"no daemon since {since}, retrying; the values shown are from before", self.error]
        troubles = self.status.troubles
        doubts = [str(trouble) for trouble in troubles if trouble.grave or trouble.reason == "dry_run"]
        return [*(stale if self.error else []), *doubts]


class Screen:
    """State that the keys change: the order, the filter, and the visible part of the list."""

    def __init__(self, node: str) -> None:
        self.choice, self.rows, self.cursor = Choice(), list[Row](), 0
        self._node, self._top, self._left, self._room, self._editing = node, 0, 0, 1, False

    def press(self, key: str) -> bool:
        """Do the action of a key, which is a letter or a name in curses; False to quit."""
        choice = self.choice
        if self._editing:
            self._editing = key not in ("\n", "\r", "KEY_ENTER", "\x1b")
            needle = choice.needle + (key if len(key) == 1 and key.isprintable() else "")
            needle = "" if key == "\x1b" else needle[:-1] if key in _BACKSPACE else needle
            self.choice = choice._replace(needle=needle)
            return True
        many = len(self.rows)
        down = {"KEY_UP": -1, "k": -1, "KEY_DOWN": 1, "j": 1, "KEY_HOME": -many, "KEY_END": many}
        down |= {"KEY_PPAGE": -self._room, "KEY_NPAGE": self._room}
        self.cursor += down.get(key, 0)
        self._left += {"KEY_LEFT": -_STEP, "KEY_RIGHT": _STEP}.get(key, 0)
        if key in _SORTS:
            self.choice = choice._replace(sort=_SORTS[key], reverse=False)
        elif key == "r":
            self.choice = choice._replace(reverse=not choice.reverse)
        elif key == "f":
            self.choice = choice._replace(folded=not choice.folded)
        elif key == "\x1b":
            self.choice = choice._replace(needle="")
        self._editing = key == "/"
        return key != "q"

    def frame(self, reading: Reading, width: int, height: int) -> list[Line]:
        """Return the lines of a screen of this size."""
        wide, choice = max(width, _LEAST), self.choice
        texts = [text for problem in reading.problems() for text in textwrap.wrap(problem, width)]
        problems: list[Line] = [[(text, "bad")] for text in texts[: max(height - 8, 1)]]
        self._room = room = max(height - len(problems) - 5, 1)
        self._select(list(chosen(reading.rows, choice)))
        last = min(self._top + room, len(self.rows))
        body = [row_line(row, wide) for row in self.rows[self._top : last]]
        detail, keys = self.rows[self.cursor].detail if body else "", _BOTTOM
        if body:
            text = "".join(text for text, _ in body[self.cursor - self._top])
            body[self.cursor - self._top] = [(fit(text, wide), "selected")]
        elif choice.needle:
            detail = f"nothing contains {choice.needle!r}"
        else:
            detail = no_gpu(reading.status)
        if self._editing:
            keys = f"filter: {choice.needle}_   Enter keep  Esc clear"
        elif choice.needle:
            keys = f"filter: {choice.needle}   Esc shows all  {keys}"
        title, bar = _columns(wide)
        heads = f"{'GPU / CONTAINER / PROCESS'[:title]:{title}}{'HOST PID':>9}{'PID':>8} "
        heads += f"{'UTILIZATION':{bar + _PERCENT}}{'MEMORY':>{_MEMORY}} NOTE"
        body = [[(heads, "head")], *body[:room], *[[]] * (room - len(body)), [(detail, "dim")]]
        widest = max(sum(cells(text) for text, _ in line) for line in body)
        self._left = max(min(self._left, widest - width), 0)
        order = f"by {choice.sort}{', reversed' * choice.reverse}"
        order += f"   {min(self._top + 1, last)}-{last} of {len(self.rows)}"
        fixed = _above(self._node, reading, order) + problems
        lines = [clip(line, width) for line in fixed] + [clip(line, width, self._left) for line in body]
        return [*lines, clip([(keys, "bold")], width)][:height]

    def _select(self, rows: list[Row]) -> None:
        """Show these rows; the cursor stays on its row, and that row visible."""
        at = max(min(self.cursor, len(self.rows) - 1), 0)
        key = self.rows[at].key if at else ""
        self.rows, last = rows, max(len(rows) - 1, 0)
        self.cursor = next((number for number, row in enumerate(rows) if row.key == key), min(at, last))
        self._top = max(min(self._top, self.cursor, len(rows) - self._room), self.cursor - self._room + 1, 0)


def _above(node: str, reading: Reading, order: str) -> list[Line]:
    status, gpus = reading.status, [row for row in reading.rows if row.kind == "gpu"]
    lost = sum(len(row.below) for row in reading.rows[len(gpus) :])
    fixed, when = status.totals.slots_repaired, time.strftime("%H:%M:%S", time.localtime(reading.read_at))
    about = f"   driver {status.driver.version or '?'}   source {status.source.name}   {when}"
    repaired = (f"  {fixed} repaired", "good" if fixed else "dim")
    unresolved = (f"  {lost} unresolved", "warn" if lost else "dim")
    return [
        [("resolver top", "bold"), (f"  {node}", ""), (about, "dim")],
        [(several(len(gpus), "GPU"), ""), repaired, unresolved, (f"   {order}", "dim")],
    ]


def _columns(width: int) -> tuple[int, int]:
    """Return the widths of title and bar; the note has the rest."""
    return min(_TITLE + (width - _LEAST) // 2, 64), min(_BAR + (width - _LEAST) // 4, 30)


def row_line(row: Row, width: int) -> Line:
    """Return a row in its columns; without PIDs, its title takes their room."""
    title, bar = _columns(width)
    indent, numbers = "  " * row.depth, ""
    if row.pids:
        numbers = " {:>8} {:>7}".format(*row.numbers())
    else:
        title += _PIDS
    name = fit(row.title, title - len(indent), middle=row.kind in ("container", "slot", "file"))
    dim, value = "dim" if row.tone == "dim" else "", row.use and row.use.value
    line: Line = [(indent + name, dim or ("bold", "container", "")[row.depth]), (numbers, dim)]
    if value is None:
        line.append((" " * (bar + 1), ""))
    else:
        filled = min(max(round(value * bar / 100), value > 0), bar)  # a small value stays visible
        line += [(" " + "━" * filled, "good"), ("─" * (bar - filled), "dim")]
    tone = "warn" if value is None else "bold" if value else "dim"
    line += [(f"{row.percent():>{_PERCENT}}", tone), (f"{row.bytes():>{_MEMORY}}", dim)]
    return [*line, (f" {row.note}", row.tone)]


# ---- the terminal ---------------------------------------------------------------------------------------------------


def watch(
    read: Callable[[], tuple[Status, list[Row]]], interval: float, status: Status, rows: list[Row]
) -> int:
    """Show the readings; return the exit code. The terminal's modes are restored in any case."""
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # the frame's signs, in whatever locale
    curses.set_escdelay(50)
    try:
        curses.setupterm()
    except curses.error:  # a terminal that this machine doesn't know
        os.environ["TERM"] = "xterm"
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, _end)
    read_next = partial(Reading.next, read=read, interval=interval)
    return curses.wrapper(_show, Reading(status, rows, time.time()), read_next)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not prevent restoring the terminal
    raise SystemExit(128 + number)


def _show(window: curses.window, reading: Reading, read_next: Callable[[Reading], Reading]) -> int:
    """Repaint on a key, a new reading or another size, and each second; returns the exit code."""
    screen, styles, due = Screen(os.uname().nodename), _styles(), 0.0
    with contextlib.suppress(curses.error):
        curses.curs_set(0)
    window.timeout(_POLL_MILLISECONDS)
    # Ctrl-S must not hold the screen back, or a write would wait for ever.
    modes = termios.tcgetattr(sys.stdin)
    modes[0] &= ~termios.IXON
    termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)
    curses.def_prog_mode()  # also after Ctrl-Z
    coming = started(partial(read_next, reading), name="reader")  # a hanging daemon delays no key
    while True:
        try:
            size = os.get_terminal_size(sys.stdin.fileno())
        except OSError:  # the terminal is gone
            return 0
        # A stopped program gets no signal of another size.
        if all(size) and curses.is_term_resized(size.lines, size.columns):
            curses.resizeterm(size.lines, size.columns)
            due = 0.0
        if coming.done():
            reading, due = coming.result(), 0.0
            coming = started(partial(read_next, reading), name="reader")
        if time.monotonic() >= due:
            _paint(window, screen.frame(reading, *window.getmaxyx()[::-1]), styles)
            due = time.monotonic() + 1
        try:
            key = window.get_wch()
        except curses.error:  # no key was pressed
            continue
        if not screen.press(key if isinstance(key, str) else curses.keyname(key).decode()):
            return 0
        due = 0.0


def _paint(window: curses.window, lines: list[Line], styles: Mapping[str, int]) -> None:
    window.erase()
    for number, line in enumerate(lines):
        window.move(number, 0)
        for text, style in line:
            with contextlib.suppress(curses.error):  # the cursor has no place after the last cell
                window.addstr(text, styles.get(style, 0))
    window.refresh()


def _styles() -> dict[str, int]:
    coloured = curses.has_colors() and not os.environ.get("NO_COLOR")
    if curses.has_colors():
        curses.use_default_colors()
    for number, (_, colour) in enumerate(_STYLES.values() if coloured else (), 1):
        curses.init_pair(number, colour, -1)
    return {
        name: attribute | (curses.color_pair(number) if coloured else 0)
        for number, (name, (attribute, _)) in enumerate(_STYLES.items(), 1)
    }
