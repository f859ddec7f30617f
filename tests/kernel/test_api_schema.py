"""The real daemon against its own description: every route, with what the description allows and what it forbids."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
import urllib3
from requests.adapters import HTTPAdapter
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from resolver import client
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.kernel.conftest import Start
from tests.patience import until

EXAMPLES = 8
#: Asked for by name, as an answer to `*/*` is a stream without end.
ACCEPT = {"Accept": "application/json, application/problem+json"}


class UnixConnection(urllib3.connection.HTTPConnection):
    """To the daemon's socket, whatever the host's name."""

    path = ""

    def _new_conn(self) -> socket.socket:
        channel = socket.socket(socket.AF_UNIX)
        channel.settimeout(60)
        channel.connect(self.path)
        return channel


class UnixAdapter(HTTPAdapter):
    def __init__(self, path: Path) -> None:
        super().__init__()
        kind = type("Connection", (UnixConnection,), {"path": str(path)})
        self._pool = urllib3.HTTPConnectionPool("resolver")
        self._pool.ConnectionCls = kind

    def get_connection_with_tls_context(self, *_args: Any, **_more: Any) -> urllib3.HTTPConnectionPool:
        return self._pool


@pytest.fixture
def daemon(node: Node, start: Start) -> Daemon:
    """A daemon that has something to tell."""
    container = node.container()
    container.tenant(load=30, guess="none")
    node.container(name="other").tenant(load=0)
    daemon = start(node, "--interval", "50ms", "--nvml-interval", "200ms", "--source", "bpf")
    daemon.wait_for("repair")
    return daemon


def test_it_keeps_to_its_description(daemon: Daemon) -> None:
    path = daemon.socket
    until(path.exists, "its socket")
    schema = schemathesis.openapi.from_dict(client.get_json("/v1/openapi.json", str(path)))
    session = requests.Session()
    session.mount("http://", UnixAdapter(path))
    for result in schema.get_all_operations():
        operation = result.ok()  # type: ignore[union-attr]
        takes_something = bool(list(operation.iter_parameters())) or operation.body
        for mode in (GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if takes_something else [])):
            hold(operation.as_strategy(generation_mode=mode), session)


def hold(cases: Any, session: requests.Session) -> None:
    """Hold each answer to the description."""

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=cases)
    def ask(case: Any) -> None:
        # A container's name can be none for reasons that no schema tells, and 7.0 is a whole number to a schema.
        without = [positive_data_acceptance] if case.operation.path == "/v1/lookup" else []
        case.call_and_validate(
            session=session, base_url="http://resolver", headers=ACCEPT, excluded_checks=without
        )

    ask()
