"""Other programs: run to their end, or replaced by a script."""

import subprocess
from pathlib import Path
from typing import Any


def completed(*words: object, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program, and return its exit code and both outputs; the options are those of `subprocess.run`."""
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=check, **options)


def script(path: Path, text: str) -> Path:
    """Write a shell script that can be executed."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
