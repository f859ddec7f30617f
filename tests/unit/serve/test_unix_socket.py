"""Unix sockets in the file system: closed to clients until open; only a dead socket is replaced."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from resolver import api
from resolver.base.errors import UsageError
from resolver.base.journal import Journal
from resolver.config import load
from resolver.linux.peers import Listener
from resolver.serve.unix_socket import UnixSocket, group_of


def reachable(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as channel:
        try:
            channel.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True


def test_it_is_there_when_it_is_open_and_gone_when_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "run" / "api.sock"
    unix_socket = UnixSocket(str(path), "--socket", mode=0o606, group=4711)
    (temporary,) = (tmp_path / "run").iterdir()
    assert not path.exists()
    assert not reachable(temporary)
    UnixSocket(f"{path}.never", "--socket").close()
    unix_socket.open()
    info = path.stat()
    assert (stat.S_IMODE(info.st_mode), info.st_gid, reachable(path)) == (0o606, 4711, True)
    assert os.listdir(path.parent) == ["api.sock"]
    unix_socket.close()
    unix_socket.close()
    assert os.listdir(path.parent) == []


def test_a_name_exchanged_for_a_link_changes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may write to the directory: a followed link once changed root's file from 0600 to 0666."""
    secret, path = tmp_path / "secret", tmp_path / "api.sock"
    secret.touch(0o600)
    bind = Listener.bind

    def exchanged(self: Listener, name: str) -> None:
        bind(self, name)
        os.unlink(name)
        os.symlink(secret, name)

    monkeypatch.setattr(Listener, "bind", exchanged)
    UnixSocket(str(path), "--socket", mode=0o666, group=4711).close()
    info = secret.stat()
    assert (stat.S_IMODE(info.st_mode), info.st_gid) == (0o600, secret.parent.stat().st_gid)


MAKE = """
import os, sys
from resolver.serve.unix_socket import UnixSocket
socket = UnixSocket(sys.argv[1], '')
print(os.getpid(), flush=True)
"""


def test_only_leftover_socket_is_removed(tmp_path: Path, root: Path) -> None:
    path = tmp_path / "api.sock"

    def left_by(program: str) -> tuple[subprocess.Popen[str], str]:
        started = subprocess.Popen(
            [sys.executable, "-c", MAKE + program, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
        )
        assert started.stdout is not None
        return started, f"api.sock.{started.stdout.readline().strip()}"

    (tmp_path / "api.sock.1999999999").write_text("no socket, so none of ours")
    (tmp_path / "api.sock.backup").write_text("precious")
    waits, waiting = left_by("input()")
    others = {"api.sock.1999999999", "api.sock.backup", waiting}
    for moment in ("the next one's start", "another one's end"):
        unix_socket = UnixSocket(str(path), "--socket") if moment == "another one's end" else None
        killed, left = left_by("os.kill(os.getpid(), 9)")
        killed.communicate()
        assert left in os.listdir(tmp_path)
        unix_socket = unix_socket or UnixSocket(str(path), "--socket")
        unix_socket.open()
        if moment == "the next one's start":
            assert {*os.listdir(tmp_path)} == {"api.sock", *others}
        unix_socket.close()
        assert {*os.listdir(tmp_path)} == others
    waits.kill()
    waits.communicate()


def test_a_living_one_is_left_alone_and_a_dead_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    first = UnixSocket(str(path), "--socket")
    first.open()
    second = UnixSocket(str(path), "--socket")
    with pytest.raises(UsageError, match="another process listens"):
        second.open()
    second.close()
    assert reachable(path)
    first.listener.close()  # as if the process had been killed
    third = UnixSocket(str(path), "--socket")
    third.open()
    assert reachable(path)
    first.close()
    assert reachable(path)  # the path now has the third process's socket
    third.close()


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        (
            "/proc/x/s",
            r"the socket /proc/x/s cannot be used \(No such file or directory\): check its",
        ),
        ("/nope/t/s", "there is no /nope, and the daemon makes none in /: make it, or name another place"),
        ("/run/" + "x" * 100, r"cannot be used \(AF_UNIX path too long\)"),
    ],
)
def test_impossible_path_is_refused_with_its_option(path: str, cause: str) -> None:
    with pytest.raises(UsageError, match=f"{cause}.* with --socket"):
        UnixSocket(path, "--socket")
    assert not os.path.lexists("/nope")


def test_missing_group_is_logged_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (group_of(""), group_of("4711"), group_of("root")) == (None, 4711, 0)
    settings, _ = load({"run_dir": str(tmp_path), "socket_group": "nobody-has-this-group"})
    assert api.make_sockets(settings, Journal()) == (None, None)
    said = "".join(capsys.readouterr())
    assert "api_off" in said
    assert "groupadd" in said
    assert os.listdir(tmp_path) == []


GIVE = """
import sys
from resolver.serve.unix_socket import UnixSocket
from resolver.base.errors import UsageError
try:
    UnixSocket(sys.argv[1], '', group=4711)
except UsageError as error:
    print(error)
else:
    print("given")
"""


@pytest.mark.parametrize(("groups", "said"), [("1", "CAP_CHOWN"), ("1,4711", "given")])
def test_without_the_right_it_is_given_to_a_group_that_one_is_in(
    tmp_path: Path, root: Path, groups: str, said: str
) -> None:
    without = ["setpriv", "--bounding-set=-chown", "--inh-caps=-all", f"--groups={groups}"]
    done = subprocess.run(
        [*without, sys.executable, "-c", GIVE, str(tmp_path / "api.sock")],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said in done.stdout
