"""A clock that jumps, for the daemon alone or with its driver: values stay right, and repairs continue."""

import time
from pathlib import Path
from typing import Final

import pytest

from tests.fakes.node import Node
from tests.kernel.conftest import Start, write_hostpid
from tests.kernel.rights import patched

HOUR: Final = 3600.0
#: Sets the daemon's wall clock ahead by the seconds in a file.
SHIFTED: Final = """
    import time
    real, path = time.time, sys.argv[1]
    def shifted():
        with open(path) as file:
            return real() + float(file.read() or 0)
    time.time, time.time_ns = shifted, lambda: int(shifted() * 1e9)
"""


@pytest.mark.parametrize("follows", [True, False], ids=["the driver's too", "the driver keeps its own"])
def test_values_stay_right_when_the_clock_jumps(
    node: Node, start: Start, tmp_path: Path, *, follows: bool
) -> None:
    ahead = tmp_path / "ahead"
    ahead.write_text("0")
    container = node.container(watcher=False)
    busy, others = container.tenant(load=40, guess="none"), node.container(name="others", watcher=False)
    options = ("--interval", "100ms", "--nvml-interval", "250ms", "--hostpid-namespace", "host")
    daemon = start(node, *options, wrapper=patched(SHIFTED, str(ahead)), anew=False)
    busy.until_load(40)
    for jump in (45.0, 35.0, -10.0, 0.0) if follows else (HOUR, -HOUR, 10 * 365 * 24 * HOUR, 0.0):
        new = tmp_path / "new"
        new.write_text(str(jump))
        new.rename(ahead)
        node.gpu.ahead_s = jump if follows else 0.0
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            assert busy.sm_util == (40,)
            time.sleep(0.02)
        write_hostpid(container, busy, 4711)
        busy.until_repaired()
        brief = others.tenant(load=70, guess="none")
        brief.until_load(70)
        brief.kill()
        brief.until_load(0)
    assert daemon.said("slot_stuck") == []
    # For ten seconds after a driver's clock was set back, new samples look older than earlier ones.
    assert follows or daemon.said("device_without_samples") == []
