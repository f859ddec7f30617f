"""The built wheel itself is tested: installed elsewhere, run, and inspected."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from resolver.base.version import VERSION
from resolver.cli import COMMANDS
from scripts.build_hook import PATHS
from tests.programs import completed


def run(*command: str | Path, **environment: str) -> str:
    done = completed(*command, env=os.environ | environment, cwd="/")
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out],
        cwd=root,
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    venv = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    interpreter = venv / "bin/python"
    run(sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-index", wheel)
    return interpreter


def test_command_runs_from_the_wheel(python: Path) -> None:
    dependencies = sysconfig.get_path("purelib")
    version = run(python.parent / "resolver", "--version", PYTHONPATH=dependencies)
    assert version == f"resolver {VERSION}\n"
    imported = run(python, "-c", "import resolver; print(resolver.__file__)", PYTHONPATH=dependencies)
    assert imported.startswith(str(python.parent.parent))


def test_kubectl_plugin_runs_from_wheel_and_as_a_copy(python: Path, root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "kubectl-resolver"
    copy.write_bytes((root / "resolver/kube/kubectl_plugin.py").read_bytes())
    # The plugin alone has only the standard library.
    for plugin in ([python.parent / "kubectl-resolver"], [python, "-I", "-S", copy]):
        assert run(*plugin, "--help").startswith("usage: kubectl resolver")
    assert run(python.parent / "kubectl-resolver", "--version") == f"kubectl resolver {VERSION}\n"


def test_every_module_imports_from_the_wheel(python: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if name.startswith("resolver/") and name.endswith(".py")]
    modules = [name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in files]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    wanted = [name for name in modules if not name.endswith("__main__") and "._bpf" not in name]
    assert "resolver.cli" in wanted
    run(python, "-c", code, *wanted, PYTHONPATH=sysconfig.get_path("purelib"))


def test_wheel_has_the_bpf_source_and_no_tests(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    bpf = {
        f"resolver/_bpf/{path.relative_to(root / 'bpf')}"
        for path in (root / "bpf").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert bpf
    assert bpf <= names
    assert not [name for name in names if name.startswith("tests/")]
    assert "resolver/py.typed" in names


def test_wheel_brings_man_pages_and_completion(python: Path) -> None:
    share = python.parent.parent / "share"
    pages = {page.name for page in (share / "man/man1").iterdir()}
    assert pages == {"resolver.1", *(f"resolver-{command}.1" for command in COMMANDS)}
    assert all("report-devices" in (share / path).read_text() for path in PATHS.values())


def test_source_archive_has_the_files_of_setup(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.tar.gz")
    assert built.name == f"hami_resolver-{VERSION}.tar.gz"
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    locks = {path.name for path in root.glob("requirements*.lock")}
    assert len(locks) == 4
    assert locks | {"Makefile", "scripts/setup.sh", "tests/fakes/demo.py"} <= names


def test_debian_package_builds_without_test_dependencies(root: Path) -> None:
    done = completed("make", "--dry-run", "deb", cwd=root, check=True).stdout
    assert "scripts/setup.sh\n" in done
    assert "scripts/setup.sh dev" not in done
