"""Draw docs/top.svg: a screen of `resolver top`, by the command's code, on a node with some repairs and problems."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from resolver.base.reasons import RepairReason, SampleReason, UnresolvedReason
from resolver.cli._top import screen
from resolver.cli._top.rows import rows_of
from resolver.cli.documents import of_snapshot
from resolver.state import Process, Snapshot
from tests.fakes.busy import GIB, GPUS, Builder

PLACE: Final = Path(__file__).parent.parent / "docs" / "top.svg"
SIZE: Final = (100, 23)
#: The styles of `resolver.cli._top.screen`, as rich calls them.
STYLES: Final = {
    "container": "cyan",
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
    "head": "underline",
    "selected": "reverse",
}


def node() -> Snapshot:
    """Return a node with two busy GPUs, repaired slots, one stuck slot, and two unresolved items."""
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
    return build.picture((first, second))._replace(interval=1e9)  # its time is long ago


def draw() -> str:
    """Return the picture as SVG, the same bytes for the same code."""
    read_at = time.mktime((2026, 1, 15, 10, 10, 5, 0, 0, -1))  # in whatever time zone
    documents, shown = of_snapshot(node()), screen.Screen("gpu-node-7")
    reading = screen.Reading(documents.status, rows_of(documents), read_at)
    shown.press("KEY_DOWN")
    shown.press("KEY_DOWN")
    console = Console(
        record=True, width=SIZE[0], file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for line in shown.frame(reading, *SIZE):
        parts = [(text, STYLES.get(style, style)) for text, style in line]
        console.print(Text.assemble(*parts), no_wrap=True, overflow="crop")
    fonts = re.sub(
        r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL
    )  # they would be fetched
    svg = console.export_svg(title="resolver top", code_format=fonts, unique_id="top")
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


if __name__ == "__main__":
    PLACE.write_text(draw())
