"""Other processes use up memory or descriptors: the daemon continues or reports it; no container is blamed."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.kernel.conftest import ROOT, USUAL, WRITER, Start, slot_of, write_hostpid
from tests.kernel.rights import patched
from tests.kernel.serving import answer, serving
from tests.patience import until

#: The daemon's limit of descriptors in these tests.
_LIMIT = 512


@contextmanager
def in_flight(count: int) -> Iterator[None]:
    pairs = []
    try:
        sent = 0
        while sent < count:
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            pairs.append(pair)
            for _ in range(4):
                socket.send_fds(pair[0], [b"x"], [0] * 250)
                sent += 250
        yield
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


def limit(daemon: Daemon) -> None:
    """Limit descriptors: the kernel compares the user's descriptors in flight with the sender's limit."""
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (_LIMIT, _LIMIT))
    for host_pid in daemon.children().values():
        resource.prlimit(host_pid, resource.RLIMIT_NOFILE, (_LIMIT, _LIMIT))


def not_ready(daemon: Daemon) -> str:
    return str(answer(daemon, "status")["source"]["not_ready"] or "")


def test_descriptors_in_flight_stop_no_repair_and_no_source(node: Node, start: Start, tmp_path: Path) -> None:
    container = node.container(watcher=False)
    tenant = container.tenant(load=0, guess="none")
    daemon = start(node, "--interval", "100ms")
    tenant.until_repaired()
    limit(daemon)
    with in_flight(2 * _LIMIT):
        for _ in range(5):
            ns_pid = tenant.fork()
            host_pid = node.gpu.host_pid(container.pidns, ns_pid)
            until(lambda this=ns_pid, right=host_pid: slot_of(container, this).hostpid == right, "a repair")  # type: ignore[misc]
        other = node.container(watcher=False)
        other.tenant(load=0, guess="none").until_repaired()
        for source in ("bpf", "netlink"):
            limited, run_dir = ("prlimit", f"--nofile={_LIMIT}:{_LIMIT}"), tmp_path / source
            later = start(node, "--dry-run", "--source", source, run_dir=run_dir, wrapper=limited, anew=False)
            later.wait_for("source", source=source)
    assert daemon.said("region_quarantined") == daemon.said("out_of_means") == []


def test_repeatedly_killed_writer_makes_daemon_not_ready(node: Node, start: Start, tmp_path: Path) -> None:
    container, spoiled = node.container(watcher=False), tmp_path / "spoiled"
    tenant = container.tenant(load=0, guess="none")
    spoils = patched(
        """
        import os, sys
        from resolver.workers import spawn as spawning
        start, spoiled = spawning.spawn, sys.argv[1]
        def spawn(argv, *rest, **more):
            killed = os.path.exists(spoiled) and any("writer_child" in word for word in argv)
            return start(["/bin/sh", "-c", "kill -KILL $$"] if killed else argv, *rest, **more)
        spawning.spawn = spawn
        """,
        str(spoiled),
    )
    daemon = serving(start, node, wrapper=spoils)
    tenant.until_repaired()
    spoiled.touch()
    os.kill(daemon.child(WRITER), signal.SIGKILL)
    write_hostpid(container, tenant, 4711)
    until(lambda: "was killed by SIGKILL" in not_ready(daemon), "not ready, and why")
    spoiled.unlink()
    tenant.until_repaired()
    until(lambda: not not_ready(daemon), "ready again")
    daemon.wait_for("means_restored")
    assert daemon.said("region_quarantined") == []


def test_a_reader_of_the_log_that_stands_still_stops_nothing(node: Node, tmp_path: Path) -> None:
    tenant = node.container(watcher=False).tenant(load=0, guess="none")
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"-" * 4095 + b"\n")
    os.set_blocking(writing, True)
    words = ["run", "--run-dir", str(tmp_path / "run"), "--containers-dir", str(node.containers_dir)]
    with subprocess.Popen(
        [sys.executable, "-m", "resolver", *words, "--log-format", "json", "--metrics-addr", "off"],
        cwd=ROOT,
        env={**node.environment(), "RESOLVER_SOURCE": USUAL},
        stderr=writing,
    ) as daemon:
        os.close(writing)
        tenant.until_repaired()
        daemon.terminate()
        assert daemon.wait() == 0
    os.close(reading)
