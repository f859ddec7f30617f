"""The tree for programs: as JSON, and as a table with one line for each GPU, container and process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resolver.cli._top.cells import ASCII
from resolver.cli._top.frame import percent
from resolver.cli._top.tree import Amount, GpuNode, ProcessNode, Tree, UnresolvedNode, title
from resolver.cli.show import print_table, size

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIMITS = ("CORE_LIMIT", "MEMORY_LIMIT")
_COLUMNS = ("KIND", "GPU", "CONTAINER", "PROCESS", "HOST_PID", "PID", "UTIL", "MEMORY", *_LIMITS, "NOTE")
_RIGHT = ("GPU", "HOST_PID", "PID", "UTIL", "MEMORY", *_LIMITS)

_Cells = tuple[str | int | None, ...]


def as_json(tree: Tree) -> dict[str, Any]:
    """``gpus`` as ``/v1/gpus`` has them, each with ``containers``, each with ``processes``; and ``unresolved``.

    ``utilization`` and ``memory`` of a container are ``{"value", "at_least"}``. null is "not known" or "none".
    """
    return {
        "at": tree.status.at,
        "driver_version": tree.status.driver_version or None,
        "driver_error": tree.status.driver_error or None,
        "gpus": [
            {"uuid": gpu.key, **gpu.report, "containers": [_container(each) for each in gpu.containers]}
            for gpu in tree.gpus
        ],
        "unresolved": [_without_empty(each) for each in tree.unresolved],
    }


def _container(container: Any) -> dict[str, Any]:
    return _without_empty(container) | {
        "utilization": container.utilization._asdict(),
        "memory": container.memory._asdict(),
        "processes": [_without_empty(each) for each in container.processes],
    }


def _without_empty(record: Any) -> dict[str, Any]:
    return {name: None if value == "" else value for name, value in record._asdict().items()}


def print_plain(tree: Tree) -> None:
    """The kind first on each line; ``-`` is "there is none", ``?`` is "not known"."""
    gpus = (line for gpu in tree.gpus for line in _gpu(gpu))
    print_table(_COLUMNS, [*gpus, *map(_unresolved, tree.unresolved)], right=_RIGHT)


def _gpu(gpu: GpuNode) -> Iterator[_Cells]:
    report = gpu.report
    index = str(report.get("device_index", gpu.key))
    ill = ",".join(str(each["reason"]) for each in report.get("illnesses", ()))
    note = (str(report.get("name") or ""), ill and f"unhealthy:{ill}")
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
