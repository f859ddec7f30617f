"""Discovery of regions through processes' mappings, which a fake lane reads."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resolver.hami.mapping_finder import MappingFinder
from resolver.linux.cgroup import ContainerCgroup
from resolver.linux.procfs import Procfs
from resolver.workers.lane import OpenFile
from resolver.workers.lanes import TenantReader
from tests.fakes import cachefiles
from tests.fakes.clock import Clock
from tests.fakes.direct import ended_lane

A, B = "a" * 64, "b" * 64


class Containers(Procfs):
    """The test is in the container A, its parent in B."""

    def container(self, host_pid: int) -> ContainerCgroup:
        return ContainerCgroup(A if host_pid == os.getpid() else B, None, None)


class Lane(TenantReader):
    """A lane that delays requests about container A's files until the test releases it."""

    def __init__(self, files: dict[str, Path]) -> None:
        super().__init__(Procfs())
        self.files, self.go, self.opened = files, asyncio.Event(), list[str]()
        self.offered = ""  # a path to answer with instead of the held file

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        file = self.files[payer]
        match function.__name__:
            case "hold_written":
                return self.offered or OpenFile(os.open(file, os.O_PATH)), "/tmp/cudevshr.cache"  # noqa: S108
            case "place_of_held":
                return "8:1", str(file)
            case "shown_in_maps":
                return "8:1", file.stat().st_ino
            case "open_held":
                self.opened.append(payer)
                if payer == A:
                    await self.go.wait()
        return await super().ask(payer, about, function, *arguments)


async def refresh(finder: MappingFinder) -> list[str]:
    added = []
    for _ in range(3):
        added += [found.ownership.container for found in finder.refresh(full=True).added]
        for _ in range(5):
            await asyncio.sleep(0)
    return added


def finder_of(lane: Lane, clock: Callable[[], float] = time.monotonic) -> MappingFinder:
    pids = [os.getpid(), os.getppid()]
    return MappingFinder(Containers(), lambda: pids, lambda _: 1, lambda _: False, clock, lane)


async def test_slow_container_delays_no_other(tmp_path: Path) -> None:
    lane = Lane({A: cachefiles.container(tmp_path, "a"), B: cachefiles.container(tmp_path, "b")})
    finder = finder_of(lane)
    assert await refresh(finder) == [B]
    lane.go.set()
    assert await refresh(finder) == [A]
    finder.close()


async def test_ended_lane_blames_no_container(tmp_path: Path) -> None:
    lane = Lane({A: cachefiles.container(tmp_path, "a"), B: cachefiles.container(tmp_path, "b")})
    finder = finder_of(lane, clock := Clock())
    lane.go.set()
    with ended_lane() as lane.offered:
        assert await refresh(finder) == []
    assert finder.rejected == {}
    lane.offered, clock.now = "", clock.now + 1
    assert sorted(await refresh(finder)) == [A, B]
    finder.close()


async def test_file_of_two_processes_is_one_region(tmp_path: Path) -> None:
    file = cachefiles.container(tmp_path, "shared")
    lane = Lane({A: file, B: file})
    finder = finder_of(lane)
    assert await refresh(finder) == [B]
    lane.go.set()
    assert await refresh(finder) == []
    assert (len(finder.regions), finder.rejected, sorted(lane.opened)) == (1, {}, [A, B])
    finder.close()
