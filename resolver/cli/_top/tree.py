"""GPU > container > process, made from the daemon's documents; unknown values are None, never 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.base.reasons import SampleReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resolver.cli.documents import Documents

Json = dict[str, Any]

HOST = "not in a container"
#: Reasons that name no place where a process could be shown.
_UNPLACED = (SampleReason.PID_UNKNOWN, SampleReason.PROCESS_ENDED)


class Amount(NamedTuple):
    """A sum. ``value`` is None if no part is known; ``at_least``: some parts are not."""

    value: int | None
    at_least: bool = False


class ProcessNode(NamedTuple):
    """A process on one GPU. ``memory`` in bytes; ``repaired``, ``stuck`` and ``no_slot`` are empty where not so."""

    host_pid: int | None
    ns_pid: int | None
    device_uuid: str  # the GPU's, or that of a MIG instance of it
    comm: str = ""
    utilization: int | None = None
    memory: int | None = None
    repaired: str = ""
    stuck: str = ""
    no_slot: str = ""
    listed: bool = True  # by NVML; else only its slot says that it is there


class ContainerNode(NamedTuple):
    """Container on one GPU, with HAMi's limits: per cent of the cores, and bytes. ``container_id`` may be empty."""

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
    limit_state: str = ""  # of the cores, over the last minute
    idle_since: float | None = None  # Unix time of its last use, if it holds memory

    def over(self) -> str:
        """Return the exceeded limit, ``core``, ``memory`` or both; empty if none is known to be exceeded."""
        used = (("core", self.utilization, self.core_limit), ("memory", self.memory, self.memory_limit))
        return " and ".join(
            what for what, amount, limit in used if limit is not None and (amount.value or 0) > limit
        )


class GpuNode(NamedTuple):
    """GPU with its users. ``report`` is the daemon's, empty if the inventory lacks it; ``key`` a unique word."""

    key: str
    report: Json
    containers: tuple[ContainerNode, ...]


class UnresolvedNode(NamedTuple):
    """A slot, a sample or a cache file that could not be resolved. ``kind`` is which of the three."""

    kind: str
    container: str
    reason: str
    slot: int | None = None
    ns_pid: int | None = None
    host_pid: int | None = None
    device_uuid: str = ""
    utilization: int | None = None


class Tree(NamedTuple):
    """All of it, and how the daemon is. ``at`` is when its picture was made (Unix time)."""

    at: float
    driver_version: str
    driver_error: str
    source: str
    troubles: tuple[str, ...]  # those without which the numbers would be others
    repaired: int
    gpus: tuple[GpuNode, ...]
    unresolved: tuple[UnresolvedNode, ...]


def build(documents: Documents) -> Tree:
    """Order the daemon's answers. Raises KeyError or TypeError if they have another form."""
    places = _Places(documents)
    for process in documents.processes:
        places.listed(process)
    for region in documents.regions:
        places.region(region)
    files = sorted((file["path"], file["reason"]) for file in documents.rejected)
    status = documents.status
    driver, troubles = status["driver"], status.get("troubles", ())
    doubts = [each for each in troubles if each["grave"] or each["reason"] == "dry_run"]
    return Tree(
        at=status["at"],
        driver_version=driver["version"] or "",
        driver_error=driver["error"] or "",
        source=status["source"]["name"],
        troubles=tuple(f"{each['what']}: {each['why']}" for each in doubts),
        repaired=status["totals"]["slots_repaired"],
        gpus=tuple(places.gpus()),
        unresolved=(*places.unresolved, *(UnresolvedNode("file", *each) for each in files)),
    )


def total(values: Iterable[int | None], *, missing: bool = False, most: int | None = None) -> Amount:
    """Sum the known values, up to ``most``. ``missing``: there are others."""
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

    def container(self, account: Json, *, asked: bool) -> ContainerNode:
        """Return its node, with values of its ``account``.

        ``asked``: the driver listed that GPU's processes, so an empty list means none.
        """
        missing = not asked and not self.processes
        cid, namespace, pod, name, uid = (self.names[each] or "" for each in ContainerNode._fields[:5])
        # Samples of several processes are of several moments: together they can pass the whole.
        use = total((each.utilization for each in self.processes), missing=missing, most=100)
        held = total((each.memory for each in self.processes), missing=missing)
        processes, (core, memory) = tuple(self.processes), self.limits
        node = ContainerNode(cid, namespace, pod, name, uid, use, held, processes, core, memory)
        return node._replace(**{each: account[each] for each in ("limit_state", "idle_since") if account})


class _Places:
    """Processes and containers by GPU, under construction."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._known = {each["container_id"]: each for each in documents.containers}
        self._parents = {part["uuid"]: gpu["uuid"] for gpu in documents.gpus for part in gpu["mig_instances"]}
        self._accounts = {(use["device_uuid"], *_name_of(use)): use for use in documents.uses}
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
        name, pod_uid = names["container_name"], names["pod_uid"]
        key = names["container_id"] or (f"{pod_uid}_{name}" if name else "")
        return places.setdefault(key, _Spot(names))

    def listed(self, process: Json) -> None:
        """Add a process that NVML lists."""
        host_pid, no_slot = process["host_pid"], process["no_slot"] or ""
        device, sm_util = process["device_uuid"], process["sm_util"]
        if no_slot in _UNPLACED and not process["container_id"] and not process["container_name"]:
            found = UnresolvedNode("sample", "", no_slot, None, process["ns_pid"], host_pid, device, sm_util)
            self.unresolved.append(found)
            return
        facts = (process["comm"] or "", sm_util, process["memory"], *_of_slot(self._owned.get(host_pid, {})))
        node = ProcessNode(host_pid, process["ns_pid"], device, *facts, no_slot=no_slot)
        self._at(device, process).processes.append(node)

    def region(self, region: Json) -> None:
        """Add a cache file: its slots, and the GPUs of its container."""
        names, slots = self._names(region), self._slots.get(region["path"], ())
        for index, device in enumerate(region["device_uuids"]):
            place = self._at(device, names)
            core, memory = place.limits
            place.limits = (region["sm_limit"][index] or core, region["limit"][index] or memory)
            for slot in slots:
                if slot["host_pid"] is not None and not slot["dead"] and slot["host_pid"] not in self._listed:
                    facts = ("", slot["device_util"][index]["utilization"], None, *_of_slot(slot))
                    node = ProcessNode(slot["host_pid"], slot["pid"], device, *facts, listed=False)
                    place.processes.append(node)
        for slot in slots:
            if (reason := slot["unresolved"]) is not None:
                pids = (slot["pid"], slot["host_pid"])
                self.unresolved.append(UnresolvedNode("slot", title(names), reason, slot["slot"], *pids))

    def _names(self, region: Json) -> Json:
        """Return the container of a cache file, as far as it is certain."""
        known = self._known.get(region["container_id"])
        if known is None and (name := _name_of(region))[0]:
            same = [each for each in self._documents.containers if _name_of(each) == name]
            known = same[0] if len(same) == 1 else None
        return known or {**region, "namespace": None, "pod": None}

    def gpus(self) -> list[GpuNode]:
        """Return every GPU: the inventory's in order, then those that only a process or a file names."""
        reports = {_gpu_key(gpu): gpu for gpu in self._documents.gpus}
        found = []
        for uuid, places in self._places.items():
            report = reports.get(uuid, {})
            asked = report.get("samples") == "ok" and not self._documents.status["driver"]["error"]
            containers = (
                place.container(self._accounts.get((uuid, *_name_of(place.names)), {}), asked=asked)
                for place in places.values()
            )
            found.append(GpuNode(uuid, report, tuple(containers)))
        return found


def _of_slot(slot: Json) -> tuple[str, str]:
    """Return why the slot was repaired, and why it is stuck; ``slot`` is empty for a process that owns none."""
    return slot.get("repaired") or "", slot.get("stuck") or ""


def _name_of(names: Json) -> tuple[str, str]:
    """Return what identifies a container through its restarts; its id where its names are unknown."""
    pod_uid, name = names["pod_uid"], names["container_name"]
    return (pod_uid, name) if pod_uid and name else ("", names["container_id"] or "")


def _gpu_key(report: Json) -> str:
    """Return its UUID, or a substitute for a broken GPU without one."""
    return report["uuid"] or f"device {report['device_index']}"


def title(names: Json) -> str:
    """Return a container's name for people: the pod's if known, else the known ids."""
    name, pod_uid = names["container_name"], names["pod_uid"]
    if names["pod"]:
        return "/".join(filter(None, (names["namespace"], names["pod"], name)))
    if name:
        return f"{pod_uid[:8]}/{name}" if pod_uid else str(name)
    return (names["container_id"] or "")[:12] or HOST
