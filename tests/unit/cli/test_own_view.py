"""The one-file command that a container gets for its own view: its messages, without a daemon."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from resolver.base import text
from resolver.cli import own_view, show

GPU = {
    **dict.fromkeys(("memory_used", "memory_limit", "memory_total", "sm_util")),
    "device_uuid": "GPU-a",
    "name": "NVIDIA L4",
}
USE = {"used_1m": None, "used_5m": None, "core_limit": 30, "limit_state": "unknown"}


def test_unknown_values_are_question_marks(capfd: pytest.CaptureFixture[str]) -> None:
    usage = {"error": "it hangs", "gpus": [GPU | {"use": USE}]}
    documents = {"/v1/usage": usage, "/v1/processes": {"error": None, "processes": []}}
    assert own_view.show(lambda route: json.dumps(documents[route]).encode()) == 0
    shown = capfd.readouterr().out
    assert "The driver gives no values now: it hangs" in shown
    assert shown.splitlines()[3].split()[:5] == ["0", "NVIDIA", "L4", "?", "?"]
    assert "No process of this container is on a GPU." in shown


def test_only_a_process_without_slot_is_called_unlimited(capfd: pytest.CaptureFixture[str]) -> None:
    process = {"pid": 7, "device_uuid": "GPU-a", "comm": "python", "sm_util": 3, "memory": 0}
    listed = [process | {"no_slot": reason} for reason in (None, "not_found_yet", "no_slot")]
    own_view.show(lambda _route: json.dumps({"processes": listed}).encode(), ["processes"])
    notes = [" ".join(line.split()[5:]) for line in capfd.readouterr().out.splitlines()[1:]]
    assert notes == ["-", "HAMi's slot is not found yet", "HAMi does not limit it"]


def test_packed_modules_need_the_standard_library_alone() -> None:
    packed = {"resolver.cli.show": show, "resolver.base.text": text, "": own_view}
    for module in packed.values():
        tree = ast.parse(Path(str(module.__file__)).read_text(), feature_version=(3, 8))
        tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.dump(node)]
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        names |= {alias.name for node in imports for alias in node.names}
        assert {name.partition(".")[0] for name in names - packed.keys()} <= set(sys.stdlib_module_names)
