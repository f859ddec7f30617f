"""What is known of the node: from the daemon, or, where none answers, read here without writing anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from resolver import client
from resolver.errors import CannotKnow, NoDaemon

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resolver.state import Snapshot

Json = dict[str, Any]
#: A daemon that takes longer hangs, and is not waited for.
_SECONDS = 2.0


class Known(NamedTuple):
    """Answers of the API's routes. ``no_daemon`` says why they are not the daemon's; empty if they are.

    ``settings_by`` says by which settings we looked ourselves.
    """

    status: Json
    containers: list[Json]
    processes: list[Json]
    slots: list[Json]
    regions: list[Json]
    rejected: list[Json]
    missing_dirs: list[str]
    gpus: list[Json]
    no_daemon: str = ""
    settings_by: str = ""

    @property
    def writes(self) -> bool:
        """Whether somebody repairs what is wrong."""
        return not self.no_daemon and not self.status["dry_run"]


def read(socket_path: str | None, file: str | None = None) -> Known:
    """Ask the daemon, else look, by the settings of that file if given. Raises ResolverError if neither can be."""

    def ask(name: str) -> Json:
        answer: Json = client.get_json(f"/v1/{name}", socket_path, seconds=_SECONDS)
        return answer

    try:
        return _read(ask)
    except NoDaemon as error:
        return _by_ourselves(str(error), socket_path, file)


def _read(ask: Callable[[str], Json], no_daemon: str = "", settings_by: str = "") -> Known:
    regions = ask("regions")
    return Known(
        status=ask("status"),
        containers=ask("containers")["containers"],
        processes=ask("processes")["processes"],
        slots=ask("slots")["slots"],
        regions=regions["regions"],
        rejected=regions["rejected"],
        missing_dirs=regions["missing_dirs"],
        gpus=ask("gpus")["gpus"],
        no_daemon=no_daemon,
        settings_by=settings_by,
    )


def _by_ourselves(no_daemon: str, socket_path: str | None, file: str | None) -> Known:
    """The daemon's own round, as a dry run. No event, no lock, no socket; it takes a second."""
    import os

    from resolver.lean import lean

    with lean("asyncio"):
        import asyncio
    import msgspec

    from resolver.cli.in_force import settings_in_force
    from resolver.config import SourceName
    from resolver.daemon.once import once
    from resolver.linux.procfs import Procfs
    from resolver.log.journal import setup_logging

    if os.geteuid() != 0:
        raise CannotKnow(f"{no_daemon}. To look without a daemon takes root (sudo)")
    Procfs().require_host_view()
    in_force = settings_in_force(socket_path, file)
    settings = msgspec.structs.replace(in_force.settings, dry_run=True, source=SourceName.SCAN)
    setup_logging(settings.log_format, "error")
    documents = _documents(asyncio.run(once(settings)))
    names = ("containers_dir", "pod_logs_dir")
    by = ", ".join(f"{name} by {in_force.origins.get(name, in_force.whose)}" for name in names)
    return _read(lambda name: msgspec.to_builtins(documents[name]()), no_daemon, by)


def _documents(picture: Snapshot) -> Mapping[str, Callable[[], Any]]:
    """As the API would answer."""
    from resolver.api import shapes

    slots = [(region, slot) for region in picture.regions for slot in region.slots]
    rejected = [shapes.RejectedFile(path, reason) for path, reason in picture.rejected.items()]
    return {
        "status": lambda: shapes.status(picture, {}),
        "containers": lambda: shapes.Containers(picture.at, list(picture.containers)),
        "processes": lambda: shapes.Processes(
            at=picture.at,
            collected_at=picture.collected_at or None,
            error=picture.joined.error or None,
            processes=list(picture.gpu_processes),
        ),
        "slots": lambda: shapes.Slots(picture.at, [shapes.Slot.of(*each) for each in slots]),
        "regions": lambda: shapes.Regions(
            at=picture.at,
            rejected=rejected,
            missing_dirs=list(picture.missing_dirs),
            regions=list(map(shapes.Region.of, picture.regions)),
        ),
        "gpus": lambda: shapes.Gpus.of(picture.inventory, picture.joined.error),
    }


def processes_in(container_id: str) -> int | None:
    """How many a container has, by the kernel; None where that is out of sight."""
    from resolver.containers.find import Wanted, find_container
    from resolver.errors import ResolverError
    from resolver.linux.procfs import Procfs

    procfs = Procfs()
    try:
        return len(find_container(procfs, Wanted(container_id), procfs.mounts("self"), None)[0].host_pids)
    except (ResolverError, OSError):
        return None
