"""The terminal: its modes and its keys, and lines painted on it. Whatever ends the program, the modes are put back."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import signal
import sys
import termios
from typing import TYPE_CHECKING, Any, Self

from rich.cells import cell_len
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style

from resolver.cli._top.cells import clip, glyphs_for
from resolver.cli._top.keys import keys_in

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from resolver.cli._top.cells import Line

STYLES = {
    "": Style(),
    "name": Style(bold=True),
    "head": Style(underline=True),
    "gpu": Style(bold=True),
    "container": Style(color="cyan"),
    "number": Style(),
    "bar": Style(color="green"),
    "rest": Style(dim=True),
    "busy": Style(bold=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "dim": Style(dim=True),
    "detail": Style(dim=True),
    "key": Style(bold=True),
    "selected": Style(reverse=True),
}

#: Alternate screen, cursor hidden, no wrapping at the right edge; and back.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
#: What follows an ESC comes with it, unless it was a person who pressed that key.
_ESC_SECONDS = 0.05


class Painter:
    """Lines as a terminal wants them: in as many colours as it has and NO_COLOR lets it have."""

    def __init__(self) -> None:
        console = Console()
        self._colors = COLOR_SYSTEMS[console.color_system] if console.color_system else None
        self._styles = {
            name: style.without_color if console.no_color else style for name, style in STYLES.items()
        }

    def paint(self, line: Line) -> str:
        """One line, without its end."""
        return "".join(
            self._styles[style].render(text, color_system=self._colors) if style else text
            for text, style in line
        )


class EndedBySignal(BaseException):  # not Exception: nobody on the way out is to take it for an error
    """A signal asked for the end; ``number`` is which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Screen:
    """A terminal in our hands, from ``with`` to its end.

    SIGTERM, SIGHUP, SIGINT and SIGQUIT leave it by `EndedBySignal`. SIGTSTP and SIGCONT give it back and take it again.
    """

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self.glyphs = glyphs_for(sys.stdout.encoding, os.environ)
        self._painter = Painter()
        self._typed = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._painted: list[str] = []
        self._former: dict[signal.Signals, Any] = {}
        self._suspend = self._renew = self._resized = False
        self._leaving = False

    # ---- taking and giving back --------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._modes = termios.tcgetattr(self._in)
        self._news_in, self._news_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._news_out, warn_on_full_buffer=False)
        try:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
                self._former[number] = signal.signal(number, self._end)
            self._former[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, self._on_resize)
            self._former[signal.SIGCONT] = signal.signal(signal.SIGCONT, self._on_continue)
            self._former[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._on_stop)
            self._take()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._leaving = True  # a second signal must not keep the terminal from its modes
        with contextlib.suppress(EOFError):  # it may be gone
            self._give_back()
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._news_in)
        os.close(self._news_out)
        self._news_out = -1
        for number, former in self._former.items():
            signal.signal(number, former)

    def _take(self) -> None:
        modes = termios.tcgetattr(self._in)
        modes[3] &= ~(
            termios.ICANON | termios.ECHO
        )  # keys one by one; ISIG stays: Ctrl-C and Ctrl-Z are signals
        modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
        self._set(modes)
        self._painted = []
        self._write(_ENTER)

    def _give_back(self) -> None:
        self._set(self._modes)
        with contextlib.suppress(termios.error):
            # After Ctrl-S the words below would wait for ever. TCOON alone undoes TCOOFF only (tty_ioctl.c).
            termios.tcflow(self._out, termios.TCOOFF)
            termios.tcflow(self._out, termios.TCOON)
        self._write(_LEAVE)

    def _set(self, modes: list[Any]) -> None:
        with contextlib.suppress(termios.error):  # it may be gone
            termios.tcsetattr(self._in, termios.TCSANOW, modes)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        if not self._leaving:
            self._leaving = True
            raise EndedBySignal(number)

    def _on_resize(self, _number: int, _frame: FrameType | None) -> None:
        self._resized = True

    def _on_continue(self, _number: int, _frame: FrameType | None) -> None:
        self._renew = True

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._suspend = True

    def _stop(self) -> None:
        """What Ctrl-Z does to any program, with the terminal in its own modes meanwhile."""
        self._give_back()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._renew = True

    # ---- in ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make `wait` return; may be called by any thread."""
        with contextlib.suppress(OSError):  # full is as good, and closed is past
            os.write(self._news_out, b"\0")

    def wait(self) -> list[str]:
        """The keys that were pressed; none when something else happened. Raises EOFError if the terminal is gone."""
        unfinished = bool(self._typed)
        ready, _, _ = select.select([self._in, self._news_in], [], [], _ESC_SECONDS if unfinished else None)
        if self._news_in in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._news_in, 4096)
        if self._suspend:
            self._suspend = False
            self._stop()
        if self._renew:
            self._renew = False
            self._take()
        if self._resized:
            self._resized = False
            self._painted = []
            self._write("\x1b[2J")
        if self._in in ready:
            try:
                typed = os.read(self._in, 4096)
            except OSError:
                typed = b""
            if not typed:
                raise EOFError
            keys, self._typed = keys_in(self._typed + self._decoder.decode(typed))
            return keys
        if unfinished and not ready:
            keys, self._typed = (["escape"] if self._typed == "\x1b" else []), ""
            return keys
        return []

    # ---- out ---------------------------------------------------------------------------------------

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in cells."""
        try:
            width, height = os.get_terminal_size(self._out)
        except OSError:
            width, height = 0, 0
        return width or 80, height or 24

    def show(self, lines: list[Line]) -> None:
        """Paint the lines that are not there already."""
        width, _ = self.size
        painted = [self._painted_line(clip(line, width, self.glyphs), width) for line in lines]
        old = self._painted + [""] * (len(painted) - len(self._painted))
        changes = [
            f"\x1b[{number}H{new}"
            for number, (new, before) in enumerate(zip(painted, old, strict=False), 1)
            if new != before
        ]
        if changes:
            self._write("".join(changes))
        self._painted = painted

    def _painted_line(self, line: Line, width: int) -> str:
        """With the end that erases what was there before; after the last cell it would erase that one."""
        rest = "\x1b[0m\x1b[K" if sum(cell_len(text) for text, _ in line) < width else ""
        return self._painter.paint(line) + rest

    def _write(self, text: str) -> None:
        data = text.encode(sys.stdout.encoding or "utf-8", "backslashreplace")
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError as error:  # EIO: nobody is at the other end any more
            raise EOFError from error
