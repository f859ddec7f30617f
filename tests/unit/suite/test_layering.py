"""The import direction of the design; pyproject.toml holds the contracts."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent

#: Children that must stay small: their allowed imports beyond the standard library.
CHILDREN = {
    "resolver/workers/writer_child.py": set[str](),
    "resolver/workers/nvml.py": {"pynvml"},
    "resolver/workers/canary.py": set[str](),
}


def imported_modules(source: str) -> set[str]:
    """Full names of every import in the source, wherever it stands; a relative one gives ``.``."""
    names = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else str(node.module))
    return names


def foreign_packages(path: Path, root: Path) -> set[str]:
    """What the file, and every module of ours that it imports, takes from beyond the standard library."""
    todo, seen, foreign = [path], set[Path](), set[str]()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in imported_modules(current.read_text()):
            package = name.partition(".")[0]
            if package == "resolver":
                module = root / name.replace(".", "/")
                todo.append(module / "__init__.py" if module.is_dir() else module.with_suffix(".py"))
            elif package not in sys.stdlib_module_names:
                foreign.add(package)
    return foreign


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
    assert foreign_packages(root / path, root) == CHILDREN[path]


def test_importing_the_package_imports_nothing_else(root: Path) -> None:
    code = "import resolver, sys; print(*(name for name in sys.modules if name.startswith('resolver')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["resolver"]


def test_import_check_sees_every_form_and_follows_modules(tmp_path: Path) -> None:
    source = "import a.b\nfrom c.d import e\ndef f():\n    from . import g\n    import h as i\n"
    assert imported_modules(source) == {"a.b", "c.d", ".", "h"}
    package = tmp_path / "resolver"
    package.mkdir()
    (package / "child.py").write_text("import os\nfrom resolver.helper import help_me\n")
    (package / "helper.py").write_text("import rich.table\n")
    assert foreign_packages(package / "child.py", tmp_path) == {"rich"}


def test_no_class_is_called_as_another_one(root: Path) -> None:
    names = Counter[str]()
    for path in root.glob("resolver/**/*.py"):
        tree = ast.parse(path.read_text())
        names.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
