"""A command of `resolver`: run in this process, which is cheaper by a start of Python, or as a child."""

import io
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from subprocess import CompletedProcess
from unittest.mock import patch

from resolver.cli import main
from tests.fakes.warm import ROOT


def called(*arguments: str, **environ: str) -> CompletedProcess[str]:
    """Call a command; return its exit code and output. Exceptions other than SystemExit pass through."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with patch.dict(os.environ, environ), redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([*arguments])
        except SystemExit as end:
            code = int(end.code or 0)
    said, complained = (each.buffer.getvalue().decode() for each in (out, err))
    return CompletedProcess(("resolver", *arguments), code, said, complained)


def run(
    *words: object, wrapper: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    line = [*wrapper, sys.executable, "-m", "resolver", *map(str, words)]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def on_terminal(*arguments: str, code: int = 0, **environ: str) -> str:
    """Return a command's output on a terminal of 80 columns; leave out empty variables."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 80))
    environment = {**os.environ, "COLUMNS": "", "TERM": "xterm-256color", **environ}
    environment = {name: value for name, value in environment.items() if value}
    command = [sys.executable, "-m", "resolver", *arguments]
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=theirs) as child:
        os.close(theirs)
        seen = b""
        with suppress(OSError):  # EIO: the child has closed its end
            while chunk := os.read(ours, 65536):
                seen += chunk
        assert child.wait() == code
    os.close(ours)
    return seen.decode().replace("\r\n", "\n")
