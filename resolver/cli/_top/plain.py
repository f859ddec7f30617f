"""The tree for programs: as JSON, and as a table with one line for each GPU, container and process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resolver.cli._top.rows import Choice, Row, rows_of
from resolver.cli._top.view import percent
from resolver.cli.cells import ASCII_SIGNS
from resolver.cli.show import print_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resolver.cli._top.tree import Tree

COLUMNS = ("KIND", "GPU", "CONTAINER", "PROCESS", "HOST_PID", "PID", "UTIL", "MEMORY", "NOTE")
_RIGHT = ("GPU", "HOST_PID", "PID", "UTIL", "MEMORY")
_NO_LINES = ("empty", "mig", "unresolved")


def as_json(tree: Tree) -> dict[str, Any]:
    """Return GPUs with containers and processes, and unresolved items; null is "not known" or "none"."""
    gpus = [{"uuid": gpu.key, **gpu.report, "containers": _plain(gpu.containers)} for gpu in tree.gpus]
    status = {name: _plain(getattr(tree, name)) for name in ("at", "driver_version", "driver_error")}
    return {**status, "gpus": gpus, "unresolved": _plain(tree.unresolved)}


def _plain(value: Any) -> Any:
    """Return a record as JSON has it, an empty text as null."""
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    return None if value == "" else [_plain(each) for each in value] if isinstance(value, tuple) else value


def print_plain(tree: Tree) -> None:
    """Print the tree with the kind first on each line; ``-`` means none, ``?`` unknown."""
    print_table(COLUMNS, _lines(rows_of(tree, Choice())), right=_RIGHT)


def _lines(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    gpu = container = ""
    for row in rows:
        if row.kind in _NO_LINES:
            continue
        note = row.note.replace("✓", "repaired")
        if row.depth == 0:
            gpu, container = row.title.partition(" ")[0], ""
            note = row.detail.replace(" ·", ";")
        elif row.depth == 1:
            container = row.title
            gpu = gpu if row.kind == "container" else ""
        process = row.title if row.depth == 2 else ""
        use = (row.host_pid, row.ns_pid, percent(row.amount), row.memory)
        yield tuple(text.translate(ASCII_SIGNS) for text in (row.kind, gpu, container, process, *use, note))
