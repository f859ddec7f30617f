"""Imports: modules of packages that must not be loaded."""

import subprocess
import sys

import pytest

from resolver.base.lean import lean

#: Modules that packages would import (some MiB in all), and modules of other commands.
UNUSED = {
    *("_hashlib", "_ssl", "ast", "click", "configparser", "email", "gzip", "hashlib"),
    *("http.client", "http.server", "logging.config", "multiprocessing", "psutil", "random"),
    *("rich", "ssl", "tempfile", "tomllib", "typing_extensions", "urllib.request"),
    "wsgiref",
}


def _in_a_new_python(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_a_daemon_carries_nothing_that_it_never_uses() -> None:
    """The daemon has all servers on, has given an answer, and has printed a traceback."""
    found = _in_a_new_python(
        "import sys\n"
        "from resolver.base.lean import lean\n"
        "import resolver.cli\n"
        "resolver.cli.parser_of('run')[0].parse_args([])\n"
        "with lean(): import asyncio\n"
        "import resolver.daemon.service, resolver.daemon.broker\n"
        "import resolver.api.app, resolver.metrics, resolver.serve.server\n"
        "print(*sys.modules)\n"
    )
    assert "h11" in found
    assert not UNUSED & found


def test_left_out_modules_can_be_imported_later() -> None:
    found = _in_a_new_python(
        "from resolver.base.lean import lean\n"
        "with lean(): import asyncio\n"
        "import ssl\n"
        "print(ssl.create_default_context.__name__)\n"
    )
    assert found == {"create_default_context"}


def test_loaded_modules_are_kept() -> None:
    import ast
    import ssl

    with lean():
        assert (sys.modules["ast"], sys.modules["ssl"]) == (ast, ssl)
    assert (sys.modules["ast"], sys.modules["ssl"]) == (ast, ssl)


def test_a_hollow_module_has_classes_and_nothing_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gzip", raising=False)
    with lean():
        from gzip import GzipFile
    assert isinstance(GzipFile, type)
    with pytest.raises(AttributeError):
        _ = GzipFile.read
    assert "gzip" not in sys.modules


#: Modules that load as slowly as Python itself.
HEAVY = {
    *("asyncio", "concurrent.futures", "ctypes", "email", "h11", "http.client", "inspect", "logging"),
    *("msgspec", "psutil", "resolver.config", "resolver.pids.ladder", "rich", "socket", "ssl"),
    *("structlog", "subprocess", "tarfile", "threading"),
}
SETTINGS = {"msgspec", "resolver.config"}
LIGHT = (
    *("--help", "--version"),
    "lookup abcdef123456 1 --socket /none",
    *("lookup --help", "reverse --help", "explain --help", "top --help", "slots --help"),
)
#: With their own imports; typing_extensions, which only tests install, imports inspect.
RECORDS = {"msgspec", "inspect"}
TAKING_SETTINGS = ("doctor --only knee", "doctor --help", "run --help", "config --socket /none")


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        *((words, set()) for words in LIGHT),
        *((words, RECORDS | SETTINGS) for words in ("status --socket /none", "slots")),
        *((f"{command} --socket /none", RECORDS) for command in ("devices", "events", "containers", "usage")),
        *((words, SETTINGS) for words in TAKING_SETTINGS),
    ],
)
def test_command_loads_only_needed_modules(words: str, taken: set[str]) -> None:
    found = _in_a_new_python(
        "import sys\n"
        "from resolver.cli import main\n"
        f"try: main({words.split()})\n"
        "except SystemExit: pass\n"
        "print()\n"
        "print(*sys.modules)\n"
    )
    assert HEAVY & found == taken
