"""How the demo looks: tables and bars."""

import shutil
import sys
from collections.abc import Sequence
from typing import Final

from resolver.cli.show import print_table, styled
from tests.fakes.measure import Row

HEAD: Final = (
    "container", "placement", "layout", "pid", "what had happened", "hostpid", "repair", "sm_util", "true", "ms", "",
)  # fmt: skip
#: Columns that a terminal narrower than this leaves out.
WIDE, NARROW = 140, ("placement", "layout", "what had happened", "true")
BAR: Final = 10
#: Scheduler of a container, by the directory of its file.
WHO: Final = {
    "hami": "HAMi",
    "volcano": "Volcano",
    "koordinator": "Koordinator",
    "kai": "KAI",
    "dra": "DRA claim",
    "bare": "bare /tmp",
}


def percent(value: int | None) -> str:
    """Format a percentage; a dash if the layout lacks the field."""
    return "-" if value is None else str(value)


def spread(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def _cells(row: Row) -> list[str]:
    case = row.case
    zeroed = case.ended or case.idles
    moment = row.true_ms if zeroed else row.repaired_ms
    return [
        case.container.name,
        WHO[case.container.placed],
        case.container.layout,
        str(case.tenant.ns_pid),
        case.story,
        f"{row.hostpid_before} -> {row.hostpid_after}",
        row.reason or ("zeroed" if zeroed else "-"),
        f"{percent(row.sm_before)} -> {percent(row.sm_after)}",
        percent(case.load) if case.load is None else spread(*row.truth),
        "-" if moment is None or not (row.reason or zeroed) else f"{moment:.0f}",
        "ok" if row.ok else "WRONG",
    ]


def bars(rows: Sequence[Row]) -> list[tuple[str, int, int, str]]:
    """Draw bars per container: its names, and the monitor's percentages before and after, and the right one."""
    sums: dict[str, tuple[int, ...]] = {}
    for row in rows:
        if row.case.load is None:
            continue
        name = f"{row.case.container.name:<8} {WHO[row.case.container.placed]:<11}"
        new = (row.sm_before or 0, row.sm_after or 0, *row.truth)
        sums[name] = tuple(map(sum, zip(sums.get(name, (0, 0, 0, 0)), new, strict=True)))
    return [(name, old, new, spread(*truth)) for name, (old, new, *truth) in sums.items()]


def say(text: str) -> None:
    print(text, flush=True)


def heading(text: str) -> None:
    say(styled(f"\n{text}\n", "bold"))


def progress(text: str) -> None:
    say(styled(f"  ... {text}", "dim"))


def table(rows: Sequence[Row]) -> None:
    narrow = shutil.get_terminal_size().columns < WIDE
    right = ("pid", "true", "ms")
    print_table(HEAD, map(_cells, rows), right=right, for_programs=NARROW if narrow else ())
    for row in rows:
        for text in row.wrong:
            say(f"  WRONG: {row.case.container.name}, pid {row.case.tenant.ns_pid}: {text}")


def picture(rows: Sequence[Row]) -> None:
    for name, old, new, true in bars(rows):
        before, after = ("#" * round(value * BAR / 100) for value in (old, new))
        say(
            f"  {name} [{styled(f'{before:.<{BAR}}', 'red')}] {old:>3} %  ->  "
            f"[{styled(f'{after:.<{BAR}}', 'green')}] {new:>3} %  (true {true})"
        )


def result(text: str, *, ok: bool) -> None:
    print(styled(text, "green" if ok else "red"), file=sys.stdout if ok else sys.stderr, flush=True)
