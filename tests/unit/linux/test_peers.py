"""The identity of a socket's peer, by the kernel's answers and errors; tests/kernel has the attacks."""

import errno
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resolver.base.errors import AccessDenied, CannotKnow
from resolver.base.reasons import PeerReason
from resolver.linux import peers
from resolver.linux.peers import Listener, PeerUnknown, credentials_of, peer_of, pidns_of
from resolver.linux.procfs import Procfs
from tests.descriptors import is_open, pidfds_of
from tests.patience import until

BOTH_WAYS = pytest.mark.parametrize("way", [{}, {"pidfd": errno.ENOPROTOOPT}], ids=["6.5", "before"])
SO_PEERGROUPS, SO_PEERPIDFD = 59, 77


@pytest.fixture
def server(tmp_path: Path) -> Iterator[socket.socket]:
    """Yield the server's end of a connection that this process makes to itself."""
    with Listener() as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.connect(str(tmp_path / "s"))
        server, _ = listener.accept()
        with server:
            yield server


def scripted(real: socket.socket, **said: int | bytes) -> Any:
    """Return a socket whose options answer as another kernel's would."""
    names = {"cred": socket.SO_PEERCRED, "groups": SO_PEERGROUPS, "pidfd": SO_PEERPIDFD}
    answers = {names[name]: answer for name, answer in said.items()}

    def getsockopt(level: int, optname: int, buflen: int) -> bytes:
        answer = answers.get(optname, b"")
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        assert buflen >= len(answer)
        return answer or real.getsockopt(level, optname, buflen)

    return SimpleNamespace(fileno=real.fileno, getsockopt=getsockopt)


def test_credentials_are_those_of_the_connecting_process(server: socket.socket) -> None:
    who = credentials_of(server)
    assert who == (os.getpid(), os.geteuid(), os.getegid(), tuple(os.getgroups()))


def test_groups_by_the_kernel_and_none_where_it_does_not_say(server: socket.socket) -> None:
    said = struct.pack("=3I", 10, 4294967294, 0)
    assert credentials_of(scripted(server, groups=said)).groups == (10, 4294967294, 0)
    for refusal in (errno.ENOPROTOOPT, errno.ERANGE):  # before Linux 4.13; more groups than fit
        assert credentials_of(scripted(server, groups=refusal)).groups == ()
    with pytest.raises(OSError, match="Bad file descriptor"):
        credentials_of(scripted(server, groups=errno.EBADF))


@BOTH_WAYS
@pytest.mark.parametrize("use_pidfd", [True, False])
def test_a_living_peer_is_held(server: socket.socket, way: dict[str, int], *, use_pidfd: bool) -> None:
    procfs = Procfs(use_pidfd=use_pidfd)
    with peer_of(scripted(server, **way), procfs) as peer:
        assert peer.is_pidfd is (use_pidfd or not way)
        assert peer.host_pid == os.getpid()
        assert peer.alive()
        assert pidns_of(peer, procfs) == (procfs.pidns("self"), procfs.ns_pids(os.getpid()))
        held = peer.fd
        assert not os.get_inheritable(held)
    peer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)


def test_a_peer_without_a_number_here_is_not_visible(server: socket.socket) -> None:
    elsewhere = scripted(server, cred=struct.pack("=iII", 0, 0, 0))
    with pytest.raises(PeerUnknown, match="hostPID") as caught:
        peer_of(elsewhere, Procfs())
    assert caught.value.reason is PeerReason.NOT_VISIBLE
    assert isinstance(caught.value, CannotKnow)


def test_each_kernels_word_about_a_peer(server: socket.socket) -> None:
    for refusal in (errno.EINVAL, errno.ESRCH, errno.ENODATA):
        with pytest.raises(PeerUnknown) as caught:
            peer_of(scripted(server, pidfd=refusal), Procfs())
        assert caught.value.reason is PeerReason.ENDED
    for refusal in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        with pytest.raises(OSError, match=r"open files|memory"):
            peer_of(scripted(server, pidfd=refusal), Procfs())


def test_the_number_of_another_is_not_proven(server: socket.socket) -> None:
    """Simulates a reused PID: a live process that has no part in this connection."""
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            reused = scripted(server, cred=struct.pack("=iII", other.pid, 0, 0), pidfd=errno.ENOPROTOOPT)
            before = set(os.listdir("/proc/self/fd"))
            with pytest.raises(PeerUnknown, match=r"6\.5") as caught:
                peer_of(reused, Procfs())
            assert caught.value.reason is PeerReason.NOT_PROVEN
            until(lambda: pidfds_of(other.pid) == 0, "no pidfd of it")
            until(lambda: not is_open(Path(f"/proc/{other.pid}")), "no directory of it")
            until(lambda: set(os.listdir("/proc/self/fd")) <= before, "no further descriptor")
            with peer_of(reused, Procfs(), exact=False) as peer:
                assert peer.host_pid == other.pid
        finally:
            other.kill()


CLIENT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as client:
    sys.stdin.readline()
    client.connect(sys.argv[1])
    print("connected", flush=True)
    sys.stdin.readline()
"""


def client(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-c", CLIENT, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@BOTH_WAYS
def test_a_peer_that_ends_while_it_is_looked_at(tmp_path: Path, way: dict[str, int]) -> None:
    with socket.socket(socket.AF_UNIX) as listener, client(tmp_path / "s") as process:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        say(process)
        server, _ = listener.accept()
        with server, peer_of(scripted(server, **way), Procfs(), exact=False) as peer:
            assert pidns_of(peer, Procfs())[1][0] == process.pid
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not reaped: its PID is in use
            assert not peer.alive()
            for _ in range(2):
                with pytest.raises(PeerUnknown) as caught:
                    pidns_of(peer, Procfs())
                assert caught.value.reason is PeerReason.ENDED
                process.wait()
            with pytest.raises(PeerUnknown) as caught:
                peer_of(scripted(server, **way), Procfs())
            assert caught.value.reason is PeerReason.ENDED


def test_one_that_is_older_than_its_connection_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "made_after", {})
    procfs, path = Procfs(), tmp_path / "s"
    with Listener() as listener, client(path) as old:
        started = (procfs.start_time(old.pid) + 1) / os.sysconf("SC_CLK_TCK")
        while time.clock_gettime(time.CLOCK_BOOTTIME) < started:
            time.sleep(0.005)
        listener.bind(str(path))
        listener.listen(5)
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert not listener.getblocking()
        say(old)
        assert old.stdout is not None
        assert old.stdout.readline() == "connected\n"
        with client(path) as young:
            say(young)
            assert young.stdout is not None
            assert young.stdout.readline() == "connected\n"
            # Both connections waited. The second client may be new, so another process may have had its PID.
            first, second = listener.accept()[0], listener.accept()[0]
            with first, second:
                with peer_of(scripted(first, pidfd=errno.ENOPROTOOPT), procfs) as peer:
                    assert peer.host_pid == old.pid
                with pytest.raises(PeerUnknown) as caught:
                    peer_of(scripted(second, pidfd=errno.ENOPROTOOPT), procfs)
                assert caught.value.reason is PeerReason.NOT_PROVEN
            young.kill()
        old.kill()


def test_peer_with_hidden_numbers(server: socket.socket) -> None:
    class Other(Procfs):
        def ns_pids(self, host_pid: int | str) -> tuple[int, ...]:  # noqa: ARG002
            raise AccessDenied("run as root")

    with peer_of(server, Procfs()) as peer, pytest.raises(PeerUnknown, match="run as root") as caught:
        pidns_of(peer, Other())
    assert caught.value.reason is PeerReason.ACCESS_DENIED
