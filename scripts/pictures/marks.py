"""What the picture of a dashboard is made of: boxes, words, lines through points, the time of day."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from html import escape
from typing import Any, Final, NamedTuple

PAGE, PAPER, EDGE, GRID = "#0f1014", "#181b1f", "#26292f", "#2a2d33"
INK, DIM = "#d5d5e0", "#9a9aa6"
NAMED: Final = {
    "green": "#73bf69",
    "yellow": "#f2cc0c",
    "orange": "#ff9830",
    "red": "#f2495c",
    "blue": "#5794f2",
    "text": "#8e8e99",
}
PALETTE: Final = (
    "#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#37872d", "#fade2a", "#447ebc",
    "#c15c17", "#705da0", "#96d98d", "#ffa6b0", "#56a64b", "#c0d8ff",
)  # fmt: skip

Points = list[tuple[float, float]]
Answers = list[tuple[dict[str, str], Points]]
Json = Mapping[str, Any]


class Box(NamedTuple):
    """A rectangle in pixels."""

    x: float
    y: float
    width: float
    height: float


class Span(NamedTuple):
    """The time that is shown."""

    start: float
    end: float
    step: float


def width_of(text: str, size: float = 12) -> float:
    """An estimate, rather too much than too little."""
    return sum(0.36 if c in "iljtf.,:/|' " else 0.85 if c in "mwMW%@" else 0.6 for c in text) * size


def cut(text: str, room: float, size: float = 12) -> str:
    """As much of it as there is room for."""
    if width_of(text, size) <= room:
        return text
    while text and width_of(text + "…", size) > room:
        text = text[:-1]
    return text + "…"


def text(x: float, y: float, words: str, color: str = INK, size: float = 12, **more: str) -> str:
    """Words, from there on, or as ``text_anchor`` says."""
    rest = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size:g}"{rest}>{escape(words)}</text>'


def rect(box: Box, fill: str, **more: str) -> str:
    """A rectangle of one colour."""
    rest = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    x, y, width, height = box
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{rest}/>'


def path(points: Points, span: Span, box: Box, top: float, *, close: bool = False, base: float = 0) -> str:
    """The line through the points; a gap where there are none. ``close``: the area below it."""
    runs: list[Points] = []
    for at, value in points:
        if not math.isfinite(value):
            continue
        if runs and at - runs[-1][-1][0] <= 1.6 * span.step:
            runs[-1].append((at, value))
        else:
            runs.append([(at, value)])
    parts = []
    for run in runs:
        places = [place(at, value, span, box, top) for at, value in run]
        # A point on the line between its neighbours says nothing.
        kept = [
            place
            for n, place in enumerate(places)
            if n in (0, len(places) - 1) or not places[n - 1][1] == place[1] == places[n + 1][1]
        ]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in kept)
        if close:
            y = box.y + box.height - base * box.height / top
            line = f"{kept[0][0]:.1f} {y:.1f}L{line}L{kept[-1][0]:.1f} {y:.1f}Z"
        parts.append(f"M{line}")
    return "".join(parts)


def place(at: float, value: float, span: Span, box: Box, top: float) -> tuple[float, float]:
    """Where a point is, in pixels; ``top`` is the value at the upper edge."""
    x = box.x + (at - span.start) / (span.end - span.start) * box.width
    return x, box.y + box.height - min(max(value / top, 0.0), 1.0) * box.height


def clock(box: Box, span: Span) -> list[str]:
    """The time of day below a plot, as often as there is room."""
    parts = []
    every = next(
        s
        for s in (30, 60, 120, 180, 300, 600, 1800)
        if (span.end - span.start) / s <= max(2.0, box.width / 58)
    )
    at = math.ceil(span.start / every) * every
    while at <= span.end:
        x = box.x + (at - span.start) / (span.end - span.start) * box.width
        words = time.strftime("%H:%M" if every >= 60 else "%H:%M:%S", time.gmtime(at))
        parts.append(f'<path d="M{x:.1f} {box.y:.1f}v{box.height:.1f}" stroke="{GRID}"/>')
        if box.x + 10 < x < box.x + box.width - 8:
            parts.append(text(x, box.y + box.height + 15, words, DIM, 11, text_anchor="middle"))
        at += every
    return parts
