"""Documents of the API for `explain` and `top`, read together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.cli.ask_daemon import ask, understood
from resolver.cli.show import duration

if TYPE_CHECKING:
    from collections.abc import Callable

Json = dict[str, Any]
#: A person waits: a daemon that takes longer hangs.
_SECONDS = 2.0
#: So long the last values count after NVML stopped answering.
_COUNTS_SECONDS = 5.0


class Documents(NamedTuple):
    """Lists of the API; ``uses`` and ``without_slot`` are those of `resolver usage`.

    ``no_daemon`` is the reason that no daemon gave them, ``settings_by`` whose settings count.
    """

    status: Json
    containers: list[Json]
    processes: list[Json]
    slots: list[Json]
    regions: list[Json]
    rejected: list[Json]
    missing_dirs: list[str]
    gpus: list[Json]
    uses: list[Json]
    without_slot: list[Json]
    no_daemon: str = ""
    settings_by: str = ""

    @property
    def age(self) -> str:
        """Return the age of NVML's values if it stopped answering; empty while they count."""
        driver = self.status["driver"]
        age = self.status["at"] - (driver["collected_at"] or self.status["at"])
        return duration(age) if driver["error"] and age > _COUNTS_SECONDS else ""

    @property
    def writes(self) -> bool:
        """Return True if a daemon makes repairs."""
        return not self.no_daemon and not self.status["dry_run"]


def documents_from(ask: Callable[[str], Json], no_daemon: str = "", settings_by: str = "") -> Documents:
    """Ask one route after the other. Values that NVML gave too long ago are None."""
    regions, usage, status = ask("regions"), ask("usage"), ask("status")
    lists = {name: ask(name)[name] for name in ("containers", "processes", "slots", "gpus")}
    lists |= {name: regions[name] for name in ("regions", "rejected", "missing_dirs")}
    lists |= {"uses": usage["containers"], "without_slot": usage["without_slot"]}
    documents = Documents(status=status, **lists, no_daemon=no_daemon, settings_by=settings_by)
    if documents.age:
        _forget_values(documents)
    return documents


def _forget_values(documents: Documents) -> None:
    slots = (each for slot in documents.slots for each in slot["device_util"])
    why = {"samples": "failed", "samples_why": f"NVML last answered {documents.age} ago"}
    for names, records in (
        (("sm_util", "memory"), documents.processes),
        (("utilization",), slots),
        (("utilization", "memory_used", "temperature", "power"), documents.gpus),
    ):
        for record in records:
            record.update(dict.fromkeys(names))
    for gpu in documents.gpus:
        gpu.update(why)


def from_daemon(socket_path: str | None) -> Documents:
    """Return the running daemon's. Raises as `resolver.cli.ask_daemon.ask`."""
    with understood():
        return documents_from(lambda name: ask(f"/v1/{name}", socket_path, _SECONDS))
