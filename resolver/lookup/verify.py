"""One process, read while it is held, so that the facts are about it and not about a later process with its PID."""

from __future__ import annotations

from contextlib import contextmanager

from resolver.base.errors import ProcessGone
from resolver.base.records import NamedTuple

TYPE_CHECKING = False  # as typing's, which a look-up does without
if TYPE_CHECKING:
    from collections.abc import Iterator

    from resolver.linux.procfs import ProcessHandle, Procfs


class ContainerProcess(NamedTuple):
    """Process of a container, with number ``container_pid`` in the PID namespace ``pidns``.

    ``start_time`` is in clock ticks since boot, ``source`` is ``cgroup``, ``scan`` or a source of PIDs. Facts that the
    kernel hides are None or empty.
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
    """Hold a process for a ``with`` block; ProcessGone at its end if the process has ended by then.

    Facts read in the block are about that process. ``keep``: without an error the handle stays open, for the caller.
    Raises ProcessGone and AccessDenied.
    """
    handle, kept = procfs.open_handle(host_pid), False
    try:
        yield handle
        # Last of all: a process that runs now was there, under this PID, during every read of the block.
        if not handle.alive():
            raise ProcessGone(f"process {host_pid} ended while it was checked")
        kept = keep
    finally:
        if not kept:
            handle.close()
