"""Documents of the API for `explain` and `top`: from the daemon, or read here without writing anything."""

import os
from typing import NamedTuple, Protocol, TypeVar

from msgspec import Struct, convert
from msgspec.structs import replace

from resolver.api import shapes
from resolver.api.status import Status, state_of
from resolver.base.errors import CannotKnow, NoDaemon
from resolver.cli.ask_daemon import ask
from resolver.cli.show import duration
from resolver.gpu.inventory import Gpu
from resolver.state import Container, ContainerUse, Process, Snapshot, WithoutSlot

#: Seconds after which a daemon without an answer counts as hanging.
_SECONDS = 2.0
#: Time for which the last values count after NVML stopped answering.
_COUNTS_SECONDS = 5.0


T = TypeVar("T")


class _Ask(Protocol):
    """Asks a route for an answer of this shape."""

    def __call__(self, shape: type[T], name: str, /) -> T: ...


class Documents(NamedTuple):
    """Lists of the API; ``uses`` and ``without_slot`` are those of `resolver usage`.

    ``no_daemon`` says why no daemon answered, ``settings_by`` where the settings are from.
    """

    status: Status
    containers: list[Container]
    processes: list[Process]
    slots: list[shapes.Slot]
    regions: list[shapes.Region]
    rejected: list[shapes.RejectedFile]
    missing_dirs: list[str]
    gpus: list[Gpu]
    uses: list[ContainerUse]
    without_slot: list[WithoutSlot]
    no_daemon: str = ""
    settings_by: str = ""

    @property
    def age(self) -> str:
        """Return the age of NVML's values if it stopped answering; empty while they count."""
        driver = self.status.driver
        age = self.status.at - (driver.collected_at or self.status.at)
        return duration(age) if driver.error and age > _COUNTS_SECONDS else ""

    @property
    def writes(self) -> bool:
        """Return True if a daemon makes repairs."""
        return not self.no_daemon and not self.status.dry_run

    def without_old_values(self) -> "Documents":
        """Return the documents with None for values that NVML gave too long ago."""
        if not self.age:
            return self
        why = f"NVML last answered {self.age} ago"
        unknown = dict.fromkeys(("utilization", "memory_used", "temperature", "power"))
        utils = [[replace(device, utilization=None) for device in slot.device_util] for slot in self.slots]
        return self._replace(
            processes=[replace(process, sm_util=None, memory=None) for process in self.processes],
            slots=[replace(slot, device_util=values) for slot, values in zip(self.slots, utils, strict=True)],
            gpus=[replace(gpu, **unknown, samples="failed", samples_why=why) for gpu in self.gpus],
        )


def read(socket_path: str | None) -> Documents:
    """Ask the daemon, or make a pass of our own without one. Raises ResolverError if neither is possible."""
    try:
        return from_daemon(socket_path)
    except NoDaemon as error:
        return _by_ourselves(str(error), socket_path)


def from_daemon(socket_path: str | None) -> Documents:
    return _gather(lambda shape, name: ask(shape, f"/v1/{name}", socket_path, _SECONDS))


def of_snapshot(snapshot: Snapshot) -> Documents:
    return _gather(lambda shape, name: convert(answer(snapshot, name), shape, from_attributes=True))


def answer(snapshot: Snapshot, name: str) -> Struct:
    return state_of(snapshot, {}) if name == "status" else shapes.whole(getattr(shapes, name)(snapshot))


def _gather(ask: _Ask) -> Documents:
    regions, usage = ask(shapes.Regions, "regions"), ask(shapes.ContainerUses, "usage")
    return Documents(
        status=ask(Status, "status"),
        containers=ask(shapes.Containers, "containers").containers,
        processes=ask(shapes.Processes, "processes").processes,
        slots=ask(shapes.Slots, "slots").slots,
        regions=regions.regions,
        rejected=regions.rejected,
        missing_dirs=regions.missing_dirs,
        gpus=ask(shapes.Gpus, "gpus").gpus,
        uses=usage.containers,
        without_slot=usage.without_slot,
    ).without_old_values()


def _by_ourselves(no_daemon: str, socket_path: str | None) -> Documents:
    """Make a daemon's pass here as a dry run, without events, lock or socket; it takes a second."""
    from resolver.base.lean import lean

    with lean():
        import asyncio

    from resolver.base.journal import setup_logging
    from resolver.base.source_records import SourceName
    from resolver.cli.in_force import settings_in_force
    from resolver.daemon.once import once
    from resolver.linux.host_view import require_host_view
    from resolver.linux.procfs import Procfs

    if os.geteuid() != 0:
        raise CannotKnow(f"{no_daemon}. Root (sudo) can run this command without a daemon")
    require_host_view(Procfs())
    in_force = settings_in_force(socket_path)
    settings = replace(in_force.settings, dry_run=True, source=SourceName.SCAN)
    setup_logging(settings.log_format, "error")
    snapshot = asyncio.run(once(settings))
    names = ("containers_dir", "pod_logs_dir")
    by = ", ".join(f"{name} by {in_force.origins.get(name, in_force.source)}" for name in names)
    return of_snapshot(snapshot)._replace(no_daemon=no_daemon, settings_by=by)
