"""Free memory is returned to the kernel once resident memory has stopped growing."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from resolver.base import memory
from resolver.base.memory import Resident

ROOT = Path(__file__).parent.parent.parent.parent
MIB = 1 << 20


def test_memory_goes_back_when_it_no_longer_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may become free later, so the trim is repeated, ever more rarely."""
    now, size = 0, 30
    given: list[int] = []
    monkeypatch.setattr(memory, "resident_bytes", lambda: size * MIB)
    monkeypatch.setattr(memory, "give_back", lambda: given.append(now))
    resident = Resident()
    for now in range(200):
        size = 30 if now < 10 else min(60, 40 + now) if now < 150 else 31
        resident.trim(now)
    tries = [after - before for before, after in itertools.pairwise(given)]
    assert 20 <= given[0] <= 26
    assert tries == sorted(tries)
    assert 4 <= len(tries) <= 8
    assert given[-1] < 150 + 64


#: Runs in a new process, because a used heap may already have room.
LARGE_LIST = """
from resolver.base import memory
MIB = 1 << 20
resident, before = memory.Resident(), memory.resident_bytes()
resident.trim(0.0)
pinned = [[bytes(1 << 10) for _ in range(1 << 6)] for _ in range(1 << 9)]
assert memory.resident_bytes() > before + 24 * MIB
last = pinned[-1][-1]  # at the heap's end: without a trim everything before it stays
del pinned
for now in (10.0, 20.0, 30.0):
    resident.trim(now)
assert memory.resident_bytes() < before + 4 * MIB
assert last
"""


def test_memory_of_a_dropped_list_is_returned() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE_LIST], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
