"""The walk through a tenant's file systems, one of which never answers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.errors import RegionRejected
from resolver.hami import mapping_finder
from resolver.hami.mapping_finder import FILE_SYSTEMS, MappingFinder
from resolver.linux.mappings import opened_by_name
from resolver.linux.procfs import Procfs
from resolver.reasons import RegionReason
from resolver.workers import path_walker
from tests.fakes import cachefiles

#: Maps its file as HAMi does; told to, it mounts a FUSE over the directory, whose requests it never reads.
HOLDER = """
    import ctypes, mmap, os, sys, time
    directory, silent = sys.argv[1], sys.argv[2] == "silent"
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(directory + "/cudevshr.cache", os.O_RDWR)
    held = mmap.mmap(fd, os.fstat(fd).st_size)
    if silent:
        assert libc.unshare(0x20000) == 0  # CLONE_NEWNS
        assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
        fuse = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
        assert libc.mount(b"silent", directory.encode(), b"fuse", 0, options) == 0, os.strerror(ctypes.get_errno())
    print("ready", flush=True)
    time.sleep(1000)
"""


class Holders:
    def __init__(self, place: Path) -> None:
        self._place = place
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, name: str, *, silent: bool) -> int:
        """The PID of a process that maps a region of its own, in ``<name>``."""
        path = cachefiles.write(self._place / name / mapping_finder.NAME, cachefiles.recorded("v1.2"))
        process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-c",
                textwrap.dedent(HOLDER),
                str(path.parent),
                "silent" if silent else "",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    def end(self) -> None:
        """All of them; with the last descriptor of a FUSE its waiting requests fail."""
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def holders(tmp_path: Path) -> Iterator[Holders]:
    made = Holders(tmp_path)
    yield made
    made.end()


def test_a_file_system_that_never_answers_keeps_only_itself_waiting(
    holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        mapping_finder, "FILE_SYSTEMS", FILE_SYSTEMS | {"fuse"}
    )  # stands for one below an overlay
    silent = holders.start("silent", silent=True)
    good = holders.start("good", silent=False)

    async def scene() -> None:
        finder = MappingFinder(
            Procfs(), lambda: {silent, good}, lambda host_pid: host_pid, lambda _name: False
        )
        longest, found, refused = 0.0, list[str](), list[tuple[str, RegionRejected]]()
        deadline = time.monotonic() + 60
        while (not found or not refused) and time.monotonic() < deadline:
            began = time.monotonic()
            changes = finder.refresh(full=True)
            longest = max(longest, time.monotonic() - began)
            found += [region.path for region in changes.added]
            refused += changes.rejected
            await asyncio.sleep(0.02)
        assert [Path(name).parent.name for name in found] == ["good"]
        ((name, why),) = refused
        assert "/silent/" in name
        assert (why.reason, "did not answer within" in why.detail) == (RegionReason.IO_ERROR, True)
        assert longest < 10
        assert finder.worker.starts >= 1
        starts = finder.worker.starts
        finder._processes[silent].retry_at = 0.0
        finder.refresh(full=True)
        await finder.settle()
        assert finder.worker.starts == starts  # it is not even asked again so soon
        finder.close()

    asyncio.run(scene())


def test_the_root_is_open_before_the_user_namespace_is_looked_at(holders: Holders) -> None:
    """Or the process could enter one of its own in between, with mounts that wait."""
    host_pid = holders.start("good", silent=False)

    class Watching(Procfs):
        held: list[bool]

        def userns(self, asked: int | str) -> int:
            links = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_there(fd)}
            self.held.append("/" in links)
            return super().userns(asked)

    def fd_there(fd: str) -> bool:
        return os.path.islink(f"/proc/self/fd/{fd}")

    procfs = Watching()
    procfs.held = []
    path = next(each.path for each in opened_by_name(procfs, host_pid, mapping_finder.NAME) if each.writable)
    os.close(path_walker.walk(procfs, host_pid, path, FILE_SYSTEMS))
    assert procfs.held
    assert all(procfs.held)


def test_nothing_but_a_kernels_own_file_system_is_entered(holders: Holders) -> None:
    host_pid = holders.start("silent", silent=True)
    path = next(
        each.path for each in opened_by_name(Procfs(), host_pid, mapping_finder.NAME) if each.writable
    )
    with pytest.raises(RegionRejected) as refused:
        path_walker.walk(Procfs(), host_pid, path, FILE_SYSTEMS)
    assert refused.value.reason is RegionReason.OTHER_DEVICE
    assert "of type fuse" in json.dumps(refused.value.detail)
