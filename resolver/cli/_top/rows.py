"""The tree as rows, from the top down: sorted, filtered, and in words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.base.text import printable
from resolver.cli._top.tree import HOST, Amount, ContainerNode, GpuNode, ProcessNode, Tree, UnresolvedNode
from resolver.cli._top.tree import title as title_of
from resolver.cli.show import duration, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: What a list can be sorted by. The largest come first, but names rise.
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


class Choice(NamedTuple):
    """Order and filter; ``folded`` hides processes."""

    sort: str = SORTS[0]
    reverse: bool = False
    needle: str = ""
    folded: bool = False


def rows_of(tree: Tree, choice: Choice) -> list[Row]:
    """Return every row that the choice lets through."""
    rows = [row for gpu in tree.gpus for row in _gpu(gpu, choice, answers=not tree.driver_error)]
    if tree.unresolved:
        title, detail = f"unresolved ({len(tree.unresolved)})", "docs/troubleshooting.md explains each reason"
        rows.append(Row(UNRESOLVED, 0, UNRESOLVED, title, tone="warn", detail=detail))
        rows += [_unresolved(f"{UNRESOLVED}/{number}", each) for number, each in enumerate(tree.unresolved)]
    return [row for row in _filtered(rows, choice.needle) if not choice.folded or row.kind != "process"]


def _filtered(rows: list[Row], needle: str) -> list[Row]:
    """Return rows that contain the text, with the rows that they are in and those in them."""
    path: list[Row] = []
    kept = set[str]()
    for row in rows:
        path = [*path[: row.depth], row]
        if any(_contains(each, needle.casefold()) for each in path):
            kept.update(each.key for each in path)
    return [row for row in rows if row.key in kept]


def _contains(row: Row, needle: str) -> bool:
    return needle in f"{row.title} {row.host_pid} {row.ns_pid} {row.note} {row.key} {row.detail}".casefold()


def _joined(*facts: str) -> str:
    return " · ".join(filter(None, facts))


# ---- GPUs --------------------------------------------------------------------------------------------------------


def _gpu(gpu: GpuNode, choice: Choice, *, answers: bool) -> Iterator[Row]:
    """Yield the row of a GPU and those below it. ``answers``: the driver does."""
    report = gpu.report
    head = f"{report['device_index']} {printable(report['name'] or '')}" if report else gpu.key
    ill = "; ".join(map(_illness, report.get("illnesses", ())))
    note, tone = _gpu_note(report)
    known = gpu.key if report else "not in the inventory"
    detail = _joined(f"GPU {head}", known, ill and f"unhealthy: {ill}", report.get("samples_why") or "")
    use, memory = Amount(report.get("utilization")), _share(report)
    yield Row(gpu.key, 0, "gpu", head, amount=use, memory=memory, note=note, tone=tone, detail=detail)
    yield from map(_mig, report.get("mig_instances", ()))
    if not gpu.containers:
        asked = answers and report.get("samples") not in (None, "failed")
        words = "no container uses it" if asked else "its users are not known"
        yield Row(f"{gpu.key}/", 1, "empty", words, tone="dim", detail=detail)
    for container in _sorted(gpu.containers, choice):
        row = _container(gpu, container)
        yield row
        yield from (_process(row, gpu, process) for process in _sorted(container.processes, choice))


def _gpu_note(report: dict[str, Any]) -> tuple[str, str]:
    """Return the most important fact about a GPU in a few letters, and its tone."""
    if not report:
        return "not in inventory", "warn"
    if report["illnesses"]:
        return "unhealthy: " + ", ".join(str(each["reason"]) for each in report["illnesses"]), "bad"
    if report["mig"]:
        return "MIG", ""
    if report["samples"] != "ok":
        return f"samples {report['samples']}", "warn"
    temperature, power = report["temperature"], report["power"]
    parts = ("" if temperature is None else f"{temperature}C", "" if power is None else f"{power:.0f}W")
    return " ".join(filter(None, parts)), ""


def _illness(illness: dict[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(illness["since"]))
    return f"{illness['reason']} since {since} ({illness['detail']})"


def _mig(instance: dict[str, Any]) -> Row:
    title = f"MIG {instance['gpu_instance']}/{instance['compute_instance']}"
    detail = f"MIG instance {instance['uuid']}: NVML does not report its utilization"
    memory = _share(instance)
    return Row(instance["uuid"], 1, "mig", title, "", "", Amount(None), memory, "unsupported", "dim", detail)


# ---- containers and processes ------------------------------------------------------------------------------------


def _sorted(nodes: Iterable[Any], choice: Choice) -> list[Any]:
    """Sort containers or processes: unknown values last, equal ones by name."""
    by_name = sorted(nodes, key=lambda node: _value(node, "name"))
    found = [(_value(node, choice.sort), node) for node in by_name]
    known = [each for each in found if each[0] is not None]
    known.sort(key=lambda each: each[0], reverse=choice.reverse is (choice.sort == "name"))
    return [node for _, node in (*known, *(each for each in found if each[0] is None))]


def _value(node: ContainerNode | ProcessNode, sort: str) -> Any:
    """Return what a node is sorted by; None if unknown, or if processes have no such value."""
    if isinstance(node, ContainerNode):
        use, memory, name = node.utilization.value, node.memory.value, (title_of(node._asdict()), 0)
    else:
        use, memory, name = node.utilization, node.memory, (node.comm, node.host_pid or 0)
    if sort in ("utilization", "memory"):
        first, second = (use, memory) if sort == "utilization" else (memory, use)
        return None if first is None else (first, second or 0)
    if sort == "name":
        return name
    return -node.idle_since if isinstance(node, ContainerNode) and node.idle_since else None


def _container(gpu: GpuNode, container: ContainerNode) -> Row:
    name, over = printable(title_of(container._asdict())), container.over()
    key = f"{gpu.key}/{container.container_id or container.pod_uid + '_' + container.container_name}"
    limit = container.memory_limit
    memory = f"{'≥' * container.memory.at_least}{_size(container.memory.value)}"
    core = "" if container.core_limit is None else f"core limit {container.core_limit}%"
    if core and container.limit_state not in ("", "in_force"):
        core += f", {container.limit_state.replace('_', ' ')}"
    note, tone = core, ""
    if over:
        note, tone = f"over {over}", "warn"
    elif not container.processes:
        note, tone = "not sampled" if container.utilization.value is None else "no process", "dim"
    detail = _joined(
        name,
        core,
        "" if limit is None else f"memory limit {size(limit)}",
        over and f"over its {over} limit",
        f"idle for {duration(time.time() - container.idle_since)}" if container.idle_since else "",
        container.container_id and f"container {container.container_id[:12]}",
        container.pod_uid and f"pod {container.pod_uid}",
        "the utilization of some of its processes is not known" * container.utilization.at_least,
    )
    row = Row(key, 1, "container", name, amount=container.utilization, note=note, tone=tone, detail=detail)
    return row._replace(memory=memory if limit is None else f"{memory}/{size(limit)}")


def _process(container: Row, gpu: GpuNode, process: ProcessNode) -> Row:
    comm, name = printable(process.comm) or "?", container.title
    facts = [f"{comm} in {name}" if name != HOST else f"{comm}, {HOST}"]
    note, tone = "", ""
    if process.utilization is None:
        why = gpu.report.get("samples", "")
        note = f"samples {why}" if why not in ("", "ok") else "not sampled"
        facts.append(f"utilization not known: {gpu.report.get('samples_why') or 'the driver does not say'}")
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
    pids, amount = (_known(process.host_pid), _known(process.ns_pid)), Amount(process.utilization)
    return Row(key, 2, "process", comm, *pids, amount, _size(process.memory), note, tone, _joined(*facts))


def _unresolved(key: str, each: UnresolvedNode) -> Row:
    name = printable(each.container) or ("sample" if each.kind == "sample" else "?")
    words = {"slot": f"slot {each.slot}", "sample": f"a sample on {each.device_uuid}", "file": "cache file"}
    detail = _joined(name, words[each.kind], each.reason)
    row = Row(key, 1, each.kind, name, note=each.reason, tone="warn", detail=detail)
    if each.kind == "file":
        return row
    host_pid, ns_pid = _known(each.host_pid), _known(each.ns_pid)
    return row._replace(host_pid=host_pid, ns_pid=ns_pid, amount=Amount(each.utilization))


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def _size(count: int | None) -> str:
    return "?" if count is None else size(count)


def _share(report: dict[str, Any]) -> str:
    used, whole = report.get("memory_used"), report.get("memory_total")
    return "?" if used is None and whole is None else f"{_size(used)}/{_size(whole)}"
