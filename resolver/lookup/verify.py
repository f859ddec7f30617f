"""One process, read while it is held, so that the facts are about it and not about a later process with its PID."""

from __future__ import annotations

from resolver.errors import ProcessGone
from resolver.records import NamedTuple

TYPE_CHECKING = False  # as typing's, which a look-up does without
if TYPE_CHECKING:
    from resolver.linux.procfs import ProcessHandle, Procfs


class ContainerProcess(NamedTuple):
    """A process of a container.

    ``container_pid`` is its number in the PID namespace with inode ``pidns``, ``start_time`` in clock ticks since boot
    (field 22 of ``/proc/<pid>/stat``), ``source`` is ``cgroup`` or ``scan``, or a source of PIDs. What the kernel does
    not show is None; ``container_id`` is empty then.
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


class _Verification:
    """Holds a process for a block. Not by `contextlib`, which would cost 2 us more for each process of thousands."""

    __slots__ = ("_handle", "_keep")

    def __init__(self, handle: ProcessHandle, *, keep: bool) -> None:
        self._handle = handle
        self._keep = keep

    def __enter__(self) -> ProcessHandle:
        return self._handle

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        handle, keep = self._handle, False
        try:
            if kind is None:
                # Last of all: a process that runs now was there, under this PID, during every read of the block.
                if not handle.alive():
                    raise ProcessGone(f"process {handle.process.host_pid} ended while it was checked")
                keep = self._keep
        finally:
            if not keep:
                handle.close()


def verify(procfs: Procfs, host_pid: int, *, keep: bool = False) -> _Verification:
    """Take hold of a process for a ``with`` block; ProcessGone at its end if the process has ended by then.

    So whatever the block read under this PID, and gives back, is about the process of the handle. ``keep``: the handle
    stays open after a block without an error, and is the caller's. Raises ProcessGone and AccessDenied.
    """
    return _Verification(procfs.open_handle(host_pid), keep=keep)
