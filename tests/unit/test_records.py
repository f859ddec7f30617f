"""Records with more than three fields are made by the names of their fields: what is which is not counted off."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

MOST = 3


def last(node: ast.expr) -> str:
    """``Name`` of ``Name`` and of ``module.Name``; empty for anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def records(trees: Iterable[ast.Module]) -> set[str]:
    """The names of classes that are made of NamedTuple or Struct, also by way of others."""
    classes = {
        each.name: {last(base) for base in each.bases}
        for tree in trees
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef)
    }
    found = {"NamedTuple", "Struct"}
    while more := {name for name, bases in classes.items() if bases & found} - found:
        found |= more
    return found - {"NamedTuple", "Struct"}


def foreign(tree: ast.Module) -> set[str]:
    """Names that a module has from elsewhere than here."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("resolver")
        for alias in node.names
    }


def counted_off(node: ast.AST, known: set[str], within: str = "") -> Iterator[tuple[int, str]]:
    """Line and class of each record that is made by position, in the class ``within``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            name = within if last(child.func) == "cls" else last(child.func)
            spread = any(isinstance(each, ast.Starred) for each in child.args)  # which has no names to give
            if name in known and len(child.args) > MOST and not spread:
                yield child.lineno, name
        yield from counted_off(child, known, child.name if isinstance(child, ast.ClassDef) else within)


def test_what_counts_as_counted_off() -> None:
    code = "class Event(NamedTuple):\n  def of(cls): return cls(1, 2, 3, 4)\nEvent(1, 2, 3)\nx.Event(1, 2, 3, 4)\n"
    tree = ast.parse(code)
    assert [*counted_off(tree, records([tree]))] == [(2, "Event"), (4, "Event")]


def test_records_are_made_by_the_names_of_their_fields(root: Path) -> None:
    trees = {path: ast.parse(path.read_text()) for path in root.glob("resolver/**/*.py")}
    known = records(trees.values())
    assert len(known) > 100
    assert [
        f"{path.relative_to(root)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in counted_off(tree, known - foreign(tree))
    ] == []
