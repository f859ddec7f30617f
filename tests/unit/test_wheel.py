"""The wheel that is built is the thing that is tested: installed elsewhere, run, and looked into."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

import resolver
from resolver.cli.completion import FILES


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        command, env=os.environ | environment, cwd="/", capture_output=True, text=True, check=False
    )
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
    """A Python of its own that has the wheel and, by PYTHONPATH, the dependencies that are installed here."""
    venv = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    interpreter = venv / "bin/python"
    run(sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-index", wheel)
    return interpreter


def test_the_page_installs_this_wheel_where_the_unit_expects_the_program(wheel: Path, root: Path) -> None:
    text = (root / "docs/systemd.md").read_text()
    assert [
        Path(each).name for each in re.findall(r"\S+\.whl", text) if not fnmatch(wheel.name, Path(each).name)
    ] == []
    (program,) = re.findall(
        r"(?m)^ExecStart=(\S+) run$", (root / "deploy/systemd/resolver.service").read_text()
    )
    steps = [
        rf"python3 -m venv {Path(program).parent.parent}",
        rf"{Path(program).parent}/pip install \S+\.whl",
        rf"ln -s {program} /usr/local/bin/resolver",
        r"systemctl enable --now resolver",
        r"resolver doctor",
    ]
    assert re.search(r"(?s)^" + r"\n(?:.*\n)?".join(steps) + "$", text, re.MULTILINE)


def test_the_command_runs_from_the_wheel(python: Path) -> None:
    dependencies = sysconfig.get_path("purelib")
    version = run(python.parent / "resolver", "--version", PYTHONPATH=dependencies)
    assert version == f"resolver {resolver.__version__}\n"
    imported = run(python, "-c", "import resolver; print(resolver.__file__)", PYTHONPATH=dependencies)
    assert imported.startswith(str(python.parent.parent))


def test_kubectls_plugin_runs_from_the_wheel_and_as_a_copy(python: Path, root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "kubectl-resolver"
    copy.write_bytes((root / "resolver/kube/kubectl_plugin.py").read_bytes())
    # Alone it has nothing but the standard library.
    for plugin in ([python.parent / "kubectl-resolver"], [python, "-I", "-S", copy]):
        assert run(*plugin, "--help").startswith("usage: kubectl resolver")


def test_every_module_imports_from_the_wheel(python: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if name.startswith("resolver/") and name.endswith(".py")]
    modules = [name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in files]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    wanted = [name for name in modules if not name.endswith("__main__") and "._bpf" not in name]
    assert "resolver.cli" in wanted
    run(python, "-c", code, *wanted, PYTHONPATH=sysconfig.get_path("purelib"))


def test_the_wheel_holds_the_kernel_side_and_no_tests(wheel: Path, root: Path) -> None:
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


def test_the_wheel_brings_the_man_pages(python: Path, root: Path) -> None:
    pages = {page.name for page in (root / "docs/man").iterdir()}
    assert "resolver.1" in pages
    assert {page.name for page in (python.parent.parent / "share/man/man1").iterdir()} == pages


@pytest.mark.parametrize("shell", FILES)
def test_the_wheel_brings_completion(python: Path, root: Path, shell: str) -> None:
    printed = run(python.parent / "resolver", "completion", shell, PYTHONPATH=sysconfig.get_path("purelib"))
    assert printed == (root / "deploy/completion" / FILES[shell]).read_text()


def test_the_version_is_in_the_changelog(root: Path) -> None:
    assert f"## [{resolver.__version__}]" in (root / "CHANGELOG.md").read_text()
