"""Tables that code can write are written by it, and every log event is in the reference."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from resolver.config import SETTINGS
from resolver.log.event_names import KINDS, LOGGED


def test_no_table_is_stale(root: Path) -> None:
    script = root / "scripts/tables.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), "run: make tables"


def test_every_setting_says_what_it_is() -> None:
    for name, setting in SETTINGS.items():
        about = setting.about
        assert about.help, name
        assert not set(about.help) & set("`|"), f"{name}: its help is plain text"
        assert bool(about.placeholder) == (setting.kind is not bool and not setting.choices), name


def logged(tree: ast.Module) -> set[str]:
    """Names of events that are logged by name."""
    names = set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        texts = [each.value if isinstance(each, ast.Constant) else None for each in node.args]
        if node.func.attr in ("debug", "info", "warning", "error", "exception", "record"):
            names |= {text for text in texts[:1] if isinstance(text, str) and text}
        elif node.func.attr == "trouble":
            names |= {text for text in texts[2:4] if isinstance(text, str) and text}
    return names


def test_every_log_event_is_in_the_reference(root: Path) -> None:
    trees = {path: ast.parse(path.read_text()) for path in root.glob("resolver/**/*.py")}
    named = set().union(*map(logged, trees.values()))
    known = {*KINDS, *LOGGED}
    assert named - known == set()
    said = {
        node.value
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and path.name != "events.py"
    }
    assert known - said == set()
