"""Commands in the documents that cannot be run on a miniature node: what they name must be there."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import yaml

from resolver.cli import COMMANDS, parser_of
from resolver.kube import kubectl_plugin
from tests.documents import Command, commands, documents

ROOT: Final = Path(__file__).parent.parent.parent
ALL: Final = commands(ROOT)

#: What tests/kernel/test_docs_commands.py runs, as it stands there.
RUN: Final = (
    "resolver",
    ".venv/bin/resolver",
    "/opt/resolver/bin/resolver",
    "make",
    "curl",
    "setpriv",
    "until",
)
#: What is run elsewhere: how the command begins, and the test that runs it.
ELSEWHERE: Final = {
    "make demo": "tests/kernel/test_demo.py",
    "make setup": "tests/runtime/test_setup.py",
    "make test": ".ci/run",
    "make gpu-check": "tests/kernel/test_gpu_check.py",
    "make image": "tests/runtime/test_image.py",
    "make docs": "tests/unit/test_site.py",
    "make bench": "tests/bench/__main__.py",
    ".venv/bin/python scripts/monitoring.py": "tests/unit/test_monitoring.py",
    "make man": "tests/unit/test_man.py",
    "make wheel": "tests/unit/test_wheel.py",
    "make fresh": "tests/runtime/fresh_machine.sh",
    "source <(resolver completion": "tests/unit/test_completion.py",
    "resolver completion fish": "tests/unit/test_completion.py",
    "resolver report-devices": "tests/kernel/test_report_devices.py",
}
#: Whole pages whose commands have a test of their own.
PAGES: Final = {
    "docs/api.md": "tests/kernel/test_api_docs.py",
    "docs/walk-through.md": "tests/kernel/test_walk_through.py",
}
#: What needs a cluster, an engine, an init system or another machine: looked at here.
NOT_HERE: Final = frozenset(
    "kubectl helm docker podman buildah systemctl journalctl apt-get install ln python3 rm nvidia-smi".split()  # noqa: SIM905
) | {"/opt/resolver/bin/pip"}
_VERBS: Final = frozenset(
    "annotate apply create delete describe exec get label logs patch port-forward rollout run set wait".split()  # noqa: SIM905
)


def elsewhere(command: Command) -> str | None:
    """The test that runs it, if that is not ours."""
    if command.document in PAGES:
        return PAGES[command.document]
    text = command.text.removeprefix("sudo ")
    return next((test for begin, test in ELSEWHERE.items() if text.startswith(begin)), None)


def is_run(command: Command) -> bool:
    """Whether it is run on the miniature node."""
    if command.program == "make" and not re.search(r"\bmake( run\b|\s*(#|$))", command.text):
        return False  # the other targets build, measure or change something
    return elsewhere(command) is None and command.program in RUN


def test_each_command_is_run_or_looked_at() -> None:
    assert sum(map(is_run, ALL)) > 10
    for command in ALL:
        test = elsewhere(command)
        known = (ROOT / test).exists() if test else is_run(command) or command.program in NOT_HERE
        assert known, f"{command}: whether it can be run is not said in {__file__}"


@pytest.mark.parametrize("command", ALL, ids=str)
def test_what_a_command_names_is_there(command: Command) -> None:
    for word in shlex.split(command.text, comments=True):
        path = word.partition("=")[2] or word
        if re.match(r"(\./)?(bpf|deploy|docs|resolver|scripts|tests)/", path):
            assert (ROOT / path).exists(), f"{command}: there is no {path}"
    for call in re.findall(r"(?<!kubectl )\bresolver ([a-z]+(?: [^|;&$)]*)?)", command.text):
        _look_at_resolver(command, shlex.split(call, comments=True))


def test_what_is_named_within_a_sentence_is_there() -> None:
    calls = [
        Command(path.name, call, ())
        for path in documents(ROOT)
        for call in re.findall(r"(?<!`)`(?:sudo )?resolver ([a-z]+(?: [^`]*)?)`", path.read_text())
    ]
    assert len(calls) > 50
    for call in calls:
        plain = call.text.replace("\\|", "|").replace("...", "").replace("[", "").replace("]", "")
        _look_at_resolver(call, plain.split())


@pytest.mark.parametrize("command", [each for each in ALL if each.program in NOT_HERE], ids=str)
def test_what_is_not_run_is_looked_at(command: Command) -> None:
    words = shlex.split(command.text, comments=True)
    words = words[words.index(command.program) :]
    if command.program == "kubectl":
        _look_at_kubectl(command, words)
    elif command.program == "helm" and words[1] in ("install", "upgrade", "template"):
        _render(command, words)


def _look_at_resolver(command: Command, words: list[str]) -> None:
    """A call of ours has options that the command has; a file called resolver is none."""
    if words[0] not in COMMANDS:
        return
    options = {flag for action in parser_of(words[0])[0]._actions for flag in action.option_strings}
    for word in words[1:]:
        if word.startswith("-") and word != "-":
            assert word.partition("=")[0] in options, f"{command}: resolver {words[0]} has no {word}"


def _look_at_kubectl(command: Command, words: list[str]) -> None:
    if words[1] == "resolver":
        here = words[2 : words.index("--")] if "--" in words else words[2:]
        kubectl_plugin._parser().parse_args(here)
        return
    if words[1] == "krew":
        return
    verb = next(word for word in words[1:] if word in _VERBS)
    for option, value in itertools.pairwise(words):
        if option == "-k":
            assert (ROOT / value / "kustomization.yaml").exists(), command
        if option in ("-p", "--patch"):
            assert yaml.safe_load(value), command
            assert value.startswith("[") or isinstance(json.loads(value), dict), command
    if verb == "exec":
        _look_at_resolver(command, words[words.index("--") + 2 :])


def _render(command: Command, words: list[str]) -> None:
    """What would be installed can be rendered, with these very options."""
    kept = [word for word in words[2:] if word not in ("--install", "--create-namespace", "--wait")]
    helm = str(Path(sys.executable).parent / "helm")
    done = subprocess.run(
        [helm, "template", *kept], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    assert "kind: DaemonSet" in done.stdout
