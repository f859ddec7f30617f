"""Tables that code can write are written by it, and every log event is in the reference."""

import ast
import re
import sys
from pathlib import Path

from resolver.base.reasons import ReasonWithWords
from resolver.config import SETTINGS
from resolver.doctor import CHECKS
from tests.programs import completed


def test_no_table_is_stale(root: Path) -> None:
    done = completed(sys.executable, "-m", "scripts.tables", "--check", cwd=root)
    assert (done.returncode, done.stdout) == (0, ""), "run: make tables"


def test_every_reason_has_a_meaning() -> None:
    for kind in ReasonWithWords.__subclasses__():
        for reason in kind:
            assert reason.meaning, reason
            assert reason.fix, reason
            assert "`" not in "".join(reason.for_terminal("/a path")), reason


def test_checks_named_in_texts_exist(root: Path) -> None:
    files = (*root.glob("docs/*.md"), *root.glob("resolver/**/*.py"), *root.glob("deploy/**/*.yaml"))
    named = {name for file in files for name in re.findall(r"--only ([a-z_]+)", file.read_text())}
    assert named
    assert named - {check.name for check in CHECKS} == set()


def test_every_setting_has_a_description() -> None:
    for name, setting in SETTINGS.items():
        about = setting.about
        assert about.help, name
        assert not set(about.help) & set("`|"), f"{name}: its help is plain text"
        assert bool(about.placeholder) == (setting.kind is not bool and not setting.choices), name
        if setting.kind in (int, float):
            assert setting.limits is not None, f"{name}: a number declares msgspec.Meta(ge=..., le=...)"


def logged(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        method = isinstance(node.func, ast.Attribute)
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [each.value if isinstance(each, ast.Constant) else None for each in node.args]
        if method and called in ("debug", "info", "warning", "error", "exception", "record"):
            names |= {text for text in texts[:1] if isinstance(text, str) and text.isidentifier()}
        elif called == "trouble":
            names |= {text for text in texts[2:4] if isinstance(text, str) and text}
    return names


def test_every_log_event_is_in_the_reference(root: Path) -> None:
    trees = {path: ast.parse(path.read_text()) for path in root.glob("resolver/**/*.py")}
    named = set().union(*map(logged, trees.values()))
    tables = (root / "docs/monitoring.md").read_text().partition("\n| kind | meaning |")[2]
    known = set(re.findall(r"^\| `(\w+)` \|", tables.partition("\n## ")[0], re.MULTILINE))
    assert named - known == set()
    said = {
        node.value
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and path.name != "event_log.py"
    }
    assert known - said == set()
