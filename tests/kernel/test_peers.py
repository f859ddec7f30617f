"""Peers in real namespaces, and the attack: a connection outlives its process, and the PID is used again."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.linux.peers import Listener, Peer, PeerUnknown, credentials_of, peer_of, pidns_of
from resolver.linux.procfs import Procfs
from resolver.reasons import PeerReason
from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.fakes.pids import reborn
from tests.fakes.process import Process
from tests.kernel.conftest import until

BOTH_WAYS = pytest.mark.parametrize("use_peerpidfd", [True, False])

CONNECT = """
import os, socket, sys
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
print("connected", flush=True)
if sys.argv[2] == "leave":
    if os.fork():
        os._exit(0)                # it ends, and its child has the connection
    print("left", flush=True)
print(sys.stdin.readline() and client.recv(100), flush=True)
"""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with Listener() as listener:
        listener.bind(str(tmp_path / "s"))
        (tmp_path / "s").chmod(0o666)
        listener.listen(16)
        yield listener


def connect(container: Container, listener: socket.socket, how: str = "stay", **options: bool) -> Process:
    script = [sys.executable, "-I", "-c", CONNECT, listener.getsockname(), how]
    process = container.spawn(script, **options)
    assert process.read_line() == "connected"
    return process


@contextlib.contextmanager
def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    connection, _ = listener.accept()
    with connection:
        yield connection


@BOTH_WAYS
def test_the_namespace_of_a_container(node: Node, listener: socket.socket, *, use_peerpidfd: bool) -> None:
    procfs, first = Procfs(), node.container()
    shared = node.container(pid_namespace=first)
    for container in (first, node.container(), shared, node.container(pid_namespace="host")):
        process = connect(container, listener)
        with accepted(listener) as connection, _peer(connection, use_peerpidfd) as peer:
            assert peer.host_pid == process.host_pid
            assert pidns_of(peer, procfs).pidns == container.pidns == process.pidns
            assert pidns_of(peer, procfs).ns_pids[-1] == process.ns_pid
    nested = connect(first, listener, nested=True)
    with accepted(listener) as connection, _peer(connection, use_peerpidfd) as peer:
        found = pidns_of(peer, procfs)
        assert found.pidns == nested.pidns != first.pidns
        assert len(found.ns_pids) == 3
        assert found.ns_pids[-1] == nested.ns_pid == 1


def _peer(connection: socket.socket, use_peerpidfd: bool) -> Peer:  # noqa: FBT001
    return peer_of(connection, Procfs(), use_peerpidfd=use_peerpidfd)


def test_a_connection_that_outlives_its_process_is_nobodys(node: Node, listener: socket.socket) -> None:
    """Whoever holds it now, and though the number is another's by now, in another container."""
    attacker = connect(node.container(), listener, "leave")
    assert attacker.read_line() == "left"
    with accepted(listener) as connection:
        host_pid = credentials_of(connection).host_pid
        assert host_pid == attacker.host_pid
        until(lambda: not os.path.exists(f"/proc/{host_pid}"), "the end of the one that connected")
        for use_peerpidfd in (True, False):
            _is_unknown(connection, PeerReason.ENDED, use_peerpidfd=use_peerpidfd)
        with reborn(host_pid) as pidns:
            assert Procfs().pidns(host_pid) == pidns  # the trap: /proc knows that number, and answers
            assert credentials_of(connection).host_pid == host_pid
            _is_unknown(connection, PeerReason.ENDED, use_peerpidfd=True)
            _is_unknown(connection, PeerReason.NOT_PROVEN, use_peerpidfd=False)
            with peer_of(connection, Procfs(), use_peerpidfd=False, exact=False) as peer:
                assert not peer.exact


def _is_unknown(connection: socket.socket, reason: PeerReason, *, use_peerpidfd: bool) -> None:
    with pytest.raises(PeerUnknown) as caught:
        peer_of(connection, Procfs(), use_peerpidfd=use_peerpidfd)
    assert caught.value.reason is reason


@BOTH_WAYS
def test_a_number_that_is_used_again_between_two_looks(
    node: Node, listener: socket.socket, *, use_peerpidfd: bool
) -> None:
    """It was held while it lived. What the next one with its number is like is not said of it."""
    process = connect(node.container(), listener)
    with accepted(listener) as connection, _peer(connection, use_peerpidfd) as peer:
        assert pidns_of(peer, Procfs()).pidns == process.pidns
        process.kill()
        until(lambda: not os.path.exists(f"/proc/{peer.host_pid}"), "its end")
        with reborn(peer.host_pid) as pidns:
            assert Procfs().pidns(peer.host_pid) == pidns != process.pidns
            with pytest.raises(PeerUnknown) as caught:
                pidns_of(peer, Procfs())
            assert caught.value.reason is PeerReason.ENDED
