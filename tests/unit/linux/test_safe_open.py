"""Descriptors that are closed in threads, up to the interpreter's end."""

import subprocess
import sys

LETS_GO_AND_ENDS = """
import os
from resolver.linux.safe_open import let_go
for _ in range(20):
    let_go(os.open("/dev/null", os.O_RDONLY))
"""


def test_program_that_ends_while_threads_start_does_not_crash() -> None:
    """Without a wait for the threads, one program in eight crashed on Python 3.11."""
    for _ in range(40):
        done = subprocess.run([sys.executable, "-c", LETS_GO_AND_ENDS], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
