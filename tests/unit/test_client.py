"""The client of a daemon, against servers that are slow, silent, broken or foreign."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from resolver import client
from resolver.base.errors import AccessDenied, Ambiguous, CannotKnow, NoDaemon, NotFound
from resolver.cli import lookup as command
from resolver.cli import main, parser_of
from tests.fakes.socket_server import SocketServer, http
from tests.kernel.rights import UNPRIVILEGED
from tests.patience import PATIENCE_S
from tests.programs import completed

CID = "0123456789abcdef" * 4
SETTLED = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n4711\n"


Answer = Callable[[socket.socket], None] | bytes | str
Serve = Callable[[Answer], SocketServer]


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "resolver.sock"


@pytest.fixture
def serve(where: Path) -> Iterator[Serve]:
    with contextlib.ExitStack() as servers:

        def make(answer: Answer) -> SocketServer:
            said = answer.encode() if isinstance(answer, str) else answer
            return servers.enter_context(SocketServer(where, said))

        yield make


def ask(where: Path) -> tuple[int, str] | None:
    began = time.monotonic()
    answer = client.get("/v1/lookup?container=x&pid=1", socket_path=str(where))
    assert time.monotonic() - began < PATIENCE_S
    return answer


def test_complete_answer_is_returned(serve: Serve, where: Path) -> None:
    server = serve(SETTLED)
    assert ask(where) == (200, "4711\n")
    assert server.requests[0].startswith(b"GET /v1/lookup?container=x&pid=1 HTTP/1.1\r\nHost: resolver\r\n")


def late(channel: socket.socket) -> None:
    time.sleep(3 * command.QUICK_SECONDS)
    channel.sendall(http('{"host_pid": 4711}'))


def drip(channel: socket.socket) -> None:
    for letter in SETTLED * 3:
        channel.sendall(letter.encode())
        time.sleep(0.05)


def pour(channel: socket.socket) -> None:
    while True:
        channel.sendall(b"x" * 65536)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "4711\n",
        "SSH-2.0-OpenSSH_9.2p1\r\n\r\n",
        "HTTP/1.1 200 OK\r\n",
        "HTTP/1.1 200 OK\r\n\r\n4711\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n471",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n4711\n1",
        "HTTP/1.1 200 OK\r\ncontent-length: five\r\n\r\n4711\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\n4711\n",
        "HTTP/1.1 2OO OK\r\ncontent-length: 5\r\n\r\n4711\n",
        "HTTP/1.1\r\n\r\n",
        "\r\n\r\n" * 1000,
        http(b"\xff\xfe"),
        lambda _channel: time.sleep(2),
        drip,
        pour,
    ],
)
def test_incomplete_answer_in_time_is_none(serve: Serve, where: Path, answer: Answer) -> None:
    serve(answer)
    assert ask(where) is None


@pytest.mark.parametrize("answers", [["403 Forbidden", "200 OK"], ["403 Forbidden", "403 Forbidden"]])
def test_undetermined_caller_asks_again(serve: Serve, where: Path, answers: list[str]) -> None:
    """Before Linux 6.5, the daemon can identify only a caller that is older than its connection."""
    left = [http('{"detail": "why", "reason": "peer_unknown"}', status) for status in answers]
    server = serve(lambda channel: channel.sendall(left.pop(0)))
    if answers[-1] == "200 OK":
        assert client.get_json("/v1/status", str(where))["detail"] == "why"
    else:
        with pytest.raises(AccessDenied, match="why"):
            client.get_json("/v1/status", str(where))
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("status", "body", "error", "candidates"),
    [
        *((status, "no JSON", CannotKnow, ()) for status in (429, 500, 503)),
        (403, "no JSON", AccessDenied, ()),
        (409, '{"detail": "two fit", "candidates": ["a", "b"]}', Ambiguous, ("a", "b")),
    ],
)
def test_refusal_is_its_error(
    serve: Serve, where: Path, status: int, body: str, error: type[Exception], candidates: tuple[str, ...]
) -> None:
    serve(http(body, f"{status} Refused"))
    with pytest.raises(error, match="two fit" if candidates else f"HTTP status {status}") as refused:
        client.get_json("/v1/status", str(where))
    assert getattr(refused.value, "candidates", ()) == candidates


def test_missing_daemon_is_reported(where: Path) -> None:
    assert ask(where) is None
    where.touch()
    assert ask(where) is None
    where.unlink()
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(where))
    assert ask(where) is None
    assert ask(Path("/" + "x" * 200)) is None
    assert ask(Path("a\0b")) is None


def test_client_leaves_a_full_backlog(where: Path) -> None:
    """With a full backlog, a blocking connect would wait."""
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as crowd:
        listener.bind(str(where))
        listener.listen(0)
        for _ in range(3):
            channel = crowd.enter_context(socket.socket(socket.AF_UNIX))
            channel.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                channel.connect(str(where))
        assert ask(where) is None


def test_socket_of_another_user_is_not_trusted(serve: Serve, where: Path) -> None:
    server = serve(SETTLED)
    os.chown(where, 65534, 65534)
    assert ask(where) is None
    assert server.requests == []


STRANGER = """
    import os, socket, sys
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    os.setresuid(65534, 65534, 65534)
    listener.listen(1)
    print("ready", flush=True)
    channel, _ = listener.accept()
    print(len(channel.recv(1000)), flush=True)
"""


def test_socket_of_another_user_is_not_asked(where: Path) -> None:
    program = [sys.executable, "-c", textwrap.dedent(STRANGER), str(where)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        assert where.stat().st_uid == 0
        assert ask(where) is None
        assert stranger.stdout.readline() == "0\n"


IN_USER_NAMESPACE = """
    import ctypes, os, sys
    unshare = ctypes.CDLL(None).unshare
    unshare(0x10000000)  # CLONE_NEWUSER
    print(flush=True)
    sys.stdin.readline()  # until its users are mapped
    if sys.argv[3]:
        os.setgid(0)
        os.setuid(0)
    unshare(int(sys.argv[2]))
    if os.fork() == 0:
        from resolver import client
        print(client.get("/v1/usage", socket_path=sys.argv[1]))
    else:
        os.wait()
"""
CLONE_NEWPID = 0x20000000


@pytest.mark.parametrize(
    ("namespace", "users", "answer"),
    [
        (CLONE_NEWPID, "0 100000 65536", (200, "4711\n")),
        (0, "0 100000 65536", None),
        (CLONE_NEWPID, "", None),
        (0, "", None),
    ],
)
def test_hosts_root_is_trusted_in_a_user_namespace(
    root: Path, namespace: int, users: str, answer: tuple[int, str] | None
) -> None:
    """The kernel shows the peer there without a user, and in a container also without a PID."""
    with tempfile.TemporaryDirectory() as place, SocketServer(Path(place) / "s", SETTLED.encode()):
        os.chmod(place, 0o711)  # noqa: S103 - like the directory that a container mounts
        os.chmod(f"{place}/s", 0o666)  # noqa: S103 - like the tenants' socket
        program = [
            sys.executable,
            "-c",
            textwrap.dedent(IN_USER_NAMESPACE),
            f"{place}/s",
            str(namespace),
            users,
        ]
        pipe = subprocess.PIPE
        with subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True, cwd=root) as inside:
            assert inside.stdout is not None
            inside.stdout.readline()
            for ids in ("uid_map", "gid_map") if users else ():
                Path(f"/proc/{inside.pid}/{ids}").write_text(users)
            assert inside.communicate("\n", timeout=60)[0] == f"{answer}\n"


def from_daemon(where: Path, cid: str = CID, ns_pid: int = 7, **more: object) -> str | None:
    options = {"pidns": None, "socket": str(where), "json": False, **more}
    return command.ask_daemon(Namespace(cid=cid, ns_pid=ns_pid, **options))


def test_number_is_printed(serve: Serve, where: Path) -> None:
    server = serve(SETTLED)
    assert from_daemon(where) == "4711"
    assert from_daemon(where, cid=f"containerd://{CID}") == "4711"
    assert f"container={CID}&pid=7 ".encode() in server.requests[1]


FOUND = {"container_id": CID, "container_pid": 7, "host_pid": 4711}


def test_json_is_printed_as_it_came(serve: Serve, where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resolver.cli.lookup.QUICK_SECONDS", 60.0)
    serve(http(json.dumps(FOUND)))
    assert from_daemon(where, json=True) == json.dumps(FOUND)


NO_NUMBERS = ("", "\n", "0\n", "-5\n", "4711", "4711\n4712\n", "<html>\n", "12345678901\n")
WRONG = ({"container_id": CID[::-1]}, {"container_pid": 8}, {"host_pid": "4711"}, {"host_pid": True})
OTHERS = ([], 7, {}, {"container_id": CID, "container_pid": 7}, *(FOUND | wrong for wrong in WRONG))


@pytest.mark.parametrize(
    ("body", "as_json"),
    [
        *((text, False) for text in NO_NUMBERS),
        *((text, True) for text in ('{"id": ', *map(json.dumps, OTHERS))),
    ],
)
def test_other_answer_is_not_printed(serve: Serve, where: Path, body: str, *, as_json: bool) -> None:
    serve(http(body))
    assert from_daemon(where, json=as_json) is None


@pytest.mark.parametrize(
    ("cid", "more"),
    [
        (CID[:12], {}),
        ("pod/name", {}),
        (CID.upper(), {}),
        (CID, {"ns_pid": 0}),
        (CID, {"pidns": 4026531836}),
    ],
)
def test_only_plain_questions_are_put_to_a_daemon(
    serve: Serve, where: Path, cid: str, more: dict[str, int]
) -> None:
    server = serve(SETTLED)
    assert from_daemon(where, cid, **more) is None
    assert server.requests == []


def test_no_daemon_is_suggested_if_one_hangs(tmp_path: Path) -> None:
    path = tmp_path / "silent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(5)
        with pytest.raises(NoDaemon, match=r"It hangs.* resolver doctor --only daemon") as caught:
            client.get_json("/v1/status", str(path), seconds=0.1)
    assert "Start one" not in str(caught.value)


def test_plain_file_is_no_socket(where: Path) -> None:
    where.touch()
    with pytest.raises(NoDaemon, match="another kind of file, and no socket"):
        client.get_json("/v1/status", str(where))


@pytest.mark.parametrize("command", ["status", "lookup main 7", "lookup research/train-0 7"])
def test_refused_caller_learns_permitted_users(root: Path, command: str) -> None:
    code = f"import sys; from resolver.cli import main; main([*{command.split()}, '--socket', sys.argv[1]])"
    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as listener:
        path = f"{place}/d.sock"
        listener.bind(path)
        listener.listen(5)
        os.chmod(place, 0o711)  # noqa: S103 - the socket below it stays closed
        os.chown(path, 0, 54321)
        os.chmod(path, 0o660)
        done = completed(*UNPRIVILEGED, sys.executable, "-c", code, path, cwd=root)
    assert (
        f"this user may not ask the daemon at {path}: Permission denied. Ask as root (sudo), or "
        in done.stderr
    )
    assert "Start one" not in done.stderr
    assert "Without one" not in done.stderr


def test_refused_directory_of_names_is_no_missing_name(root: Path) -> None:
    code = (
        "import os, resolver.cli.container_names, resolver.cli.lookup; from resolver.cli import main; "
        "os.setuid(65534); main('lookup main 7 --socket /no'.split())"
    )
    with tempfile.TemporaryDirectory() as place:  # only its owner can read it
        environment = os.environ | {"RESOLVER_POD_LOGS_DIR": place}
        done = completed(sys.executable, "-c", code, cwd=root, env=environment)
    assert f"{place} may not be read, and has the names of pods: run as root" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        [CID, "7"],
        [CID, "7", "--json"],
        ["--json", CID, "7", "--socket", "/x"],
        ["research/train-0", "0012"],
        ["--socket", "/x", CID, "--json", "7"],
    ],
)
def test_fast_parser_agrees_with_argparse(words: list[str]) -> None:
    args = command.parsed(words)
    assert args is not None
    assert vars(args) == vars(parser_of("lookup")[0].parse_args(words))


LEFT = f"""{CID}; {CID} seven; {CID} -7; {CID} \u0667; {CID} 7 8; {CID} 7 --js; {CID} 7 --socket=/x; {CID} 7 --socket
    {CID} 7 --socket --json; {CID} 7 --pidns 4026531836; --help; -- {CID} 7"""


@pytest.mark.parametrize("words", [[], ["", "7"], *(each.split() for each in re.split("; |\n", LEFT))])
def test_other_arguments_go_to_argparse(words: list[str]) -> None:
    assert command.parsed(words) is None


@pytest.mark.parametrize(("cid", "there"), [(CID, True), (CID, False), (CID[:12], False)])
def test_plain_look_up_loads_no_parser(serve: Serve, where: Path, cid: str, *, there: bool) -> None:
    """A parser takes long to load."""
    serve(SETTLED)
    socket_path = where if there else where.with_name("none")
    code = (
        "import sys; from resolver.cli import lookup, main; "
        "lookup.QUICK_SECONDS = 60; "  # on a busy machine the server of this test may be late
        f"main(['lookup', '{cid}', '7', '--socket', '{socket_path}']); print(*sys.modules)"
    )
    done = completed(sys.executable, "-I", "-c", code, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    never = {
        *("argparse", "gettext", "shutil", "http", "asyncio", "psutil", "threading", "typing", "re"),
        *("msgspec", "resolver.base.reasons"),
    }
    assert not loaded & (never | ({"json", "resolver.lookup"} if there else {"socket"}))


@pytest.mark.parametrize(
    ("answer", "kernel", "code", "said"),
    [
        *((answer, [{"host_pid": 4712}], 0, ("4712\n", "")) for answer in (
            late, http("4711\n", "503 Busy"), http("no number\n"), "HTTP/1.1 200 OK\r\n",
        )),
        (late, CannotKnow("not root"), 0, ("4711\n", "")),
        (late, NotFound("it is not there"), 1, ("", "resolver lookup: it is not there\n")),
    ],
)  # fmt: skip
def test_kernel_answers_for_late_daemon_and_vice_versa(
    serve: Serve, where: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    answer: Answer, kernel: list[object] | Exception, code: int, said: tuple[str, str],
) -> None:  # fmt: skip
    serve(answer)
    answers = (
        [Mock(_asdict=Mock(return_value=each)) for each in kernel] if isinstance(kernel, list) else kernel
    )
    monkeypatch.setattr("resolver.lookup.forward.lookup", Mock(side_effect=answers))
    assert main(["lookup", CID, "7", "--socket", str(where)]) == code
    assert capsys.readouterr() == said
