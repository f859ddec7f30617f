"""docs/walk-through.md, run from its first command to its last on the demo's node, as a new user would type it."""

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.fakes.daemon import free_port
from tests.fakes.node import Node
from tests.fakes.scene import DRIVERS, Case, full_scene, settle
from tests.kernel.conftest import ROOT, SOURCES
from tests.patience import PATIENCE_S

PAGE: Final = ROOT / "docs/walk-through.md"


class Command(NamedTuple):
    text: str
    shown: list[str]


def commands(text: str) -> list[Command]:
    """Return the commands of all `console` blocks: lines that begin with ``$ ``."""
    found: list[Command] = []
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Command(line[2:], []))
            else:
                found[-1].shown.append(line)
    return found


STEPS: Final = commands(PAGE.read_text())
pytestmark = pytest.mark.long


class User(NamedTuple):
    home: Path
    environment: dict[str, str]
    cases: list[Case]
    running: list[subprocess.Popen[bytes]]

    def types(self, text: str) -> tuple[str, str]:
        shell = ["/bin/bash", "-c", f'sudo() {{ "$@"; }}; {text.removesuffix("&")}']
        here: dict[str, Any] = {"env": self.environment, "cwd": self.home}
        if text.endswith("&"):
            here |= {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
            self.running.append(subprocess.Popen(shell, **here))
            return "", ""
        done = subprocess.run(shell, **here, capture_output=True, text=True, check=False, timeout=120)
        return done.stdout, done.stderr


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with Node(tmp_path, DRIVERS[0][0]) as node:
        cases = full_scene(node)
        time.sleep(1.3)  # watchers sum up the last second
        settle(cases)
        train = cases[0].container
        (tmp_path / f"pods/research_train-0_{train.pod_uid}/train").mkdir(parents=True)
        environment = node.environment() | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "RESOLVER_CONTAINERS_DIR": str(node.containers_dir),
            "RESOLVER_POD_LOGS_DIR": str(tmp_path / "pods"),
            "RESOLVER_RUN_DIR": str(tmp_path / "run"),
            "RESOLVER_SOCKET": str(tmp_path / "s"),
            "RESOLVER_METRICS_ADDR": f"127.0.0.1:{free_port()}",
            "RESOLVER_SOURCE": SOURCES[-1],
        }
        user = User(tmp_path, environment, cases, [])
        try:
            yield user
        finally:
            for process in user.running:
                os.killpg(process.pid, signal.SIGTERM)
            for process in user.running:
                process.wait(PATIENCE_S)


def test_commands_of_the_page_begin_with_sudo() -> None:
    calls = [call for step in STEPS for call in re.findall(r"(?:\w+ )?\bresolver (?=[a-z])", step.text)]
    assert set(calls) == {"sudo resolver "}


def test_commands_of_the_page_answer_as_shown(user: User) -> None:
    assert len(STEPS) > 10
    train = user.cases[0]
    assert train.tenant.hostpid == train.tenant.ns_pid
    for step in STEPS:
        follow(user, step)
    assert train.tenant.hostpid == train.tenant.host_pid
    looked_up, _ = user.types("resolver lookup research/train-0 2")
    assert looked_up == f"{train.tenant.host_pid}\n"
    with tarfile.open(user.home / "bundle.tar.gz") as archive:
        texts = [archive.extractfile(member).read().decode() for member in archive]  # type: ignore[union-attr]
    assert not re.search(r"\btrain-0\b|\bresearch\b", "\n".join(texts))


def follow(user: User, step: Command) -> None:
    """Repeat the command until it answers as the page shows: the daemon needs a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        out, err = user.types(step.text)
        missing = [part for part in parts(step, user.home) if not re.search(part, words(out))]
        if not missing:
            return
        assert time.monotonic() < deadline, f"{step.text}\nnot said: {missing[0]}\nbut:\n{out}{err}"
        assert all(process.poll() is None for process in user.running), "the daemon has ended"
        time.sleep(0.5)


def parts(step: Command, home: Path) -> Iterator[str]:
    """Yield a pattern for each shown part between omissions: numbers, ids, times and line breaks vary."""
    shown = "\n".join(step.shown).replace("/usr/local/vgpu", f"{home}/vgpu")
    for part in re.split(r"(?m)^\[\.\.\.\]$", shown):
        if part.strip():
            yield r" ".join(map(_wild, part.split()))


def words(text: str) -> str:
    return " ".join(text.split())


def _wild(word: str) -> str:
    name = re.match(r"[a-z_]+=", word)
    if re.fullmatch(r"\d+|[\d.]+(%|s|M|G|KiB|MiB)?[,;]?", word):
        return r"[\d.]+(?:%|s|M|G|KiB|MiB)?[,;]?"
    if name:
        return re.escape(name[0]) + r"\S+"
    return r"\S+" if re.search(r"\d", word) and not re.match("GPU|research/", word) else re.escape(word)
