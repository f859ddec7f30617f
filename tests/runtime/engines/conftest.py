"""Fixtures of the engines' tests: a node, a machine for the engine, and the row of the table that a test tells."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.fakes.node import Node
from tests.kernel.conftest import Start
from tests.runtime.engines import debian, image
from tests.runtime.engines.machine import Machine, views

#: The Debian release of the engines; set by `make engines`.
SUITE = os.environ.get("ENGINES_SUITE", debian.SUITES[0])

Row = dict[str, Any]


@pytest.fixture
def view() -> str:
    return views()[0]


@pytest.fixture(scope="session")
def engines_root() -> Path:
    return debian.root(SUITE)


@pytest.fixture
def start(open_place: Path) -> Iterator[Start]:
    starter = Start(open_place / "run")
    yield starter
    starter.close()


@pytest.fixture
def machine(open_place: Path, node: Node, engines_root: Path, view: str) -> Iterator[Machine]:
    place = open_place / "m"
    rootfs = image.fill(place / "rootfs", engines_root, node.built)
    image.archive(rootfs, place / "image.tar", os.uname().machine)
    with Machine(engines_root, place, [node.root, node.built], view) as machine:
        yield machine


class Tell(Protocol):
    def __call__(self, engine: str, how: str, seen: Row) -> None: ...


@pytest.fixture
def tell(request: pytest.FixtureRequest, view: str) -> Iterator[Tell]:
    def told(engine: str, how: str, seen: Row) -> None:
        request.node.user_properties.append(("row", {"engine": engine, "how": how, "cgroups": view, **seen}))

    yield told
    assert "row" in dict(request.node.user_properties), "it told no row"
