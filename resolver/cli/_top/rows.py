"""The tree as rows, from the top down: sorted, filtered, and in words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from resolver.base.text import printable
from resolver.cli._top.tree import Amount, ContainerNode, ProcessNode
from resolver.cli.container_names import HOST
from resolver.cli.show import duration, size
from resolver.gpu.inventory import Gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resolver.cli._top.tree import Tree, UnresolvedNode

Node = TypeVar("Node", ContainerNode, ProcessNode)
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
    path: list[Row] = []
    kept = dict[str, Row]()
    for row in _every(tree, choice):
        path = [*path[: row.depth], row]
        if any(above.contains(choice.needle) for above in path):
            kept |= {above.key: above for above in path}
    return [row for row in kept.values() if not (choice.folded and row.kind == "process")]


def _every(tree: Tree, choice: Choice) -> Iterator[Row]:
    for gpu in tree.gpus:
        report = gpu.report or Gpu(gpu.key, 0, samples="failed")
        yield _gpu(gpu.key, gpu.report)
        if not gpu.containers:
            asked = not tree.status.driver.error and report.samples != "failed"
            words = "no container uses it" if asked else "its users are not known"
            yield Row(f"{gpu.key}/", 1, "empty", words, tone="dim")
        for container in _sorted(gpu.containers, choice):
            row = _container(f"{gpu.key}/{container.names.key}", container)
            yield row
            for process in _sorted(container.processes, choice):
                yield _process(row, report, process)
    if tree.unresolved:
        title, detail = f"unresolved ({len(tree.unresolved)})", "docs/troubleshooting.md explains each reason"
        yield Row(UNRESOLVED, 0, UNRESOLVED, title, tone="warn", detail=detail)
    for number, node in enumerate(tree.unresolved):
        yield _unresolved(f"{UNRESOLVED}/{number}", node)


def _joined(*facts: str | None) -> str:
    return " · ".join(filter(None, facts))


def _gpu(key: str, report: Gpu | None) -> Row:
    """Return the row of a GPU, with the most important fact about it as its note."""
    if report is None:
        return Row(key, 0, "gpu", key, "", "", Amount(None), "?", "not in inventory", "warn", f"GPU {key}")
    measured = (report.temperature, "C"), (report.power, "W")
    note, tone = " ".join(f"{value:.0f}{unit}" for value, unit in measured if value is not None), ""
    if report.illnesses:
        note, tone = "unhealthy: " + ", ".join(illness.reason for illness in report.illnesses), "bad"
    elif report.mig:
        note = "MIG"
    elif report.samples != "ok":
        note, tone = f"samples {report.samples}", "warn"
    used, whole = report.memory_used, report.memory_total
    memory = "?" if used is None and whole is None else f"{_size(used)}/{_size(whole)}"
    ill = (f"unhealthy: {illness.reason} ({illness.detail})" for illness in report.illnesses)
    title = f"{report.device_index} {printable(report.name)}"
    detail = _joined(f"GPU {title}", key, *ill, report.samples_why)
    return Row(key, 0, "gpu", title, "", "", Amount(report.utilization), memory, note, tone, detail)


def _sorted(nodes: Iterable[Node], choice: Choice) -> list[Node]:
    """Sort containers or processes: unknown values last, equal ones by name."""
    by_name = sorted(nodes, key=lambda node: _value(node, "name") or ())
    with_value = [node for node in by_name if _value(node, choice.sort) is not None]
    down = choice.reverse is (choice.sort == "name")
    with_value.sort(key=lambda node: _value(node, choice.sort) or (), reverse=down)
    return with_value + [node for node in by_name if _value(node, choice.sort) is None]


def _value(node: ContainerNode | ProcessNode, sort: str) -> tuple[str | float, ...] | None:
    """Return the value that a node is sorted by; None if unknown, or if processes have no such value."""
    if isinstance(node, ContainerNode):
        use, memory, name = node.utilization.value, node.memory.value, (node.names.title, 0)
        idle = (-node.idle_since,) if node.idle_since else None
    else:
        use, memory, name, idle = node.utilization, node.memory, (node.comm, node.host_pid or 0), None
    by_use = None if use is None else (use, memory or 0)
    by_memory = None if memory is None else (memory, use or 0)
    return dict(zip(SORTS, (by_use, by_memory, name, idle), strict=True))[sort]


def _container(key: str, container: ContainerNode) -> Row:
    names, over, limit, busy = (
        container.names,
        container.over(),
        container.memory_limit,
        container.utilization,
    )
    title, tone = printable(names.title), ""
    core = "" if container.core_limit is None else f"core limit {container.core_limit}%"
    if core and container.limit_state not in ("", "in_force"):
        core += f", {container.limit_state.replace('_', ' ')}"
    note = core
    if over:
        note, tone = f"over {over}", "warn"
    elif not container.processes:
        note, tone = "not sampled" if busy.value is None else "no process", "dim"
    idle = container.idle_since
    detail = _joined(
        title,
        core,
        f"idle for {duration(time.time() - idle)}" if idle else "",
        names.container_id and f"container {names.container_id[:12]}",
        names.pod_uid and f"pod {names.pod_uid}",
        "the utilization of some of its processes is not known" * busy.at_least,
    )
    memory = f"{'≥' * container.memory.at_least}{_size(container.memory.value)}"
    memory += "" if limit is None else f"/{size(limit)}"
    return Row(key, 1, "container", title, "", "", busy, memory, note, tone, detail)


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
