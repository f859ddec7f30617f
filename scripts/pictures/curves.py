"""Curves of a dashboard's picture: lines, stacked areas and bars, with axes and legends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scripts.pictures.marks import (
    DIM,
    GRID,
    NAMED,
    PALETTE,
    PAPER,
    Answers,
    Box,
    Json,
    Points,
    Span,
    clock,
    cut,
    path,
    place,
    rect,
    text,
    width_of,
)
from scripts.pictures.units import number, ticks
from tests.fakes.monitored import legend


class Curve(NamedTuple):
    """A series with its name and look."""

    name: str
    color: str
    points: Points
    dashed: bool
    right: bool  # on an axis of its own
    unit: str


def _curves(panel: Json, answers: Mapping[str, Answers]) -> list[Curve]:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    curves: list[Curve] = []
    for target in panel["targets"]:
        ref = target["refId"]
        for labels, points in answers[ref]:
            name = legend(target["legendFormat"], labels)
            looks: dict[str, Any] = {}
            for override in panel["fieldConfig"]["overrides"]:
                matcher = override["matcher"]
                if matcher["options"] == (name if matcher["id"] == "byName" else ref):
                    looks |= {each["id"]: each["value"] for each in override["properties"]}
            color = PALETTE[len(curves) % len(PALETTE)]
            if "color" in looks:
                color = NAMED[looks["color"]["fixedColor"]]
            right = looks.get("custom.axisPlacement") == "right"
            dashed = "custom.lineStyle" in looks
            curves.append(Curve(name, color, points, dashed, right, looks.get("unit", unit)))
    return curves


def lines(panel: Json, box: Box, answers: Mapping[str, Answers], span: Span) -> list[str]:
    """A panel of curves."""
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    curves = _curves(panel, answers)
    look = panel["options"]["legend"]
    parts, plot = (_legend_right if look["placement"] == "right" else _legend_below)(curves, box)
    stacked = "stacking" in custom
    heights = _stacked(curves) if stacked else [curve.points for curve in curves]
    left = [points for curve, points in zip(curves, heights, strict=True) if not curve.right]
    most = max((value for points in left for _, value in points if math.isfinite(value)), default=1.0)
    steps = ticks(defaults.get("max", most), defaults["unit"])
    labels = [number(step, defaults["unit"]) for step in steps]
    margin = max(map(width_of, labels), default=0) * 0.9 + 6
    plot = Box(plot.x + margin, plot.y + 4, plot.width - margin - 6, plot.height - 24)
    others = [curve for curve in curves if curve.right]
    if others:
        plot = plot._replace(width=plot.width - 34)
    top = steps[-1]
    parts += _axes(plot, span, steps, labels)
    if custom.get("drawStyle") == "bars":
        return parts + _bars(curves, heights, plot, span, top)
    order = list(zip(curves, heights, strict=True))
    for curve, points in reversed(order) if stacked else order:
        if not points:
            continue
        if curve.right:
            parts += _right_axis(curve, plot, span)
            continue
        fill = custom["fillOpacity"] / 100 * (0 if curve.dashed else 1)
        if stacked:
            parts.append(f'<path d="{path(points, span, plot, top, close=True)}" fill="{PAPER}"/>')
        if fill:
            area = path(points, span, plot, top, close=True)
            parts.append(f'<path d="{area}" fill="{curve.color}" fill-opacity="{fill:g}"/>')
        dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
        parts.append(
            f'<path d="{path(points, span, plot, top)}" fill="none" stroke="{curve.color}" stroke-width="1.4"{dash}/>'
        )
    return parts


def _stacked(curves: Sequence[Curve]) -> list[Points]:
    """Each curve on top of those before it."""
    floor: dict[float, float] = {}
    found = []
    for curve in curves:
        points = []
        for at, value in curve.points:
            floor[at] = floor.get(at, 0.0) + value
            points.append((at, floor[at]))
        found.append(points)
    return found


def _bars(curves: Sequence[Curve], heights: Sequence[Points], box: Box, span: Span, top: float) -> list[str]:
    parts = []
    wide = max(1.0, box.width * span.step / (span.end - span.start) * 0.8)
    for curve, points in zip(curves, heights, strict=True):
        rectangles = []
        for (at, above), (_, value) in zip(points, curve.points, strict=True):
            if value > 0:
                x, y = place(at, above, span, box, top)
                rectangles.append(
                    f"M{x - wide / 2:.1f} {y:.1f}h{wide:.1f}v{value / top * box.height:.1f}h-{wide:.1f}z"
                )
        if rectangles:
            parts.append(f'<path d="{"".join(rectangles)}" fill="{curve.color}" fill-opacity="0.85"/>')
    return parts


def _axes(box: Box, span: Span, steps: Sequence[float], labels: Sequence[str]) -> list[str]:
    parts = []
    for step, label in zip(steps, labels, strict=True):
        y = box.y + box.height - step / steps[-1] * box.height
        parts += [
            f'<path d="M{box.x:.1f} {y:.1f}h{box.width:.1f}" stroke="{GRID}"/>',
            text(box.x - 6, y + 4, label, DIM, 11, text_anchor="end"),
        ]
    return parts + clock(box, span)


def _right_axis(curve: Curve, box: Box, span: Span) -> list[str]:
    steps = ticks(max((value for _, value in curve.points), default=1.0), curve.unit)
    parts = [
        text(
            box.x + box.width + 6,
            box.y + box.height - step / steps[-1] * box.height + 4,
            number(step, curve.unit),
            DIM,
            11,
        )
        for step in steps
    ]
    line = path(curve.points, span, box, steps[-1])
    return [*parts, f'<path d="{line}" fill="none" stroke="{curve.color}" stroke-width="1.4"/>']


def _legend_below(curves: Sequence[Curve], box: Box) -> tuple[list[str], Box]:
    """Names side by side under the plot, in three lines at most."""
    parts: list[str] = []
    rows: list[list[tuple[Curve, str, float]]] = [[]]
    x = 0.0
    for curve in curves:
        name = cut(curve.name, box.width - 24, 11)
        wide = 20 + width_of(name, 11) + 10
        if x + wide > box.width and rows[-1]:
            rows.append([])
            x = 0.0
        rows[-1].append((curve, name, x))
        x += wide
    shown = rows[:3]
    height = 16.0 * len(shown) + 2
    for line, row in enumerate(shown):
        y = box.y + box.height - height + 14 + line * 16
        for curve, name, at in row:
            parts += _key(curve, box.x + at, y)
            parts.append(text(box.x + at + 20, y, name, size=11))
    return parts, box._replace(height=box.height - height)


def _legend_right(curves: Sequence[Curve], box: Box) -> tuple[list[str], Box]:
    """Names and last values beside the plot, the largest first."""
    wide = min(box.width * 0.52, 190.0)
    x, y = box.x + box.width - wide, box.y + 8
    parts = [text(box.x + box.width, y, "Last", NAMED["blue"], 11, text_anchor="end")]
    rows = sorted(curves, key=lambda curve: -(curve.points[-1][1] if curve.points else -1))
    for curve in rows[: int((box.height - 12) / 16)]:
        y += 16
        last = number(curve.points[-1][1], curve.unit) if curve.points else "-"
        parts += _key(curve, x, y)
        parts += [
            text(x + 20, y, cut(curve.name, wide - 22 - width_of(last, 11) - 6, 11), size=11),
            text(box.x + box.width, y, last, size=11, text_anchor="end"),
        ]
    return parts, box._replace(width=box.width - wide - 8)


def _key(curve: Curve, x: float, y: float) -> list[str]:
    if curve.dashed:
        return [
            f'<path d="M{x:.1f} {y - 4:.1f}h14" stroke="{curve.color}" stroke-width="2" stroke-dasharray="4 2"/>'
        ]
    return [rect(Box(x, y - 6, 14, 4), curve.color, rx="1")]
