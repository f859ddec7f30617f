"""The tree as rows, from the top down: sorted, filtered, and in words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.base.text import printable
from resolver.cli._top.tree import Amount, ContainerNode, ProcessNode
from resolver.cli.container_names import HOST
from resolver.cli.show import duration, size
from resolver.gpu.inventory import Gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resolver.cli._top.tree import GpuNode, Tree, UnresolvedNode
    from resolver.gpu.inventory import MigInstance

#: Sort keys of a list. The largest values come first; names ascend.
SORTS = ("utilization", "memory", "name", "idle time")
UNRESOLVED = "unresolved"  # the key of the heading above the unresolved rows


class Row(NamedTuple):
    """Line of the list. ``depth`` is 0 for a GPU, 1 for a container, 2 for a process; ``amount`` in per cent."""

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

    def contains(self, needle: str) -> bool:
        """Check if a text of the row contains it."""
        texts = (self.title, self.host_pid, self.ns_pid, self.note, self.key, self.detail)
        return needle.casefold() in " ".join(texts).casefold()

    def percent(self) -> str:
        """Return the utilization in at most five letters; ``?`` is unknown."""
        if self.amount is None or self.amount.value is None:
            return "" if self.amount is None else "?"
        return f"{'≥' * self.amount.at_least}{self.amount.value}%"


class Choice(NamedTuple):
    """Order and filter; ``folded`` hides processes."""

    sort: str = SORTS[0]
    reverse: bool = False
    needle: str = ""
    folded: bool = False


def rows_of(tree: Tree, choice: Choice) -> list[Row]:
    """Return the chosen rows: those that contain the text, with the rows that they are in and those in them."""
    rows = [row for gpu in tree.gpus for row in _gpu(gpu, choice, answers=not tree.status.driver.error)]
    if tree.unresolved:
        title, detail = f"unresolved ({len(tree.unresolved)})", "docs/troubleshooting.md explains each reason"
        rows.append(Row(UNRESOLVED, 0, UNRESOLVED, title, tone="warn", detail=detail))
        rows += [_unresolved(f"{UNRESOLVED}/{number}", node) for number, node in enumerate(tree.unresolved)]
    path: list[Row] = []
    kept = set[str]()
    for row in rows:
        path = [*path[: row.depth], row]
        if any(above.contains(choice.needle) for above in path):
            kept.update(above.key for above in path)
    return [row for row in rows if row.key in kept and not (choice.folded and row.kind == "process")]


def _joined(*facts: str) -> str:
    return " · ".join(filter(None, facts))


def _gpu(gpu: GpuNode, choice: Choice, *, answers: bool) -> Iterator[Row]:
    """Yield the row of a GPU and those below it. ``answers``: the driver does."""
    report = gpu.report or Gpu(gpu.key, 0, samples="failed")
    title, (note, tone) = f"{report.device_index} {printable(report.name)}", _gpu_note(report)
    if gpu.report is None:
        title, note, tone = gpu.key, "not in inventory", "warn"
    ill = "; ".join(
        f"{illness.reason} since {time.strftime('%Y-%m-%d %H:%M', time.localtime(illness.since))} ({illness.detail})"
        for illness in report.illnesses
    )
    uuid = gpu.key if gpu.report else "not in the inventory"
    detail = _joined(f"GPU {title}", uuid, ill and f"unhealthy: {ill}", report.samples_why or "")
    yield Row(
        gpu.key, 0, "gpu", title, "", "", Amount(report.utilization), _share(report), note, tone, detail
    )
    yield from map(_mig, report.mig_instances)
    if not gpu.containers:
        asked = answers and report.samples != "failed"
        words = "no container uses it" if asked else "its users are not known"
        yield Row(f"{gpu.key}/", 1, "empty", words, tone="dim", detail=detail)
    for container in _sorted(gpu.containers, choice):
        above = _container(gpu, container)
        yield above
        yield from (_process(above, report, process) for process in _sorted(container.processes, choice))


def _gpu_note(report: Gpu) -> tuple[str, str]:
    """Return the most important fact about a GPU in a few letters, and its tone."""
    if report.illnesses:
        return "unhealthy: " + ", ".join(illness.reason for illness in report.illnesses), "bad"
    if report.mig:
        return "MIG", ""
    if report.samples != "ok":
        return f"samples {report.samples}", "warn"
    temperature, power = report.temperature, report.power
    parts = ("" if temperature is None else f"{temperature}C", "" if power is None else f"{power:.0f}W")
    return " ".join(filter(None, parts)), ""


def _mig(instance: MigInstance) -> Row:
    title = f"MIG {instance.gpu_instance}/{instance.compute_instance}"
    detail = f"MIG instance {instance.uuid}: NVML does not report its utilization"
    memory = _share(instance)
    return Row(instance.uuid, 1, "mig", title, "", "", Amount(None), memory, "unsupported", "dim", detail)


def _sorted(nodes: Iterable[Any], choice: Choice) -> list[Any]:
    """Sort containers or processes: unknown values last, equal ones by name."""
    by_name = sorted(nodes, key=lambda node: _value(node, "name"))
    with_value = [node for node in by_name if _value(node, choice.sort) is not None]
    with_value.sort(
        key=lambda node: _value(node, choice.sort), reverse=choice.reverse is (choice.sort == "name")
    )
    return with_value + [node for node in by_name if _value(node, choice.sort) is None]


def _value(node: ContainerNode | ProcessNode, sort: str) -> Any:
    """Return what a node is sorted by; None if unknown, or if processes have no such value."""
    if isinstance(node, ContainerNode):
        use, memory, name = node.utilization.value, node.memory.value, (node.names.title, 0)
        idle = -node.idle_since if node.idle_since else None
    else:
        use, memory, name, idle = node.utilization, node.memory, (node.comm, node.host_pid or 0), None
    by_use = None if use is None else (use, memory or 0)
    by_memory = None if memory is None else (memory, use or 0)
    return dict(zip(SORTS, (by_use, by_memory, name, idle), strict=True))[sort]


def _container(gpu: GpuNode, container: ContainerNode) -> Row:
    names, over, limit = container.names, container.over(), container.memory_limit
    title, note, tone = printable(names.title), "", ""
    core = "" if container.core_limit is None else f"core limit {container.core_limit}%"
    if core and container.limit_state not in ("", "in_force"):
        core += f", {container.limit_state.replace('_', ' ')}"
    note = core
    if over:
        note, tone = f"over {over}", "warn"
    elif not container.processes:
        note, tone = "not sampled" if container.utilization.value is None else "no process", "dim"
    detail = _joined(
        title,
        core,
        "" if limit is None else f"memory limit {size(limit)}",
        over and f"over its {over} limit",
        f"idle for {duration(time.time() - container.idle_since)}" if container.idle_since else "",
        names.container_id and f"container {names.container_id[:12]}",
        names.pod_uid and f"pod {names.pod_uid}",
        "the utilization of some of its processes is not known" * container.utilization.at_least,
    )
    memory = f"{'≥' * container.memory.at_least}{_size(container.memory.value)}"
    memory += "" if limit is None else f"/{size(limit)}"
    key, amount = f"{gpu.key}/{names.key}", container.utilization
    return Row(key, 1, "container", title, "", "", amount, memory, note, tone, detail)


def _process(container: Row, gpu: Gpu, process: ProcessNode) -> Row:
    comm, name = printable(process.comm) or "?", container.title
    facts = [f"{comm} in {name}" if name != HOST else f"{comm}, {HOST}"]
    note, tone = "", ""
    if process.utilization is None:
        note = f"samples {gpu.samples}" if gpu.name and gpu.samples != "ok" else "not sampled"
        facts.append(f"utilization not known: {gpu.samples_why or 'the driver does not say'}")
    if process.repaired:
        note, tone = f"✓ {process.repaired}", "good"
        facts.append(f"hostpid repaired, was {process.repaired}")
    if not process.listed:
        note = note or "not on the GPU"
        facts.append("has a slot, and NVML does not list it")
    if process.no_slot and name != HOST:
        note, tone = process.no_slot, "warn" if process.no_slot == "no_slot" else "dim"
        facts.append(f"HAMi knows nothing of it: {process.no_slot}")
    if process.stuck:
        note, tone = "sm_util stuck", "bad"
        facts.append(process.stuck)
    key = f"{container.key}/{process.device_uuid}/{process.host_pid}"
    pids, amount = (_number(process.host_pid), _number(process.ns_pid)), Amount(process.utilization)
    return Row(key, 2, "process", comm, *pids, amount, _size(process.memory), note, tone, _joined(*facts))


def _unresolved(key: str, node: UnresolvedNode) -> Row:
    name = printable(node.container) or ("sample" if node.kind == "sample" else "?")
    words = {"slot": f"slot {node.slot}", "sample": f"a sample on {node.device_uuid}", "file": "cache file"}
    detail = _joined(name, words[node.kind], node.reason)
    row = Row(key, 1, node.kind, name, note=node.reason, tone="warn", detail=detail)
    if node.kind == "file":
        return row
    host_pid, ns_pid = _number(node.host_pid), _number(node.ns_pid)
    return row._replace(host_pid=host_pid, ns_pid=ns_pid, amount=Amount(node.utilization))


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _size(count: int | None) -> str:
    return "?" if count is None else size(count)


def _share(report: Gpu | MigInstance) -> str:
    used, whole = report.memory_used, report.memory_total
    return "?" if used is None and whole is None else f"{_size(used)}/{_size(whole)}"
