"""Standard error with a reader that has stopped reading or has closed the pipe."""

import os
from collections.abc import Iterator

import pytest

from resolver.base import output
from resolver.base.output import Output


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def drained(fd: int, to: Output) -> bytes:
    os.set_blocking(fd, False)
    found = b""
    while True:
        try:
            found += os.read(fd, 1 << 16)
        except BlockingIOError:
            return found
        to.flush()


def test_a_reader_that_stands_still_costs_lines_and_no_time(pipe: tuple[int, int]) -> None:
    out = Output(pipe[1])
    for number in range(10_000):
        out.write(f"{number:>99}\n")
    assert out.lost > 5_000
    assert out.take_lost() == 0  # reported only once there is a reader
    lines = drained(pipe[0], out).decode().splitlines()
    assert [int(line) for line in lines] == list(range(len(lines)))  # no line is torn or out of order
    assert len(lines) + out.take_lost() == 10_000
    assert out.take_lost() == 0


def test_a_line_longer_than_a_pipe_takes_at_once(pipe: tuple[int, int]) -> None:
    out = Output(pipe[1])
    out.write("x" * 200_000 + "\n")
    assert drained(pipe[0], out) == b"x" * 200_000 + b"\n"
    out.write("y" * (output.MOST_BYTES + 1))
    assert out.lost == 1


def test_a_reader_that_is_gone_ends_nothing(pipe: tuple[int, int]) -> None:
    out = Output(pipe[1])
    other = os.dup(pipe[0])
    os.dup2(os.open("/dev/null", os.O_RDONLY), pipe[0])
    os.close(other)
    out.write("nobody reads this\n")
    assert out.lost == 1


def test_a_lone_surrogate_is_escaped(pipe: tuple[int, int]) -> None:
    out = Output(pipe[1])
    out.write("\udcff\n")
    assert drained(pipe[0], out) == b"\\udcff\n"
