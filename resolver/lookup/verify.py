"""One process, looked at while it is held: what is said of it then is about it, and about no later one with its PID."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from resolver.errors import ProcessGone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resolver.linux.procfs import ProcessHandle, Procfs


class Found(NamedTuple):
    """A process of a container.

    ``container_pid`` is its number in the PID namespace with inode ``pidns``, ``start_time`` in clock ticks since boot
    (field 22 of ``/proc/<pid>/stat``), ``source`` is ``cgroup`` or ``scan``, or a source of PIDs. What the kernel does
    not tell is None; ``container_id`` is empty then.
    """

    container_id: str
    container_pid: int
    host_pid: int
    pidns: int
    pod_uid: str | None
    container_name: str | None
    start_time: int
    comm: str
    source: str


@contextmanager
def verify(procfs: Procfs, host_pid: int, *, keep: bool = False) -> Iterator[ProcessHandle]:
    """Take hold of a process for the block; ProcessGone at its end if the process has ended by then.

    So whatever the block read under this PID, and gives back, is about the process of the handle. ``keep``: the handle
    stays open after a block without an error, and is the caller's. Raises ProcessGone and AccessDenied.
    """
    handle = procfs.open_handle(host_pid)
    try:
        yield handle
        # Last of all: a process that runs now was there, under this PID, during every read of the block.
        if not handle.alive():
            raise ProcessGone(f"process {host_pid} ended while it was looked at")
    except BaseException:
        handle.close()
        raise
    if not keep:
        handle.close()
