"""The daemon's answers as rows, from the top down: GPU > container > process. Unknown values are None, never 0."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from resolver.base.reasons import SampleReason
from resolver.base.text import printable
from resolver.cli.container_names import HOST, Named
from resolver.cli.show import as_json, duration, size
from resolver.gpu.inventory import Gpu
from resolver.state import Process

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from resolver.api.shapes import Region, Slot
    from resolver.cli.documents import Documents
    from resolver.state import Container, ContainerUse

    Facts = Mapping[str, object]
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


class Row(NamedTuple):
    """Line of the list, with those ``below`` it; ``facts`` are its JSON.

    ``pids`` are the host's and the container's, ``use`` is in per cent, ``memory`` and its ``limit`` in bytes.
    """

    kind: str
    key: str
    title: str
    facts: Facts
    below: list[Row]
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
        """Check if a text of the row contains it."""
        texts = (self.title, self.note, self.key, self.detail, *self.numbers())
        return needle.casefold() in " ".join(texts).casefold()

    def numbers(self) -> tuple[str, str]:
        """Return the PIDs; ``?`` is unknown."""
        host_pid, ns_pid = ("?" if pid is None else str(pid) for pid in self.pids or (None, None))
        return (host_pid, ns_pid) if self.pids else ("", "")

    def percent(self) -> str:
        """Return the utilization in at most five letters; ``?`` is unknown."""
        return "" if self.use is None else _amount(self.use, f"{self.use.value}%")

    def bytes(self) -> str:
        """Return the memory, and its limit."""
        text = "" if self.memory is None else _amount(self.memory, size(self.memory.value or 0))
        return f"{text}/{size(self.limit)}" if self.limit is not None else text


def _amount(amount: Amount, text: str) -> str:
    return "?" if amount.value is None else f"{'≥' * amount.at_least}{text}"


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

    def at(key: str, names: Named) -> _Place:
        return places.setdefault(key, {}).setdefault(names.key, _Place(names, [], [None, None]))

    for region in documents.regions:
        for index, device in enumerate(region.device_uuids):
            core, memory = (limits := at(parents.get(device, device), names_of[region.path]).limits)
            limits[:] = region.sm_limit[index] or core, region.limit[index] or memory
    for names, process, slot, listed in _processes(documents, names_of):
        key = parents.get(process.device_uuid, process.device_uuid)
        gpu = gpus.get(key) or Gpu(key, 0)
        at(key, names).processes.append(_process(key, names, gpu, process, slot, listed=listed))
    uses = {(use.device_uuid, _identity(use)): use for use in documents.uses}
    answers, rows = not documents.status.driver.error, []
    for key, containers in places.items():
        asked = key in gpus and gpus[key].samples == "ok" and answers
        chosen = [place for place in containers.values() if not name or place.names.is_called(name)]
        below = [
            _container(key, place, uses.get((key, _identity(place.names))), asked=asked) for place in chosen
        ]
        if below or not name:
            rows.append(_gpu(key, gpus.get(key), below, answers=answers))
    lost = list(_unresolved(documents, names_of, name))
    detail = "docs/troubleshooting.md explains each reason"
    heading = Row(UNRESOLVED, UNRESOLVED, f"{UNRESOLVED} ({len(lost)})", {}, lost, "", "warn", detail)
    return [*rows, heading] if lost else rows


def _processes(
    documents: Documents, names_of: dict[str, Named]
) -> Iterator[tuple[Named, Process, Slot | None, bool]]:
    """Yield the processes in NVML's list, and True; then those of slots that are not in it."""
    owned = {slot.host_pid: slot for slot in documents.slots if not slot.dead}
    for process in documents.processes:
        if not _is_unplaced(process):
            yield Named.of(process), process, owned.get(process.host_pid), True
    listed = {process.host_pid for process in documents.processes}
    for slot in documents.slots:
        if (
            slot.path in names_of
            and slot.host_pid is not None
            and slot.host_pid not in listed
            and not slot.dead
        ):
            for util in slot.device_util:
                place = slot.host_pid, slot.pid, util.device_uuid, *(None,) * 6
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


def _identity(record: ContainerUse | Named) -> tuple[str, str]:
    """Return a container's identity through restarts: pod and name, or its id if these are unknown."""
    pod_uid, name = record.pod_uid, record.container_name
    return (pod_uid, name) if pod_uid and name else ("", record.container_id or "")


# ---- each kind of row -----------------------------------------------------------------------------------------------


def _joined(*facts: str | None) -> str:
    return " · ".join(filter(None, facts))


def _gpu(key: str, report: Gpu | None, below: list[Row], *, answers: bool) -> Row:
    """Return the row of a GPU, with the most important fact about it as its note. ``answers``: the driver does."""
    facts = {"uuid": key, **(as_json(report) or {}), "containers": [row.facts for row in below]}
    if report is None:
        detail = f"GPU {key} · not in the inventory"
        return Row(
            "gpu", key, key, facts, below, "not in inventory", "warn", detail, Amount(None), Amount(None)
        )
    measured = (report.temperature, "C"), (report.power, "W")
    note, tone = " ".join(f"{value:.0f}{unit}" for value, unit in measured if value is not None), ""
    if report.illnesses:
        note, tone = "unhealthy: " + ", ".join(illness.reason for illness in report.illnesses), "bad"
    elif report.mig:
        note = "MIG"
    elif report.samples != "ok":
        note, tone = f"samples {report.samples}", "warn"
    if not below:
        words = (
            "no container uses it" if answers and report.samples != "failed" else "its users are not known"
        )
        below = [Row("empty", f"{key}/", words, {}, [], tone="dim")]
    ill = (f"unhealthy: {illness.reason} ({illness.detail})" for illness in report.illnesses)
    title = f"{report.device_index} {printable(report.name)}"
    detail = _joined(f"GPU {title}", key, *ill, report.samples_why)
    use, memory = Amount(report.utilization), Amount(report.memory_used)
    return Row("gpu", key, title, facts, below, note, tone, detail, use, memory, report.memory_total)


def total(values: Iterable[int | None], *, missing: bool = False, most: int | None = None) -> Amount:
    """Sum the known values, up to ``most``. ``missing``: there are others."""
    values = list(values)
    numbers = [value for value in values if value is not None]
    partly = missing or len(numbers) < len(values)
    if partly and not numbers:
        return Amount(None)
    return Amount(sum(numbers) if most is None else min(sum(numbers), most), partly)


def _container(gpu: str, place: _Place, account: ContainerUse | None, *, asked: bool) -> Row:
    """Return a container's row. ``asked``: the driver listed the GPU's processes, so an empty list means none."""
    names, below, (core_limit, limit) = place
    # Samples of several processes are of several moments: together they can pass the whole.
    use = total((row.use and row.use.value for row in below), missing=not asked and not below, most=100)
    memory = total((row.memory and row.memory.value for row in below), missing=not asked and not below)
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
    over = [name for name, amount, most in uses if most is not None and (amount.value or 0) > most]
    if over:
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


def _process(key: str, names: Named, gpu: Gpu, process: Process, slot: Slot | None, *, listed: bool) -> Row:
    """Return a process's row. ``listed``: by NVML; else only its slot says that it is there."""
    comm, in_container = printable(process.comm or "") or "?", names.title != HOST
    repaired, stuck, no_slot = slot and slot.repaired, slot and slot.stuck, process.no_slot
    shown = {"host_pid", "ns_pid", "device_uuid", "comm", "memory", "no_slot"}
    facts = {name: value for name, value in as_json(process).items() if name in shown}
    facts |= {"utilization": process.sm_util, "repaired": repaired, "stuck": stuck, "listed": listed}
    texts, note, tone = [f"{comm} in {printable(names.title)}" if in_container else f"{comm}, {HOST}"], "", ""
    if process.sm_util is None:
        note = f"samples {gpu.samples}" if gpu.name and gpu.samples != "ok" else "not sampled"
        texts.append(f"utilization not known: {gpu.samples_why or 'the driver does not say'}")
    if repaired:
        note, tone = f"✓ {repaired}", "good"
        texts.append(f"hostpid repaired, was {repaired}")
    if not listed:
        note = note or "not on the GPU"
        texts.append("has a slot, and NVML does not list it")
    if no_slot and in_container:
        note, tone = no_slot, "warn" if no_slot == "no_slot" else "dim"
        texts.append(f"{no_slot}: {no_slot.for_terminal()[0]}")
    if stuck:
        note, tone = "sm_util stuck", "bad"
        texts.append(stuck)
    key = f"{key}/{names.key}/{process.device_uuid}/{process.host_pid}"
    numbers = Amount(process.sm_util), Amount(process.memory), None, (process.host_pid, process.ns_pid)
    return Row("process", key, comm, facts, [], note, tone, _joined(*texts), *numbers)


def _unresolved(documents: Documents, names_of: dict[str, Named], name: str) -> Iterator[Row]:
    """Yield the samples, slots and cache files that could not be resolved; of one container only its slots."""
    for process in () if name else filter(_is_unplaced, documents.processes):
        device, use = process.device_uuid, process.sm_util
        words, pids = f"a sample on {device}", (process.host_pid, process.ns_pid)
        facts = {"device_uuid": device, "utilization": use}
        yield _lost("sample", "", str(process.no_slot), words, pids, Amount(use), facts)
    for slot in documents.slots:
        names, number = names_of.get(slot.path), slot.slot
        if names and slot.unresolved is not None and (not name or names.is_called(name)):
            about = names.title, slot.unresolved, f"slot {number}", (slot.host_pid, slot.pid), Amount(None)
            yield _lost("slot", *about, {"slot": number})
    for path, reason in () if name else sorted((file.path, file.reason) for file in documents.rejected):
        yield _lost("file", path, reason, "cache file", None, None, {})


def _lost(
    kind: str, container: str, reason: str, words: str, pids: Pids | None, use: Amount | None, more: Facts
) -> Row:
    title, (host_pid, ns_pid) = printable(container) or kind, pids or (None, None)
    facts: Facts = {"kind": kind, "container": container or None, "reason": reason, "slot": None}
    pair = {"ns_pid": ns_pid, "host_pid": host_pid, "device_uuid": None, "utilization": None}
    key, detail = f"{UNRESOLVED}/{kind}/{container}/{pids}/{more}", _joined(title, words, reason)
    return Row(kind, key, title, {**facts, **pair, **more}, [], reason, "warn", detail, use, pids=pids)


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
    by_name = sorted(rows, key=lambda row: _value(row, "name") or ())
    with_value = [row for row in by_name if _value(row, choice.sort) is not None]
    down = choice.reverse is (choice.sort == "name")
    with_value.sort(key=lambda row: _value(row, choice.sort) or (), reverse=down)
    return with_value + [row for row in by_name if _value(row, choice.sort) is None]


def _value(row: Row, sort: str) -> tuple[str | float, ...] | None:
    """Return a row's sort key; None if its value is unknown or absent."""
    use, memory = row.use and row.use.value, row.memory and row.memory.value
    by_use = None if use is None else (use, memory or 0)
    by_memory = None if memory is None else (memory, use or 0)
    by_name = row.title, (row.pids and row.pids[0]) or 0
    idle = (-row.idle_since,) if row.idle_since else None
    return dict(zip(SORTS, (by_use, by_memory, by_name, idle), strict=True))[sort]
