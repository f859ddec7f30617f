"""GPU > container > process, made from the daemon's documents; and what is unresolved.

A process is under each GPU that NVML lists it on. One that owns a slot, and that NVML does not list, is under every
GPU of its cache file. Whatever is not known is None: it is drawn as ``?``, and never counts as 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

Json = dict[str, Any]

#: What the rows take of a GPU's report.
_GPU_FIELDS = (
    "device_index",
    "illnesses",
    "memory_total",
    "memory_used",
    "mig",
    "name",
    "power",
    "samples",
    "samples_why",
    "temperature",
    "utilization",
)
HOST = "not in a container"
#: Reasons that name no place where a process could be shown.
_UNPLACED = frozenset(("pid_unknown", "process_ended"))


class Amount(NamedTuple):
    """A sum. ``value`` is None if no part of it is known; ``at_least`` if some are not."""

    value: int | None
    at_least: bool = False


class ProcessNode(NamedTuple):
    """A process on one GPU. ``memory`` in bytes; ``repaired``, ``stuck`` and ``no_slot`` are empty where not so."""

    host_pid: int | None
    ns_pid: int | None
    comm: str
    utilization: int | None
    memory: int | None
    repaired: str
    stuck: str
    no_slot: str
    listed: bool  # by NVML; else only its slot says that it is there
    device_uuid: str  # the GPU's, or that of a MIG instance of it


class ContainerNode(NamedTuple):
    """A container on one GPU; ``container_id`` is empty while no process of it is known.

    Limits are HAMi's, by the container's cache file: per cent of the cores, and bytes; None without one.
    """

    container_id: str
    namespace: str
    pod: str
    container_name: str
    pod_uid: str
    utilization: Amount
    memory: Amount
    processes: tuple[ProcessNode, ...]
    core_limit: int | None = None
    memory_limit: int | None = None

    def over(self) -> str:
        """Which limit it is over, ``core``, ``memory`` or both; empty while it is over none as far as is known."""
        used = (("core", self.utilization, self.core_limit), ("memory", self.memory, self.memory_limit))
        return " and ".join(
            what for what, amount, limit in used if limit is not None and (amount.value or 0) > limit
        )


class GpuNode(NamedTuple):
    """A GPU with who uses it. ``report`` is the daemon's of it; empty for one that the inventory does not have.

    ``key`` is its UUID, or another word that no other GPU has.
    """

    key: str
    report: Json
    containers: tuple[ContainerNode, ...]


class UnresolvedNode(NamedTuple):
    """A slot, a sample or a cache file that could not be resolved. ``kind`` is which of the three."""

    kind: str
    container: str
    slot: int | None
    ns_pid: int | None
    host_pid: int | None
    device_uuid: str
    utilization: int | None
    reason: str


class DaemonState(NamedTuple):
    """How the daemon is. ``at`` is when its picture was made (Unix time); errors are empty where there is none."""

    at: float
    driver_version: str
    driver_error: str
    source: str
    not_ready: str
    dry_run: bool
    repaired: int

    @classmethod
    def of(cls, status: Json) -> DaemonState:
        """From ``/v1/status``."""
        driver, source = status["driver"], status["source"]
        return cls(
            at=status["at"],
            driver_version=driver["version"] or "",
            driver_error=driver["error"] or "",
            source=source["name"],
            not_ready=source["not_ready"] or "",
            dry_run=status["dry_run"],
            repaired=status["totals"]["slots_repaired"],
        )


class Tree(NamedTuple):
    """All of it, and how the daemon is."""

    status: DaemonState
    gpus: tuple[GpuNode, ...]
    unresolved: tuple[UnresolvedNode, ...]


class Documents(NamedTuple):
    """The lists in the daemon's answers to ``/v1/gpus`` and so on, as it gave them."""

    status: Json
    gpus: list[Json]
    containers: list[Json]
    processes: list[Json]
    regions: list[Json]
    slots: list[Json]
    rejected: list[Json]


def build(documents: Documents) -> Tree:
    """Order what the daemon says. Raises KeyError or TypeError if it is not what is expected."""
    for gpu in documents.gpus:
        for field in _GPU_FIELDS:
            gpu[field]
    places = _Places(documents)
    for process in documents.processes:
        places.listed(process)
    for region in documents.regions:
        places.region(region)
    files = sorted((str(file["path"]), str(file["reason"])) for file in documents.rejected)
    alone = [
        UnresolvedNode(
            kind="file",
            container=path,
            slot=None,
            ns_pid=None,
            host_pid=None,
            device_uuid="",
            utilization=None,
            reason=reason,
        )
        for path, reason in files
    ]
    return Tree(DaemonState.of(documents.status), tuple(places.gpus()), (*places.unresolved, *alone))


def total(values: Iterable[int | None], *, missing: bool = False, most: int | None = None) -> Amount:
    """The sum of what is known, at most ``most``. ``missing``: there is more, and of that nothing is known."""
    values = list(values)
    known = [value for value in values if value is not None]
    partly = missing or len(known) < len(values)
    if partly and not known:
        return Amount(None)
    return Amount(sum(known) if most is None else min(sum(known), most), partly)


class _Spot:
    """A container on a GPU, while it is being put together."""

    def __init__(self, names: Json) -> None:
        self.names = names
        self.processes: list[ProcessNode] = []
        self.limits: tuple[int | None, int | None] = (None, None)

    def container(self, *, asked: bool) -> ContainerNode:
        """``asked``: the driver listed what runs on that GPU, so that an empty list means none."""
        names, processes = self.names, self.processes
        missing = not asked and not processes
        return ContainerNode(
            names["container_id"] or "",
            names["namespace"] or "",
            names["pod"] or "",
            names["container_name"] or "",
            names["pod_uid"] or "",
            # Samples of several processes are of several moments: together they can pass the whole.
            total((each.utilization for each in processes), missing=missing, most=100),
            total((each.memory for each in processes), missing=missing),
            tuple(processes),
            *self.limits,
        )


class _Places:
    """Who is where, while it is being put together."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._known = {each["container_id"]: each for each in documents.containers}
        self._by_name: dict[tuple[str, str], list[Json]] = {}
        for each in documents.containers:
            self._by_name.setdefault((each["pod_uid"], each["container_name"]), []).append(each)
        self._parents = {
            instance["uuid"]: gpu["uuid"] for gpu in documents.gpus for instance in gpu["mig_instances"]
        }
        self._slots: dict[str, list[Json]] = {}  # by their region's path
        self._owned: dict[int, Json] = {}  # by their owner
        for slot in documents.slots:
            self._slots.setdefault(slot["path"], []).append(slot)
            if slot["host_pid"] is not None and not slot["dead"]:
                self._owned[slot["host_pid"]] = slot
        self._listed = {process["host_pid"] for process in documents.processes}
        # By device, then by container.
        self._places: dict[str, dict[str, _Spot]] = {_gpu_key(gpu): {} for gpu in documents.gpus}
        self.unresolved: list[UnresolvedNode] = []

    def _at(self, device: str, names: Json) -> _Spot:
        places = self._places.setdefault(self._parents.get(device, device), {})
        key = names["container_id"] or (_key(names) if names["container_name"] else "")
        place = places.get(key)
        if place is None:
            place = places[key] = _Spot(names)
        return place

    def listed(self, process: Json) -> None:
        """A process that NVML lists."""
        host_pid, no_slot = process["host_pid"], process["no_slot"] or ""
        device, sm_util = process["device_uuid"], process["sm_util"]
        if no_slot in _UNPLACED and not process["container_id"] and not process["container_name"]:
            self.unresolved.append(
                UnresolvedNode(
                    kind="sample",
                    container="",
                    slot=None,
                    ns_pid=process["ns_pid"],
                    host_pid=host_pid,
                    device_uuid=device,
                    utilization=sm_util,
                    reason=no_slot,
                )
            )
            return
        slot = self._owned.get(host_pid) or {}
        self._at(device, process).processes.append(
            ProcessNode(
                host_pid=host_pid,
                ns_pid=process["ns_pid"],
                comm=process["comm"] or "",
                utilization=sm_util,
                memory=process["memory"],
                repaired=slot.get("repaired") or "",
                stuck=slot.get("stuck") or "",
                no_slot=no_slot,
                listed=True,
                device_uuid=device,
            )
        )

    def region(self, region: Json) -> None:
        """A cache file: its slots, and that its container has these GPUs."""
        names, slots = self._names(region), self._slots.get(region["path"], ())
        for index, device in enumerate(region["device_uuids"]):
            place = self._at(device, names)
            # An older daemon does not report them.
            limits = (region.get(field) or () for field in ("sm_limit", "limit"))
            core, memory = (each[index] if index < len(each) else None for each in limits)
            place.limits = (core or place.limits[0], memory or place.limits[1])
            place.processes += [
                ProcessNode(
                    host_pid=slot["host_pid"],
                    ns_pid=slot["pid"],
                    comm="",
                    utilization=slot["device_util"][index]["utilization"],
                    memory=None,
                    repaired=slot["repaired"] or "",
                    stuck=slot["stuck"] or "",
                    no_slot="",
                    listed=False,
                    device_uuid=device,
                )
                for slot in slots
                if slot["host_pid"] is not None and not slot["dead"] and slot["host_pid"] not in self._listed
            ]
        self.unresolved += [
            UnresolvedNode(
                kind="slot",
                container=title(names),
                slot=slot["slot"],
                ns_pid=slot["pid"],
                host_pid=slot["host_pid"],
                device_uuid="",
                utilization=None,
                reason=slot["unresolved"],
            )
            for slot in slots
            if slot["unresolved"] is not None
        ]

    def _names(self, region: Json) -> Json:
        """Who the container of a cache file is, as far as that is certain."""
        known = self._known.get(region["container_id"])
        if known is None and region["pod_uid"] and region["container_name"]:
            same = self._by_name.get((region["pod_uid"], region["container_name"]), [])
            known = same[0] if len(same) == 1 else None
        return known or {**region, "namespace": None, "pod": None}

    def gpus(self) -> list[GpuNode]:
        """Every GPU: those of the inventory in their order, then those that only a process or a file names."""
        reports = {_gpu_key(gpu): gpu for gpu in self._documents.gpus}
        answers = not self._documents.status["driver"]["error"]
        found = []
        for uuid, places in self._places.items():
            report = reports.get(uuid, {})
            asked = answers and report.get("samples") == "ok"
            found.append(
                GpuNode(uuid, report, tuple(place.container(asked=asked) for place in places.values()))
            )
        return found


def _gpu_key(report: Json) -> str:
    """Of its UUID, which NVML may never have given for a GPU in trouble."""
    return report["uuid"] or f"device {report['device_index']}"


def _key(names: Json) -> str:
    return f"{names['pod_uid']}_{names['container_name']}"


def title(names: Json) -> str:
    """A container's name for people: the pod's where it is known, else the ids that are."""
    name, pod_uid = names["container_name"], names["pod_uid"]
    if names["pod"]:
        return "/".join(filter(None, (names["namespace"], names["pod"], name)))
    if name:
        return f"{pod_uid[:8]}/{name}" if pod_uid else str(name)
    return (names["container_id"] or "")[:12] or HOST
