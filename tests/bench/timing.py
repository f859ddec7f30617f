"""Times steps in turns, because a busy moment of the machine then slows all of them."""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

#: A row of the bench's table: name, value (None if the note says why it was not measured), unit, bound or None, note.
RowValues = tuple[str, float | None, str, float | None, str]


def progress(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def medians(steps: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def command(argv: Sequence[str] | str, code: int = 0) -> Callable[[], object]:
    """Return a step that runs a command (a string: in a shell) and fails unless it ends with this code."""
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the step; a pipe would have to be emptied

    def step() -> None:
        complaints.seek(0)
        complaints.truncate()
        done = subprocess.run(
            argv, shell=isinstance(argv, str), check=False, stdout=subprocess.DEVNULL, stderr=complaints
        )
        if done.returncode != code:
            complaints.seek(0)
            raise RuntimeError(f"{argv} ended with {done.returncode}: {complaints.read().decode()}")

    return step
