"""Processes without a slot: reported after 30 s, with causes that a lane reads once per container."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from resolver.base.errors import ProcessGone, ResolverError, TooSlow
from resolver.base.reasons import BypassReason, SampleReason
from resolver.state import Process, WithoutSlot
from resolver.usage.bypasses import Bypasses

PROCESS = Process(100, 2, "GPU-a", "c1", "u", "main", "ns", "pod", "python", 50, 1, SampleReason.NO_SLOT)


class Reader:
    """A lane with a test's answers; the census has no container."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.library: list[str] | ResolverError = [BypassReason.STATIC]

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        self.asked.append((function.__name__, arguments[0]))
        assert payer == "c1"
        assert about == ("c1" if function.__name__ == "library_causes" else "")
        if function.__name__ == "mount_causes":
            return arguments[1] or [BypassReason.NOT_MOUNTED]
        if isinstance(self.library, Exception):
            raise self.library
        return self.library

    def get(self, _container_id: str) -> None:
        return None


class Collected:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reader = 1000.0, Reader()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now + 1e9)
        self.bypasses = Bypasses(self.reader, self.reader)  # type: ignore[arg-type]

    def collect(self, *processes: Process, seconds: float = 31.0) -> tuple[WithoutSlot, ...]:
        """Collect after ``seconds``, let the lane answer, and return the report."""

        async def collected() -> None:
            self.bypasses.note(processes)
            for _ in range(5):
                await asyncio.sleep(0)

        self.now += seconds
        asyncio.run(collected())
        return self.bypasses.report(processes)


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Collected:
    return Collected(monkeypatch)


def test_process_without_slot_is_reported_after_30_seconds(collected: Collected) -> None:
    assert collected.collect(PROCESS) == ()
    assert collected.collect(PROCESS, seconds=29.0) == ()
    assert collected.reader.asked == []
    (report,) = collected.collect(PROCESS, seconds=2.0)
    assert report == WithoutSlot(PROCESS, collected.now - 31 + 1e9, (BypassReason.STATIC,))
    owner = replace(PROCESS, no_slot=None)
    assert collected.collect(owner) == ()
    assert collected.collect(PROCESS) == ()


def test_causes_are_read_once_per_container(collected: Collected) -> None:
    other = replace(PROCESS, host_pid=101)
    for _ in range(4):
        collected.collect(PROCESS, other)
    asked = [("library_causes", 101), ("mount_causes", 101), ("library_causes", 100), ("mount_causes", 100)]
    assert collected.reader.asked == asked


HOST = replace(PROCESS, container_id=None, no_slot=SampleReason.NOT_IN_CONTAINER)


@pytest.mark.parametrize(
    ("process", "library", "causes", "asked"),
    [
        (PROCESS, [BypassReason.LOADED], (BypassReason.LOADED,), 1),  # the mounts need no read
        (PROCESS, ProcessGone("100"), (), 1),
        (HOST, [], (), 0),
    ],
    ids=["library loaded", "process ended", "process of the host"],
)
def test_causes_are_read_only_if_they_can_apply(
    collected: Collected,
    process: Process,
    library: list[str] | ResolverError,
    causes: tuple[BypassReason, ...],
    asked: int,
) -> None:
    collected.reader.library = library
    collected.collect(process)
    (report,) = collected.collect(process)
    assert report.causes == causes
    assert collected.reader.asked == [("library_causes", 100)] * asked


def test_unreadable_process_is_a_reason_and_retried(collected: Collected) -> None:
    collected.reader.library = TooSlow("it holds its memory")
    collected.collect(PROCESS)
    (report,) = collected.collect(PROCESS)
    assert report.causes == (BypassReason.UNREADABLE,)
    collected.reader.library = []
    (report,) = collected.collect(PROCESS)
    assert report.causes == (BypassReason.NOT_MOUNTED,)
