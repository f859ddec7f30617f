"""The tree as rows, from the top down: sorted, filtered, folded, and in words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.cli._top.cells import ASCII, Glyphs, printable, size
from resolver.cli._top.tree import HOST, Amount, Container, Gpu, Process, Tree, Unresolved, title

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SORTS = ("utilization", "memory", "name")
UNRESOLVED = "unresolved"  # the key of the heading above what is

#: What a process's ``no_slot`` is called, beside the reason itself.
_NOT_SAID = "the driver does not say"


class Row(NamedTuple):
    """One line of the list.

    ``key`` stays the same from one reading to the next. ``depth`` is 0 for a GPU, 1 for a container, 2 for a process.
    ``amount`` is the utilization in per cent, None where there is none to be told. ``detail`` is everything, in words.
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


class Choice(NamedTuple):
    """What the person wants to see. ``folded`` has the keys of rows whose inside is not shown."""

    sort: str = SORTS[0]
    needle: str = ""
    folded: frozenset[str] = frozenset()


def rows_of(tree: Tree, choice: Choice, glyphs: Glyphs) -> list[Row]:
    """Every row that is to be seen."""
    return list(_Rows(choice, glyphs).walk(tree))


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
                UNRESOLVED,
                0,
                UNRESOLVED,
                f"unresolved ({len(found)})",
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

    def _gpu(self, gpu: Gpu) -> Iterator[Row]:
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
        yield Row(
            gpu.key,
            0,
            "gpu",
            head,
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
            yield Row(f"{gpu.key}/", 1, "empty", title, tone="dim", detail=self._joined(facts))
        for rows in inside:
            yield from rows

    def _mig(self, instance: dict[str, object]) -> Row:
        used, whole = instance["memory_used"], instance["memory_total"]
        return Row(
            str(instance["uuid"]),
            1,
            "mig",
            f"MIG {instance['gpu_instance']}/{instance['compute_instance']}",
            amount=Amount(None),
            memory=_of(used if isinstance(used, int) else None, whole if isinstance(whole, int) else None),
            note="unsupported",
            tone="dim",
            detail=f"MIG instance {instance['uuid']}: NVML tells no utilization of it",
        )

    # ---- containers and processes ------------------------------------------------------------------

    def _containers(self, gpu: Gpu, *, whole: bool) -> list[list[Row]]:
        order: Callable[[Container], tuple[object, ...]] = {
            "utilization": lambda each: (_down(each.utilization), _down(each.memory), _name(each)),
            "memory": lambda each: (_down(each.memory), _down(each.utilization), _name(each)),
            "name": lambda each: (_name(each),),
        }[self._choice.sort]
        # Sorted before it is filtered: whoever types sees the list get shorter, and nothing move.
        found = (self._container(gpu, each, whole=whole) for each in sorted(gpu.containers, key=order))
        return [rows for rows in found if rows]

    def _container(self, gpu: Gpu, container: Container, *, whole: bool) -> list[Row]:
        name = self._text(_name(container))
        key = f"{gpu.key}/{container.container_id or container.pod_uid + '_' + container.container_name}"
        whole = whole or self._fits(f"{name} {container.container_id} {container.pod_uid}")
        processes = [
            row
            for row in (self._process(key, name, gpu, each) for each in self._sorted(container.processes))
            if whole or self._fits(f"{row.title} {row.host_pid} {row.ns_pid} {row.note}")
        ]
        if not whole and not processes:
            return []
        folded = key in self._choice.folded
        note = ""
        if not container.processes:
            note = "not sampled" if container.utilization.value is None else "no process"
        elif folded:
            note = _count(len(container.processes), "process", "processes")
        facts = [name]
        if container.container_id:
            facts.append(f"container {container.container_id[:12]}")
        if container.pod_uid:
            facts.append(f"pod {self._text(container.pod_uid)}")
        if container.utilization.at_least:
            facts.append("the utilization of some of its processes is not known")
        row = Row(
            key,
            1,
            "container",
            name,
            amount=container.utilization,
            memory=self._at_least(container.memory),
            note=note,
            tone="" if container.processes else "dim",
            detail=self._joined(facts),
            folded=folded if container.processes else None,
        )
        return [row] if folded else [row, *processes]

    def _sorted(self, processes: tuple[Process, ...]) -> list[Process]:
        order: Callable[[Process], tuple[object, ...]] = {
            "utilization": lambda each: (_down(Amount(each.utilization)), each.host_pid or 0),
            "memory": lambda each: (_down(Amount(each.memory)), each.host_pid or 0),
            "name": lambda each: (each.comm, each.host_pid or 0),
        }[self._choice.sort]
        return sorted(processes, key=order)

    def _process(self, container: str, name: str, gpu: Gpu, process: Process) -> Row:
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
            f"{container}/{process.device_uuid}/{process.host_pid}",
            2,
            "process",
            comm,
            _number(process.host_pid),
            _number(process.ns_pid),
            Amount(process.utilization),
            "?" if process.memory is None else size(process.memory),
            note,
            tone,
            self._joined(facts),
        )

    def _unresolved(self, number: int, each: Unresolved) -> Row:
        name = self._text(each.container) or {"sample": "sample"}.get(each.kind, "?")
        words = {
            "slot": f"slot {each.slot}",
            "sample": f"a sample on {each.device_uuid}",
            "file": "cache file",
        }
        return Row(
            f"{UNRESOLVED}/{number}",
            1,
            each.kind,
            name,
            "" if each.kind == "file" else _number(each.host_pid),
            "" if each.kind == "file" else _number(each.ns_pid),
            None if each.kind == "file" else Amount(each.utilization),
            "",
            each.reason,
            "warn",
            self._joined([name, self._text(words[each.kind]), each.reason]),
        )

    def _joined(self, facts: list[str]) -> str:
        return f" {self._glyphs.dot} ".join(filter(None, facts))

    def _at_least(self, amount: Amount) -> str:
        if amount.value is None:
            return "?"
        return (self._glyphs.at_least if amount.at_least else "") + size(amount.value)


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


def _illness(illness: dict[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(illness["since"]))
    return f"{illness['reason']} since {since} ({printable(illness['detail'])})"


def _name(container: Container) -> str:
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
