"""The node as the checks see it: a daemon's settings, and shared answers, each asked once."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from resolver import client
from resolver.base.errors import AccessDenied, ResolverError
from resolver.base.lock_holder import lock_holder
from resolver.base.reasons import STARTING
from resolver.base.source_records import steps
from resolver.config import Settings
from resolver.linux.procfs import Procfs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resolver.api.status import Status
    from resolver.doctor.findings import Finding
    from resolver.gpu.sampler import Collection
    from resolver.linux.mounts import Mount

#: Most rounds of a search for regions.
_ROUNDS = 4096
_STATUS_SECONDS = 3.0


class NodeRegions(NamedTuple):
    """Content of the containers directories: ``(path, layout)`` of each region; rejected files with reasons."""

    regions: tuple[tuple[str, str], ...]
    rejected: Mapping[str, str]
    missing_dirs: frozenset[str]
    not_writable: Sequence[str]


class Node:
    """The checked node. ``settings_error`` explains why the default settings are used instead of the given ones."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        settings_from: str = "",
        settings_error: str = "",
        nvml_seconds: float = 20.0,
    ) -> None:
        """Take the settings. ``nvml_seconds`` is the driver's time limit: it may open every GPU first."""
        self.settings = settings or Settings()
        self.settings_from = settings_from
        self.settings_error = settings_error
        self.procfs = Procfs()
        self.nvml_seconds = nvml_seconds
        self.no_answer = ""  # why no daemon answers
        self.refused = False  # a daemon answered, and refused
        self.tried: dict[str, Finding] = {}  # by source
        self.works: set[str] = set()  # sources that found a new process

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the sources that the daemon may use, best first."""
        return steps(self.settings.source)

    @cached_property
    def mounts(self) -> list[Mount]:
        return self.procfs.mounts("self")

    @cached_property
    def status(self) -> Status | None:
        """Return a running daemon's ``/v1/status``; None, and `no_answer` says why, if none answers."""
        from resolver.api.status import Status

        try:
            body = client.get_bytes("/v1/status", self.settings.socket_path, seconds=_STATUS_SECONDS)
            return msgspec.json.decode(body, type=Status)
        except msgspec.DecodeError:
            self.no_answer = "its answer is not understood: it is of another version"
        except (ResolverError, OSError) as error:
            self.no_answer, self.refused = str(error), isinstance(error, AccessDenied)
        return None

    @cached_property
    def lock_holder(self) -> int | None:
        """Return the host PID of the daemon that holds the lock in our run directory, None without one."""
        return lock_holder(self.settings.run_dir)

    @cached_property
    def collection(self) -> Collection:
        """Return NVML's answer, from a worker like the daemon's; a hanging driver costs its time limit, once."""
        import asyncio

        from resolver.gpu.sampler import Sampler

        async def collect() -> Collection:
            sampler = Sampler()
            try:
                answer = await sampler.collect(self.nvml_seconds)
                late = f"the driver did not answer within {self.nvml_seconds:g} s"
                return answer._replace(error=late) if answer.error == STARTING else answer
            finally:
                sampler.stop()

        return asyncio.run(collect())

    @cached_property
    def regions(self) -> NodeRegions:
        """Return all that the daemon would find, read as it reads: no lock, no write, every step bounded."""
        import asyncio

        from resolver.containers.log_names import ContainerNames
        from resolver.hami.directory_finder import DirectoryFinder

        settings = self.settings
        names = ContainerNames(settings.container_logs_dir, settings.pod_logs_dir)
        finder = DirectoryFinder(settings.containers_dir, self.procfs, names=names)

        async def search() -> None:
            finder.refresh(full=True)
            for _ in range(_ROUNDS):
                if not await finder.settle():
                    break
                finder.refresh(full=False)

        try:
            asyncio.run(search())
            listing = sorted(finder.regions.items())
            closed = [
                path for path, region in listing if not os.access(f"/proc/self/fd/{region.fd}", os.W_OK)
            ]
            regions = tuple((path, region.layout.name) for path, region in listing)
            return NodeRegions(
                regions, dict(sorted(finder.rejected.items())), frozenset(finder.missing_dirs), closed
            )
        finally:
            finder.close()
