"""Every command in the documents that can run here is run here, on the demo's node, and answers as it is shown there.

Names of containers, PIDs and places are exchanged for those of the node; the rest is as it stands on the page. What
cannot run here is looked at by tests/unit/test_docs_commands.py, which also sees to it that no command is left out.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from resolver import client
from tests.documents import Command
from tests.fakes.node import Node
from tests.fakes.scene import DRIVERS, Case, full_scene, settle
from tests.kernel.conftest import ROOT, Daemon, slot_of, until
from tests.unit.test_docs_commands import ALL, is_run

#: As the documents have them.
_CID, _HOST_PIDS = "931072da1f44272bcbee5e1c8a22d0c6437c6d05c734f3c3e00d3c2173520dee", ("10960", "24399")
#: Lines that are there or not, by what this machine has and what has happened.
_MAYBE: Final = re.compile(r"\[|not (bpf|netlink) |\s+(cause|fix) |(warning|failed) |\d+ checks: ")
#: A line of a table of names and values: the name.
_NAME: Final = re.compile(r"([a-z]\S*(?: [a-z]+)*) {2,}\S")
_COMMANDS: Final = [command for command in ALL if is_run(command)]
#: What the documents show is no behaviour of its own: each command has its tests, and this takes a while.
pytestmark = pytest.mark.long
_FRESH: Final = re.compile(r"--dry-run|resolver slots\b")


class Scene(NamedTuple):
    """The demo's node, and how commands are run on it. ``hostpids`` is what its slots said before any repair."""

    node: Node
    cases: list[Case]
    hostpids: list[int]
    home: Path
    environment: dict[str, str]
    port: int

    def here(self, text: str) -> str:
        """A command with this node's names in it."""
        by_name = {case.container.name: case for case in self.cases}
        case = by_name["serve"]
        for theirs, ours in (
            (_CID, case.container.container_id),
            (_CID[:12], case.container.container_id[:12]),
            *((pid, str(case.tenant.host_pid)) for pid in _HOST_PIDS),
            # Other tests have containers of that name on this machine.
            ("explain batch", f"explain {by_name['batch'].container.container_id}"),
            ("/opt/resolver/bin/", ""),
            ("resolver slots", f"resolver slots {self.node.containers_dir}"),
            ("/run/resolver/", f"{self.home}/run/"),
            ("/etc/resolver.toml", f"{self.home}/resolver.toml"),
            ("/var/log/doctor", f"{self.home}/doctor"),
            ("/var/run/hami/", f"{self.home}/hami/"),
            (":9395", f":{self.port}"),
        ):
            text = text.replace(theirs, ours)
        return text

    def start(self, command: Command) -> subprocess.Popen[str]:
        """By a shell, in the checkout, in a session of its own."""
        return subprocess.Popen(
            ["/bin/bash", "-c", f'set -o pipefail; sudo() {{ "$@"; }}; {self.here(command.text)}'],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def spoil(self) -> None:
        """Everything as wrong as it was."""
        for case, hostpid in zip(self.cases, self.hostpids, strict=True):
            if not case.ended:
                case.tenant.command(f"hostpid {hostpid}")

    def answer(self, command: Command) -> str:
        """What it prints; it has to succeed, within a time that nobody would call hanging."""
        with self.start(command) as running:
            try:
                out, err = running.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                pytest.fail(f"{command} does not end", pytrace=False)
        # A node in miniature is not well in everything.
        wanted = (0, 1, 4) if re.search("doctor|explain", command.text) else (0,)
        assert running.returncode in wanted, f"{command}: {err[-1500:]}"
        return out


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    home = tmp_path_factory.mktemp("docs")
    home.chmod(0o755)
    (home / "hami").mkdir(mode=0o755)
    (home / "hami/hostpid").mkdir(mode=0o711)
    (home / "hami/hostpid").chmod(0o711)
    (home / "resolver.toml").write_text('interval = "500ms"\n')
    with Node(home, DRIVERS[0][0]) as node:
        cases = full_scene(node)
        settle(cases)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        environment = node.environment() | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(home),
            "RESOLVER_CONTAINERS_DIR": str(node.containers_dir),
            "RESOLVER_RUN_DIR": str(home / "run"),
            "RESOLVER_SOCKET": str(home / "run/resolver.sock"),
            "RESOLVER_METRICS_ADDR": f"127.0.0.1:{port}",
        }
        hostpids = [
            0 if case.ended else slot_of(case.container, case.tenant.ns_pid).hostpid for case in cases
        ]
        yield Scene(node, cases, hostpids, home, environment, port)


@pytest.fixture(scope="module")
def daemon(scene: Scene) -> Iterator[Daemon]:
    scene.spoil()
    metrics = f"127.0.0.1:{scene.port}"
    running = Daemon(scene.node, scene.home / "run", "--metrics-addr", metrics, environment=scene.environment)
    try:
        running.wait_for("started")
        running.wait_for("repair")
        until((scene.home / "run/resolver.sock").exists, "its socket")
        until(lambda: not told(scene)["source"]["not_ready"], "its source at work")
        yield running
    finally:
        running.stop()


def told(scene: Scene) -> dict[str, Any]:
    """The daemon's status."""
    return dict(client.get_json("/v1/status", str(scene.home / "run/resolver.sock")))


def runs_a_daemon(command: Command) -> bool:
    return bool(re.search(r"(resolver|make) run\b", command.text))


def told_once(command: Command) -> bool:
    return "--once" in command.text and runs_a_daemon(command)


def reads_only(command: Command) -> bool:
    return _FRESH.search(command.text) is not None


# In this order: what is told of a node that nobody repaired, what repairs it, what goes on doing so.


@pytest.mark.parametrize("command", [c for c in _COMMANDS if reads_only(c)], ids=str)
def test_what_only_looks_says_what_is_shown(scene: Scene, command: Command) -> None:
    _compare(command, scene.answer(command))


@pytest.mark.parametrize("command", [c for c in _COMMANDS if told_once(c) and not reads_only(c)], ids=str)
def test_what_repairs_once_says_what_is_shown(scene: Scene, command: Command) -> None:
    scene.spoil()
    _compare(command, scene.answer(command))


@pytest.mark.parametrize("command", [c for c in _COMMANDS if runs_a_daemon(c) and not told_once(c)], ids=str)
def test_what_starts_a_daemon_starts_one(scene: Scene, command: Command) -> None:
    with scene.start(command) as running:
        assert running.stderr is not None
        said = ""
        watch = threading.Timer(30, os.killpg, (running.pid, signal.SIGKILL))
        watch.start()
        while '"started"' not in said and (line := running.stderr.readline()):
            said += line
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGTERM)
        _, rest = running.communicate()
        watch.cancel()
    assert '"started"' in said, f"{command}: {said}{rest}"
    assert "Traceback" not in said + rest
    assert "_off" not in said, f"{command}: {said}"


@pytest.mark.parametrize(
    "command", [c for c in _COMMANDS if not runs_a_daemon(c) and not reads_only(c)], ids=str
)
def test_what_asks_a_daemon_is_answered(scene: Scene, daemon: Daemon, command: Command) -> None:
    until(lambda: daemon.said("repair"), "a repair")
    _compare(command, scene.answer(command))


def _compare(command: Command, answer: str) -> None:
    """Each shown line is in the answer, but for numbers, ids and blanks; of a name and its value the name."""
    found = answer.splitlines()
    for line in command.shown:
        if not line.strip() or _MAYBE.match(line):
            continue
        name = _NAME.match(line)
        pattern = re.compile(re.escape(name[1]) + r"\s.*" if name else _wild(line) + r"\s*")
        assert any(pattern.fullmatch(each) for each in found), f"{command}\nshown: {line}\nanswer:\n{answer}"


def _wild(line: str) -> str:
    words = []
    for word in line.split():
        varies = re.search(r"\d|^-$", word) or re.fullmatch(r'"(tenant|serve|cgroup)",?', word)
        key = re.match(r"\w+=|", word)
        words.append((key[0] if key else "") + r"\S+" if varies or (key and key[0]) else re.escape(word))
    return r"\s*" + r"\s+".join(words)
