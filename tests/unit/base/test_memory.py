"""Resident memory is given back once it has stopped growing."""

from __future__ import annotations

import pytest

from resolver.base import memory
from resolver.base.memory import Resident

MIB = 1 << 20


def test_memory_goes_back_once_when_it_no_longer_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    sizes = iter([30, 28, 40, 45, 45, 31, 31, 31])
    given: list[float] = []
    monkeypatch.setattr(memory, "_resident", lambda: next(sizes) * MIB)
    monkeypatch.setattr(memory, "_give_back", lambda: given.append(now))
    resident = Resident()
    for now in (100.0, 102.0, 104.0, 106.0, 106.1, 108.0, 110.0, 112.0):
        resident.look(now)
    assert given == [108.0]


def test_a_large_list_that_is_gone_is_gone_from_the_process() -> None:
    resident, before = Resident(), memory._resident()
    resident.look(0.0)
    pinned = [[bytes(1 << 10) for _ in range(1 << 6)] for _ in range(1 << 9)]
    assert memory._resident() > before + 24 * MIB
    last = pinned[-1][-1]  # at the heap's end: without a trim what lies before it stays
    del pinned
    resident.look(10.0)
    resident.look(20.0)
    resident.look(30.0)
    assert memory._resident() < before + 4 * MIB
    assert last
