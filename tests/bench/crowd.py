"""The bench's crowd: thousands of idle processes, and regions whose slots they own."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from resolver.linux.procfs import Procfs
from tests.fakes.bpf.lives import children_of
from tests.fakes.cachefiles import region

HERE = Path(__file__).parent
UUID = "GPU-5a3c1e70-8d42-4f6b-9b1e-2f7d0c9a4e01"
FILE = "11111111-2222-3333-4444-555555555555.cache"


@contextlib.contextmanager
def crowd(containers: int, processes: int, directory: Path | None = None) -> Iterator[int]:
    """Start PID namespaces with as many processes in each; yield the host PID of their starter."""
    with tempfile.TemporaryDirectory() as scratch:
        program = f"{scratch}/crowd"
        subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-o", program, HERE / "crowd.c"], check=True)
        arguments = [program, str(containers), str(processes)]
        if directory is not None:
            arguments += [str(directory), FILE]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
            if starter.stdout is None or starter.stdout.readline() != b"ready\n":
                raise RuntimeError("the crowd did not start: it needs root and room for its processes")
            try:
                yield starter.pid
            finally:
                starter.kill()


def make_regions(directory: Path, containers: int, slots: int) -> None:
    """One region per container, with slots for the PIDs 1 to ``slots``."""
    for number in range(containers):
        region(directory / f"pod-{number}_main" / FILE, [(pid, 0) for pid in range(1, slots + 1)], [UUID])


def host_pids(starter: int) -> dict[int, list[int]]:
    """Return each container's host PIDs by the kernel's list of children, in order of the PIDs in the container."""
    procfs = Procfs()
    found: dict[int, list[int]] = {}
    for number, init in enumerate(children_of(starter)):
        members = [init, *children_of(init)]
        found[number] = sorted(members, key=lambda host_pid: procfs.ns_pids(host_pid)[-1])
    return found
