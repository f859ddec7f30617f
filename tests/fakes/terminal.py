"""A real terminal without a user: tmux with its own server and size, and its screen as text."""

import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.programs import completed

#: The whole environment of its programs; a test adds more.
ENVIRONMENT = {"LANG": "C.UTF-8", "TERM": "screen-256color", "PATH": "/usr/bin:/bin", "PS1": "$ "}


class Terminal(AbstractContextManager["Terminal"]):
    """Runs `command` (a shell's words) in a terminal of `width` by `height` cells."""

    def __init__(
        self, command: str, width: int = 80, height: int = 24, environment: Mapping[str, str] | None = None
    ) -> None:
        if shutil.which("tmux") is None:
            pytest.fail("tmux is not installed: run make setup-dev", pytrace=False)
        self._directory = tempfile.TemporaryDirectory(prefix="resolver-terminal-")
        self._socket = Path(self._directory.name) / "socket"
        variables = ENVIRONMENT | dict(environment or {})
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        self._tmux(
            *("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height)),
            f"exec env -i {words} sh -c {shlex.quote(command)}",
            *(";", "set-option", "-g", "remain-on-exit", "on"),
            *(";", "set-option", "-g", "escape-time", "0"),
        )

    def __exit__(self, *_: object) -> None:
        subprocess.run(
            ["tmux", "-S", self._socket, "kill-server"], capture_output=True, check=False, timeout=60
        )
        self._directory.cleanup()

    def _tmux(self, *words: str) -> str:
        done = completed("tmux", "-u", "-S", self._socket, *words, timeout=60)
        assert done.returncode == 0, f"tmux {words}: {done.stderr}"
        return done.stdout

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._tmux("capture-pane", "-p").splitlines()]

    def text(self) -> str:
        return "\n".join(self.lines())

    def styled(self) -> str:
        """Return the screen with its escape sequences."""
        return self._tmux("capture-pane", "-p", "-e")

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def get(self, name: str) -> str:
        """Return a variable of tmux: `alternate_on`, `cursor_flag`, `wrap_flag`, `pane_pid`."""
        return self._tmux("display-message", "-p", f"#{{{name}}}").strip()

    def wait(self, what: str | Callable[[str], object]) -> str:
        """Wait until the screen has a text, or fulfills a condition; return the screen."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            text = self.text()
            if (what in text) if isinstance(what, str) else what(text):
                return text
            assert time.monotonic() < deadline, (
                f"within {PATIENCE_S} s not seen: {what}; on the screen:\n{text}"
            )
            time.sleep(0.03)
