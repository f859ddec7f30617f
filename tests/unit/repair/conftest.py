"""Fixtures: a region whose repairs a test drives step by step."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.fakes.planned import Bench


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def bench(stack: ExitStack) -> Bench:
    return Bench(stack)
