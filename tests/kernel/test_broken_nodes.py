"""A node in each of several broken states: doctor, status and explain exit with an error, and name the cause.

``make broken`` prints them as a table.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.request import Request, urlopen

import pytest

from tests.fakes.command import run
from tests.fakes.container import Container
from tests.fakes.daemon import Daemon, free_port
from tests.fakes.node import Node
from tests.kernel.conftest import FAST, Start
from tests.kernel.rights import mounted, without
from tests.patience import until
from tests.programs import script

UNIT_ERROR: Final = "resolver run: RESOLVER_INTERVAL: 'soon' is no time"


class Commands(NamedTuple):
    containers_dir: Path
    wrapper: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


class Scene(NamedTuple):
    node: Node
    container: Container
    start: Start
    scratch: Path

    def daemon(self, *arguments: str, **options: Any) -> Daemon:
        daemon = self.start(self.node, *FAST, *arguments, **options)
        until(daemon.socket.exists, "its socket")
        return daemon

    def commands(self, *wrapper: str, **environment: str) -> Commands:
        return Commands(self.node.containers_dir, wrapper, tuple(environment.items()))

    def beside(self, **options: Any) -> Commands:
        """Commands beside a daemon with these options."""
        self.daemon(**options)
        return self.commands()


def failed_unit(scene: Scene) -> Commands:
    script(scene.scratch / "journalctl", f'echo "{UNIT_ERROR}"')
    unit = "mount -t tmpfs none /usr/lib/systemd/system; touch /usr/lib/systemd/system/resolver.service"
    setting = "mount -t tmpfs none /etc/default; echo RESOLVER_INTERVAL=soon > /etc/default/resolver"
    return scene.commands(*mounted(f"{unit}; {setting}"), PATH=f"{scene.scratch}:{os.environ['PATH']}")


def read_only_directory(scene: Scene) -> Commands:
    place = scene.node.containers_dir
    return scene.beside(wrapper=mounted(f"mount --bind {place} {place}; mount -o remount,ro,bind {place}"))


def no_driver(scene: Scene) -> Commands:
    nowhere = {"LD_LIBRARY_PATH": str(scene.scratch)}
    scene.daemon(environment={**scene.node.environment(), **nowhere})
    return scene.commands(**nowhere)


def stopped_daemon(scene: Scene) -> Commands:
    scene.daemon().signal(signal.SIGSTOP)
    return scene.commands()


def wrong_token(scene: Scene) -> Commands:
    token, port = scene.scratch / "token", free_port()
    token.write_text("secret")
    daemon = scene.daemon("--metrics-addr", f"127.0.0.1:{port}", "--metrics-token-file", str(token))
    daemon.wait_for("metrics_on")
    token.write_text("")
    request = Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": "Bearer secret"})
    with urlopen(request) as answer:  # noqa: S310
        assert answer.status == 200
    daemon.wait_for("metrics_files_refused")
    return scene.commands()


def no_proc_sys(scene: Scene) -> Commands:
    wrapper = mounted("mount -t tmpfs none /proc/sys")
    scene.daemon(wrapper=wrapper)
    return scene.commands(*wrapper)


def wrong_directory(scene: Scene) -> Commands:
    place = scene.scratch / "nowhere"
    return scene.beside(containers_dir=place)._replace(containers_dir=place)


def foreign_files(scene: Scene) -> Commands:
    os.truncate(scene.container.cache, 4711)
    return scene.beside()


def another_user(scene: Scene) -> Commands:
    scene.daemon()
    code = (
        "import os, sys, resolver.doctor, resolver.cli.doctor, resolver.cli.status, resolver.cli.explain\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "from resolver.cli import main\nsys.exit(main(sys.argv[4:]))"
    )
    return scene.commands(sys.executable, "-c", code)


#: Words that doctor, status and explain must print about the cause; none if all is well.
BROKEN: Final[dict[str, tuple[Callable[[Scene], Commands], tuple[str, str, str]]]] = {
    "no daemon": (Scene.commands, ("start it", "Start one with", "start the daemon")),
    "failed unit": (failed_unit, (UNIT_ERROR, UNIT_ERROR, "/etc/default/resolver")),
    "read-only directory": (read_only_directory, ("ReadWritePaths", "read-only", "ReadWritePaths")),
    "no driver": (no_driver, ("install the driver", "no driver", "install the driver")),
    "stopped daemon": (stopped_daemon, ("kill -CONT",) * 3),
    "wrong token": (wrong_token, ("/token",) * 3),
    "no rights": (
        lambda scene: scene.beside(wrapper=without("SYS_PTRACE")),
        ("CAP_SYS_PTRACE", "The daemon's error: /proc/", "CAP_SYS_PTRACE"),
    ),
    "no /proc": (
        lambda scene: scene.commands(*mounted("mount -t tmpfs none /proc")),
        ("mount -t proc", "mount -t proc", "mount -t proc"),
    ),
    "no /proc/sys": (no_proc_sys, ("", "", "")),
    "wrong directory": (wrong_directory, ("/nowhere",) * 3),
    "other scheduler's files": (foreign_files, ("unknown_size",) * 3),
    "another user": (another_user, ("sudo",) * 3),
}


@pytest.mark.parametrize("state", BROKEN)
def test_broken_node_gets_the_sentence_that_helps(
    state: str, node: Node, start: Start, tmp_path: Path
) -> None:
    container = node.container(name="main")
    tenant = container.tenant(load=10, guess="wrong")
    break_, words = BROKEN[state]
    commands = break_(Scene(node, container, start, tmp_path))
    place = str(commands.containers_dir)
    options = ("--socket", str(tmp_path / "run/resolver.sock"))
    lines = (
        ("doctor", "--run-dir", str(tmp_path / "run")),
        ("status", *options),
        ("explain", f"{container.pod_uid}/main", *options),
    )
    env = {"RESOLVER_CONTAINERS_DIR": place, "RESOLVER_SOURCE": "scan", "COLUMNS": "2000"}
    try:
        for line, word in zip(lines, words, strict=True):
            code, said = 0, ""

            def answered(line: tuple[str, ...] = line, word: str = word) -> bool:
                nonlocal code, said
                done = run(
                    *line,
                    wrapper=commands.wrapper,
                    env={**node.environment(), **env, **dict(commands.environment)},
                )
                code, said = done.returncode, done.stdout + done.stderr
                return code != 0 and word in said if word else code == 0

            until(answered, f"{word} by {line[0]}")
            sentence = next(text for text in said.splitlines() if word in text)
            assert (
                state != "no rights" or tenant.hostpid == 999999
            )  # the command must read other processes' mount tables
            print(f"| {state} | {line[0]} | {code} | {' '.join(sentence.split())} |")
    finally:
        for daemon in start.started:
            daemon.signal(signal.SIGCONT)
