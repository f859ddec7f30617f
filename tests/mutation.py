"""``make mutation ARGS=plan``: changes a pure module in one place at a time, and sees whether a test of it fails.

The module's own tests are collected once; each change is made in a fork, with a time limit: functions get the changed
code, and the module's constants the changed values. What no test noticed is a survivor: `tests/mutation.json` has those
that change nothing anybody could see, each with the reason.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).parent.parent
KNOWN: Final = ROOT / "tests/mutation.json"
#: The share of changes that tests have to notice, in each module.
WANTED: Final = 0.9
_FAILED, _NOT_MADE = 1, 77

#: Module -> its tests, and the functions that are changed if it is not all of them.
MODULES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "repair.plan": (("repair/test_plan.py", "repair/test_repairer.py", "repair/test_abandoned.py"), ()),
    "repair.region_slots": (
        ("repair/test_region_slots.py", "repair/test_plan.py", "repair/test_abandoned.py"),
        (),
    ),
    "repair.slot_states": (("repair/test_slot_states.py", "repair/test_plan.py"), ()),
    "repair.region": (("repair/test_region_slots.py", "repair/test_plan.py"), ()),
    "repair.orders": (("repair/test_orders.py",), ()),
    "repair.reported_values": (("repair/test_reported_values.py", "repair/test_plan.py"), ()),
    "hami.hostpid_policy": (("hami/test_hostpid_policy.py",), ()),
    "hami.layout": (("hami/test_layout.py", "hami/test_region.py"), ()),
    "hami.packed_slots": (("hami/test_packed_slots.py", "hami/test_layout.py"), ()),
    "gpu.attribution": (("gpu/test_attribution.py",), ()),
    "linux.cgroup": (("linux/test_cgroup.py",), ()),
    "linux.procfs": (("linux/test_procfs.py",), ("parse_ns_pids", "parse_start_time")),
    "linux.mounts": (("linux/test_procfs.py",), ()),
    "config": (("config/test_config.py",), ()),
    "config.values": (("config/test_values.py", "config/test_config.py"), ()),
}

_COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change: where it is, in words, and the module with it."""

    line: int
    change: str
    tree: ast.Module


def changes(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """What can be changed of one node, each in words and as what does it to a copy."""

    def setting(**values: object) -> Callable[[ast.AST], None]:
        return lambda copied: copied.__dict__.update(values)

    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            other = _COMPARED[type(op)]
            yield f"{type(op).__name__} -> {other.__name__}", setting(ops=[other()])
        case ast.BoolOp():
            other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield f"-> {type(other_op).__name__}", setting(op=other_op)
        case ast.UnaryOp(op=ast.Not()):
            yield "not -> not not", setting(operand=ast.UnaryOp(ast.Not(), node.operand))
        case ast.BinOp() | ast.AugAssign() if type(node.op) in _COMPUTED:
            other_sum = _COMPUTED[type(node.op)]
            yield f"{type(node.op).__name__} -> {other_sum.__name__}", setting(op=other_sum())
        case ast.Constant(value=bool(value)):
            yield f"{value} -> {not value}", setting(value=not value)
        case ast.Constant(value=int(value) | float(value)):
            other_value = value + (
                1 if isinstance(value, int) else 1000
            )  # a second more or less is no promise
            yield f"{value} -> {other_value}", setting(value=other_value)
        case ast.IfExp() | ast.If() | ast.While() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield "condition negated", setting(test=ast.UnaryOp(ast.Not(), node.test))
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "returns None", setting(value=ast.Constant(None))
        case ast.Continue() | ast.Break():
            yield "left out", lambda copied: setattr(copied, "__class__", ast.Pass)
        case ast.Expr(value=ast.Call() | ast.Yield()):
            yield "left out", setting(value=ast.Constant(None))


def mutants(source: str, functions: Sequence[str] = ()) -> Iterator[Mutant]:
    """Every change of a module's source; none of annotations, docstrings or decorators."""
    tree = ast.parse(source)
    for place, node in enumerate(_shown(tree, functions)):
        for change, apply in changes(node):
            other = copy.deepcopy(tree)
            apply(next(each for number, each in enumerate(_shown(other, functions)) if number == place))
            yield Mutant(getattr(node, "lineno", 0), change, ast.fix_missing_locations(other))


def _shown(tree: ast.AST, functions: Sequence[str]) -> Iterator[ast.AST]:
    """The nodes that may be changed, always in the same order."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "keywords_of_class"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            named = isinstance(child, ast.FunctionDef) and child.name in functions
            if not functions or named:
                yield child
            yield from _shown(child, () if named else functions)


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes(inner)


def functions_of(thing: Any, name: str) -> Iterator[FunctionType]:
    """Every function of a module or class, below whatever it is wrapped in."""
    for each in list(vars(thing).values()):
        for below in (each, *(getattr(each, way, None) for way in ("fget", "func", "__func__"))):
            plain = getattr(below, "__wrapped__", below)
            if isinstance(plain, FunctionType) and plain.__module__ == name:
                yield plain
        if isinstance(each, type) and each.__module__ == name:
            yield from functions_of(each, name)


def exchange(module: ModuleType, changed: CodeType) -> bool:
    """Give the module's functions the changed code and its constants the changed values; whether there was any."""
    by_name = {code.co_qualname: code for code in codes(changed)}
    found = False
    for function in functions_of(module, module.__name__):
        code = by_name.get(function.__code__.co_qualname)
        if code is not None and code != function.__code__:
            function.__code__ = code
            found = True
    if not found:
        namespace = {"__name__": module.__name__, "__file__": module.__file__}
        exec(changed, namespace)  # noqa: S102 - runs the mutated module
        for name, value in namespace.items():
            if not callable(value) and not name.startswith("__") and value != getattr(module, name):
                setattr(module, name, value)
                found = True
    return found


class Examiner:
    """A plugin that runs the collected tests once for each change, and not for themselves."""

    def __init__(self, name: str) -> None:
        self.name, self.enough = name, False
        self.module = f"resolver.{name}"
        path = ROOT / self.module.replace(".", "/")
        self.path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def pytest_configure(self) -> None:
        """Have the generated tests be short, the same each time, and leave nothing behind."""
        import hypothesis

        short = {"max_examples": 20, "database": None, "derandomize": True, "deadline": None}
        hypothesis.settings.register_profile("mutation", **short)  # type: ignore[arg-type]
        hypothesis.settings.load_profile("mutation")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        source = self.path.read_text()
        known = {(each["line"], each["change"]) for each in json.loads(KNOWN.read_text()).get(self.name, ())}
        began = time.monotonic()
        if self.noticed(session, lambda: True, 600.0) is not False:
            print(f"{self.name}: its tests fail as it is")
            return True
        patience = max(30.0, 10 * (time.monotonic() - began))
        lines, survivors, count, stale = source.splitlines(), 0, 0, known.copy()
        for mutant in mutants(source, MODULES[self.name][1]):
            code = compile(mutant.tree, str(self.path), "exec", dont_inherit=True)
            change = functools.partial(exchange, sys.modules[self.module], code)
            seen = self.noticed(session, change, patience)
            count += seen is not None
            text = lines[mutant.line - 1].strip()
            stale.discard((text, mutant.change))
            if seen is False:
                why = "known: " if (text, mutant.change) in known else ""
                survivors += not why
                print(f"{self.name}:{mutant.line}: {why}{mutant.change}: {text}", flush=True)
        for text, change in sorted(stale):
            print(f"{self.name}: no longer there, take it out of {KNOWN.name}: {change}: {text}")
        share = 1 - survivors / max(1, count)
        took = time.monotonic() - began
        print(f"{self.name}: {share:.0%} of {count} changes noticed, {took:.0f} s", flush=True)
        self.enough = share >= WANTED and not stale
        return True

    def noticed(self, session: pytest.Session, change: Callable[[], bool], seconds: float) -> bool | None:
        """Whether a test fails, or does not end in time, after a change; None where it can not be made."""
        child = os.fork()
        if child == 0:
            status = _FAILED
            with contextlib.suppress(BaseException):
                os.setsid()
                nothing = os.open(os.devnull, os.O_RDWR)
                for fd in (0, 1, 2):
                    os.dup2(nothing, fd)
                status = _NOT_MADE if not change() else _FAILED if fails(session) else 0
            os._exit(status)
        watched = os.pidfd_open(child)
        ended = bool(select.select([watched], [], [], seconds)[0])
        os.close(watched)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return None if status == _NOT_MADE else not ended or status != 0


def fails(session: pytest.Session) -> bool:
    items = session.items
    for item, after in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        if session.testsfailed:
            return True
    return False


def main() -> int:
    """Examine the modules that are named, or all, each in a process of its own; 1 where too much goes unnoticed."""
    chosen = [name for name in MODULES if not sys.argv[1:] or {name, name.split(".")[-1]} & {*sys.argv[1:]}]
    enough = True
    for name in chosen:
        child = os.fork()
        if child == 0:
            examiner = Examiner(name)
            tests = [str(ROOT / "tests/unit" / file) for file in MODULES[name][0]]
            pytest.main(["-q", "-s", "--no-header", "-p", "no:cacheprovider", *tests], [examiner])
            os._exit(int(not examiner.enough))
        enough = os.waitpid(child, 0)[1] == 0 and enough
    return int(not enough)


if __name__ == "__main__":
    sys.exit(main())
