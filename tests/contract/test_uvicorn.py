"""What `resolver.serve.http` uses of the inside of uvicorn. pyproject.toml names the versions that have it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import h11
import pytest
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

REQUEST = b"GET /page?x=1 HTTP/1.1\r\nHost: x\r\n\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written; never blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Protocol(H11Protocol):
    """Notes which of the methods that are overridden in `resolver.serve.http` are called."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, ServerState(), {"mine": 1})
        self.called: list[str] = []

    def on_response_complete(self) -> None:
        self.called.append("on_response_complete")
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self.called.append("send_400_response")
        super().send_400_response(msg)


def config(application: Any) -> Config:
    made = Config(
        application,
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        http="h11",
        interface="asgi3",
        proxy_headers=False,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=4096,
    )
    made.load()
    return made


def talk(application: Any, *said: bytes) -> tuple[Protocol, Transport]:
    """The protocol and its transport after all was said and answered."""

    async def run() -> tuple[Protocol, Transport]:
        protocol, transport = Protocol(config(application)), Transport()
        assert protocol.cycle is None
        protocol.connection_made(transport)
        for piece in said:
            protocol.data_received(piece)
        await asyncio.gather(*protocol.server_state.tasks, return_exceptions=True)
        protocol._unset_keepalive_if_required()
        return protocol, transport

    return asyncio.run(run())


async def hello(scope: Any, _receive: Any, send: Any) -> None:
    scope["state"]["seen"] = True
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


def test_an_answer_is_a_head_and_then_its_body() -> None:
    """`_HeadFirst` joins the first write, which begins with the status, with the next one."""
    protocol, transport = talk(hello, REQUEST)
    head, body, *rest = transport.written
    assert head.startswith(b"HTTP/1.1 200 ")
    assert head.endswith(b"\r\n\r\n")
    assert (body, b"".join(rest)) == (b"hello", b"")
    assert protocol.called == ["on_response_complete"]
    assert isinstance(protocol.cycle, RequestResponseCycle)
    assert (protocol.cycle.response_started, protocol.cycle.response_complete) == (True, True)
    assert protocol.conn.their_state is h11.IDLE


def test_the_state_of_a_connection_is_in_its_requests() -> None:
    seen = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["state"]["mine"], scope["path"], scope["query_string"], scope["method"]))
        await hello(scope, receive, send)

    protocol, _ = talk(application, REQUEST)
    assert seen == [(1, "/page", b"x=1", "GET")]
    assert "seen" not in protocol.app_state  # each request has a copy


def test_half_a_request_is_waited_for() -> None:
    protocol, transport = talk(hello, REQUEST[:9])
    assert (protocol.conn.their_state, protocol.conn.our_state) == (h11.IDLE, h11.IDLE)
    assert protocol.conn.trailing_data[0]
    assert transport.written == []


@pytest.mark.parametrize(
    ("said", "status"), [(b"nonsense\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nX: " + b"x" * 9000, 431)]
)
def test_what_is_no_request_is_refused_by_a_method_of_its_own(said: bytes, status: int) -> None:
    hints = []

    class Hinting(Protocol):
        def send_400_response(self, msg: str) -> None:  # noqa: ARG002
            import sys

            hints.append(getattr(sys.exception(), "error_status_hint", None))

    async def run() -> None:
        protocol = Hinting(config(hello))
        protocol.connection_made(Transport())
        protocol.data_received(said)

    asyncio.run(run())
    assert hints == [status]


def test_what_is_read_and_set_is_there() -> None:
    protocol, _ = talk(hello, REQUEST)
    for name in ("transport", "loop", "conn", "flow", "app_state", "server_state", "timeout_keep_alive_task"):
        assert hasattr(protocol, name), name
    for name in ("disconnected", "message_event", "response_started", "response_complete"):
        assert hasattr(protocol.cycle, name), name
    assert isinstance(protocol.flow, FlowControl)
    assert protocol.flow.write_paused is False
    assert isinstance(protocol.server_state.tasks, set)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("connection_made", ["transport"]),
        ("connection_lost", ["exc"]),
        ("data_received", ["data"]),
        ("pause_writing", []),
        ("resume_writing", []),
        ("on_response_complete", []),
        ("send_400_response", ["msg"]),
        ("handle_websocket_upgrade", ["event"]),
        ("_unset_keepalive_if_required", []),
    ],
)
def test_overridden_methods_take_what_they_took(name: str, arguments: list[str]) -> None:
    assert list(inspect.signature(getattr(H11Protocol, name)).parameters) == ["self", *arguments]


def test_the_version_is_one_that_is_allowed(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    (wanted,) = (each for each in project["dependencies"] if each.startswith("uvicorn"))
    match = re.fullmatch(r"uvicorn>=0\.(\d+),<0\.(\d+)", wanted)
    assert match, "both ends are bound"
    minor = int(importlib.metadata.version("uvicorn").split(".")[1])
    assert int(match[1]) <= minor < int(match[2])


def test_only_one_module_knows_uvicorn(root: Path) -> None:
    found = [
        path.relative_to(root).as_posix()
        for path in (root / "resolver").rglob("*.py")
        if re.search(r"^\s*(from|import) uvicorn", path.read_text(), re.MULTILINE)
    ]
    assert found == ["resolver/serve/http.py"]
