"""The import direction of the design; pyproject.toml holds the contracts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent

#: Children that must be short, and start fast; what each may import beyond the standard library.
CHILDREN = {
    "resolver/hami/writer.py": set[str](),
    "resolver/gpu/nvml_worker.py": {"pynvml"},
}


def imported_packages(source: str) -> set[str]:
    """Top-level names of every import in the source, wherever it stands; a relative one gives ``.``."""
    names = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else str(node.module).partition(".")[0])
    return names


def test_imports_point_one_way(root: Path) -> None:
    done = subprocess.run(
        [BIN / "lint-imports", "--no-cache", "--config", "pyproject.toml"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"import-linter complains:\n{done.stdout}{done.stderr}", pytrace=False)


@pytest.mark.parametrize("path", CHILDREN)
def test_children_import_the_standard_library_only(path: str, root: Path) -> None:
    imported = imported_packages((root / path).read_text())
    assert imported - sys.stdlib_module_names <= CHILDREN[path]


def test_importing_the_package_imports_nothing_else(root: Path) -> None:
    source = (root / "resolver/__init__.py").read_text()
    assert imported_packages(source) == set()


def test_the_check_itself_sees_every_form_of_import() -> None:
    source = "import a.b\nfrom c.d import e\ndef f():\n    from . import g\n    import h as i\n"
    assert imported_packages(source) == {"a", "c", ".", "h"}
