"""Fixtures of the engines' tests: a node, a machine for the engine, and the row of the table that a test tells."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.fakes.node import Node
from tests.kernel.conftest import DRIVER, Start
from tests.runtime.engines import debian, image
from tests.runtime.engines.machine import Machine, views

#: The release whose engines are tried; set by `make engines`.
SUITE = os.environ.get("ENGINES_SUITE", debian.SUITES[0])
#: Every view of the cgroup hierarchies that this kernel can give; the others' tests take the first.
EVERY_VIEW = pytest.mark.parametrize("view", views())

Row = dict[str, Any]


@pytest.fixture
def view() -> str:
    """What an engine finds of the cgroup hierarchies."""
    return views()[0]


@pytest.fixture(scope="session")
def engines_root() -> Path:
    """The Debian with the engines."""
    return debian.root(SUITE)


@pytest.fixture
def work() -> Iterator[Path]:
    """A directory of the host's file system; a short path, as the kernel takes 107 bytes for that of a socket."""
    place = Path(tempfile.mkdtemp(prefix="engines-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def node(work: Path) -> Iterator[Node]:
    """A node with the driver that makes every guess of HAMi's wrong."""
    with Node(work / "node", DRIVER) as node:
        yield node


@pytest.fixture
def start(work: Path) -> Iterator[Start]:
    """Starts daemons."""
    starter = Start(work / "run")
    yield starter
    starter.close()


@pytest.fixture
def machine(work: Path, node: Node, engines_root: Path, view: str) -> Iterator[Machine]:
    """Where an engine runs."""
    place = work / "m"
    rootfs = image.fill(place / "rootfs", engines_root, node.built)
    image.archive(rootfs, place / "image.tar", os.uname().machine)
    with Machine(engines_root, place, [node.root, node.built], view) as machine:
        yield machine


class Tell(Protocol):
    """Takes down what was seen, for the table."""

    def __call__(self, engine: str, how: str, seen: Row) -> None: ...


@pytest.fixture
def tell(request: pytest.FixtureRequest, view: str) -> Tell:
    """A test has one row or none."""

    def told(engine: str, how: str, seen: Row) -> None:
        row = {"engine": engine, "how": how, "cgroups": view, **seen}
        request.node.user_properties.append(("row", json.dumps(row)))

    return told
