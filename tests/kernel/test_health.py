"""A driver that hangs, fails with every error, loses and gets GPUs: the snapshot is right within two intervals.

Nothing here waits for time to pass: an interval is one collection and one pass. Containers, slots, children and
nvidia-ml-py are real. Both tenants are always busy, so every 0 that is reported is false.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resolver.config import Settings, WriteUtilization
from resolver.daemon.service import Service
from resolver.gpu import sampler as sampler_module
from resolver.gpu.inventory import Gpu
from resolver.state import Snapshot
from resolver.usage import gpu_users
from tests.fakes.chain import read_chain
from tests.fakes.gpu import DEFAULT_DEVICES, Load
from tests.fakes.gpu import Gpu as Driver
from tests.fakes.node import Node
from tests.fakes.state import Answer
from tests.kernel.conftest import DRIVER, Start
from tests.kernel.serving import answer
from tests.patience import until

FIRST, SECOND = DEFAULT_DEVICES
LOADS = {FIRST.uuid: 50, SECOND.uuid: 20}
INTERVALS = 2
LOST, RESET, NOT_FOUND, NOT_SUPPORTED, NO_FUNCTION = 15, 16, 6, 3, 13
LIBRARY = (1, 9, 18)  # errors of the library as a whole: UNINITIALIZED, DRIVER_NOT_LOADED, a version mismatch
EVERY_ERROR = (*range(1, 31), 999)
#: One error of each kind, or every error (long).
CODES = pytest.mark.parametrize(
    "codes",
    [
        (*LIBRARY, LOST, RESET, NOT_FOUND, NOT_SUPPORTED, NO_FUNCTION, 4, 999),
        pytest.param(EVERY_ERROR, marks=pytest.mark.long),
    ],
    ids=["kinds", "all"],
)


class Bench:
    def __init__(self, node: Node) -> None:
        self.node, self.seconds, self._told = node, 0.0, 0
        self.tenants = {}
        for device in (FIRST, SECOND):
            container = node.container(name=f"on-{device.minor}", watcher=False, devices=[device])
            self.tenants[device.uuid] = container.tenant(load=LOADS[device.uuid], guess="none")
        settings = Settings(
            containers_dir=(str(node.containers_dir),),
            nvml_interval=0.1,
            write_utilization=WriteUtilization.ALWAYS,
        )
        self._runner = asyncio.Runner()
        self.service = Service(settings)

    def close(self) -> None:
        self.service.close()
        self._runner.close()

    def interval(self) -> Snapshot:

        async def steps() -> Snapshot:
            await self.service.collect_once()
            await self.service.pass_once(patient=False)
            return self.service.snapshots.take()

        self.seconds += 1
        return self._runner.run(steps())

    def intervals(self) -> Snapshot:
        for _ in range(INTERVALS):
            snapshot = self.interval()
            for uuid, utilization in self.utilization(snapshot).items():
                assert utilization in (None, LOADS[uuid]), f"{uuid}: {utilization}"
                assert self.tenants[uuid].slot()["sm_util"] == [LOADS[uuid]]
            for process in snapshot.gpu_processes:
                assert process.sm_util in (None, LOADS.get(process.device_uuid))
                assert process.memory != 0
        return snapshot

    def utilization(self, snapshot: Snapshot) -> dict[str, int | None]:
        return {
            uuid: slot.utilization[0]
            for region in snapshot.regions
            for uuid, slot in zip(region.device_uuids, region.slots, strict=True)
        }

    def right(self) -> Snapshot:
        self.node.gpu.set_devices(DEFAULT_DEVICES)
        self.node.gpu.set_errors()
        self.node.gpu.set_faults()
        snapshot = self.intervals()
        assert snapshot.joined.error == ""
        assert self.utilization(snapshot) == LOADS
        assert [(gpu.uuid, gpu.illnesses, gpu.samples) for gpu in snapshot.inventory.gpus] == [
            (FIRST.uuid, (), "ok"),
            (SECOND.uuid, (), "ok"),
        ]
        return snapshot

    def gpu_events(self) -> list[tuple[str, Any]]:
        events = [
            each for each in self.service.events.after(self._told) if each.kind.startswith(("gpu_", "nvml_"))
        ]
        self._told = max([self._told, *(event.number for event in events)])
        return [(event.kind, event.fields.get("reason") or event.fields.get("device")) for event in events]


@pytest.fixture
def bench(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name in ("LD_LIBRARY_PATH", "NVML_STANDIN_STATE"):
        monkeypatch.setenv(name, node.environment()[name])
    bench = Bench(node)
    clock = SimpleNamespace(time=time.time, monotonic=lambda: bench.seconds)
    monkeypatch.setattr(sampler_module, "time", clock)
    monkeypatch.setattr(gpu_users, "DRIVER_SECONDS", 30.0)  # this machine may be slow, the driver is not
    try:
        for _ in range(3):  # slots are known only after the first NVML answer
            bench.interval()
        bench.right()
        bench.gpu_events()
        yield bench
    finally:
        bench.close()


def gpu(snapshot: Snapshot, uuid: str) -> Gpu:
    (found,) = (gpu for gpu in snapshot.inventory.gpus if gpu.uuid == uuid)
    return found


def reasons(snapshot: Snapshot, uuid: str) -> list[str]:
    return [illness.reason for illness in gpu(snapshot, uuid).illnesses]


@CODES
@pytest.mark.parametrize(
    "call", [Answer.ANY, Answer.HANDLE, Answer.UUID, Answer.UTILIZATION], ids=lambda call: call.name
)
def test_failing_device_leaves_only_its_own_values_unknown(
    bench: Bench, call: Answer, codes: tuple[int, ...]
) -> None:
    for code in codes:
        samples = call is Answer.UTILIZATION
        if samples and code == NOT_FOUND:
            continue  # NVML's sign for no process
        bench.node.gpu.set_devices([replace(FIRST, errors={call: code}), SECOND])
        if call is Answer.UUID:  # asked only when devices are listed
            bench.seconds += 61
        snapshot = bench.intervals()
        utilization = bench.utilization(snapshot)
        assert utilization[FIRST.uuid] is None, code
        if code in LIBRARY:
            assert samples or snapshot.joined.error
            assert [gpu.uuid for gpu in snapshot.inventory.gpus] == [FIRST.uuid, SECOND.uuid]
        else:
            assert snapshot.joined.error == ""
            assert utilization[SECOND.uuid] == LOADS[SECOND.uuid]
            assert reasons(snapshot, SECOND.uuid) == []
            if samples and code not in (LOST, RESET):
                status = "unsupported" if code in (NOT_SUPPORTED, NO_FUNCTION) else "failed"
                assert gpu(snapshot, FIRST.uuid).samples == status
                (process,) = (p for p in snapshot.gpu_processes if p.device_uuid == FIRST.uuid)
                assert (process.sm_util, bool(process.memory)) == (None, True)
            elif not samples:
                expected = {LOST: "lost", RESET: "reset_required"}.get(code, "unreachable")
                assert reasons(snapshot, FIRST.uuid) == [expected]
        bench.right()
    assert bench.service.gpus.sampler.worker.failures == 0


@CODES
@pytest.mark.parametrize(
    "call", [Answer.INIT, Answer.COUNT, Answer.DRIVER_VERSION], ids=lambda call: call.name
)
def test_failing_library_leaves_everything_unknown(
    bench: Bench, call: Answer, codes: tuple[int, ...]
) -> None:
    known = bench.service.gpus.inventory
    for code in codes:
        bench.node.gpu.set_errors({call: code})
        bench.service.gpus.sampler.worker.stop()  # the next worker has to start the library
        bench.seconds += 61
        snapshot = bench.intervals()
        assert snapshot.joined.error, code
        assert set(bench.utilization(snapshot).values()) == {None}
        assert snapshot.gpu_processes == ()
        assert [gpu.uuid for gpu in snapshot.inventory.gpus] == [gpu.uuid for gpu in known.gpus]
    bench.right()


def test_lost_device_is_unhealthy_and_removed_one_gone(bench: Bench) -> None:
    bench.node.gpu.set_devices([replace(FIRST, lost=True), SECOND])
    for _ in range(3):
        snapshot = bench.intervals()
        assert bench.utilization(snapshot) == LOADS | {FIRST.uuid: None}
        assert reasons(snapshot, FIRST.uuid) == ["lost"]
    assert bench.gpu_events() == [("gpu_unhealthy", "lost")]
    bench.right()
    assert bench.gpu_events() == [("gpu_healthy", FIRST.uuid)]
    bench.node.gpu.set_devices([FIRST])
    snapshot = bench.intervals()
    assert bench.utilization(snapshot) == LOADS | {SECOND.uuid: None}
    assert [gpu.uuid for gpu in snapshot.inventory.gpus] == [FIRST.uuid]
    assert bench.gpu_events() == [("gpu_gone", SECOND.uuid)]
    bench.right()
    assert bench.gpu_events() == [("gpu_found", SECOND.uuid)]


def test_disputed_value_is_unknown_with_its_reason(tmp_path: Path, node: Node, start: Start) -> None:
    """NVML leaves the process out for the daemon, but its watcher gets a value."""
    tenant = node.container(release="2.8.2", sm_limit=0, devices=[FIRST]).tenant(load=30)
    node.state_file = tmp_path / "other-state"
    with Driver(node.state_file, tmp_path / "other.sock", DRIVER, DEFAULT_DEVICES) as other:
        other.connect(read_chain(tenant.host_pid), 0, Load(memory=1 << 20))
        other.connect(read_chain(os.getpid()), 0, Load(sm=50))
        daemon = start(node, "--nvml-interval", "200ms")
        why = daemon.wait_for("nvml_contradicts_watchers")["why"]

        def process() -> dict[str, Any]:
            listed = answer(daemon, "processes")["processes"]
            return next(each for each in listed if each["host_pid"] == tenant.host_pid)

        until(daemon.socket.exists, "the socket")
        until(lambda: process()["sm_util"] is None, "an unknown value")
        assert (process()["sm_util_why"], process()["memory"]) == (why, 1 << 20)
        (slot,) = answer(daemon, "slots")["slots"]
        assert (slot["device_util"][0]["utilization"], slot["stuck"]) == (None, why)
