"""A process that is held while it is read."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from resolver.base.errors import ProcessGone
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.lookup.resolve import verify


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture(params=[True, False], ids=["pidfd", "directory"])
def procfs(request: pytest.FixtureRequest) -> Procfs:
    return Procfs(use_pidfd=request.param)


def is_open(handle: ProcessHandle) -> bool:
    return handle.fd >= 0 and os.path.exists(f"/proc/self/fd/{handle.fd}")


@pytest.mark.parametrize("keep", [False, True])
def test_reads_of_living_process_are_kept(
    procfs: Procfs, sleeper: subprocess.Popen[bytes], *, keep: bool
) -> None:
    with verify(procfs, sleeper.pid, keep=keep) as handle:
        assert handle.process.host_pid == sleeper.pid
        assert is_open(handle)
    assert is_open(handle) is keep
    handle.close()


@pytest.mark.parametrize("keep", [False, True])
def test_reads_of_ended_process_are_dropped(
    procfs: Procfs, sleeper: subprocess.Popen[bytes], *, keep: bool
) -> None:
    def read() -> int:
        with verify(procfs, sleeper.pid, keep=keep) as handle:
            handles.append(handle)
            sleeper.kill()
            os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # a zombie still has its PID
            return handle.process.host_pid

    handles: list[ProcessHandle] = []
    with pytest.raises(ProcessGone, match=f"process {sleeper.pid} ended"):
        read()
    assert not is_open(handles[0])


@pytest.mark.parametrize("keep", [False, True])
def test_error_of_the_block_is_kept_and_files_closed(
    procfs: Procfs, sleeper: subprocess.Popen[bytes], *, keep: bool
) -> None:
    with pytest.raises(KeyError), verify(procfs, sleeper.pid, keep=keep) as handle:
        raise KeyError
    assert not is_open(handle)
