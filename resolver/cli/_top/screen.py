"""The terminal: lines painted and keys read by curses, until the person quits."""

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
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

from resolver.base.retry import started
from resolver.cli._top.view import LiveView
from resolver.cli.show import in_ascii

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import FrameType

    from resolver.cli._top.tree import Reading

_POLL_SECONDS: Final = 0.1
#: Attribute and colour of each style.
_STYLES: Final = {
    "": (curses.A_NORMAL, -1),
    "bold": (curses.A_BOLD, -1),
    "dim": (curses.A_DIM, -1),
    "head": (curses.A_UNDERLINE, -1),
    "selected": (curses.A_REVERSE, -1),
    "container": (curses.A_NORMAL, curses.COLOR_CYAN),
    "good": (curses.A_NORMAL, curses.COLOR_GREEN),
    "warn": (curses.A_NORMAL, curses.COLOR_YELLOW),
    "bad": (curses.A_BOLD, curses.COLOR_RED),
}
_NAMED: Final = ("up", "down", "ppage", "npage", "home", "end", "backspace", "enter")
_LETTERS: Final = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x1b": "escape"}
_KEYS: Final = _LETTERS | {getattr(curses, f"KEY_{name.upper()}"): name for name in _NAMED}


def watch(socket_path: str | None, interval: float, first: Reading, name: str) -> int:
    """Show the readings; returns the exit code. The terminal gets its modes back, whatever ends this."""
    with contextlib.suppress(locale.Error):  # one of another machine, by ssh, that this one doesn't have
        locale.setlocale(locale.LC_ALL, "")
    curses.set_escdelay(50)
    try:
        curses.setupterm()
    except curses.error:  # a terminal that this machine doesn't know
        os.environ["TERM"] = "xterm"
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, _end)

    def read_next(last: Reading) -> Future[Reading]:
        """Read in a thread, so that a hanging daemon delays no key."""
        return started(partial(last.next, socket_path, name, interval), name="reader")

    return curses.wrapper(_show, first, read_next)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one must not keep the terminal from its modes
    raise SystemExit(128 + number)


def _show(window: curses.window, reading: Reading, read_next: Callable[[Reading], Future[Reading]]) -> int:
    """Repaint on a key, a new reading or another size, and each second; returns the exit code."""
    view, styles = LiveView(os.uname().nodename), _styles()
    encode = str if locale.nl_langinfo(locale.CODESET) == "UTF-8" else in_ascii
    with contextlib.suppress(curses.error):
        curses.curs_set(0)
    window.nodelay(True)
    # Ctrl-S must not hold the screen back, or a write would wait for ever.
    modes = termios.tcgetattr(sys.stdin)
    modes[0] &= ~termios.IXON
    termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)
    curses.def_prog_mode()  # also after Ctrl-Z
    coming, due, empty = read_next(reading), 0.0, 0
    while True:
        if coming.done():
            reading, due = coming.result(), 0.0
            coming = read_next(reading)
        if _is_resized() or time.monotonic() >= due:
            height, width = window.getmaxyx()
            window.erase()
            for number, line in enumerate(view.lines(reading, width, height)):
                window.move(number, 0)
                for text, style in line:
                    with contextlib.suppress(curses.error):  # after the last cell is no place for the cursor
                        window.addstr(encode(text), styles[style])
            window.refresh()
            due = time.monotonic() + 1
        ready = select.select([sys.stdin], [], [], _POLL_SECONDS)[0]
        keys = _typed(window)
        if not all(view.press(key) for key in keys if key):
            return 0
        due = 0.0 if keys else due
        empty = empty + 1 if ready and not keys else 0
        if empty > 2:  # the other end of the terminal is gone
            return 0


def _is_resized() -> bool:
    """Adopt another size of the terminal, of which a stopped program gets no signal."""
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
    styles = {name: attribute for name, (attribute, _) in _STYLES.items()}
    if curses.has_colors():
        curses.use_default_colors()
        for number, (name, (_, colour)) in enumerate(_STYLES.items(), 1):
            if colour >= 0 and not os.environ.get("NO_COLOR"):
                curses.init_pair(number, colour, -1)
                styles[name] |= curses.color_pair(number)
    return styles
