"""``make bench``: speed and memory, beside their comparisons, in one run.

A table for people, and all numbers as JSON in ``bench.json``. Nothing here passes or fails: the bounds in the
table are aims.
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

from tests.bench import api, bpf, daemon, hostile, idle, integral, kai, load, lookup, passes, scrape, values
from tests.bench.crowd import crowd
from tests.bench.timing import RowValues, progress
from tests.fakes.rm.fetch import USABLE

PARTS = (
    "lookup", "api", "pass", "daemon", "idle", "values", "usage", "kai", "scrape", "bpf", "load", "hostile",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        choices=[*PARTS, []],
        help=f"of {', '.join(PARTS)} (default: all but hostile, which takes long)",
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
    if os.geteuid() != 0:
        print("make bench: it makes PID and mount namespaces, so it needs root", file=sys.stderr)
        return 2
    as_installed()
    wanted = args.parts or [part for part in PARTS if part != "hostile"]
    rows: list[RowValues] = []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            rows.extend(_measured(args, wanted, Path(scratch)))
    finally:  # half an hour of figures is not lost with the last one
        _report(rows, args.json)
    return 0


def _report(rows: list[RowValues], path: str) -> None:
    show(rows)
    fields = ("name", "value", "unit", "bound", "beside")
    results = [dict(zip(fields, row, strict=True)) for row in rows]
    machine = {"kernel": platform.release(), "python": platform.python_version(), "cores": os.cpu_count()}
    Path(path).write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


def as_installed() -> None:
    """Commands and daemons find their modules compiled, also in a fresh checkout, and allocate as in the image."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONMALLOC"] = "malloc"
    compileall.compile_dir(hostile.ROOT / "resolver", quiet=1)


def _measured(args: argparse.Namespace, wanted: Sequence[str], scratch: Path) -> Iterator[RowValues]:
    if "lookup" in wanted:
        yield from lookup.measure_containers()
    if {"lookup", "api"} & set(wanted):
        progress(f"starting {args.processes} processes in 50 PID namespaces")
        with crowd(50, args.processes // 50) as starter:
            if "lookup" in wanted:
                yield from lookup.measure(scratch)
            if "api" in wanted:
                yield from api.measure(scratch, starter)
    parts: dict[str, Callable[[], Iterable[RowValues]]] = {
        "pass": lambda: passes.measure(scratch),
        "daemon": lambda: daemon.measure(scratch),
        "idle": lambda: idle.measure(scratch),
        "values": lambda: values.measure(scratch, args.library),
        "usage": lambda: integral.measure(scratch, args.seconds, args.library),
        "kai": lambda: kai.measure(scratch),
        "scrape": scrape.measure,
        "bpf": lambda: bpf.measure(args.processes),
        "load": lambda: load.measure(args.seconds, scratch),
        "hostile": lambda: hostile.measure(only=args.attack, tree=args.tree),
    }
    for name, measure in parts.items():
        if name in wanted:
            yield from measure()


def show(rows: list[RowValues]) -> None:
    width = max((len(name) for name, *_ in rows), default=0)
    for name, value, unit, bound, beside in rows:
        text, aim = "-" if value is None else f"{value:.2f}", ""
        if bound is not None and value is not None:
            aim = f"{'ok' if value <= bound else 'MISSED':6} (<= {bound:g})"
        print(f"{name:{width}}  {text:>9} {unit:6}  {aim:18}  {beside}")


if __name__ == "__main__":
    sys.exit(main())
