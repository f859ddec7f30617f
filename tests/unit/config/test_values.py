"""Text of settings' values."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resolver.base.errors import UsageError
from resolver.config import load
from resolver.config.values import parse_address, parse_duration, text_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("1s", 1), ("2m", 120), ("0.5", 0.5), (" 3 s ", 3), ("1.5 ms", 0.0015), ("0", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "1d", "-1s", "1e3", "nan", "inf", "1 2", "1,5s", ".5", "1s1s"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="250ms"):
        parse_duration(text)


@given(
    st.floats(0.01, 3600),
    st.sampled_from([("ms", 1000.0), ("s", 1.0), ("", 1.0), ("m", 1 / 60), ("h", 1 / 3600)]),
)
def test_duration_is_printed_as_written(seconds: float, unit: tuple[str, float]) -> None:
    name, per_second = unit
    assert parse_duration(f"{seconds * per_second:.12f}{name}") == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (":65535", ("", 65535)),
        ("127.0.0.1:9395", ("127.0.0.1", 9395)),
        ("localhost:80", ("127.0.0.1", 80)),
        ("[::1]:9395", ("::1", 9395)),
        ("[::]:0", ("::", 0)),
        ("off", None),
    ],
)
def test_addresses(text: str, meant: tuple[str, int] | None) -> None:
    assert parse_address(text) == meant
    assert load({"metrics_addr": text}, None, {})[0].metrics_addr == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "9395", "127.0.0.1", ":port", ":65536", ":-1", "\u0661:1"),
        *("::1:9395", "[::1:9395", "[::g]:1", "example.org:80"),
    ],
)
def test_invalid_address_is_refused_at_start(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"metrics_addr \(command line\): .* is not possible: .*(write|brackets)"
    ):
        load({"metrics_addr": text}, None, {})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (0.25, "250ms"),
        (1.0, "1s"),
        (90.5, "90.5s"),
        (("/a", "/b"), "/a:/b"),
        (65536, "65536"),
    ],
)
def test_a_value_is_told_as_it_is_given_in_the_environment(value: Any, text: str) -> None:
    assert text_of(value) == text
