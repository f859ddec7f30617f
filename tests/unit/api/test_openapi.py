"""The API's description: answers match it, releases remove nothing, and a common generator accepts it."""

import importlib
import itertools
import json
import os
import pkgutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import requests
import schemathesis
import urllib3
from requests.adapters import HTTPAdapter
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from resolver import client
from tests.fakes.pictures import CID, FULL
from tests.fakes.served import serving

#: Removed since the last release; CHANGELOG.md has the upgrade notes.
GIVEN_UP = {
    "components/schemas/Policy/properties/not_measured": "`policy.not_measured`",
    "components/schemas/Policy/required/not_measured": "`policy.not_measured`",
    "components/schemas/RepairReason/enum/unmapped": "`unmapped`",
    "components/schemas/UnresolvedReason/enum/not_host_pidns": "`not_host_pidns`",
}
_WORDS = frozenset({"description", "summary", "title"})
#: Adding one of these refuses requests accepted before, or breaks clients.
_NARROWING = frozenset(
    {"maximum", "minimum", "maxLength", "minLength", "maxItems", "minItems", "pattern", "format"}
)


def facts(document: Any, place: str) -> Iterator[str]:
    """Yield each path in a description, and its value; list items are keyed by their names or words."""
    if not isinstance(document, dict | list):
        yield f"{place}={document!r}"
        return
    parts = document.items() if isinstance(document, dict) else map(_named, itertools.count(), document)
    for name, part in parts:
        if not (name in _WORDS and isinstance(part, str)):
            yield f"{place}/{name}"
            if part is not None:
                yield from facts(part, f"{place}/{name}")


def _named(number: int, part: Any) -> tuple[str | int, Any]:
    if isinstance(part, str):
        return part, None
    return (part["name"] if isinstance(part, dict) and "name" in part else number), part


def lost(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield each fact of ``before`` that ``now`` lacks or narrows."""
    had, has = (
        {fact for part in ("paths", "components") for fact in facts(each[part], part)}
        for each in (before, now)
    )
    yield from had - has
    for fact in has - had:
        place, _, name = fact.rpartition("/")
        # A new kind of answer, such as null, breaks clients that never expect it.
        if (name in _NARROWING and f"{place}/type" in had) or (place.endswith("/anyOf") and place in had):
            yield fact
        operation, parameters, name = fact.rpartition("/parameters/")
        if parameters and name.endswith("/required=True") and operation in had:
            yield fact


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with serving(tmp_path_factory.mktemp("api") / "api.sock") as served:
        document: dict[str, Any] = client.get_json("/v1/openapi.json", served.path)
    return document


@pytest.fixture(scope="module")
def released(root: Path) -> dict[str, Any]:
    """Return the last release's description, without the words that are not compared."""
    text = (root / "tests" / "fixtures" / "openapi" / "released.json").read_text()
    document: dict[str, Any] = json.loads(text)
    return document


def test_nothing_is_lost_since_the_last_release(
    released: dict[str, Any], description: dict[str, Any], root: Path
) -> None:
    gone = set(lost(released, description))
    assert {fact for fact in gone if not fact.startswith(tuple(f"{each}/" for each in GIVEN_UP))} == set(
        GIVEN_UP
    )
    unreleased = (root / "CHANGELOG.md").read_text().split("\n## [")[1]
    assert [said for said in GIVEN_UP.values() if said not in unreleased] == []


def test_requests_are_not_asked_for_more_than_before(
    released: dict[str, Any], description: dict[str, Any]
) -> None:
    for name in ("Pairs", "Pair"):
        before, now = (each["components"]["schemas"][name] for each in (released, description))
        assert now["required"] == before["required"]


@pytest.mark.timeout(180)
def test_a_generated_client_gets_its_answers(
    tmp_path: Path, description: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    document, package = tmp_path / "openapi.json", tmp_path / "generated_client"
    document.write_text(json.dumps(description))
    tools = Path(sys.executable).parent
    made = subprocess.run(
        [
            *(tools / "openapi-python-client", "generate", "--meta", "none", "--fail-on-warning"),
            *("--path", document, "--output-path", package),
        ],
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    monkeypatch.syspath_prepend(tmp_path)
    generated = importlib.import_module("generated_client")
    routes = importlib.import_module("generated_client.api.default")
    models = importlib.import_module("generated_client.models")
    needs: dict[str, dict[str, Any]] = {
        "get_lookup": {"container": CID, "pid": 1},
        "get_reverse": {"host_pid": os.getpid()},
        "post_cordon": {"body": models.Cordon([])},
        "post_lookup": {"body": models.Pairs([["abcdef", 1], models.Pair(1, CID)])},
    }
    seen = {}
    with (
        serving(tmp_path / "api.sock", group=os.getgid(), **FULL) as served,
        httpx.Client(
            base_url="http://resolver",
            transport=httpx.HTTPTransport(uds=served.path),
            headers={"Accept": "application/json"},
        ) as http,
    ):
        asking = generated.Client("http://resolver").set_httpx_client(http)
        for module in pkgutil.iter_modules(routes.__path__):
            route = importlib.import_module(f"generated_client.api.default.{module.name}")
            answer = route.sync_detailed(client=asking, **needs.get(module.name, {}))
            seen[module.name] = answer.status_code, type(answer.parsed).__name__
    assert seen.pop("get_lookup") == (404, "ProblemDocument")
    assert {status for status, _ in seen.values()} == {200}
    assert seen["get_slots"][1] == "Slots"
    assert seen["post_lookup"][1] == "PairAnswers"


class UnixConnection(urllib3.connection.HTTPConnection):
    path = ""

    def _new_conn(self) -> socket.socket:
        channel = socket.socket(socket.AF_UNIX)
        channel.settimeout(60)
        channel.connect(self.path)
        return channel


class UnixAdapter(HTTPAdapter):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.pool = urllib3.HTTPConnectionPool("resolver")
        self.pool.ConnectionCls = type("Connection", (UnixConnection,), {"path": path})

    def get_connection_with_tls_context(self, *_args: Any, **_more: Any) -> urllib3.HTTPConnectionPool:
        return self.pool


def test_it_keeps_to_its_description(tmp_path: Path, description: dict[str, Any]) -> None:
    schema = schemathesis.openapi.from_dict(description)
    with serving(tmp_path / "api.sock", group=os.getgid(), **FULL) as served, requests.Session() as session:
        session.mount("http://", UnixAdapter(served.path))
        for result in schema.get_all_operations():
            operation = result.ok()  # type: ignore[union-attr]
            takes_something = bool(list(operation.iter_parameters())) or operation.body
            for mode in (GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if takes_something else [])):
                hold(operation.as_strategy(generation_mode=mode), session)


def hold(cases: Any, session: requests.Session) -> None:
    @hypothesis.settings(
        max_examples=8, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(case=cases)
    def ask(case: Any) -> None:
        # A name can be invalid for reasons that no schema states, and a schema accepts 7.0 as an integer.
        without = [positive_data_acceptance] if case.operation.path == "/v1/lookup" else []
        # Accept names the types, because `*/*` gets an endless stream.
        accept = {"Accept": "application/json, application/problem+json"}
        case.call_and_validate(
            session=session, base_url="http://resolver", headers=accept, excluded_checks=without
        )

    ask()
