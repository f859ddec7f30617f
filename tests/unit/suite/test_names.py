"""Events, metrics, settings and reasons that tests name as strings exist in the product."""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resolver.config import OTHER_VARIABLES
from resolver.config.settings import SETTINGS
from tests.fakes.daemon import Counters, Daemon
from tests.fakes.names import EVENTS, METRICS, REASONS

Named = Iterator[tuple[int, str]]

#: Tests about names that don't exist, or that belong to other programs.
ABOUT_OTHERS = (
    "unit/config/test_config.py",
    "unit/deploy/test_chart_refusals.py",
    "unit/workers/test_supervisor.py",
)
#: Other values of `reason`: those of the API's problems, and of the metric of unknown values.
OTHER_REASONS = {
    *("bad_request", "method_not_allowed", "no_json", "no_such_container", "no_such_route", "not_yours"),
    *("peer_unknown", "GPUWithoutLibrary", "CrashLoopBackOff", "Done"),  # the last two are Kubernetes'
    *("implausible", "not_told", "unknown_device", "unresolved", "unsupported"),
}
_FIELDS = ("reason", "unresolved", "repaired", "no_slot")


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _events(node: ast.AST) -> Named:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    if node.func.attr in ("said", "wait_for") and node.args and (text := _text(node.args[0])):
        yield node.lineno, text


def _metrics(node: ast.AST) -> Named:
    for text in re.findall(
        r"^resolver_[a-z0-9_]+[a-z0-9](?=$|\{)", _text(node) if isinstance(node, ast.expr) else ""
    ):
        yield node.lineno, text  # type: ignore[attr-defined]


def _variables(node: ast.AST) -> Named:
    text = (
        node.arg or "" if isinstance(node, ast.keyword) else _text(node) if isinstance(node, ast.expr) else ""
    )
    if re.fullmatch(r"RESOLVER_[A-Z0-9_]+", text):
        yield getattr(node, "lineno", 0), text


def _reasons(node: ast.AST) -> Named:
    if isinstance(node, ast.keyword) and node.arg in _FIELDS and (text := _text(node.value)):
        yield node.value.lineno, text
    if (
        isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Subscript)
        and _text(node.left.slice) in _FIELDS
    ):
        yield from ((node.lineno, text) for right in node.comparators if (text := _text(right)))
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        yield from (
            (node.lineno, text) for key, value in pairs if _text(key) in _FIELDS and (text := _text(value))
        )


def _is_metric(name: str) -> bool:
    family = re.sub(r"_(bucket|sum|count|total|created)$", "", name)
    return bool({name, family, f"{family}_total"} & METRICS)


VARIABLES = {setting.variable for setting in SETTINGS.values()} | OTHER_VARIABLES

KINDS: dict[str, tuple[Callable[[ast.AST], Named], Callable[[str], bool]]] = {
    "event": (_events, EVENTS.__contains__),
    "metric": (_metrics, _is_metric),
    "setting": (_variables, VARIABLES.__contains__),
    "reason": (_reasons, (REASONS | OTHER_REASONS).__contains__),
}


@functools.cache
def _trees(root: Path) -> dict[str, ast.Module]:
    paths = [path for path in (root / "tests").rglob("*.py") if not str(path).endswith(ABOUT_OTHERS)]
    return {str(path.relative_to(root)): ast.parse(path.read_text()) for path in paths}


@pytest.mark.parametrize("kind", KINDS)
def test_names_in_tests_exist(kind: str, root: Path) -> None:
    find, exists = KINDS[kind]
    named = [
        (f"{path}:{line}", name)
        for path, tree in _trees(root).items()
        for node in ast.walk(tree)
        for line, name in find(node)
    ]
    assert len(named) > 20, "the search is blind"
    assert [(place, name) for place, name in named if not exists(name)] == []


def test_unknown_event_is_refused() -> None:
    with pytest.raises(AssertionError, match="no event is called 'dead_slot_zeroed'"):
        Daemon.said(object.__new__(Daemon), "dead_slot_zeroed")


def test_unknown_counter_is_refused() -> None:
    assert Counters()["conflicts"] == Counters()["repairs_missing"] == 0
    with pytest.raises(AssertionError, match="no counter is called 'repair_missing'"):
        Counters()["repair_missing"]
