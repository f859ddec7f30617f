"""Answers depend on the caller: root and the group see everything, a container sees its own PIDs."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from resolver.linux.procfs import Procfs
from tests.fakes.command import run
from tests.fakes.container import Container
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.fakes.process import Process
from tests.kernel.conftest import EVERY_SOURCE, Start, with_every_source
from tests.kernel.serving import SLEEP
from tests.patience import until
from tests.programs import completed

GROUP = 54321
PYTHON = (sys.executable, "-c")

#: A client: `serve` sends one request per line of input, on one connection or each on a new one, and prints answers.
ASKER = """
import http.client, json, os, socket, sys
def connect(path):
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(path)
    channel.settimeout(60)
    return channel
def ask(channel, method, path, body=""):
    head = f"{method} {path} HTTP/1.1\\r\\nHost: r\\r\\nContent-Type: application/json\\r\\n"
    head += f"Accept: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
    try:
        channel.sendall((head + body).encode())
    except BrokenPipeError:
        pass  # the daemon answered, then closed the connection
    answer = http.client.HTTPResponse(channel, method=method)
    try:
        answer.begin()
    except ConnectionResetError:
        return [0, ""]  # closed before it read the request
    return [answer.status, answer.read().decode()]
def serve(channel=None):
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(ask(channel or connect(path), *json.loads(line))), flush=True)
path = sys.argv[1]
"""
#: Sends requests without waiting, and prints the statuses of the answers when the connection is closed.
FLOOD = (
    ASKER
    + """
channel, said = connect(path), b""
try:
    channel.sendall(b"GET /v1/lookup?pid=1 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" * int(sys.argv[2]))
except BrokenPipeError:
    pass  # closed before all was sent
try:
    while more := channel.recv(65536):
        said += more
except ConnectionResetError:
    pass
print(json.dumps([int(each[:3]) for each in said.split(b"HTTP/1.1 ")[1:]]), flush=True)
"""
)


class Asker:
    def __init__(self, process: Process) -> None:
        self._process = process
        assert process.read_line() == "ready"

    def __call__(self, path: str, method: str = "GET", body: str = "") -> tuple[int, Any]:
        self._process.write_line(json.dumps([method, path, body]))
        status, text = json.loads(self._process.read_line())
        return status, json.loads(text) if text else None

    @property
    def ns_pid(self) -> int:
        return self._process.ns_pid

    @property
    def host_pid(self) -> int:
        return self._process.host_pid


def asker(container: Container, path: Path, rights: str = "") -> Asker:
    return Asker(container.spawn([*PYTHON, ASKER + rights + "serve()", str(path)]))


def on_the_host(path: Path, question: str, *, uid: int = 0, groups: str = "0") -> tuple[int, Any]:
    program = ASKER + f"print(json.dumps(ask(connect(path), 'GET', {question!r})))\n"
    user = ("setpriv", f"--reuid={uid}", f"--regid={uid}", f"--groups={groups}")
    done = completed(*user, *PYTHON, program, path, cwd="/")
    assert done.returncode == 0, done.stderr
    status, text = json.loads(done.stdout)
    return status, json.loads(text)


def roots(path: Path) -> Path:
    return path.parent.parent / "resolver.sock"


@pytest.fixture
def path(open_place: Path) -> Path:
    """The socket of `daemon` that containers can reach; that of root is `roots`."""
    return open_place / "tenants" / "resolver.sock"


@pytest.fixture(autouse=True)
def daemon(path: Path, node: Node, start: Start, source: str) -> Daemon:
    options = ["--socket", str(roots(path)), "--socket-group", str(GROUP), "--tenant-socket", str(path)]
    daemon = start(node, "--interval", "50ms", "--nvml-interval", "200ms", *options)
    until(lambda: path.exists() and roots(path).exists(), "its sockets")
    return daemon


OWN_VIEW = ("/v1/processes", "/v1/usage", "/v1/slots")
EVERYTHING = (
    "/v1/containers", "/v1/regions", "/v1/gpus", "/v1/unresolved", "/v1/status", "/v1/events", "/v1/nothing",
)  # fmt: skip


@with_every_source("user", [0, 1000])
def test_a_container_sees_its_own_and_nothing_else(node: Node, path: Path, source: str, user: int) -> None:
    mine, other = node.container(name="mine"), node.container(name="other")
    processes = [mine.spawn(SLEEP) for _ in range(3)]
    theirs = other.spawn(SLEEP)
    nested = mine.spawn(SLEEP, nested=True)
    (outer,) = Procfs().ns_pids(nested.host_pid)[1:-1]
    ask = asker(mine, path, f"os.setgroups([{GROUP}]); os.setresgid({user}, {user}, {user})\n"
                f"os.setresuid({user}, {user}, {user})\n")  # fmt: skip

    # The container's processes, by PID alone or by container id, at any depth.
    for ns_pid, host_pid in (
        *((each.ns_pid, each.host_pid) for each in processes),
        (ask.ns_pid, ask.host_pid), (1, mine.init_host_pid), (outer, nested.host_pid),
    ):  # fmt: skip
        for more in ("", f"&container={mine.container_id}", f"&container=containerd://{mine.container_id}",
                     f"&container={mine.container_id[:12]}", f"&pidns={mine.pidns}"):  # fmt: skip
            status, found = ask(f"/v1/lookup?pid={ns_pid}{more}")
            assert status == 200, (more, found)
            assert (found["host_pid"], found["pidns"]) == (host_pid, mine.pidns), more
        assert found["container_id"] == mine.container_id
    assert ask("/v1/lookup?pid=4000")[0] == 404
    status, found = ask(f"/v1/reverse?host_pid={processes[0].host_pid}")
    assert (status, found["container_pid"]) == (200, processes[0].ns_pid)

    # Another container's process is refused with the same message as one that doesn't exist.
    refusals = set()
    for question in (
        f"/v1/lookup?pid={theirs.ns_pid}&container={other.container_id}",
        f"/v1/lookup?pid=4000&container={other.container_id}",
        f"/v1/lookup?pid=1&container={'ab' * 32}",
        f"/v1/lookup?pid=1&pidns={other.pidns}",
        "/v1/lookup?pid=1&pidns=4026531836",
        "/v1/lookup?pid=1&pidns=77",
        f"/v1/reverse?host_pid={theirs.host_pid}",
        f"/v1/reverse?host_pid={os.getpid()}",
        "/v1/reverse?host_pid=1",
        "/v1/reverse?host_pid=2000000000",
    ):
        status, problem = ask(question)
        assert (status, problem["reason"]) == (403, "not_yours"), (question, problem)
        refusals.add(problem["detail"])
    assert len(refusals) == 1
    # Five characters of an id are too few.
    assert ask(f"/v1/lookup?pid=1&container={mine.container_id[:5]}")[0] == 403
    for question in EVERYTHING:
        assert (ask(question)[0], ask(question)[1]["reason"]) == (403, "not_yours"), question
    assert ask("/v1/openapi.json")[0] == 200

    # In a batch, the container's own processes get answers, and all others the same refusal.
    alone = [{"pid": ns_pid} for ns_pid in (processes[1].ns_pid, 4000, outer)]
    pairs = [[mine.container_id, processes[0].ns_pid], *alone]
    pairs += [[other.container_id, theirs.ns_pid], ["ab" * 32, 1], {"pid": 1, "container": "x/y"}]
    status, found = ask("/v1/lookup", "POST", json.dumps({"pairs": pairs}))
    assert status == 200
    assert [each.get("host_pid") or each["reason"] for each in found["answers"]] == [
        *(processes[0].host_pid, processes[1].host_pid, "no_such_process", nested.host_pid),
        *("not_yours", "not_yours", "not_yours"),
    ]
    assert ask("/v1/lookup", "POST", '{"pairs": []}' + " " * (64 << 10))[0] == 413


def test_host_processes_get_all_by_group_and_none_as_tenants(node: Node, path: Path) -> None:
    root = roots(path)
    assert (root.stat().st_mode & 0o777, root.stat().st_gid) == (0o660, GROUP)
    container = node.container(pid_namespace="host")
    everything = "/v1/containers"
    for uid, groups in ((0, "0"), (1000, str(GROUP)), (GROUP, "1")):  # the last has it as primary group
        assert on_the_host(root, everything, uid=uid, groups=groups)[0] == 200
    assert (
        asker(container, root)(everything)[0] == 200
    )  # in the host's PID namespace, root counts as the host's
    # A container's root can connect to this socket, but gets no answer.
    ask = asker(node.container(name="given"), root)
    for question in (everything, "/v1/lookup?pid=1", f"/v1/reverse?host_pid={os.getpid()}"):
        status, problem = ask(question)
        assert (status, problem["reason"]) == (403, "not_yours")
        assert "--tenant-socket" in problem["detail"]
    # The tenants' socket refuses host processes: answers name pods, from a directory that they can't read.
    questions = (everything, f"/v1/lookup?pid={os.getpid()}", "/v1/openapi.json", *OWN_VIEW)
    for uid, groups in ((0, "0"), (1000, str(GROUP)), (65534, "65534")):
        for question in (*questions, f"/v1/reverse?host_pid={container.init_host_pid}"):
            status, problem = on_the_host(path, question, uid=uid, groups=groups)
            assert (status, problem["reason"]) == (403, "not_yours"), question
            assert container.pod_uid not in problem["detail"]


LEAVES_IT_BEHIND = (
    ASKER
    + """
channel = connect(path)
if "asks" in sys.argv:
    assert ask(channel, "GET", f"/v1/lookup?pid={os.getpid()}")[0] == 200
r, w = os.pipe()
if os.fork():
    os._exit(0)
os.close(w)
# The one that connected is reaped when this one has another parent.
while os.getppid() != 1:
    pass
serve(channel)
"""
)


@pytest.mark.parametrize("before", ["silent", "asks"])
def test_connection_of_ended_caller_is_refused(node: Node, path: Path, before: str) -> None:
    """By then another process may hold the connection, and another namespace may have the inode."""
    container = node.container()
    ask = Asker(container.spawn([*PYTHON, LEAVES_IT_BEHIND, str(path), before]))
    reverse = f"/v1/reverse?host_pid={container.init_host_pid}"
    for question in ("/v1/lookup?pid=1", "/v1/status", reverse, *OWN_VIEW):
        status, problem = ask(question)
        if before == "silent" and not status:
            break  # the caller ended before the accept: closed without an answer
        assert (status, problem["reason"]) == (403, "peer_unknown"), problem


IN_A_NAMESPACE_OF_ITS_OWN = (
    ASKER
    + """
import ctypes
assert ctypes.CDLL(None, use_errno=True).unshare(0x20000000) == 0
if os.fork():
    os.wait()
    os._exit(0)
serve()
"""
)


@EVERY_SOURCE
def test_a_namespace_within_sees_only_itself(node: Node, path: Path, source: str) -> None:
    container = node.container()
    sibling = container.spawn(SLEEP)
    outside = container.spawn([*PYTHON, IN_A_NAMESPACE_OF_ITS_OWN, str(path)])
    ask = Asker(outside)
    status, found = ask("/v1/lookup?pid=1")
    assert status == 200
    assert Procfs().ns_pids(found["host_pid"])[-1] == 1
    assert found["host_pid"] not in (1, container.init_host_pid, outside.host_pid)
    assert ask(f"/v1/lookup?pid={sibling.ns_pid + 1000}")[0] == 404
    for question in (f"/v1/lookup?pid={sibling.ns_pid}&pidns={container.pidns}",
                     f"/v1/reverse?host_pid={sibling.host_pid}"):  # fmt: skip
        assert ask(question)[0] == 403


def test_a_pid_namespace_decides_which_processes_are_shown(node: Node, path: Path) -> None:
    """A container of the same pod and the host's root, inside the namespace, see the namespace's processes."""
    first = node.container()
    second = node.container(first.pod_uid, "second", pid_namespace=first)
    process = first.spawn(SLEEP)
    status, found = asker(second, path)(f"/v1/lookup?pid={process.ns_pid}")
    assert (status, found["host_pid"], found["container_id"]) == (200, process.host_pid, first.container_id)
    program = ASKER + (
        f"print(json.dumps([ask(connect(path), 'GET', q) for q in ('/v1/status', '/v1/lookup?pid={process.ns_pid}')]))"
    )
    enter = ["nsenter", f"--target={first.init_host_pid}", "--pid"]
    done = completed(*enter, *PYTHON, program, path, check=True)
    (refused, _), (status, text) = json.loads(done.stdout)
    assert (refused, status, json.loads(text)["host_pid"]) == (403, 200, process.host_pid)


HANDS_IT_OUT = (
    ASKER
    + """
channel = connect(path)
with socket.socket(socket.AF_UNIX) as to:
    to.connect(sys.argv[2])
    socket.send_fds(to, [b"x"], [channel.fileno()])
    sys.stdin.read()
"""
)


def test_a_connection_that_is_handed_over_is_still_its_makers(node: Node, path: Path, tmp_path: Path) -> None:
    """The host's root gets the container's view on a connection that a container sent by SCM_RIGHTS."""
    container, other = node.container(), node.container(name="other")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "to"))
        listener.listen()
        giver = container.spawn([*PYTHON, HANDS_IT_OUT, str(path), str(tmp_path / "to")])
        taken, _ = listener.accept()
        with taken:
            _, (fd,), _, _ = socket.recv_fds(taken, 10, 1)
    with socket.socket(fileno=fd) as channel:
        channel.settimeout(60)
        names: dict[str, Any] = {"sys": sys}
        exec(ASKER.replace("path = sys.argv[1]", ""), names)  # noqa: S102 - the very client that containers run
        ask = names["ask"]
        assert ask(channel, "GET", "/v1/status")[0] == 403
        assert ask(channel, "GET", f"/v1/lookup?pid=1&container={other.container_id}")[0] == 403
        status, text = ask(channel, "GET", "/v1/lookup?pid=1")
        assert (status, json.loads(text)["host_pid"]) == (200, container.init_host_pid)
        giver.kill()
        assert ask(channel, "GET", "/v1/lookup?pid=1")[0] == 403


TAKES_THEM_ALL = (
    ASKER
    + """
import time
held, counts = [], {}
def count(status):
    counts[status] = counts.get(status, 0) + 1
for _ in range(int(sys.argv[2])):
    channel = connect(path)
    held.append(channel)
    if "at-once" in sys.argv:
        count(ask(channel, "GET", "/v1/lookup?pid=1")[0])
for channel in held if "at-once" not in sys.argv else ():
    count(ask(channel, "GET", "/v1/lookup?pid=1")[0])
print(json.dumps(counts), flush=True)
time.sleep(1000)
"""
)


def test_connections_of_containers_shut_no_other_out(node: Node, path: Path) -> None:
    """One container opens 300 connections; then nine containers open 16 each."""
    greedy = node.container().spawn([*PYTHON, TAKES_THEM_ALL, str(path), "300"])
    statuses = json.loads(greedy.read_line())
    assert statuses.get("200", 0) <= 16
    assert sum(statuses.values()) == 300
    assert on_the_host(roots(path), "/v1/status")[0] == 200
    other = node.container(name="other")
    assert asker(other, path)("/v1/lookup?pid=1")[0] == 200
    greedy.kill()
    until(lambda: _connected(path) == 0, "its connections closed")
    for _ in range(9):
        # Silent clients are closed after 10 s, so each client asks immediately.
        greedy = node.container().spawn([*PYTHON, TAKES_THEM_ALL, str(path), "16", "at-once"])
        assert json.loads(greedy.read_line()) == {"200": 16}
    assert asker(other, path)("/v1/lookup?pid=1")[0] == 200
    assert _connected(path) <= 128


def _connected(path: Path) -> int:
    return int(on_the_host(roots(path), "/v1/status")[1]["api"]["tenants_connected"])


COMES_AND_GOES = (
    ASKER
    + """
print("begins", flush=True)
while True:
    try:
        connect(path).close()
    except OSError:
        pass
"""
)


def test_a_container_that_asks_all_the_time_is_told_to_wait(node: Node, path: Path) -> None:
    began = time.monotonic()
    flood = node.container().spawn([*PYTHON, FLOOD, str(path), "400"])
    statuses: list[int] = json.loads(flood.read_line())
    assert len(statuses) > 50
    # The limit is a burst of 100 and 50 a second, which a slow machine never reaches.
    assert statuses[-1] == 429 or 100 + 50 * (time.monotonic() - began) > 400, statuses
    until(lambda: _connected(path) == 0, "its connection closed: it has to wait for its turn again")
    assert on_the_host(roots(path), "/v1/status")[0] == 200
    assert asker(node.container(name="other"), path)("/v1/lookup?pid=1")[0] == 200


def test_group_members_look_up_processes_hidden_from_them(node: Node, path: Path) -> None:
    """The command runs without rights and can't read the container's namespaces; the daemon can."""
    container = node.container()
    process = container.spawn(SLEEP)
    for asked, groups, code, said in (
        (container.container_id[:12], GROUP, 0, f"{process.host_pid}\n"),
        (f"{container.pod_uid}/main", GROUP, 0, f"{process.host_pid}\n"),
        ("abcdefabcdef", GROUP, 1, ""),
        (container.container_id[:12], 1, 4, ""),
    ):
        wrapper = ("setpriv", "--reuid=1000", "--regid=1000", f"--groups={groups}")
        done = run("lookup", asked, process.ns_pid, "--socket", roots(path), wrapper=wrapper)
        assert (done.returncode, done.stdout) == (code, said), (asked, done.stderr)


def test_streams_and_floods_neither_block_nor_log(node: Node, daemon: Daemon, path: Path) -> None:
    """Clients connect to both sockets and disconnect while the daemon stops."""
    node.container().spawn([*PYTHON, COMES_AND_GOES, str(path)]).read_line()
    ask = b"GET /v1/%s HTTP/1.1\r\nHost: r\r\n\r\n"
    with contextlib.ExitStack() as stack:
        streaming, idle, begun = channels = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for channel in channels:
            stack.enter_context(channel).connect(str(roots(path)))
        streaming.sendall(ask % b"events")
        idle.sendall(ask % b"status")
        begun.sendall(b"GE")
        assert streaming.recv(100).startswith(b"HTTP/1.1 200")
        with subprocess.Popen([*PYTHON, COMES_AND_GOES, str(roots(path))], stdout=subprocess.PIPE) as flood:
            assert flood.stdout is not None
            flood.stdout.readline()
            time.sleep(0.5)
            try:
                assert daemon.stop() == 0
            finally:
                flood.kill()
    assert daemon.other_output == []
    assert not roots(path).exists()
