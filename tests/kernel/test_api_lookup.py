"""Look-ups through a running daemon: what its map answers is what the kernel says, or it is silent."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from resolver import client
from resolver.base.errors import NotFound, ProcessGone
from resolver.linux.procfs import Procfs
from resolver.lookup.forward import lookup
from tests.fakes.command import run
from tests.fakes.container import Container
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.kernel.conftest import EVERY_SOURCE, FAST, Start
from tests.kernel.serving import SLEEP, Orders, serving
from tests.patience import PATIENCE_S, until


def ask(daemon: Daemon, container: Container, ns_pid: int) -> dict[str, Any] | None:
    """The daemon's answer; None if there is no such process."""
    where = str(daemon.socket)
    try:
        return client.look_up(container.container_id, ns_pid, socket_path=where, seconds=PATIENCE_S)
    except (NotFound, ProcessGone):
        return None


def by_walk(container: Container, ns_pid: int) -> dict[str, Any] | None:
    """The same without a daemon."""
    try:
        return lookup(Procfs(), container.container_id, ns_pid)._asdict()
    except (NotFound, ProcessGone):
        return None


def command(daemon: Daemon | Path, container: Container, ns_pid: int, *more: str) -> tuple[int, str]:
    """The real command: exit code and standard output."""
    where = daemon if isinstance(daemon, Path) else daemon.socket
    done = run("lookup", container.container_id, ns_pid, "--socket", where, *more)
    return done.returncode, done.stdout


# ---- the same answers ---------------------------------------------------------------------------------------------


@EVERY_SOURCE
def test_answers_are_the_kernels(node: Node, start: Start, source: str) -> None:
    plain = [node.container(name=f"plain-{n}") for n in range(4)]
    sharing = node.container(plain[0].pod_uid, "sharing", pid_namespace=plain[0])
    on_host = node.container(name="on-host", pid_namespace="host")
    containers = [*plain, sharing, on_host]
    truth: dict[tuple[str, int], int] = {}
    for container in containers:
        if container is not sharing and container is not on_host:
            truth[container.container_id, 1] = container.init_host_pid
        for _ in range(6):
            process = container.spawn(SLEEP)
            truth[container.container_id, process.ns_pid] = process.host_pid
        container.spawn(SLEEP, nested=True)
    daemon = serving(start, node)
    last = plain[3].processes[0]
    until(lambda: ask(daemon, plain[3], last.ns_pid), "its first answer")
    chance, answered = random.Random(3), Counter[tuple[str, str]]()
    numbers = sorted({ns_pid for _, ns_pid in truth} | {2, 9, 4000})
    for _ in range(60):
        container, ns_pid = chance.choice(containers), chance.choice(numbers)
        found, wanted = ask(daemon, container, ns_pid), by_walk(container, ns_pid)
        known = truth.get((container.container_id, ns_pid))
        if known is not None:
            assert wanted is not None
            assert wanted["host_pid"] == known
        assert (found is None) == (wanted is None), (
            f"{container.name} {ns_pid}: {found}, the truth is {wanted}"
        )
        if found is not None and wanted is not None:
            said = found.pop("source")
            answered[container.name, said] += 1
            assert said == source or source != "bpf" or container not in plain or known is None
            wanted.pop("source")
            assert found == wanted
    print(f"{source}: answered {dict(answered)}")
    assert {name for name, _ in answered} == {container.name for container in containers}
    assert {name for name, said in answered if said == source} == {container.name for container in plain}


@EVERY_SOURCE
def test_the_command_takes_the_map_s_answer_where_there_is_one(node: Node, start: Start, source: str) -> None:
    plain = node.container()
    sharing = node.container(plain.pod_uid, "sharing", pid_namespace=plain)
    on_host = node.container(name="on-host", pid_namespace="host")
    daemon = serving(start, node)
    for container, said in ((plain, source), (sharing, "cgroup"), (on_host, "cgroup")):
        process = container.spawn(SLEEP)
        code, text = command(daemon, container, process.ns_pid, "--json")
        assert (code, json.loads(text)["host_pid"]) == (0, process.host_pid)
        until(
            lambda c=container, p=process, s=said: (  # type: ignore[misc]
                json.loads(command(daemon, c, p.ns_pid, "--json")[1])["source"] == s
            ),
            f"an answer by {said}",
        )
        assert command(daemon, container, process.ns_pid) == (0, f"{process.host_pid}\n")
    nested = plain.spawn(SLEEP, nested=True)
    (outer,) = Procfs().ns_pids(nested.host_pid)[1:2]
    assert command(daemon, plain, outer) == (0, f"{nested.host_pid}\n")
    assert command(daemon, plain, 1) == (0, f"{plain.init_host_pid}\n")  # not the nested one of that number
    assert command(daemon, plain, 4000)[0] == 1


# ---- processes that end -------------------------------------------------------------------------------------------


@EVERY_SOURCE
def test_a_number_that_is_used_again_is_another_process(node: Node, start: Start, source: str) -> None:
    container = node.container()
    order = Orders(container)
    daemon = serving(start, node)
    seen = 0
    for _ in range(40):
        host_pid = order("as 777")
        for _ in range(5):
            found = ask(daemon, container, 777)
            if found is not None:
                assert (found["host_pid"], found["start_time"]) == (host_pid, Procfs().start_time(host_pid))
                seen += 1
        order("kill 777")
        assert ask(daemon, container, 777) is None
    container.stop()
    assert ask(daemon, container, 1) is None
    assert seen >= (40 if source == "bpf" else 1)  # a scan rests between two looks


def test_a_restarted_container_is_another(node: Node, start: Start, source: str) -> None:
    container = node.container()
    daemon = serving(start, node)
    for _ in range(5):
        until(lambda: ask(daemon, container, 1), "its answer")
        before, old = container.container_id, container.init_host_pid
        container.restart()
        assert container.init_host_pid != old
        until(lambda: (ask(daemon, container, 1) or {}).get("host_pid") == container.init_host_pid)
        gone = client.get(f"/v1/lookup?container={before}&pid=1", socket_path=str(daemon.socket), seconds=10)
        assert gone is not None
        assert gone[0] == 404


# ---- without a daemon ---------------------------------------------------------------------------------------------


def test_without_a_daemon_the_kernel_is_asked(node: Node, tmp_path: Path) -> None:
    container = node.container()
    process = container.spawn(SLEEP)
    nowhere, dead, silent = (tmp_path / name for name in ("nowhere", "dead", "silent"))
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(dead))
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(silent))
        mute.listen(8)
        for where in (nowhere, dead, silent):
            began = time.monotonic()
            code, text = command(where, container, process.ns_pid, "--json")
            took = time.monotonic() - began
            print(f"{where.name}: {took:.2f} s")
            found = json.loads(text)
            assert (code, found["host_pid"], found["source"]) == (0, process.host_pid, "cgroup")
            assert took < PATIENCE_S


# ---- the socket ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/proc/resolver.sock", "/" + "x" * 120], ids=["no place", "too long"])
def test_a_socket_that_cannot_be_made_ends_no_repair(node: Node, start: Start, path: str) -> None:
    container = node.container()
    tenant = container.tenant(guess="none")
    daemon = start(node, *FAST, "--socket", path)
    assert daemon.wait_for("api_off")["socket"] == path
    daemon.wait_for("repair", ns_pid=tenant.ns_pid)
