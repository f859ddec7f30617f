"""The terminal: lines painted and keys read by curses, until the person has seen enough."""

from __future__ import annotations

import contextlib
import curses
import locale
import os
import select
import signal
import sys
import termios
import time
from typing import TYPE_CHECKING, Final, NoReturn

from resolver.cli._top.reading import Reader
from resolver.cli._top.view import LiveView
from resolver.cli.cells import in_ascii, shows_unicode

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from resolver.cli._top.reading import Reading
    from resolver.cli.cells import Line

_POLL_SECONDS: Final = 0.1
_COLOURS: Final = {
    "container": curses.COLOR_CYAN,
    "good": curses.COLOR_GREEN,
    "warn": curses.COLOR_YELLOW,
    "bad": curses.COLOR_RED,
}
_LOOKS: Final = {
    "": curses.A_NORMAL,
    "bold": curses.A_BOLD,
    "bad": curses.A_BOLD,
    "dim": curses.A_DIM,
    "head": curses.A_UNDERLINE,
    "selected": curses.A_REVERSE,
}
_KEYS: Final = {
    curses.KEY_UP: "up",
    curses.KEY_DOWN: "down",
    curses.KEY_PPAGE: "page up",
    curses.KEY_NPAGE: "page down",
    curses.KEY_HOME: "home",
    curses.KEY_END: "end",
    curses.KEY_BACKSPACE: "backspace",
    curses.KEY_ENTER: "enter",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x1b": "escape",
}


def watch(socket_path: str | None, interval: float, first: Reading, name: str) -> int:
    """Show the readings; returns the exit code. The terminal gets its modes back, whatever ends this."""
    locale.setlocale(locale.LC_ALL, "")
    curses.set_escdelay(50)
    try:
        curses.setupterm()
    except curses.error:  # a terminal that this machine doesn't know
        os.environ["TERM"] = "xterm"
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, _end)
    reader = Reader(socket_path, interval, first, name)
    reader.start()
    return curses.wrapper(_show, reader)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one must not keep the terminal from its modes
    raise SystemExit(128 + number)


def _show(window: curses.window, reader: Reader) -> int:
    """Repaint on a key, a new reading or another size, and each second; returns the exit code."""
    view, styles = LiveView(os.uname().nodename), _styles()
    shown_as = str if shows_unicode(os.environ) else in_ascii
    with contextlib.suppress(curses.error):
        curses.curs_set(0)
    window.nodelay(True)
    shown, due, empty = None, 0.0, 0
    try:
        while reader.failure is None:
            reading = reader.latest
            if _resized():
                due = 0.0
            if reading is not shown or time.monotonic() >= due:
                height, width = window.getmaxyx()
                _paint(window, view.lines(reading, width, height), styles, shown_as)
                shown, due = reading, time.monotonic() + 1
            ready = select.select([sys.stdin], [], [], _POLL_SECONDS)[0]
            keys = _typed(window)
            if not all(view.press(key) for key in keys if key):
                return 0
            due = 0.0 if keys else due
            empty = empty + 1 if ready and not keys else 0
            if empty > 2:  # the other end of the terminal is gone
                return 0
        raise reader.failure
    finally:
        with contextlib.suppress(termios.error):
            # After Ctrl-S curses would wait for ever. TCOON alone undoes TCOOFF only (tty_ioctl.c).
            termios.tcflow(sys.stdout, termios.TCOOFF)
            termios.tcflow(sys.stdout, termios.TCOON)


def _resized() -> bool:
    """Take another size of the terminal; a stopped program is not told of it."""
    with contextlib.suppress(OSError):  # the terminal is gone
        width, height = os.get_terminal_size(sys.stdout.fileno())
        if width and height and curses.is_term_resized(height, width):
            curses.resizeterm(height, width)
            return True
    return False


def _typed(window: curses.window) -> list[str]:
    """Return the keys that were pressed, by letter or name; another size and an unknown key are empty."""
    keys = []
    with contextlib.suppress(curses.error):  # no more
        while True:
            key = window.get_wch()
            keys.append(_KEYS.get(key) or (key if isinstance(key, str) and key.isprintable() else ""))
    return keys


def _styles() -> dict[str, int]:
    styles = {name: _LOOKS.get(name, curses.A_NORMAL) for name in (*_LOOKS, *_COLOURS)}
    if not curses.has_colors():
        return styles
    curses.use_default_colors()
    if not os.environ.get("NO_COLOR"):
        for number, (name, colour) in enumerate(_COLOURS.items(), 1):
            curses.init_pair(number, colour, -1)
            styles[name] |= curses.color_pair(number)
    return styles


def _paint(
    window: curses.window, lines: list[Line], styles: dict[str, int], shown_as: Callable[[str], str]
) -> None:
    """Paint the lines, unless the terminal takes nothing: after Ctrl-S a write would wait."""
    if not select.select([], [sys.stdout], [], 0)[1]:
        return
    window.erase()
    for number, line in enumerate(lines):
        window.move(number, 0)
        for text, style in line:
            with contextlib.suppress(curses.error):  # after the last cell there is no place for the cursor
                window.addstr(shown_as(text), styles[style])
    window.refresh()
