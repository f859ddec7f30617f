"""A command of `resolver`, run in this process: most of what a child would cost is the start of Python."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from subprocess import CompletedProcess
from unittest.mock import patch

from resolver.cli import main


def called(*arguments: str, **environ: str) -> CompletedProcess[str]:
    """What it prints and its exit code; what it raises beside that is raised here."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with patch.dict(os.environ, environ), redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([*arguments])
        except SystemExit as end:
            code = int(end.code or 0)
    said, complained = (each.buffer.getvalue().decode() for each in (out, err))
    return CompletedProcess(("resolver", *arguments), code, said, complained)
