"""The daemon with NVIDIA's own libnvidia-ml over the simulated resource manager: true values, and nothing zeroed."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fakes.daemon import Daemon
from tests.fakes.gpu import Device
from tests.fakes.node import Node
from tests.fakes.rm.fetch import library
from tests.kernel.conftest import Start
from tests.kernel.serving import answer
from tests.patience import until
from tests.programs import completed

pytestmark = pytest.mark.nvidia

GPUS: Final = tuple(
    Device(f"GPU-0102030{i}-0506-0708-090a-0b0c0d0e0f10", name=f"NVIDIA Simulated {i}", minor=i)
    for i in range(2)
)
LOADS: Final = (30, 40)
SECONDS, LOOK = 14.0, 0.01
NEAR: Final = 4  # points: sums of floating point are rounded up
#: Share of reads. A watcher that loses its CPU between 0 and the value shows 0 that long: up to
#: 0.2 % on a crowded machine, 0.06 % on a quiet one. Wrong zeros once were 32 %; the daemon writes none,
#: except if a watcher has no CPU for two ticks: then the test measures again.
MOST_WRONG: Final = 0.02


@pytest.fixture(params=["550.163.01", "535.261.03"])
def real(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path, request.param, GPUS, library(request.param)) as node:
        yield node


def written(daemon: Daemon) -> int:
    return int(answer(daemon, "status")["counters"].get("utilization_writes", 0))


def test_steady_loads_are_never_zeroed(real: Node, start: Start) -> None:
    pairs = []
    for gpu, load in zip(GPUS, LOADS, strict=True):
        container = real.container(name=f"on-{gpu.minor}", release="2.8.2", sm_limit=0, devices=[gpu])
        pairs.append((container, container.tenant(load=load), gpu.uuid, load))
    daemon = start(real, "--nvml-interval", "1s")
    for _, tenant, _, _ in pairs:
        tenant.until_repaired()
    time.sleep(2.5)

    def steady() -> bool:
        looks, wrong, before = 0, 0, (written(daemon), len(daemon.said("slot_stuck")))
        end = time.monotonic() + SECONDS
        while looks <= 1000 or time.monotonic() < end:
            for container, _, uuid, load in pairs:
                for sums in container.monitor_views(8).values():
                    looks += 1
                    wrong += abs(sums[uuid] - load) > NEAR
            time.sleep(LOOK)
        after = written(daemon), len(daemon.said("slot_stuck"))
        print(f"{wrong} of {looks} looks, writes and stuck slots {before} to {after}")
        return wrong <= MOST_WRONG * looks and before == after

    until(steady, "values that are right without the daemon", 60)  # four tries
    container, tenant, uuid, _ = pairs[0]
    tenant.set_load(0)
    until(lambda: {sums[uuid] for sums in container.monitor_views(8).values()} == {0}, "idleness")
    assert daemon.said("nvml_contradicts_watchers") == []


def test_two_processes_in_turn_have_their_halves(real: Node, start: Start) -> None:
    container = real.container(release="2.8.2", sm_limit=0, devices=GPUS[:1])
    tenants = [container.tenant(load=45), container.tenant(load=45)]
    start(real, "--nvml-interval", "1s")
    for tenant in tenants:
        tenant.until_repaired()
    time.sleep(2.5)

    def halves() -> bool:
        values: list[int] = []
        for _ in range(100):
            values += [tenant.sm_util[0] for tenant in tenants]
            time.sleep(0.1)
        print(f"mean {sum(values) / len(values)}, {values.count(0)} times 0")
        # A watcher sets 0 at each tick before it fills the value in; if it loses its CPU, the 0 stays longer.
        return values.count(0) <= 2 and 42 <= sum(values) / len(values) <= 49

    until(halves, "half of the GPU for each", 60)


def test_demo_is_right(root: Path) -> None:
    done = completed(sys.executable, "-m", "tests.fakes.demo", "--library", "550.163.01", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Driver 550.163.01" in done.stdout
    assert "Every value is right" in done.stdout
