"""The containers of this node: when they started, and their names.

Found through the first process of each PID namespace that a runtime made, and through users of a GPU or a cache file. A
container that shares a namespace and uses neither isn't listed; look-ups find it.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

from msgspec import structs

from resolver.base.budget import Slices
from resolver.base.errors import CannotKnow, ProcessGone, WorkerFailed
from resolver.base.journal import Journal
from resolver.containers.find import name_by_mounts
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.containers.log_names import ContainerNames
from resolver.linux.procfs import Procfs
from resolver.pids.pidmap import PidMap
from resolver.state import Container
from resolver.workers.lane import ALL
from resolver.workers.lanes import TenantReader

#: Seconds between two refreshes of the map that only serve containers without a GPU.
_SCAN_SECONDS = 5.0
#: Attempts to read a container's name: the runtime makes its mounts after its first process.
_LOOKS = 5
#: Seconds after which all containers are checked again, even without a change.
_LOOK_AGAIN = 30.0
#: Program of a pod's sandbox, which lacks the mounts that name a container.
_SANDBOX = "pause"


class _Known(NamedTuple):
    report: Container
    host_pid: int
    looks: int

    @property
    def settled(self) -> bool:
        """Return True if another read adds nothing: a missing name may be known next time."""
        return bool(self.report.container_name) or not self.report.pod_uid or self.looks >= _LOOKS


class Census:
    """List of running containers."""

    def __init__(
        self,
        procfs: Procfs,
        pidmap: PidMap,
        namespaces: KnownNamespaces,
        names: ContainerNames,
        journal: Journal,
        reader: TenantReader | None = None,
    ) -> None:
        self._procfs, self._reader = procfs, reader or TenantReader(procfs)
        self._pidmap = pidmap
        self._namespaces = namespaces
        self.pods, self._names = names.pods, names
        self._journal = journal
        self._known: dict[str, _Known] = {}
        self._sandboxes = set[str]()  # ids of containers that only hold a pod's namespaces
        self.next_scan = 0.0
        self._asked: tuple[object, ...] = ()  # users and regions at the last scan
        self._made_of: tuple[object, ...] = ()  # inputs of the list
        self._again_at = 0.0

    async def refresh(self, users: Mapping[str, int], regions: Mapping[str, list[str]]) -> bool:
        """Update the list; return True if anything changed, or may have: names of processes do.

        ``users``: a host PID for each container id known from elsewhere; ``regions``: paths by id.
        """
        now = time.monotonic()
        if now >= self.next_scan or (users, regions) != self._asked:
            self.next_scan, self._asked = now + _SCAN_SECONDS, (users, regions)
            await self._pidmap.catch_up(Slices())
        self._names.refresh()
        made_of = (self._pidmap.inits(), users, regions, self.pods.names)
        again = now >= self._again_at
        if made_of == self._made_of and not again:
            return False
        before = self.containers()
        slices = Slices()
        for _ in self._namespaces.steps():
            await slices.yield_if_due()
        present: dict[str, tuple[int, int | None]] = {
            cid: (host_pid, None) for cid, host_pid in users.items()
        }
        present |= self._by_inits()
        self._sandboxes &= present.keys()
        present = {cid: seen for cid, seen in present.items() if cid not in self._sandboxes}
        for container_id in self._known.keys() - present.keys():
            report = self._known.pop(container_id).report
            self._journal.record("container_ended", level="debug", **_about(report))
        for container_id, (host_pid, pidns) in present.items():
            container = self._known.get(container_id)
            if container is None or container.host_pid != host_pid or not container.settled:
                await slices.yield_if_due()
                await self.identify(container_id, host_pid, pidns, container)
        await slices.yield_if_due()
        for container_id, container in self._known.items():
            namespace, pod = (name or None for name in self.pods.of(container.report.pod_uid or ""))
            paths = tuple(regions.get(container_id, ()))
            seen = container.report
            if (seen.namespace, seen.pod, seen.regions) != (namespace, pod, paths):
                report = structs.replace(seen, namespace=namespace, pod=pod, regions=paths)
                self._known[container_id] = container._replace(report=report)
        complete = all(container.settled for container in self._known.values())
        self._made_of, self._again_at = (made_of if complete else ()), now + _LOOK_AGAIN
        return again or self.containers() != before

    def _by_inits(self) -> dict[str, tuple[int, int | None]]:
        """Return first process and PID namespace by container id.

        A tenant with cgroups can imitate another container's id, so the first holder keeps it.
        """
        claims: dict[str, list[tuple[int, int | None]]] = {}
        for first in self._namespaces.made_by_runtime():
            claims.setdefault(first.container_id, []).append((first.host_pid, first.pidns))
        containers = {}
        for container_id, claim in claims.items():
            container = self._known.get(container_id)
            rightful = [pidns for pidns in claim if container and pidns[0] == container.host_pid] or claim
            if len(rightful) == 1:
                containers[container_id] = rightful[0]
        return containers

    async def identify(
        self, container_id: str, host_pid: int, pidns: int | None, known: _Known | None
    ) -> None:
        """Add a new container with its names."""
        pod_uid, runtime, name = "", "", ""
        try:
            container = self._procfs.container(host_pid)
            if container.container_id != container_id:
                return  # it ended, and its PID is another's: the next scan of all will show
            pod_uid, runtime = container.pod_uid or "", container.runtime or ""
            kubelets = self._names.of(container_id)
            if kubelets is not None:
                name = kubelets.container
            else:
                name = await self._reader.ask("", ALL, name_by_mounts, host_pid, container.pod_uid)
            if pod_uid and not name and self._procfs.comm(host_pid) == _SANDBOX:
                self._sandboxes.add(container_id)
                return
        except ProcessGone:
            return
        except (CannotKnow, WorkerFailed, OSError):
            pass
        namespace, pod = self.pods.of(pod_uid)
        report = Container(
            container_id=container_id,
            pod_uid=pod_uid or None,
            container_name=name or None,
            namespace=namespace or None,
            pod=pod or None,
            runtime=runtime or None,
            pidns=pidns,
            init_host_pid=host_pid if pidns is not None else None,
            regions=(),
            since=known.report.since if known else time.time(),
        )
        if known is None:
            self._journal.record("container_started", level="debug", **_about(report))
        self._known[container_id] = _Known(report, host_pid, known.looks + 1 if known else 1)

    def containers(self) -> tuple[Container, ...]:
        return tuple(container.report for container in self._known.values())

    def get(self, container_id: str) -> Container | None:
        container = self._known.get(container_id)
        return container.report if container else None


def _about(report: Container) -> dict[str, str]:
    names = ("container_id", "pod_uid", "container_name", "namespace", "pod")
    return {name: getattr(report, name) or "" for name in names}
