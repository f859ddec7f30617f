"""Each monitor's reports against NVML's values, for each release's behaviour: the error and its duration.

Processes of one container start, work, change, idle, end cleanly, one of two and the last one, are killed, and come
again, on one, two and four GPUs; the cache files are read all the while as the monitors read them, each by its rule. A
value counts as right within 3 points of NVML's, 0 as 0 only. With NVIDIA's own library each container has its own GPUs,
where its processes take turns as on hardware, and NVML's values are those of the ring of periods.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.bench.timing import RowValues, progress
from tests.bench.usage import cpu
from tests.fakes.container import Container
from tests.fakes.daemon import BOUND, Daemon
from tests.fakes.gpu import LATE_S, Device
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.regions import RULES
from tests.fakes.releases import BEHAVIOURS, RELEASES, Release
from tests.fakes.rm.fetch import library
from tests.fakes.state import DEVICES, Fault
from tests.patience import until

EVERY_GPU: Final = tuple(
    Device(f"GPU-000000{i:02}-aaaa-4bbb-8ccc-0123456789ab", minor=i) for i in range(DEVICES)
)
GPUS: Final = EVERY_GPU[:4]
NEAR: Final = 3
#: Loads of the devices in turn, for each process that is to live then: None for one that ends or is not there.
Loads = tuple[int, ...] | None
IDLE: Final = (0, 0, 0, 0)
LIFE: Final[tuple[tuple[str, Loads, Loads], ...]] = (
    ("start", (30, 25, 20, 15), None),
    ("second", (30, 25, 20, 15), (20, 10, 5, 15)),
    ("change", (60, 5, 40, 10), (10, 30, 0, 20)),
    ("first GPU", (40, 0, 0, 0), IDLE),
    ("idle", IDLE, IDLE),
    ("busy", (10, 20, 30, 40), (50, 40, 30, 20)),
    ("one exits", None, (50, 40, 30, 20)),
    ("last exits", None, None),
    ("new one", (70, 60, 50, 90), None),
    ("third", (70, 60, 50, 90), (10, 15, 20, 5)),
    ("killed", None, (10, 15, 20, 5)),
    ("last killed", None, None),
    ("another", (15, 25, 35, 45), None),
)
PHASE_S: Final = 5.0
GRACE_S: Final = 2.0  # after which every value has to be right
LOOK_S: Final = 0.01
TWICE_S: Final = 1.0  # between two answers
_SLOTS: Final = 8  # that can hold anything: no life has more processes at a time than two
#: Per cent of the looks later than `GRACE_S`; and where watchers make values wrong at each tick: those of 2.4.1 set 0,
#: those of 2.5.0 and 2.6 add, and those before 2.10 set 0 if the driver refuses their call.
MOST_WRONG: Final = 0.5
MOST_WRONG_FOUGHT: Final = 1.0
#: Containers of 2.9.0 on such a driver, and the CPU that holding their values may take, in per cent of a core.
HELD: Final = {16: 2.0, 128: 8.0}
HELD_SETTLE_S, HELD_S = 40.0, 20.0
#: Drivers on which releases from 2.8.2 on differ, and their faults.
DRIVERS: Final = {
    "550.163.01": Fault(0),
    "570.86.15": Fault(0),
    "580.105.08": Fault.PROCESS_UTILIZATION_UNSUPPORTED,
}
REFUSING: Final = "580.105.08"
ON_EACH_DRIVER: Final = "2.8.2", "2.9.0", "2.10"


class Case:
    """A container of one release on some GPUs, and its observed values under each rule."""

    def __init__(self, container: Container) -> None:
        self.container, self.gpus = container, len(container.devices)
        self.tenants: list[Tenant | None] = [None, None]
        self.looks = 0
        self.longest = dict.fromkeys(RULES, (0.0, ""))
        self.worst = dict.fromkeys(RULES, (0, ""))
        self.wrong = dict.fromkeys(RULES, 0)
        self._first: dict[str, float] = {}
        self._loads: list[tuple[int, ...]] = []  # of those that live
        self._phase, self._changed = "", 0.0

    def change(self, phase: str, *loads: Loads) -> None:
        self.end_phase()
        for place, load in enumerate(loads):
            tenant = self.tenants[place]
            if load is None:
                if tenant is not None:
                    tenant.kill() if "killed" in phase else tenant.stop()
                self.tenants[place] = None
                continue
            if tenant is None:
                tenant = self.tenants[place] = self.container.tenant()
            tenant.set_load(*load[: self.gpus])
        self._loads = [load[: self.gpus] for load in loads if load is not None]
        self._phase, self._changed, self._first = phase, time.monotonic(), {}

    def _truth(self) -> list[tuple[int, int]]:
        """The least and the most that NVML said of all processes on each GPU."""
        gpu = self.container.node.gpu
        if not gpu.turns:
            return [(sum(loads), sum(loads)) for loads in zip(*self._loads, strict=True)] or [
                (0, 0)
            ] * self.gpus
        truth = []
        for device in self.container.devices:
            place = gpu.devices.index(device)
            pids = [each.host_pid for each in self.tenants if each is not None]
            lows = [gpu.span(pid, place, LATE_S)[0] for pid in pids]
            # Where NVML leaves a process out, its value stands until a second answer does, too.
            waits = [LATE_S if low else LATE_S + TWICE_S for low in lows]
            highs = [gpu.span(pid, place, wait)[1] for pid, wait in zip(pids, waits, strict=True)]
            truth.append((sum(lows), sum(highs)))
        return truth

    def _errors(self) -> dict[str, tuple[bool, int]]:
        """By rule, whether all devices are right, and the largest error in points."""
        errors, truth = {}, self._truth()
        for rule, seen in self.container.monitor_views(_SLOTS).items():
            values = [seen[device.uuid] for device in self.container.devices]
            off = [
                max(low - value, value - high, 0) for value, (low, high) in zip(values, truth, strict=True)
            ]
            right = all(
                error <= (NEAR if value and high else 0)
                for error, value, (_, high) in zip(off, values, truth, strict=True)
            )
            errors[rule] = right, max(off)
        return errors

    def right(self) -> bool:
        return all(right for right, _ in self._errors().values())

    def look(self) -> None:
        errors, after = self._errors(), time.monotonic() - self._changed
        self.looks += after > GRACE_S
        for rule, (right, error) in errors.items():
            if right:
                self._first.setdefault(rule, after)
            if after > GRACE_S:
                self.wrong[rule] += not right
                self.worst[rule] = max(self.worst[rule], (error, self._phase))

    def end_phase(self) -> None:
        """Record the seconds until the values were right; the phase's length if they never were."""
        for rule in RULES if self._phase else ():
            took = self._first.get(rule, PHASE_S)
            self.longest[rule] = max(self.longest[rule], (took, self._phase))

    def rows(self) -> Iterator[RowValues]:
        release, driver = self.container.release.name, self.container.node.gpu.driver_version
        gpus = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"
        gpus += f", driver {driver}" if driver in DRIVERS else ""
        fought = release == "2.4.1" or (release == "2.5.0" and self.gpus > 1)
        refused = DRIVERS.get(driver) and release != "2.10"
        for rule in RULES:
            (longest_s, longest_in), (worst, worst_in) = self.longest[rule], self.worst[rule]
            beside = (
                f"by {worst} points at most ({worst_in})" if worst > NEAR else "by no more than it jitters"
            )
            yield (
                f"monitor of {rule}, tenants of {release}, {gpus}: wrong {GRACE_S:.0f} s after a change",
                100 * self.wrong[rule] / (self.looks or 1),
                "% time",
                MOST_WRONG_FOUGHT if fought or refused else MOST_WRONG,
                f"{beside}; right within {longest_s:.1f} s ({longest_in})",
            )


def _compare(scratch: Path, release: str) -> Iterator[RowValues]:
    """Every release of HAMi on one, two and four GPUs, under one daemon with its defaults.

    All at once, and then those `ON_EACH_DRIVER`; with NVIDIA's library of a ``release`` as many as have a GPU each.
    """
    every = [(behaviour, gpus) for behaviour in BEHAVIOURS for gpus in (1, 2, 4)]
    if release:
        nodes = [(release, Fault(0), group) for group in _groups(every)]
    else:
        some = [(RELEASES[name], gpus) for name in ON_EACH_DRIVER for gpus in (1, 2, 4)]
        nodes = [
            ("535.183.01", Fault(0), every),
            *((version, fault, some) for version, fault in DRIVERS.items()),
        ]
    for number, (version, fault, group) in enumerate(nodes):
        devices = EVERY_GPU if release else GPUS
        with Node(scratch / str(number), version, devices, library(release) if release else None) as node:
            node.gpu.set_faults(fault)
            yield from _live(node, group)


def _groups(every: Sequence[tuple[Release, int]]) -> list[list[tuple[Release, int]]]:
    """Split the cases into groups that have enough GPUs."""
    groups: list[list[tuple[Release, int]]] = [[]]
    for each in every:
        if sum(gpus for _, gpus in (*groups[-1], each)) > len(EVERY_GPU):
            groups.append([])
        groups[-1].append(each)
    return groups


def _live(node: Node, group: Sequence[tuple[Release, int]]) -> Iterator[RowValues]:
    cases: list[Case] = []
    first = 0
    for release, gpus in group:
        name = release.name.lower().replace(".", "-").replace(" ", "-")
        devices = node.gpu.devices[first : first + gpus]
        cases.append(
            Case(node.container(name=f"r{name}-{gpus}", release=release.name, sm_limit=0, devices=devices))
        )
        first += gpus * node.gpu.turns
    options = ("--source", "auto", "--log-level", "error")
    with Daemon(node, node.root / "run", *options, wrapper=BOUND) as daemon:
        until(daemon.socket.exists, "the daemon")
        for phase, *loads in LIFE:
            progress(phase)
            for case in cases:
                case.change(phase, *loads)
            deadline = time.monotonic() + PHASE_S
            while (now := time.monotonic()) < deadline:
                for case in cases:
                    case.look()
                time.sleep(max(0.0, LOOK_S - (time.monotonic() - now)))
        for case in cases:
            case.end_phase()
    for case in cases:
        yield from case.rows()


def measure(scratch: Path, release: str = "") -> list[RowValues]:
    rows = sorted(_compare(scratch / "values", release))
    return rows if release else [*rows, *(_held(scratch, count) for count in HELD)]


def _held(scratch: Path, count: int) -> RowValues:
    """CPU with that many containers whose watchers set a value to 0 at each tick."""
    progress(f"{count} containers with a held value")
    place = scratch / f"held-{count}"
    with Node(place, REFUSING, GPUS) as node:
        node.gpu.set_faults(DRIVERS[REFUSING])
        for number in range(count):
            devices = [GPUS[number % len(GPUS)]]
            node.container(name=f"c{number}", release="2.9.0", sm_limit=0, devices=devices).tenant(load=20)
        with Daemon(node, place / "run", "--source", "auto", "--log-level", "error", wrapper=BOUND) as daemon:
            time.sleep(HELD_SETTLE_S)
            before = cpu(daemon.process.pid)
            time.sleep(HELD_S)
            used = cpu(daemon.process.pid).per_cent(before, HELD_S)
    name = f"CPU with {count} containers whose value is held, driver {REFUSING}"
    return name, sum(used), "% core", HELD[count], f"daemon {used.own:.2f}, children {used.children:.2f}"
