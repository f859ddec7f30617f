"""Many containers with KAI's placement, where each can reach all files: seconds until all slots are right."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.bench.timing import RowValues, progress
from tests.bench.usage import cpu
from tests.fakes.daemon import BOUND, Daemon
from tests.fakes.node import Node
from tests.fakes.regions import read_file

CONTAINERS, PROCESSES = 100, 8
_AIM_S = 5.0
_SETTLE_S, _LONGEST_S = 3.0, 120.0
SOURCES: Final = ("bpf", "scan")


def measure(scratch: Path) -> Iterator[RowValues]:
    for source in SOURCES:
        progress(f"{CONTAINERS} containers of KAI's with {PROCESSES} processes each, --source {source}")
        yield from _run(scratch / f"kai-{source}", source)


def _run(scratch: Path, source: str) -> list[RowValues]:
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node(scratch / "node", "535.183.01"))
        made = [
            node.container(name=f"c{number}", placement="kai", watcher=False) for number in range(CONTAINERS)
        ]
        options = [*node.placement_options(), "--source", source]
        daemon = stack.enter_context(Daemon(node, scratch / "run", *options, wrapper=BOUND))
        time.sleep(_SETTLE_S)
        began, before = time.monotonic(), cpu(daemon.process.pid)
        wrong: dict[tuple[Path, int], int] = {}
        for _ in range(PROCESSES):
            for container in made:
                words = container.tenant_arguments(guess="none")
                process = container.spawn(words[: words.index("--driver-socket")])
                wrong[container.cache, process.ns_pid] = process.host_pid
        started = now = time.monotonic()
        while wrong and now < started + _LONGEST_S:
            for path in {path for path, _ in wrong}:
                for slot in read_file(path).slots:
                    if wrong.get((path, slot.pid)) == slot.hostpid:
                        del wrong[path, slot.pid]
            time.sleep(0.05)
            now = time.monotonic()
        used = cpu(daemon.process.pid).per_cent(before, now - began)
    what = f"{CONTAINERS} x {PROCESSES} slots with KAI, {source}: all right after the last start"
    never = f"{len(wrong)} slots never right" if wrong else "every slot was repaired"
    starts = f"starts took {started - began:.1f} s"
    return [
        (what, now - started, "s", _AIM_S if source == "bpf" else None, never),
        ("  CPU of the daemon meanwhile", used.own + used.children, "% core", None, starts),
    ]
