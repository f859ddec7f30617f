"""The allowed directions of imports; pyproject.toml has the contracts."""

import ast
import sys
from collections import Counter
from pathlib import Path

import grimp
import pytest

from tests.programs import completed

BIN = Path(sys.executable).parent

#: Children that must stay small: their allowed imports beyond the standard library.
CHILDREN = {
    "resolver.workers.writer_child": set[str](),
    "resolver.workers.nvml": {"pynvml"},
    "resolver.workers.canary": set[str](),
}


def test_imports_point_one_way(root: Path) -> None:
    done = completed(BIN / "lint-imports", "--no-cache", "--config", "pyproject.toml", cwd=root)
    if done.returncode != 0:
        pytest.fail(f"import-linter complains:\n{done.stdout}{done.stderr}", pytrace=False)


def test_children_import_the_standard_library_only() -> None:
    graph = grimp.build_graph("resolver", include_external_packages=True, cache_dir=None)
    imported = {
        child: {name.partition(".")[0] for name in graph.find_upstream_modules(child)} for child in CHILDREN
    }
    others = {child: names - sys.stdlib_module_names - {"resolver"} for child, names in imported.items()}
    assert others == CHILDREN


def test_importing_the_package_imports_nothing_else(root: Path) -> None:
    code = "import resolver, sys; print(*(name for name in sys.modules if name.startswith('resolver')))"
    done = completed(sys.executable, "-c", code, cwd=root, check=True)
    assert done.stdout.split() == ["resolver"]


def test_class_names_are_unique(root: Path) -> None:
    names = Counter[str]()
    for path in root.glob("resolver/**/*.py"):
        tree = ast.parse(path.read_text())
        names.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
