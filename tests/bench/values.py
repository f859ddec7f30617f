"""What HAMi's monitor would report beside what NVML says, for each release's behaviour: how wrong, and for how long.

Loads are set and changed on one and on four GPUs, busy and idle, on some devices and on all; the cache files are read
all the while as the monitor reads them. A value counts as right within 3 points of NVML's, 0 as 0 only.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tests.bench.timing import Progress, RowValues
from tests.fakes.container import Container
from tests.fakes.gpu import Device
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.releases import BEHAVIOURS

GPUS: Final = tuple(Device(f"GPU-0000000{i}-aaaa-4bbb-8ccc-0123456789ab", minor=i) for i in range(4))
NEAR: Final = 3
#: Loads of the devices in turn, the last for the rest, too; each for so many seconds.
PHASES: Final = (
    ("busy", (30, 25, 20, 15)),
    ("changed", (70, 60, 5, 90)),
    ("the first alone", (40, 0, 0, 0)),
    ("all but the first", (0, 50, 35, 10)),
    ("idle", (0,)),
    ("busy again", (10, 20, 30, 40)),
    ("idle again", (0,)),
)
PHASE_S: Final = 5.0
GRACE_S: Final = 2.0  # after which every value has to be right
LOOK_S: Final = 0.005


class Seen(NamedTuple):
    """One case in all phases: longest seconds to the first right look of all devices, and what came after `GRACE_S`."""

    release: str
    gpus: int
    longest_s: float
    longest_in: str
    worst: int  # largest error of a device later than GRACE_S after a change, points
    wrong: float  # share of the looks then, in which a device was wrong

    @property
    def ok(self) -> bool:
        """Whether it was right within the time, and at all looks from then on."""
        return self.longest_s <= GRACE_S and not self.wrong


class Case:
    """A tenant of one release on some GPUs, and what was seen of it."""

    def __init__(self, container: Container, tenant: Tenant, gpus: int) -> None:
        self.container, self.tenant, self.gpus = container, tenant, gpus
        self.longest, self.longest_in, self.worst, self.looks, self.wrong = 0.0, "", 0, 0, 0
        self._loads: tuple[int, ...] = ()
        self._phase, self._changed, self._first = "", 0.0, 0.0

    def change(self, phase: str, loads: tuple[int, ...]) -> None:
        """The next phase; ends the one before."""
        self.end_phase()
        every = (*loads, *(loads[-1],) * self.gpus)[: self.gpus]
        self.tenant.set_load(*every)
        self._phase, self._loads, self._changed, self._first = phase, every, time.monotonic(), 0.0

    def right(self) -> bool:
        """Whether the monitor would report the right values now."""
        return self._compare()[0]

    def _compare(self) -> tuple[bool, int]:
        """Whether all devices are right, and the largest error in points."""
        seen = self.container.monitor_view()
        pairs = [(seen[device.uuid], load) for device, load in zip(GPUS, self._loads, strict=False)]
        right = all(value == load if load == 0 else abs(value - load) <= NEAR for value, load in pairs)
        return right, max(abs(value - load) for value, load in pairs)

    def look(self) -> None:
        """Compare once."""
        right, error = self._compare()
        after = time.monotonic() - self._changed
        if right and not self._first:
            self._first = after
        if after > GRACE_S:
            self.looks += 1
            self.wrong += not right
            self.worst = max(self.worst, error)

    def end_phase(self) -> None:
        """Note how long the phase took to be right; all of it, if it never was."""
        took = self._first or (PHASE_S if self._phase else 0.0)
        if took > self.longest:
            self.longest, self.longest_in = took, self._phase

    def seen(self) -> Seen:
        """The verdict."""
        share = self.wrong / self.looks if self.looks else 0.0
        return Seen(self.container.release.name, self.gpus, self.longest, self.longest_in, self.worst, share)


def compare(scratch: Path, progress: Progress, *options: str) -> list[Seen]:
    """Every release on one and four GPUs, all at once, under one daemon with its defaults (and ``options``)."""
    with Node(scratch, "535.183.01", GPUS) as node:
        cases = []
        for release in BEHAVIOURS:
            for gpus in (1, 4):
                container = node.container(
                    name=f"r{release.name.replace('.', '-')}-{gpus}",
                    release=release.name,
                    sm_limit=0,
                    devices=GPUS[:gpus],
                )
                cases.append(Case(container, container.tenant(), gpus))
        with _daemon(node, scratch, options):
            for phase, loads in PHASES:
                progress(f"{phase}: {', '.join(map(str, loads))} %")
                for case in cases:
                    case.change(phase, loads)
                until = time.monotonic() + PHASE_S
                while (now := time.monotonic()) < until:
                    for case in cases:
                        case.look()
                    time.sleep(max(0.0, LOOK_S - (time.monotonic() - now)))
            for case in cases:
                case.end_phase()
        return [case.seen() for case in cases]


@contextmanager
def _daemon(node: Node, scratch: Path, options: tuple[str, ...]) -> Iterator[None]:
    arguments = [sys.executable, "-m", "resolver", "run", "--containers-dir", str(node.containers_dir)]
    arguments += [
        "--run-dir",
        str(scratch / "run"),
        "--metrics-addr",
        "off",
        "--log-level",
        "error",
        *options,
    ]
    daemon = subprocess.Popen(arguments, env=node.environment())
    try:
        time.sleep(1.5)  # until it has repaired every hostpid
        yield
    finally:
        daemon.terminate()
        daemon.wait()


def measure(scratch: Path, progress: Progress) -> list[RowValues]:
    """The table's rows."""
    scratch.joinpath("values").mkdir()
    rows: list[RowValues] = []
    for seen in compare(scratch / "values", progress):
        name = f"{seen.release}, {seen.gpus} GPU{'s' if seen.gpus > 1 else ''}"
        rows += [
            (f"HAMi {name}: to the right values", seen.longest_s, "s", GRACE_S, seen.longest_in),
            ("  wrong later than that", 100 * seen.wrong, "% time", 0, f"by {seen.worst} points at most"),
        ]
    return rows
