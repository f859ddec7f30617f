"""The tree as rows, from the top down: sorted, filtered, folded, and in words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.cli._top.cells import ASCII, Glyphs, printable
from resolver.cli._top.tree import (
    HOST,
    Amount,
    ContainerNode,
    GpuNode,
    ProcessNode,
    Tree,
    UnresolvedNode,
    title,
)
from resolver.cli.show import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SORTS = ("utilization", "memory", "name")
UNRESOLVED = "unresolved"  # the key of the heading above what is

#: So much of a memory limit in use is worth a note.
_NEAR_PERCENT = 90
#: What a process's ``no_slot`` is called, beside the reason itself.
_NOT_SAID = "the driver does not say"


class Row(NamedTuple):
    """One line of the list.

    ``key`` stays the same from one reading to the next. ``depth`` is 0 for a GPU, 1 for a container, 2 for a process.
    ``amount`` is the utilization in per cent, None where it is unknown. ``detail`` is everything, in words.
    """

    key: str
    depth: int
    kind: str
    title: str
    host_pid: str = ""
    ns_pid: str = ""
    amount: Amount | None = None
    memory: str = ""
    note: str = ""
    tone: str = ""
    detail: str = ""
    folded: bool | None = None  # None: nothing to fold
    history: tuple[int | None, ...] = ()  # utilizations of the readings so far, the newest last


class Choice(NamedTuple):
    """What the person wants to see. ``folded`` has the keys of rows whose inside is not shown."""

    sort: str = SORTS[0]
    needle: str = ""
    folded: frozenset[str] = frozenset()


def rows_of(tree: Tree, choice: Choice, glyphs: Glyphs) -> list[Row]:
    """Every row that is to be seen."""
    return list(_Rows(choice, glyphs).walk(tree))


def container_key(gpu: GpuNode, container: ContainerNode) -> str:
    """The key of a container's row on a GPU."""
    return f"{gpu.key}/{container.container_id or container.pod_uid + '_' + container.container_name}"


class _Rows:
    def __init__(self, choice: Choice, glyphs: Glyphs) -> None:
        self._choice = choice
        self._glyphs = glyphs
        self._needle = choice.needle.casefold()
        self._ascii = glyphs is ASCII
        self._answers = True  # the driver does

    def walk(self, tree: Tree) -> Iterator[Row]:
        """All rows, in order."""
        self._answers = not tree.status.driver_error
        for gpu in tree.gpus:
            yield from self._gpu(gpu)
        found = [each for each in tree.unresolved if self._fits(" ".join(map(str, each)))]
        if found:
            folded = UNRESOLVED in self._choice.folded
            yield Row(
                key=UNRESOLVED,
                depth=0,
                kind=UNRESOLVED,
                title=f"unresolved ({len(found)})",
                tone="warn",
                detail="nothing is said about these: docs/troubleshooting.md explains each reason",
                folded=folded,
            )
            if not folded:
                for number, each in enumerate(found):
                    yield self._unresolved(number, each)

    def _fits(self, text: str) -> bool:
        return not self._needle or self._needle in text.casefold()

    def _text(self, text: str) -> str:
        return printable(text, ascii_only=self._ascii)

    # ---- GPUs --------------------------------------------------------------------------------------

    def _gpu(self, gpu: GpuNode) -> Iterator[Row]:
        report = gpu.report
        name = self._text(report.get("name") or "")
        head = f"{report['device_index']} {name}" if report else gpu.key
        whole = self._fits(f"{head} {gpu.key}")
        inside = self._containers(gpu, whole=whole)
        if not whole and not inside:
            return
        ill = "; ".join(map(_illness, report.get("illnesses", ())))
        note, tone = _gpu_note(report)
        folded = gpu.key in self._choice.folded
        facts = [f"GPU {head}", gpu.key if report else "not in the inventory", ill and f"unhealthy: {ill}"]
        facts.append(self._text(report.get("samples_why") or ""))
        facts += _details(report.get("details") or {})
        yield Row(
            key=gpu.key,
            depth=0,
            kind="gpu",
            title=head,
            amount=Amount(report.get("utilization")),
            memory=_of(report.get("memory_used"), report.get("memory_total")),
            note=note,
            tone=tone,
            detail=self._joined(facts),
            folded=folded,
        )
        if folded:
            return
        for instance in report.get("mig_instances", ()):
            if whole:
                yield self._mig(instance)
        if not inside and not self._needle:
            known = self._answers and report.get("samples") not in (None, "failed")
            title = "no container uses it" if known else "who uses it is not known"
            yield Row(
                key=f"{gpu.key}/", depth=1, kind="empty", title=title, tone="dim", detail=self._joined(facts)
            )
        for rows in inside:
            yield from rows

    def _mig(self, instance: dict[str, object]) -> Row:
        used, whole = instance["memory_used"], instance["memory_total"]
        return Row(
            key=str(instance["uuid"]),
            depth=1,
            kind="mig",
            title=f"MIG {instance['gpu_instance']}/{instance['compute_instance']}",
            amount=Amount(None),
            memory=_of(used if isinstance(used, int) else None, whole if isinstance(whole, int) else None),
            note="unsupported",
            tone="dim",
            detail=f"MIG instance {instance['uuid']}: NVML does not report its utilization",
        )

    # ---- containers and processes ------------------------------------------------------------------

    def _containers(self, gpu: GpuNode, *, whole: bool) -> list[list[Row]]:
        order: Callable[[ContainerNode], tuple[object, ...]] = {
            "utilization": lambda each: (_down(each.utilization), _down(each.memory), _name(each)),
            "memory": lambda each: (_down(each.memory), _down(each.utilization), _name(each)),
            "name": lambda each: (_name(each),),
        }[self._choice.sort]
        # Sorted before it is filtered: whoever types sees the list get shorter, and nothing move.
        found = (self._container(gpu, each, whole=whole) for each in sorted(gpu.containers, key=order))
        return [rows for rows in found if rows]

    def _container(self, gpu: GpuNode, container: ContainerNode, *, whole: bool) -> list[Row]:
        name = self._text(_name(container))
        key = container_key(gpu, container)
        whole = whole or self._fits(f"{name} {container.container_id} {container.pod_uid}")
        processes = [
            row
            for row in (self._process(key, name, gpu, each) for each in self._sorted(container.processes))
            if whole or self._fits(f"{row.title} {row.host_pid} {row.ns_pid} {row.note}")
        ]
        if not whole and not processes:
            return []
        folded = key in self._choice.folded
        note, tone = "", "" if container.processes else "dim"
        if container.over():
            note, tone = f"over {container.over()}", "warn"
        elif not container.processes:
            note = "not sampled" if container.utilization.value is None else "no process"
        elif _near(container):
            note, tone = f"memory at {_share(container)}%", "warn"
        elif folded:
            note = _count(len(container.processes), "process", "processes")
        elif container.core_limit is not None:
            note = f"core limit {container.core_limit}%"
        facts = [name, *_limits(container)]
        if container.container_id:
            facts.append(f"container {container.container_id[:12]}")
        if container.pod_uid:
            facts.append(f"pod {self._text(container.pod_uid)}")
        if container.utilization.at_least:
            facts.append("the utilization of some of its processes is not known")
        row = Row(
            key=key,
            depth=1,
            kind="container",
            title=name,
            amount=container.utilization,
            memory=self._at_least(container.memory)
            + (f"/{size(container.memory_limit)}" if container.memory_limit is not None else ""),
            note=note,
            tone=tone,
            detail=self._joined(facts),
            folded=folded if container.processes else None,
        )
        return [row] if folded else [row, *processes]

    def _sorted(self, processes: tuple[ProcessNode, ...]) -> list[ProcessNode]:
        order: Callable[[ProcessNode], tuple[object, ...]] = {
            "utilization": lambda each: (_down(Amount(each.utilization)), each.host_pid or 0),
            "memory": lambda each: (_down(Amount(each.memory)), each.host_pid or 0),
            "name": lambda each: (each.comm, each.host_pid or 0),
        }[self._choice.sort]
        return sorted(processes, key=order)

    def _process(self, container: str, name: str, gpu: GpuNode, process: ProcessNode) -> Row:
        comm = self._text(process.comm) or "?"
        facts = [f"{comm} in {name}" if name != HOST else f"{comm}, {HOST}"]
        note, tone = "", ""
        if process.utilization is None:
            why = gpu.report.get("samples", "")
            note = f"samples {why}" if why not in ("", "ok") else "not sampled"
            facts.append(f"utilization not known: {self._text(gpu.report.get('samples_why') or _NOT_SAID)}")
        if process.repaired:
            note, tone = f"{self._glyphs.repaired} {process.repaired}", "good"
            facts.append(f"hostpid repaired, was {process.repaired}")
        if not process.listed:
            note = note or "not on the GPU"
            facts.append("has a slot, and NVML does not list it")
        if process.no_slot and name != HOST:
            note, tone = process.no_slot, "warn" if process.no_slot == "no_slot" else "dim"
            facts.append(f"HAMi knows nothing of it: {process.no_slot}")
        if process.stuck:
            note, tone = "sm_util stuck", "bad"
            facts.append(self._text(process.stuck))
        return Row(
            key=f"{container}/{process.device_uuid}/{process.host_pid}",
            depth=2,
            kind="process",
            title=comm,
            host_pid=_number(process.host_pid),
            ns_pid=_number(process.ns_pid),
            amount=Amount(process.utilization),
            memory="?" if process.memory is None else size(process.memory),
            note=note,
            tone=tone,
            detail=self._joined(facts),
        )

    def _unresolved(self, number: int, each: UnresolvedNode) -> Row:
        name = self._text(each.container) or {"sample": "sample"}.get(each.kind, "?")
        words = {
            "slot": f"slot {each.slot}",
            "sample": f"a sample on {each.device_uuid}",
            "file": "cache file",
        }
        return Row(
            key=f"{UNRESOLVED}/{number}",
            depth=1,
            kind=each.kind,
            title=name,
            host_pid="" if each.kind == "file" else _number(each.host_pid),
            ns_pid="" if each.kind == "file" else _number(each.ns_pid),
            amount=None if each.kind == "file" else Amount(each.utilization),
            memory="",
            note=each.reason,
            tone="warn",
            detail=self._joined([name, self._text(words[each.kind]), each.reason]),
        )

    def _joined(self, facts: list[str]) -> str:
        return f" {self._glyphs.dot} ".join(filter(None, facts))

    def _at_least(self, amount: Amount) -> str:
        if amount.value is None:
            return "?"
        return (self._glyphs.at_least if amount.at_least else "") + size(amount.value)


def _share(container: ContainerNode) -> int | None:
    """How much of its memory limit it holds, in per cent."""
    if container.memory_limit is None or container.memory.value is None:
        return None
    return container.memory.value * 100 // container.memory_limit


def _near(container: ContainerNode) -> bool:
    """At its memory limit the next allocation fails."""
    return (_share(container) or 0) >= _NEAR_PERCENT


def _limits(container: ContainerNode) -> list[str]:
    """HAMi's limits in words, and how close to them it is."""
    found = []
    if container.core_limit is not None:
        found.append(f"core limit {container.core_limit}%")
    if container.memory_limit is not None:
        share = _share(container)
        used = "" if share is None else f" ({share}% of it used)"
        found.append(f"memory limit {size(container.memory_limit)}{used}")
    over = container.over()
    return [*found, f"over its {over} limit"] if over else found


def _gpu_note(report: dict[str, object]) -> tuple[str, str]:
    """What is most worth knowing of a GPU in a few letters, and its tone."""
    illnesses = report.get("illnesses")
    if isinstance(illnesses, list | tuple) and illnesses:
        return "unhealthy: " + ", ".join(str(each["reason"]) for each in illnesses), "bad"
    if not report:
        return "not in inventory", "warn"
    if report["mig"]:
        return "MIG", ""
    if report["samples"] != "ok":
        return f"samples {report['samples']}", "warn"
    temperature, power = report["temperature"], report["power"]
    parts = [f"{temperature}C" if temperature is not None else ""]
    parts.append(f"{power:.0f}W" if isinstance(power, float | int) else "")
    return " ".join(filter(None, parts)), ""


def _details(details: dict[str, Any]) -> list[str]:
    """What the setting ``gpu_details`` adds, as far as it is known."""
    said = []
    if details.get("sm_clock") is not None:
        said.append(f"{details['sm_clock']} MHz")
    throttled = [printable(str(each)) for each in details.get("throttle_reasons") or () if each != "idle"]
    if throttled:
        said.append(f"throttled: {', '.join(throttled)}")
    if details.get("power_limit") is not None:
        said.append(f"limit {details['power_limit']:.0f}W")
    video = [f"{name} {details[name]}%" for name in ("encoder", "decoder") if details.get(name)]
    return [*said, *video]


def _illness(illness: dict[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(illness["since"]))
    return f"{illness['reason']} since {since} ({printable(illness['detail'])})"


def _name(container: ContainerNode) -> str:
    return title(container._asdict())


def _down(amount: Amount) -> tuple[bool, int]:
    """Sorts the largest first, and what is not known last."""
    return (amount.value is None, -(amount.value or 0))


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _of(used: int | None, whole: int | None) -> str:
    if used is None and whole is None:
        return "?"
    return f"{'?' if used is None else size(used)}/{'?' if whole is None else size(whole)}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
