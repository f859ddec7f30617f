"""The tree as rows, from the top down: sorted, filtered, folded, and in words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.base.text import printable, several
from resolver.cli._top.tree import HOST, Amount, ContainerNode, GpuNode, ProcessNode, Tree, UnresolvedNode
from resolver.cli._top.tree import title as title_of
from resolver.cli.cells import ASCII, Glyphs
from resolver.cli.show import size

if TYPE_CHECKING:
    from collections.abc import Iterator

SORTS = ("utilization", "memory", "name")
UNRESOLVED = "unresolved"  # the key of the heading above the unresolved rows

#: A container that uses this share of its memory limit gets a note: its next allocation may fail.
_NEAR_PERCENT = 90


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
    folded: bool | None = None  # None: nothing to fold


class Choice(NamedTuple):
    """Order, filter, and the keys of the folded rows."""

    sort: str = SORTS[0]
    needle: str = ""
    folded: frozenset[str] = frozenset()


def rows_of(tree: Tree, choice: Choice, glyphs: Glyphs) -> list[Row]:
    """Return every row that the choice lets through."""
    return list(_Rows(choice, glyphs).walk(tree))


def container_key(gpu: GpuNode, container: ContainerNode) -> str:
    """Return the key of a container's row on a GPU."""
    return f"{gpu.key}/{container.container_id or container.pod_uid + '_' + container.container_name}"


class _Rows:
    def __init__(self, choice: Choice, glyphs: Glyphs) -> None:
        self._choice = choice
        self._glyphs = glyphs
        self._needle = choice.needle.casefold()
        self._answers = True  # the driver does

    def walk(self, tree: Tree) -> Iterator[Row]:
        """Yield all rows, in order."""
        self._answers = not tree.status.driver_error
        for gpu in tree.gpus:
            yield from self._gpu(gpu)
        found = [each for each in tree.unresolved if self._fits(*each)]
        folded = UNRESOLVED in self._choice.folded
        if found:
            title, detail = f"unresolved ({len(found)})", "docs/troubleshooting.md explains each reason"
            yield Row(UNRESOLVED, 0, UNRESOLVED, title, tone="warn", detail=detail, folded=folded)
        if not folded:
            for number, each in enumerate(found):
                yield self._unresolved(f"{UNRESOLVED}/{number}", each)

    def _fits(self, *texts: object) -> bool:
        return not self._needle or self._needle in " ".join(map(str, texts)).casefold()

    def _text(self, text: str) -> str:
        return printable(text, ascii_only=self._glyphs is ASCII)

    def _joined(self, *facts: str) -> str:
        return self._text(f" {self._glyphs.dot} ".join(filter(None, facts)))

    # ---- GPUs --------------------------------------------------------------------------------------

    def _gpu(self, gpu: GpuNode) -> Iterator[Row]:
        report = gpu.report
        head = f"{report['device_index']} {self._text(report['name'] or '')}" if report else gpu.key
        whole = self._fits(head, gpu.key)
        order = sorted(gpu.containers, key=self._order_of)
        # Sorted before it is filtered: while a person types, the list gets shorter and nothing moves.
        inside = list(filter(None, (self._container(gpu, each, whole=whole) for each in order)))
        if not whole and not inside:
            return
        ill = "; ".join(map(_illness, report.get("illnesses", ())))
        note, tone = _gpu_note(report)
        folded = gpu.key in self._choice.folded
        detail = self._joined(
            f"GPU {head}",
            gpu.key if report else "not in the inventory",
            ill and f"unhealthy: {ill}",
            report.get("samples_why") or "",
        )
        use, memory = Amount(report.get("utilization")), _share(report)
        row = Row(gpu.key, 0, "gpu", head, amount=use, memory=memory, note=note, tone=tone)
        yield row._replace(detail=detail, folded=folded)
        if folded:
            return
        for instance in report["mig_instances"] if report and whole else ():
            yield _mig(instance)
        if not inside and not self._needle:
            known = self._answers and report.get("samples") not in (None, "failed")
            words = "no container uses it" if known else "its users are not known"
            yield Row(f"{gpu.key}/", 1, "empty", words, tone="dim", detail=detail)
        for rows in inside:
            yield from rows

    # ---- containers and processes ------------------------------------------------------------------

    def _order_of(self, each: ContainerNode | ProcessNode) -> tuple[object, ...]:
        """Sort the largest first, unknown values last, and equal ones by name or PID."""
        if isinstance(each, ContainerNode):
            use, memory, name = each.utilization, each.memory, title_of(each._asdict())
        else:
            use, memory, name = Amount(each.utilization), Amount(each.memory), f"{each.host_pid or 0:10}"
        first = {"utilization": (use, memory), "memory": (memory, use), "name": ()}[self._choice.sort]
        comm = each.comm if isinstance(each, ProcessNode) and not first else ""
        return (*((amount.value is None, -(amount.value or 0)) for amount in first), comm, name)

    def _container(self, gpu: GpuNode, container: ContainerNode, *, whole: bool) -> list[Row]:
        name = self._text(title_of(container._asdict()))
        key = container_key(gpu, container)
        whole = whole or self._fits(name, container.container_id, container.pod_uid)
        order = sorted(container.processes, key=self._order_of)
        rows = [self._process(key, name, gpu, each) for each in order]
        processes = [
            row for row in rows if whole or self._fits(row.title, row.host_pid, row.ns_pid, row.note)
        ]
        if not whole and not processes:
            return []
        folded = key in self._choice.folded
        note, tone = _container_note(container, folded=folded)
        memory = f"{self._glyphs.at_least * container.memory.at_least}{_size(container.memory.value)}"
        if container.memory_limit is not None:
            memory += f"/{size(container.memory_limit)}"
        detail = self._joined(
            name,
            *_limits(container),
            container.container_id and f"container {container.container_id[:12]}",
            container.pod_uid and f"pod {container.pod_uid}",
            "the utilization of some of its processes is not known" * container.utilization.at_least,
        )
        row = Row(
            key, 1, "container", name, amount=container.utilization, memory=memory, note=note, tone=tone
        )
        row = row._replace(detail=detail, folded=folded if container.processes else None)
        return [row] if folded else [row, *processes]

    def _process(self, container: str, name: str, gpu: GpuNode, process: ProcessNode) -> Row:
        comm = self._text(process.comm) or "?"
        facts = [f"{comm} in {name}" if name != HOST else f"{comm}, {HOST}"]
        note, tone = "", ""
        if process.utilization is None:
            why = gpu.report.get("samples", "")
            note = f"samples {why}" if why not in ("", "ok") else "not sampled"
            facts.append(
                f"utilization not known: {gpu.report.get('samples_why') or 'the driver does not say'}"
            )
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
            facts.append(process.stuck)
        key = f"{container}/{process.device_uuid}/{process.host_pid}"
        row = Row(key, 2, "process", comm, _known(process.host_pid), _known(process.ns_pid))
        use, memory = Amount(process.utilization), _size(process.memory)
        return row._replace(amount=use, memory=memory, note=note, tone=tone, detail=self._joined(*facts))

    def _unresolved(self, key: str, each: UnresolvedNode) -> Row:
        name = self._text(each.container) or ("sample" if each.kind == "sample" else "?")
        slot, sample = f"slot {each.slot}", f"a sample on {each.device_uuid}"
        words = {"slot": slot, "sample": sample, "file": "cache file"}[each.kind]
        detail = self._joined(name, words, each.reason)
        row = Row(key, 1, each.kind, name, note=each.reason, tone="warn", detail=detail)
        if each.kind == "file":
            return row
        host_pid, ns_pid = _known(each.host_pid), _known(each.ns_pid)
        return row._replace(host_pid=host_pid, ns_pid=ns_pid, amount=Amount(each.utilization))


def _mig(instance: dict[str, Any]) -> Row:
    title = f"MIG {instance['gpu_instance']}/{instance['compute_instance']}"
    detail = f"MIG instance {instance['uuid']}: NVML does not report its utilization"
    row = Row(str(instance["uuid"]), 1, "mig", title, amount=Amount(None), detail=detail)
    return row._replace(memory=_share(instance), note="unsupported", tone="dim")


def _container_note(container: ContainerNode, *, folded: bool) -> tuple[str, str]:
    """Return the most important fact about a container in a few letters, and its tone."""
    if container.over():
        return f"over {container.over()}", "warn"
    if not container.processes:
        return "not sampled" if container.utilization.value is None else "no process", "dim"
    share = _of_limit(container)
    if share is not None and share >= _NEAR_PERCENT:
        return f"memory at {share}%", "warn"
    if folded:
        return several(len(container.processes), "process", "processes"), ""
    return "" if container.core_limit is None else f"core limit {container.core_limit}%", ""


def _of_limit(container: ContainerNode) -> int | None:
    """Return the share of its memory limit that a container uses, in per cent."""
    if container.memory_limit is None or container.memory.value is None:
        return None
    return container.memory.value * 100 // container.memory_limit


def _limits(container: ContainerNode) -> Iterator[str]:
    """Yield HAMi's limits in words, and how close to them the container is."""
    if container.core_limit is not None:
        yield f"core limit {container.core_limit}%"
    if container.memory_limit is not None:
        share = _of_limit(container)
        used = "" if share is None else f" ({share}% of it used)"
        yield f"memory limit {size(container.memory_limit)}{used}"
    if container.over():
        yield f"over its {container.over()} limit"


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


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def _size(count: int | None) -> str:
    return "?" if count is None else size(count)


def _share(report: dict[str, Any]) -> str:
    used, whole = report.get("memory_used"), report.get("memory_total")
    return "?" if used is None and whole is None else f"{_size(used)}/{_size(whole)}"
