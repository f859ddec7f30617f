"""Draws docs/top.svg: a frame of `resolver top`, by its own code, on a node that has something to show.

    .venv/bin/python -m scripts.pictures.top

Each word has its own place, and bars are rectangles: so it looks the same whatever font there is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from rich.cells import cell_len

from resolver.cli._top.cells import UNICODE, Line
from resolver.cli._top.frame import Shown, frame
from resolver.cli._top.reading import Reading
from resolver.cli._top.rows import Choice, rows_of
from resolver.cli._top.screen import STYLES
from resolver.reasons import RepairReason, SampleReason, UnresolvedReason
from resolver.state import Process, Snapshot
from tests.fakes.busy import GIB, GPUS, Builder
from tests.fakes.served import tree_of

PLACE: Final = Path(__file__).parent.parent.parent / "docs" / "top.svg"
SIZE: Final = (100, 23)

_CELL: Final = (8.4, 19.0)
_LEFT, _TOP, _BOTTOM = 18.0, 44.0, 14.0
_PAPER, _INK, _DIM, _EDGE, _CHOSEN = "#0d1117", "#c9d1d9", "#7d8590", "#30363d", "#1f3a5f"
_COLORS: Final = {"green": "#3fb950", "yellow": "#d29922", "red": "#ff7b72", "cyan": "#79c0ff"}
_FONTS: Final = (
    "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
)


def node() -> Snapshot:
    """Two GPUs in use, slots that were repaired, one that stays stuck, and two things that nobody can resolve."""
    first = GPUS[0]
    second = replace(GPUS[1], utilization=64, memory_used=38 * GIB, temperature=58, power=241.0)
    build = Builder()
    build.named(first, "ml-prod/bert-trainer-7f9c8d-x2x9k/main")
    build.limited(60, 40)
    build.process("torchrun", 48213, 12, 31, 19.6, RepairReason.WRONG_NAMESPACE)
    build.process("torchrun", 48214, 13, 30, 19.6, RepairReason.WRONG_NAMESPACE)
    build.named(first, "ml-prod/llm-serving-0/vllm")
    build.limited(30, 16)
    build.process("vllm", 51877, 7, 26, 1.4, RepairReason.MISSING)
    build.named(first, "research/notebook-ana/jupyter")
    build.process("python3", 60021, 88, 0, 0.4)
    build.named(second, "vision/diffusion-batch-19/worker")
    build.limited(50, 24)
    build.process("python3", 33190, 7, 41, 22.1, RepairReason.STALE)
    build.named(second, "vision/video-index-5c66/encode")
    build.process(
        "ffmpeg", 34402, 21, 18, 11.0, stuck="sm_util stays 0: the watcher does not see its process"
    )
    build.named(second, "research/whisper-eval/main")
    build.process("python3", 35555, 9, None, 4.5)
    build.unresolved(31, UnresolvedReason.AMBIGUOUS)
    build.processes.append(
        Process(29001, None, first.uuid, *(None,) * 6, 3, None, SampleReason.PROCESS_ENDED)
    )
    return build.picture((first, second))


def draw() -> str:
    """The picture as SVG text."""
    tree = tree_of(node())
    rows = [
        row._replace(history=_history(row.amount.value)) if row.kind == "container" and row.amount else row
        for row in rows_of(tree, Choice(), UNICODE)
    ]
    at = tree.status.at
    reading = Reading(tree, time.mktime((2026, 1, 15, 10, 10, 5, 0, 0, -1)))  # in whatever time zone
    lines = frame(reading, rows, Shown(cursor=2), SIZE, UNICODE, "gpu-node-7", at)
    width, height = SIZE[0] * _CELL[0] + 2 * _LEFT, len(lines) * _CELL[1] + _TOP + _BOTTOM
    look = f'font-family="{_FONTS}" font-size="14" fill="{_INK}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {look}>',
        f'<rect x="1" y="1" width="{width - 2:g}" height="{height - 2:g}" rx="9" fill="{_PAPER}" stroke="{_EDGE}"/>',
        *(
            f'<circle cx="{20 + 20 * number}" cy="20" r="6" fill="{color}"/>'
            for number, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
        ),
    ]
    for number, line in enumerate(lines):
        parts += _line(line, _TOP + number * _CELL[1])
    return "\n".join([*parts, "</svg>", ""])


def _history(value: int | None) -> tuple[int | None, ...]:
    """Twelve readings that end with this one."""
    if value is None:
        return (None,) * 12
    return (
        *(max(value * share // 100 - 1, 0) for share in (12, 30, 55, 71, 92, 99, 96, 80, 88, 97, 100)),
        value,
    )


def _line(line: Line, top: float) -> Iterator[str]:
    if line and line[0][1] in ("selected", "head"):
        chosen = line[0][1] == "selected"
        place, size = (top, _CELL[1]) if chosen else (top + _CELL[1] - 1.5, 1)
        color = _CHOSEN if chosen else _EDGE
        width = SIZE[0] * _CELL[0] + 2 * _LEFT - 18
        yield f'<rect x="9" y="{place:g}" width="{width:g}" height="{size:g}" fill="{color}"/>'
    cell = 0
    for text, style in line:
        # Words one or no blank apart stay together; a bar's signs are drawn.
        for found in re.finditer(r"[━╸─]+|[▁-█]+|[^\s━╸─▁-█]+(?: [^\s━╸─▁-█]+)*", text):
            at = cell + cell_len(text[: found.start()])
            if found.group()[0] in "━╸─":
                yield from _bar(found.group(), at, top)
            elif "▁" <= found.group()[0] <= "█":
                yield from _levels(found.group(), at, top)
            else:
                yield _text(found.group(), at, top, style)
        cell += cell_len(text)


def _bar(signs: str, cell: int, top: float) -> Iterator[str]:
    """The filled part thick, the rest thin; a half sign is half a cell, and the rest begins after it."""
    halves = {"━": 2, "╸": 1}
    filled = sum(halves.get(sign, 0) for sign in signs) / 2
    x, y = _LEFT + cell * _CELL[0], top + _CELL[1] / 2
    if filled:
        color = _COLORS["green"]
        yield f'<rect x="{x:.1f}" y="{y - 3:g}" width="{filled * _CELL[0]:.1f}" height="6" rx="1" fill="{color}"/>'
    rest = len(signs) - filled
    if rest:
        yield (
            f'<rect x="{x + filled * _CELL[0]:.1f}" y="{y - 3:g}" width="{rest * _CELL[0]:.1f}" height="6" '
            f'fill="{_EDGE}"/>'
        )


def _levels(signs: str, cell: int, top: float) -> Iterator[str]:
    """Each sign as high as its level."""
    for number, sign in enumerate(signs, cell):
        high = (ord(sign) - ord("▁") + 1) * 14 / 8
        x, y = _LEFT + number * _CELL[0], top + 17 - high
        yield f'<rect x="{x:.1f}" y="{y:g}" width="{_CELL[0]:.1f}" height="{high:g}" fill="{_COLORS["green"]}"/>'


def _text(text: str, cell: int, top: float, style: str) -> str:
    look = STYLES[style]
    color = _COLORS.get(look.color.name if look.color else "", _DIM if look.dim or style == "head" else _INK)
    weight = ' font-weight="bold"' if look.bold else ""
    x, y, width = _LEFT + cell * _CELL[0], top + 14, cell_len(text) * _CELL[0]
    return (
        f'<text x="{x:.1f}" y="{y:g}" textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs" '
        f'fill="{color}"{weight}>{escape(text)}</text>'
    )


if __name__ == "__main__":
    PLACE.write_text(draw())
    print(PLACE)
