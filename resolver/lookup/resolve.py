"""Resolves a number in a PID namespace to its process: each candidate is read while it is held.

Candidates come from the kernel (`forward`) or the daemon's map (`cached`), which can't make an answer wrong.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from resolver.base.errors import AccessDenied, ProcessGone
from resolver.base.records import NamedTuple
from resolver.containers.namespaces import Namespace, has_number
from resolver.linux.cgroup import ContainerCgroup
from resolver.linux.procfs import ProcessHandle, Procfs


class ContainerProcess(NamedTuple):
    """Process of a container: ``container_pid`` is its number in the PID namespace ``pidns``.

    ``start_time`` is in clock ticks since boot; ``source`` is ``cgroup``, ``scan`` or a source of PIDs. Hidden facts
    are None or empty.
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

    ``keep``: without an error the handle stays open, for the caller. Raises ProcessGone and AccessDenied.
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


def resolve(
    procfs: Procfs,
    host_pids: Iterable[int],
    namespace: Namespace,
    ns_pid: int,
    within: Callable[[int], ContainerCgroup | None],
    source: str,
    *,
    brief: bool = False,
) -> ContainerProcess | None:
    """Return the first of these processes with number ``ns_pid`` in the namespace, or None.

    ``within`` returns the container of a held process, None for an unwanted one. The container's name is the caller's
    to add. ``brief`` leaves out the command name.
    Raises AccessDenied if nothing else is found.
    """
    refused: AccessDenied | None = None
    for host_pid in host_pids:
        try:
            with verify(procfs, host_pid) as handle:
                matches = has_number(procfs, handle.process, namespace, ns_pid) and within(host_pid)
                comm = procfs.comm(host_pid) if matches and not brief else ""
        except ProcessGone:
            continue
        except AccessDenied as error:
            refused = error
            continue
        if matches:
            return ContainerProcess(
                container_id=matches.container_id,
                container_pid=ns_pid,
                host_pid=host_pid,
                pidns=namespace.pidns,
                pod_uid=matches.pod_uid,
                container_name=None,
                start_time=handle.process.start_time,
                comm=comm,
                source=source,
            )
    if refused is not None:
        raise refused
    return None
