"""A dashboard as a picture: its panels with the answers to their queries, in about the look that Grafana gives them.

Text is placed by an estimate of its width, with room to spare, so that no font breaks it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

from scripts.pictures.curves import lines
from scripts.pictures.marks import (
    DIM,
    EDGE,
    GRID,
    INK,
    NAMED,
    PAGE,
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
from scripts.pictures.units import number
from tests.fakes.monitored import legend

WIDTH: Final = 1440
UNIT: Final = 31.0  # height of a row of Grafana's grid, with its gap
GAP: Final = 8.0
HEAD: Final = 30.0
BAR: Final = 52.0  # the line of choices above

_FONT: Final = "Inter, Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def draw(dashboard: Json, recorded: Json) -> str:
    """The whole dashboard as SVG. ``recorded`` has ``start``, ``end``, ``step`` and ``answers`` by panel and query."""
    span = Span(recorded["start"], recorded["end"], recorded["step"])
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    height = BAR + bottom * UNIT + GAP
    size = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}" font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="{PAGE}"/>',
        *_choices(dashboard),
    ]
    for panel in dashboard["panels"]:
        spot = panel["gridPos"]
        column = (WIDTH - GAP) / 24
        box = Box(
            GAP + spot["x"] * column,
            BAR + spot["y"] * UNIT,
            spot["w"] * column - GAP,
            spot["h"] * UNIT - GAP,
        )
        answers = {
            target["refId"]: recorded["answers"][f"{panel['title']}/{target['refId']}"]
            for target in panel.get("targets", ())
        }
        parts += _panel(panel, box, answers, span)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _choices(dashboard: Json) -> list[str]:
    parts = [text(GAP + 4, 32, dashboard["title"], size=17, font_weight="600")]
    x = GAP + 4 + width_of(dashboard["title"], 17) + 26
    for variable in dashboard["templating"]["list"]:
        value = "All" if variable["type"] == "query" else "default"
        label, room = variable["label"], width_of(variable["label"]) + 16
        wide = room + width_of(value) + 38
        parts += [
            rect(Box(x, 14, wide, 26), PAPER, rx="2", stroke=EDGE),
            text(x + 8, 31, label, DIM),
            text(x + room + 4, 31, value, NAMED["blue"]),
            f'<path d="M{x + wide - 16:.1f} 25l4 4l4 -4" fill="none" stroke="{DIM}"/>',
        ]
        x += wide + 8
    return parts


def _panel(panel: Json, box: Box, answers: Mapping[str, Any], span: Span) -> list[str]:
    kind = panel["type"]
    if kind == "row":
        return [
            f'<path d="M{box.x + 6:.1f} {box.y + 8:.1f}l5 5l5 -5" fill="none" stroke="{INK}" stroke-width="1.5"/>',
            text(box.x + 24, box.y + 16, panel["title"], size=14, font_weight="600"),
        ]
    parts = [
        rect(box, PAPER, rx="3", stroke=EDGE),
        text(box.x + 10, box.y + 20, cut(panel["title"], box.width - 20, 13), size=13, font_weight="600"),
    ]
    inside = Box(box.x + 10, box.y + HEAD, box.width - 20, box.height - HEAD - 8)
    draws = {"stat": _stat, "timeseries": lines, "state-timeline": _timeline, "table": _table}
    return parts + draws[kind](panel, inside, answers, span)


# ---- one big number -----------------------------------------------------------------------------------------------


def _stat(panel: Json, box: Box, answers: Mapping[str, Any], span: Span) -> list[str]:
    defaults = panel["fieldConfig"]["defaults"]
    (_, points), *_ = answers["A"]
    last = points[-1][1]
    color = NAMED["green"]
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is None or last >= step["value"]:
            color = NAMED[step["color"]]
    top = max((value for _, value in points if value > 0), default=1.0)
    foot = Box(box.x - 9, box.y + box.height - 24, box.width + 18, 31)
    area = path(points, span, foot, top, close=True)
    words = number(last, defaults["unit"])
    return [
        f'<path d="{area}" fill="{color}" fill-opacity="0.18"/>',
        f'<path d="{path(points, span, foot, top)}" fill="none" stroke="{color}" stroke-opacity="0.7"/>',
        text(box.x + box.width / 2, box.y + 37, words, color, 34, text_anchor="middle", font_weight="500"),
    ]


# ---- bands and rows -----------------------------------------------------------------------------------------------


def _timeline(panel: Json, box: Box, answers: Mapping[str, Answers], span: Span) -> list[str]:
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    looks = {float(value): look for value, look in mapping["options"].items()}
    rows = sorted(
        (legend(panel["targets"][0]["legendFormat"], labels), points) for labels, points in answers["A"]
    )
    margin = max(width_of(name, 11) for name, _ in rows) + 4
    plot = Box(box.x + margin, box.y + 4, box.width - margin - 6, box.height - 46)
    parts = clock(plot, span)
    tall = plot.height / len(rows)
    for index, (name, points) in enumerate(rows):
        y = plot.y + index * tall
        parts.append(text(plot.x - 8, y + tall / 2 + 4, name, size=11, text_anchor="end"))
        for begin, end, value in _bands(points, span):
            x, _ = place(begin, 0, span, plot, 1)
            beyond, _ = place(min(end, span.end), 0, span, plot, 1)
            band = Box(x, y + tall * 0.1, beyond - x, tall * 0.8)
            parts.append(rect(band, NAMED[looks[value]["color"]], fill_opacity="0.78"))
    x, y = box.x, box.y + box.height - 4
    for look in sorted(looks.values(), key=lambda each: each["index"]):
        parts += [
            rect(Box(x, y - 6, 14, 4), NAMED[look["color"]], rx="1"),
            text(x + 20, y, look["text"], size=11),
        ]
        x += 34 + width_of(look["text"], 11)
    return parts


def _bands(points: Points, span: Span) -> list[tuple[float, float, float]]:
    """From, to, value: as long as it stays the same, and is told."""
    bands: list[tuple[float, float, float]] = []
    for at, value in points:
        if bands and bands[-1][2] == value and at - bands[-1][1] <= 0.6 * span.step:
            bands[-1] = (bands[-1][0], at + span.step, value)
        else:
            bands.append((at, at + span.step, value))
    return bands


def _table(panel: Json, box: Box, answers: Mapping[str, Answers], span: Span) -> list[str]:
    columns, rows = _rows(panel, answers)
    looks = {
        each["matcher"]["options"]: {one["id"]: one["value"] for one in each["properties"]}
        for each in panel["fieldConfig"]["overrides"]
    }
    shown = [{name: _cell(row[name], name, looks, span) for name in columns} for row in rows]
    bars = {name for name in columns if "custom.cellOptions" in looks.get(name, {})}
    widths = _widths(columns, shown, bars, box.width)
    parts, tall = [], 22.0
    x = box.x
    for column, wide in zip(columns, widths, strict=True):
        name = cut(column, wide - 6, 11)
        parts.append(text(x + 4, box.y + 12, name, NAMED["blue"], 11, font_weight="600"))
        x += wide
    for index, row in enumerate(rows[: int((box.height - 18) / tall)]):
        y = box.y + 20 + index * tall
        parts.append(f'<path d="M{box.x:.1f} {y:.1f}h{box.width:.1f}" stroke="{GRID}"/>')
        x = box.x
        for column, wide in zip(columns, widths, strict=True):
            cell, words = Box(x + 4, y, wide - 8, tall), shown[index][column]
            if column in bars and isinstance(row[column], float):
                bar = Box(cell.x, y + 5, cell.width - 44, tall - 10)
                parts += [
                    rect(bar, GRID, rx="1"),
                    rect(bar._replace(width=bar.width * min(row[column], 1.0)), NAMED["green"], rx="1"),
                    text(cell.x + cell.width, y + 15, words, NAMED["green"], 11, text_anchor="end"),
                ]
            else:
                parts.append(text(cell.x, y + 15, cut(words, cell.width, 11), size=11))
            x += wide
    return parts


def _widths(
    columns: Sequence[str], rows: Sequence[Mapping[str, str]], bars: Container[str], room: float
) -> list[float]:
    """As wide as what is in them; the widest gives way, and what is left over is shared out."""
    widths = [
        max(width_of(words, 11) for words in (column, *(row[column] for row in rows)))
        + (70 if column in bars else 14)
        for column in columns
    ]
    while sum(widths) > room:
        widths[widths.index(max(widths))] -= 1
    return [wide + (room - sum(widths)) / len(widths) for wide in widths]


def _rows(panel: Json, answers: Mapping[str, Answers]) -> tuple[list[str], list[dict[str, Any]]]:
    """What the panel's transformations make of the answers: merged, named, sorted."""
    names: Mapping[str, str] = {}
    sort: list[str] = []
    for step in panel["transformations"]:
        if step["id"] == "organize":
            names = step["options"]["renameByName"]
        elif step["id"] == "sortBy":
            sort.append(step["options"]["sort"][0]["field"])
    merged: dict[frozenset[tuple[str, str]], dict[str, Any]] = {}
    for ref, answer in answers.items():
        value = "Value" if len(answers) == 1 else f"Value #{ref}"
        for labels, points in answer:
            merged.setdefault(frozenset(labels.items()), dict(labels))[value] = points[-1][1]
    rows = [{shown: row.get(name, "") for name, shown in names.items()} for row in merged.values()]
    for column in sort:
        rows.sort(key=lambda row: str(row[column]))
    return list(names.values()), rows


def _cell(value: Any, column: str, looks: Mapping[str, Any], span: Span) -> str:
    if not isinstance(value, float):
        return str(value)
    unit = looks.get(column, {}).get("unit", "short")
    if unit == "dateTimeFromNow":
        minutes = (span.end - value / 1000) / 60
        return f"{minutes:.0f} minutes ago" if minutes >= 1.5 else "a minute ago"
    return number(value, unit)
