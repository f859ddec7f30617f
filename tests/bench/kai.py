"""Many containers with KAI's placement, where each can reach all files: seconds until all slots are right."""

import contextlib
import time
from pathlib import Path
from typing import Final, NamedTuple

from tests.bench.timing import Progress, RowValues
from tests.bench.usage import cpu
from tests.fakes.daemon import BOUND, Daemon
from tests.fakes.node import Node
from tests.fakes.regions import read_file

CONTAINERS, PROCESSES = 100, 8
_AIM_S = 5.0
_SETTLE_S, _LONGEST_S = 3.0, 120.0
SOURCES: Final = ("bpf", "scan")


class Seen(NamedTuple):
    """Seconds from the last start until all slots were right, those of the starts, and CPU meanwhile in per cent."""

    right_s: float
    starts_s: float
    per_cent: float
    wrong: int


def measure(scratch: Path, progress: Progress) -> list[RowValues]:
    rows: list[RowValues] = []
    for source in SOURCES:
        progress(f"{CONTAINERS} containers of KAI's with {PROCESSES} processes each, --source {source}")
        (scratch / f"kai-{source}").mkdir()
        seen = run(scratch / f"kai-{source}", source)
        what = f"{CONTAINERS} x {PROCESSES} slots with KAI, {source}"
        wrong = f"{seen.wrong} slots never right" if seen.wrong else "every slot was repaired"
        aim = _AIM_S if source == "bpf" else None
        rows += [
            (f"{what}: all right after the last start", seen.right_s, "s", aim, wrong),
            ("  CPU of the daemon meanwhile", seen.per_cent, "% core", None, f"starts took {seen.starts_s:.1f} s"),
        ]  # fmt: skip
    return rows


def run(scratch: Path, source: str, containers: int = CONTAINERS, processes: int = PROCESSES) -> Seen:
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node(scratch / "node", "535.183.01"))
        made = [
            node.container(name=f"c{number}", placement="kai", watcher=False) for number in range(containers)
        ]
        options = [*node.placement_options(), "--source", source]
        daemon = stack.enter_context(Daemon(node, scratch / "run", *options, wrapper=BOUND))
        time.sleep(_SETTLE_S)
        began, before = time.monotonic(), cpu(daemon.process.pid)
        wrong: dict[tuple[Path, int], int] = {}
        for _ in range(processes):
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
        return Seen(now - started, started - began, used.own + used.children, len(wrong))
