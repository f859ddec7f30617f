"""The daemon's answers as rows, from the top down: GPU > container > process. Unknown values are None, never 0."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from resolver.api.shapes import Region, Slot
from resolver.api.status import Status
from resolver.base.reasons import SampleReason
from resolver.base.text import printable
from resolver.cli.container_names import HOST, Named
from resolver.cli.documents import Documents
from resolver.cli.show import as_json, duration, size
from resolver.gpu.inventory import Gpu
from resolver.state import Container, ContainerUse, Process

Pids = tuple[int | None, int | None]


#: Sort keys of a list. The largest values come first; names ascend.
SORTS = ("utilization", "memory", "name", "idle time")
UNRESOLVED = "unresolved"  # the heading above the unresolved rows
#: Reasons that name no place where a process could be shown.
_UNPLACED = (SampleReason.PID_UNKNOWN, SampleReason.PROCESS_ENDED)
_DEPTHS = {"gpu": 0, UNRESOLVED: 0, "process": 2}


class Amount(NamedTuple):
    """A sum. ``value`` is None if no part is known; ``at_least``: some parts are not."""

    value: int | None
    at_least: bool = False

    def shown(self, text: str) -> str:
        """Return the value's text; ``?`` if it is unknown."""
        return "?" if self.value is None else f"{'≥' * self.at_least}{text}"


class Row(NamedTuple):
    """Line of the list, with those ``below`` it; ``facts`` are its JSON.

    ``pids`` are the host's and the container's, ``use`` is in per cent, ``memory`` and its ``limit`` in bytes.
    """

    kind: str
    key: str
    title: str
    facts: Mapping[str, object]
    below: list["Row"]
    note: str = ""
    tone: str = ""
    detail: str = ""
    use: Amount | None = None
    memory: Amount | None = None
    limit: int | None = None
    pids: Pids | None = None
    idle_since: float | None = None

    @property
    def depth(self) -> int:
        """Return 0 for a GPU, 1 for a container, 2 for a process."""
        return _DEPTHS.get(self.kind, 1)

    def contains(self, needle: str) -> bool:
        texts = (self.title, self.note, self.key, self.detail, *self.numbers())
        return needle.casefold() in " ".join(texts).casefold()

    def numbers(self) -> tuple[str, ...]:
        """Return the PIDs; ``?`` is unknown."""
        return tuple("?" if pid is None else str(pid) for pid in self.pids) if self.pids else ("", "")

    def percent(self) -> str:
        """Return the utilization in at most five letters; ``?`` is unknown."""
        return self.use.shown(f"{self.use.value}%") if self.use else ""

    def bytes(self) -> str:
        """Return the memory, and its limit."""
        text = self.memory.shown(size(self.memory.value or 0)) if self.memory else ""
        return text if self.limit is None else f"{text}/{size(self.limit)}"


class _Place(NamedTuple):
    """A container on a GPU, under construction; ``limits`` are of cores and memory."""

    names: Named
    processes: list[Row]
    limits: list[int | None]


def rows_of(documents: Documents, name: str = "") -> list[Row]:
    """Return the inventory's GPUs, those that only a process or a file names, and the unresolved items.

    ``name``: only that container or pod.
    """
    gpus = {gpu.uuid or f"device {gpu.device_index}": gpu for gpu in documents.gpus}
    parents = {mig.uuid: gpu.uuid for gpu in documents.gpus for mig in gpu.mig_instances}
    names_of = {region.path: _names(documents.containers, region) for region in documents.regions}
    places: dict[str, dict[str, _Place]] = {key: {} for key in gpus}

    def at(device: str, names: Named) -> _Place:
        on_gpu = places.setdefault(parents.get(device, device), {})
        return on_gpu.setdefault(names.key, _Place(names, [], [None, None]))

    for region in documents.regions:
        for device, core, memory in zip(region.device_uuids, region.sm_limit, region.limit, strict=True):
            limits = at(device, names_of[region.path]).limits
            limits[:] = core or limits[0], memory or limits[1]
    for names, process, slot, listed in _processes(documents, names_of):
        gpu = gpus.get(parents.get(process.device_uuid, process.device_uuid))
        row = _process(names, gpu, process, slot, listed=listed)
        at(process.device_uuid, names).processes.append(row)
    uses = {(use.device_uuid, *_identity(use)): use for use in documents.uses}
    answers, rows = not documents.status.driver.error, []
    for key, containers in places.items():
        asked = key in gpus and gpus[key].samples == "ok" and answers
        below = [
            _container(key, place, uses.get((key, *_identity(place.names))), asked=asked)
            for place in containers.values()
            if not name or place.names.is_called(name)
        ]
        if below or not name:
            rows.append(_gpu(key, gpus.get(key), below, answers=answers))
    if lost := list(_unresolved(documents, names_of, name)):
        title, detail = f"{UNRESOLVED} ({len(lost)})", "docs/troubleshooting.md explains each reason"
        rows.append(Row(UNRESOLVED, UNRESOLVED, title, {}, lost, "", "warn", detail))
    return rows


def no_gpu(status: Status) -> str:
    """Explain an empty list."""
    return f"no GPU: {status.driver.error or 'none on this node'}"


def _processes(
    documents: Documents, names_of: dict[str, Named]
) -> Iterator[tuple[Named, Process, Slot | None, bool]]:
    """Yield the processes in NVML's list, and True; then those of slots that are not in it."""
    owned = {slot.host_pid: slot for slot in documents.slots if slot.host_pid is not None and not slot.dead}
    for process in documents.processes:
        if not _is_unplaced(process):
            yield Named.of(process), process, owned.get(process.host_pid), True
    listed = {process.host_pid for process in documents.processes}
    for host_pid, slot in owned.items():
        for util in slot.device_util if slot.path in names_of and host_pid not in listed else ():
            place = host_pid, slot.pid, util.device_uuid, *(None,) * 6
            yield names_of[slot.path], Process(*place, util.utilization, None, None), slot, False


def _is_unplaced(process: Process) -> bool:
    return process.no_slot in _UNPLACED and not process.container_id and not process.container_name


def _names(containers: list[Container], region: Region) -> Named:
    """Return the container of a cache file; without its pod's name unless that is certain."""
    place = region.pod_uid or "", region.container_name or ""
    same = [container for container in containers if container.container_id == region.container_id]
    if not same and all(place):
        same = [record for record in containers if (record.pod_uid, record.container_name) == place]
    return Named.of(same[0]) if len(same) == 1 else Named(region.container_id or "", "", "", *place[::-1])


def _identity(record: ContainerUse | Named) -> tuple[str | None, ...]:
    """Return a container's identity through restarts: pod and name, or its id if these are unknown."""
    names = record.pod_uid, record.container_name
    return names if all(names) else ("", record.container_id)


# ---- each kind of row -----------------------------------------------------------------------------------------------


def _joined(*facts: str | None) -> str:
    return " · ".join(filter(None, facts))


def _gpu(key: str, gpu: Gpu | None, below: list[Row], *, answers: bool) -> Row:
    """Return the row of a GPU, with the most important fact about it as its note. ``answers``: the driver does."""
    facts = {"uuid": key, **(as_json(gpu) or {}), "containers": [row.facts for row in below]}
    if gpu is None:
        note, detail = "not in inventory", f"GPU {key} · not in the inventory"
        return Row("gpu", key, key, facts, below, note, "warn", detail, Amount(None), Amount(None))
    measured = (gpu.temperature, "C"), (gpu.power, "W")
    note, tone = " ".join(f"{value:.0f}{unit}" for value, unit in measured if value is not None), ""
    if gpu.illnesses:
        note, tone = "unhealthy: " + ", ".join(illness.reason for illness in gpu.illnesses), "bad"
    elif gpu.mig:
        note = "MIG"
    elif gpu.samples != "ok":
        note, tone = f"samples {gpu.samples}", "warn"
    if not below:
        unused = answers and gpu.samples != "failed"
        words = "no container uses it" if unused else "its users are not known"
        below = [Row("empty", f"{key}/", words, {}, [], tone="dim")]
    ill = (f"unhealthy: {illness.reason} ({illness.detail})" for illness in gpu.illnesses)
    title = f"{gpu.device_index} {printable(gpu.name)}"
    detail = _joined(f"GPU {title}", key, *ill, gpu.samples_why)
    use, memory = Amount(gpu.utilization), Amount(gpu.memory_used)
    return Row("gpu", key, title, facts, below, note, tone, detail, use, memory, gpu.memory_total)


def total(amounts: Iterable[Amount | None], *, missing: bool = False, most: float = float("inf")) -> Amount:
    """Sum the known values, up to ``most``. ``missing``: more are unknown."""
    values = [amount and amount.value for amount in amounts]
    numbers = [value for value in values if value is not None]
    partly = missing or len(numbers) < len(values)
    return Amount(None) if partly and not numbers else Amount(int(min(sum(numbers), most)), partly)


def _container(gpu: str, place: _Place, account: ContainerUse | None, *, asked: bool) -> Row:
    """Return a container's row. ``asked``: the driver listed the GPU's processes, so an empty list means none."""
    names, below, (core_limit, limit) = place
    missing = not asked and not below
    # Samples of several processes differ in time, so their sum can exceed 100 %.
    use = total((row.use for row in below), missing=missing, most=100)
    memory = total((row.memory for row in below), missing=missing)
    state, idle_since = (account.limit_state, account.idle_since) if account else (None, None)
    facts = {name: text or None for name, text in names._asdict().items()} | {
        "utilization": use,
        "memory": memory,
        "processes": [row.facts for row in below],
        "core_limit": core_limit,
        "memory_limit": limit,
        "limit_state": state,
        "idle_since": idle_since,
    }
    core = "" if core_limit is None else f"core limit {core_limit}%"
    if core and state not in (None, "in_force"):
        core += f", {state.replace('_', ' ')}"
    note, tone = core, ""
    uses = (("core", use, core_limit), ("memory", memory, limit))
    if over := [name for name, amount, most in uses if most is not None and (amount.value or 0) > most]:
        note, tone = f"over {' and '.join(over)}", "warn"
    elif not below:
        note, tone = "not sampled" if use.value is None else "no process", "dim"
    title = printable(names.title)
    detail = _joined(
        title,
        core,
        f"idle for {duration(time.time() - idle_since)}" if idle_since else "",
        names.container_id and f"container {names.container_id[:12]}",
        names.pod_uid and f"pod {names.pod_uid}",
        "the utilization of some of its processes is not known" * use.at_least,
    )
    numbers = use, memory, limit, None, idle_since
    return Row("container", f"{gpu}/{names.key}", title, facts, below, note, tone, detail, *numbers)


def _process(names: Named, gpu: Gpu | None, process: Process, slot: Slot | None, *, listed: bool) -> Row:
    """Return a process's row. ``listed``: NVML lists it; otherwise only its slot names it."""
    comm, in_container = printable(process.comm or "") or "?", names.title != HOST
    repaired, stuck = (slot.repaired, slot.stuck) if slot else (None, None)
    no_slot = process.no_slot if in_container else None
    unsampled = f"samples {gpu.samples}" if gpu and gpu.samples != "ok" else "not sampled"
    why = (gpu and gpu.samples_why) or "the driver does not say"
    meaning = f"{no_slot}: {no_slot.for_terminal()[0]}" if no_slot else ""
    states = (
        (not listed, "not on the GPU", "", "has a slot, and NVML does not list it"),
        (process.sm_util is None, unsampled, "", f"utilization not known: {why}"),
        (repaired, f"✓ {repaired}", "good", f"hostpid repaired, was {repaired}"),
        (no_slot, no_slot or "", "warn" if no_slot is SampleReason.NO_SLOT else "dim", meaning),
        (stuck, "sm_util stuck", "bad", stuck),
    )
    present = [("", "", ""), *(state[1:] for state in states if state[0])]
    note, tone, _ = present[-1]
    title = f"{comm} in {printable(names.title)}" if in_container else f"{comm}, {HOST}"
    detail = _joined(title, *(words for _, _, words in present))
    facts = as_json(process) | {"utilization": process.sm_util, "listed": listed}
    facts |= {"repaired": repaired, "stuck": stuck}
    key = f"{names.key}/{process.device_uuid}/{process.host_pid}"
    numbers = Amount(process.sm_util), Amount(process.memory), None, (process.host_pid, process.ns_pid)
    return Row("process", key, comm, facts, [], note, tone, detail, *numbers)


def _unresolved(documents: Documents, names_of: dict[str, Named], name: str) -> Iterator[Row]:
    """Yield the samples, slots and cache files that could not be resolved; of one container only its slots."""
    for process in () if name else filter(_is_unplaced, documents.processes):
        words, use = f"a sample on {process.device_uuid}", process.sm_util
        facts = {"device_uuid": process.device_uuid, "utilization": use}
        yield _lost("sample", "", process.no_slot, words, (process.host_pid, process.ns_pid), facts)
    for slot in documents.slots:
        names = names_of.get(slot.path)
        if names and slot.unresolved and (not name or names.is_called(name)):
            words, pids = f"slot {slot.slot}", (slot.host_pid, slot.pid)
            yield _lost("slot", names.title, slot.unresolved, words, pids, {"slot": slot.slot})
    for path, reason in () if name else sorted((file.path, file.reason) for file in documents.rejected):
        yield _lost("file", path, reason, "cache file")


def _lost(
    kind: str, container: str, reason: str | None, words: str, pids: Pids | None = None, more: Any = None
) -> Row:
    title, (host_pid, ns_pid) = printable(container) or kind, pids or (None, None)
    facts: dict[str, Any] = {"kind": kind, "container": container or None, "reason": reason, "slot": None}
    facts |= {"ns_pid": ns_pid, "host_pid": host_pid, "device_uuid": None, "utilization": None} | (more or {})
    use = Amount(facts["utilization"]) if pids else None
    detail = _joined(title, words, reason)
    return Row(kind, f"{UNRESOLVED}/{facts}", title, facts, [], reason or "", "warn", detail, use, pids=pids)


# ---- the choice -----------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """Order and filter; ``folded`` hides processes."""

    sort: str = SORTS[0]
    reverse: bool = False
    needle: str = ""
    folded: bool = False


def chosen(rows: list[Row], choice: Choice, *, matches: bool = False) -> Iterator[Row]:
    """Yield the rows that contain the text, with the rows that they are in and those in them."""
    for row in rows:
        contains = matches or row.contains(choice.needle)
        below = row.below if row.kind == UNRESOLVED else _sorted(row.below, choice)
        inside = list(chosen(below, choice, matches=contains))
        if contains or inside:
            yield row
            yield from () if choice.folded and row.kind == "container" else inside


def _sorted(rows: list[Row], choice: Choice) -> list[Row]:
    """Sort containers or processes: unknown values last, equal ones by name."""
    by_name = sorted(rows, key=lambda row: (row.title, (row.pids and row.pids[0]) or 0))
    if choice.sort == "name":
        return by_name[:: -1 if choice.reverse else 1]
    down = 1 if choice.reverse else -1

    def key(row: Row) -> tuple[bool, float, int]:
        use, memory = (amount and amount.value for amount in (row.use, row.memory))
        pairs = (use, memory), (memory, use), (row.idle_since and -row.idle_since, None)
        value, other = dict(zip(("utilization", "memory", "idle time"), pairs, strict=True))[choice.sort]
        return value is None, down * (value or 0), down * (other or 0)

    return sorted(by_name, key=key)
