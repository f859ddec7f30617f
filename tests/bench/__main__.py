"""``make bench``: speed and memory, each beside what it is to be compared with, in one run.

A table for people, and all numbers as JSON in ``bench.json``. Nothing here passes or fails: the bounds in the
table are what is aimed at.
"""

import argparse
import compileall
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.bench import api, bpf, daemon, hostile, idle, integral, kai, load, lookup, passes, scrape, values
from tests.bench.crowd import crowd
from tests.bench.timing import RowValues
from tests.fakes.rm.fetch import USABLE

PARTS = (
    "lookup", "api", "pass", "daemon", "idle", "scrape", "bpf", "load", "hostile", "kai", "values",
    "usage",
)  # fmt: skip


class Row(NamedTuple):
    """One line of the table. ``bound`` is in the unit of ``value``; None if nothing is aimed at.

    ``value`` is None where it could not be measured; ``beside`` says why.
    """

    name: str
    value: float | None
    unit: str
    bound: float | None
    beside: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", help=f"{', '.join(PARTS)} (default: all but hostile, which takes long)"
    )
    parser.add_argument("--processes", type=int, default=10_000, help="idle processes beside (default 10000)")
    parser.add_argument(
        "--seconds", type=float, default=60, help="how long `load` and `usage` last (default 60)"
    )
    parser.add_argument(
        "--attack", default="", metavar="NAME", help="of `hostile`, those that begin like this only"
    )
    parser.add_argument(
        "--tree",
        type=Path,
        default=hostile.ROOT,
        help="of `hostile`, whose daemon: another checkout's (default: this)",
    )
    parser.add_argument(
        "--library",
        choices=USABLE,
        default="",
        help="of `values` and `usage`, NVIDIA's NVML of that release over a simulated driver (default: the stand-in)",
    )
    parser.add_argument("--json", default="bench.json", metavar="FILE")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if os.geteuid() != 0:
        print("make bench: it makes PID and mount namespaces, so it needs root", file=sys.stderr)
        return 2
    as_installed()
    wanted = args.parts or [part for part in PARTS if part != "hostile"]
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            rows.extend(Row(*row) for row in _measured(args, wanted, Path(scratch)))
    finally:  # half an hour of figures is not lost with the last one
        _report(rows, args.json)
    return 0


def _report(rows: list[Row], path: str) -> None:
    show(rows)
    machine = {"kernel": platform.release(), "python": platform.python_version(), "cores": os.cpu_count()}
    Path(path).write_text(
        json.dumps({"machine": machine, "results": [row._asdict() for row in rows]}, indent=1) + "\n"
    )


def as_installed() -> None:
    """Commands and daemons find their modules compiled, also in a fresh checkout, and allocate as in the image."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONMALLOC"] = "malloc"
    compileall.compile_dir(hostile.ROOT / "resolver", quiet=1)


def _measured(args: argparse.Namespace, wanted: Sequence[str], scratch: Path) -> Iterator[RowValues]:
    if "lookup" in wanted:
        yield from lookup.measure_containers(progress)
    if {"lookup", "api"} & set(wanted):
        progress(f"starting {args.processes} processes in 50 PID namespaces")
        with crowd(50, args.processes // 50) as starter:
            if "lookup" in wanted:
                yield from lookup.measure(scratch, progress)
            if "api" in wanted:
                yield from api.measure(scratch, starter, progress)
    parts: dict[str, Callable[[], Iterable[RowValues]]] = {
        "pass": lambda: passes.measure(scratch, progress),
        "daemon": lambda: daemon.measure(scratch, progress),
        "idle": lambda: idle.measure(scratch, progress),
        "values": lambda: values.measure(scratch, progress, args.library),
        "usage": lambda: integral.measure(scratch, args.seconds, progress, args.library),
        "kai": lambda: kai.measure(scratch, progress),
        "scrape": lambda: scrape.measure(progress),
        "bpf": lambda: bpf.measure(args.processes, progress),
        "load": lambda: load.measure(args.seconds, scratch, progress),
        "hostile": lambda: hostile.measure(progress, only=args.attack, tree=args.tree),
    }
    for name, measure in parts.items():
        if name in wanted:
            yield from measure()


def progress(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def show(rows: list[Row]) -> None:
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        value = "-" if row.value is None else f"{row.value:.2f}"
        bound = ""
        if row.bound is not None and row.value is not None:
            bound = f"{'ok' if row.value <= row.bound else 'MISSED':6} (<= {row.bound:g})"
        print(f"{row.name:{width}}  {value:>9} {row.unit:6}  {bound:18}  {row.beside}")


if __name__ == "__main__":
    sys.exit(main())
