"""The tree for programs: as JSON, and as a table with one line for each GPU, container and process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resolver.cli._top.tree import Amount, GpuNode, ProcessNode, Tree, UnresolvedNode, title
from resolver.cli._top.view import percent
from resolver.cli.cells import ASCII
from resolver.cli.show import print_table, size

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIMITS = ("CORE_LIMIT", "MEMORY_LIMIT")
_COLUMNS = ("KIND", "GPU", "CONTAINER", "PROCESS", "HOST_PID", "PID", "UTIL", "MEMORY", *_LIMITS, "NOTE")
_RIGHT = ("GPU", "HOST_PID", "PID", "UTIL", "MEMORY", *_LIMITS)

_Cells = tuple[str | int | None, ...]


def as_json(tree: Tree) -> dict[str, Any]:
    """Return GPUs with containers and processes, and unresolved items; null is "not known" or "none"."""
    gpus = [{"uuid": gpu.key, **gpu.report, "containers": _plain(gpu.containers)} for gpu in tree.gpus]
    status = {name: _plain(getattr(tree.status, name)) for name in ("at", "driver_version", "driver_error")}
    return {**status, "gpus": gpus, "unresolved": _plain(tree.unresolved)}


def _plain(value: Any) -> Any:
    """Return a record as JSON has it, an empty text as null."""
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    return None if value == "" else [_plain(each) for each in value] if isinstance(value, tuple) else value


def print_plain(tree: Tree) -> None:
    """Print the tree with the kind first on each line; ``-`` means none, ``?`` unknown."""
    gpus = (line for gpu in tree.gpus for line in _gpu(gpu, silent=bool(tree.status.driver_error)))
    print_table(_COLUMNS, [*gpus, *map(_unresolved, tree.unresolved)], right=_RIGHT)


def _gpu(gpu: GpuNode, *, silent: bool) -> Iterator[_Cells]:
    report = gpu.report
    index = str(report.get("device_index", gpu.key))
    ill = ",".join(str(each["reason"]) for each in report.get("illnesses", ()))
    why = str(report.get("samples_why") or "") if silent else ""
    note = (str(report.get("name") or ""), ill and f"unhealthy:{ill}", why)
    memory = report.get("memory_used")
    use = (_percent(report.get("utilization")), _memory(Amount(memory)))
    yield ("gpu", index, None, None, None, None, *use, None, None, "; ".join(filter(None, note)))
    for each in gpu.containers:
        name = title(each._asdict())
        use = (percent(each.utilization, ASCII), _memory(each.memory))
        limits = (
            None if each.core_limit is None else f"{each.core_limit}%",
            None if each.memory_limit is None else size(each.memory_limit),
        )
        over = each.over() and f"over:{each.over().replace(' and ', ',')}"
        yield ("container", index, name, None, None, None, *use, *limits, over)
        for process in each.processes:
            pids = (process.comm or "?", _known(process.host_pid), _known(process.ns_pid))
            use = (_percent(process.utilization), _memory(Amount(process.memory)))
            yield ("process", index, name, *pids, *use, None, None, _note(process))


def _note(process: ProcessNode) -> str:
    if process.stuck:
        return "stuck"
    return process.no_slot or (process.repaired and f"repaired:{process.repaired}")


def _unresolved(each: UnresolvedNode) -> _Cells:
    if each.kind == "file":
        return ("file", None, each.container, *[None] * 7, each.reason)
    pids = (_known(each.host_pid), _known(each.ns_pid))
    name = each.container or "?"
    return (each.kind, None, name, None, *pids, _percent(each.utilization), None, None, None, each.reason)


def _known(value: int | None) -> str | int:
    return "?" if value is None else value


def _percent(value: int | None) -> str:
    return percent(Amount(value), ASCII)


def _memory(amount: Amount) -> str:
    if amount.value is None:
        return "?"
    return (ASCII.at_least if amount.at_least else "") + size(amount.value)
