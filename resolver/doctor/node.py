"""The node as the checks see it: the settings that a daemon would have, and what several checks ask for, asked once.

The roots of ``/proc`` and ``/sys``, and what the kernel says about itself, are fields: a directory of fixtures stands
in for a kernel that the tests cannot boot.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver import client
from resolver.config import Settings, SourceName
from resolver.errors import ResolverError
from resolver.linux.procfs import Procfs
from resolver.pids.ladder import LADDER

if TYPE_CHECKING:
    from resolver.doctor.others import Other
    from resolver.gpu.sampler import Collection
    from resolver.hami.directory_finder import DirectoryFinder
    from resolver.linux.procfs import Mount

#: More rounds of looking for regions are not made: each opens up to 256 files.
_ROUNDS = 64
_STATUS_SECONDS = 3.0


class NodeRegions(NamedTuple):
    """What is below the containers directories: ``(path, layout)`` of every region, and what is refused and why.

    ``found`` counts the regions by directory and by placement.
    """

    regions: tuple[tuple[str, str], ...]
    rejected: dict[str, str]
    missing_dirs: frozenset[str]
    not_writable: tuple[str, ...]
    found: dict[tuple[str, str], int]


class Node:
    """Where to look. ``settings_error`` says why the settings are the defaults instead of those that were meant."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        settings_from: str = "",
        settings_error: str = "",
        proc: str = "/proc",
        sys: str = "/sys",
        uname: tuple[str, str] | None = None,
        pythons: tuple[str, ...] = (),
        nvml_seconds: float = 20.0,
    ) -> None:
        """``uname`` is ``(release, machine)``; ``pythons`` those that may have bcc, by default the loader's.

        ``nvml_seconds``: how long the driver may take to start; without a persistence daemon it opens every GPU first.
        """
        self.settings = settings or Settings()
        self.settings_from = settings_from
        self.settings_error = settings_error
        self.procfs = Procfs(proc)
        self.sys = sys
        self.nvml_seconds = nvml_seconds
        running = os.uname()
        self.release, self.machine = uname or (running.release, running.machine)
        self._pythons = pythons

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources that the daemon may use, best first."""
        wanted = self.settings.source
        return LADDER if wanted == SourceName.AUTO else (str(wanted),)

    @property
    def pythons(self) -> tuple[str, ...]:
        """Those that the BPF loader may run under, in its order."""
        from resolver.pids.bpf_load import default_pythons

        return self._pythons or default_pythons()

    def version(self) -> tuple[int, int] | None:
        """The kernel's, None if the release does not start with one."""
        major, _, rest = self.release.partition(".")
        minor = "".join(char if char.isdigit() else " " for char in rest).split(" ", 1)[0]
        return (int(major), int(minor)) if major.isdigit() and minor else None

    @cached_property
    def mounts(self) -> list[Mount]:
        """Our own mount table."""
        return self.procfs.mounts("self")

    @cached_property
    def status(self) -> dict[str, Any] | None:
        """What a running daemon says of itself (``/v1/status``); None if none answers, or answers something else."""
        try:
            answer = client.get_json("/v1/status", self.settings.socket_path, seconds=_STATUS_SECONDS)
        except (ResolverError, OSError):
            return None
        needed = {"at", "host_pid", "source", "driver", "policy", "totals", "counters"}
        return answer if isinstance(answer, dict) and needed <= answer.keys() else None

    @cached_property
    def locks(self) -> dict[int, set[str]]:
        """``{host_pid: files}`` of every lock that is held by flock(2), each file as ``major:minor:inode``.

        By the kernel's list: taking the daemon's lock to find out would make one fail that starts just then.
        """
        found = dict[int, set[str]]()
        with contextlib.suppress(OSError), open(f"{self.procfs.root}/locks", encoding="ascii") as file:
            for line in file:
                fields = line.split()  # one that only waits for a lock has "->" before the kind
                if len(fields) >= 6 and fields[1] == "FLOCK":
                    found.setdefault(int(fields[4]), set()).add(fields[5])
        return found

    @cached_property
    def lock_holder(self) -> int | None:
        """The host PID of the daemon that holds the lock in our run directory, None if nobody does."""
        try:
            info = os.stat(os.path.join(self.settings.run_dir, "lock"))
        except OSError:
            return None
        exact = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
        for host_pid, files in self.locks.items():
            # An overlay gives its files other device numbers than the kernel's list does: then it must be a daemon.
            alike = any(each.endswith(f":{info.st_ino}") for each in files)
            if exact in files or (alike and host_pid in self.daemons):
                return host_pid
        return None

    @cached_property
    def daemons(self) -> dict[int, Other]:
        """``{host_pid: daemon}`` of those that serve the files that a daemon with our settings would."""
        from resolver.doctor.others import find

        return {
            host_pid: other
            for host_pid, other in find(self.procfs).items()
            if other.same_files(self.settings)
        }

    @cached_property
    def collection(self) -> Collection:
        """What NVML says, asked of a worker as the daemon's; a driver that hangs costs its time limit, once."""
        from resolver.gpu.sampler import Sampler

        async def collect() -> Collection:
            sampler = Sampler()
            try:
                return await sampler.collect(self.nvml_seconds)
            finally:
                sampler.stop()

        return asyncio.run(collect())

    @cached_property
    def regions(self) -> NodeRegions:
        """All that the daemon would find, read as it reads: no lock, no write, every step bounded."""
        from resolver.containers.log_names import ContainerNames
        from resolver.hami.directory_finder import DirectoryFinder

        settings = self.settings
        names = ContainerNames(settings.container_logs_dir, settings.pod_logs_dir)
        finder = DirectoryFinder(settings.containers_dir, self.procfs, names=names)
        try:
            found: dict[tuple[str, str], int] = {}
            for _ in range(_ROUNDS):
                changes = finder.refresh(full=True)
                for path, whose in ((each.path, each.whose) for each in changes.added):
                    key = os.path.dirname(os.path.dirname(path)), whose.placement
                    found[key] = found.get(key, 0) + 1
                if not changes.added and not changes.rejected:
                    break
            return _seen(finder, found)
        finally:
            finder.close()


def _seen(finder: DirectoryFinder, found: dict[tuple[str, str], int]) -> NodeRegions:
    return NodeRegions(
        regions=tuple((path, region.layout.name) for path, region in sorted(finder.regions.items())),
        rejected={path: str(reason) for path, reason in sorted(finder.rejected.items())},
        missing_dirs=frozenset(finder.missing_dirs),
        not_writable=tuple(
            path
            for path, region in sorted(finder.regions.items())
            if not os.access(f"/proc/self/fd/{region.fd}", os.W_OK)
        ),
        found=found,
    )
