"""The metrics of a snapshot, parsed by Prometheus's own library."""

import asyncio
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from resolver.base.reasons import RegionReason, RepairReason, SampleReason, UnresolvedReason
from resolver.config import Settings
from resolver.gpu.attribution import Joined
from resolver.gpu.inventory import Gpu, Illness, Inventory, MigInstance, Sample, Xid
from resolver.metrics import Page, collector
from resolver.metrics.family import FAMILIES
from resolver.state import (
    Container,
    Counted,
    HamiCounts,
    Process,
    RegionReport,
    SlotReport,
    SlotReports,
    Snapshot,
)
from tests.fakes.exposition import Read
from tests.fakes.pictures import picture

GPUS = ("GPU-a", "GPU-b")


async def text(snapshot: Snapshot, **wanted: Any) -> bytes:
    status, kind, body = await Page(lambda: snapshot, Settings(**wanted)).answer("/metrics")
    assert (status, kind) == (200, CONTENT_TYPE_PLAIN_0_0_4)
    return body


def read(snapshot: Snapshot, **wanted: Any) -> Read:
    return Read(asyncio.run(text(snapshot, **wanted)))


def gpu(uuid: str, index: int, **changes: Any) -> Gpu:
    report = Gpu(uuid, index, index, "A100", 80 << 30, 2 << 30, 37, 61, 180.5, False, (), 0, "ok", "", ())
    return replace(report, **changes)


def joined(**changes: Any) -> Joined:
    asked = frozenset(GPUS)
    soon = time.time() + 86400  # far ahead: made at collection, it must not be stale when the tests run
    known = Joined(soon, "", {}, asked, (), (), asked)
    return known._replace(**changes)


def container(number: int = 1, **changes: Any) -> Container:
    names = f"uid-{number}", "main", "default", f"pod-{number}"
    report = Container(f"{number:064x}", *names, "containerd", 4026532000 + number, 100 * number, (), 0.0)
    return replace(report, **changes)


def slot(host_pid: int | None, **changes: Any) -> SlotReport:
    report = SlotReport(2, 0, host_pid or 0, host_pid, False, None, None, (0,), (0,))
    return replace(report, **changes)


def region(
    of: Container, uuids: tuple[str, ...] = GPUS[:1], *slots: SlotReport, **changes: Any
) -> RegionReport:
    path = f"/containers/{of.pod_uid}_{of.container_name}/x.cache"
    names = of.pod_uid or "", of.container_name or ""
    report = RegionReport(path, *names, "v1.2", uuids, of.container_id, slots=SlotReports(slots))
    return replace(report, **changes)


def process(
    of: Container | None, host_pid: int, sm_util: int | None, uuid: str = GPUS[0], **changes: Any
) -> Process:
    report = Process(host_pid, 2, uuid, None, None, None, None, None, None, sm_util, 1 << 20, None)
    if of:
        names = ("container_id", "pod_uid", "container_name", "namespace", "pod")
        changes = {name: getattr(of, name) for name in names} | changes
    return replace(report, **changes)


def node(
    containers: tuple[Container, ...],
    processes: tuple[Process, ...] = (),
    regions: tuple[RegionReport, ...] = (),
    **changes: Any,
) -> Snapshot:
    known = {
        "joined": joined(),
        "collected_at": time.time(),
        "inventory": Inventory(1, time.time(), "550.54.15", tuple(map(gpu, GPUS, (0, 1)))),
    }
    return picture(
        at=time.time(), containers=containers, gpu_processes=processes, regions=regions, **known | changes
    )


UTILIZATION, MEMORY = "resolver_container_utilization_ratio", "resolver_container_memory_bytes"
UNKNOWN = "resolver_container_unknown_values"


ONE, TWO = container(1), container(2)
LIES = (
    slot(None, unresolved=UnresolvedReason.INVALID_PID, utilization=(None,)),
    slot(None, slot=1, dead=True, sm_util=(100,)),
)
BEFORE, AFTER = container(1, container_id="a" * 64), container(1, container_id="b" * 64)
GHOST = container(
    1, container_id="", namespace="", pod=""
)  # its cgroup has no id, but its slots' owners are known
OF_NOBODY = process(None, 7, 25)


@pytest.mark.parametrize(
    ("containers", "processes", "regions", "shares"),
    [
        ((ONE, TWO), (), (region(ONE),), {"uid-1 GPU-a": 0.0}),  # one idle, one without HAMi
        # Slots with false values neither hide load nor add any.
        ((ONE, TWO), (process(ONE, 7, 87),), (region(ONE, GPUS[:1], *LIES), region(TWO, GPUS[:1], *LIES)),
         {"uid-1 GPU-a": 0.87, "uid-2 GPU-a": 0.0}),
        # One container with two files.
        ((ONE,), (process(ONE, 7, 40),), (region(ONE), region(ONE, GPUS, path="/containers/uid-1_main/y.cache")),
         {"uid-1 GPU-a": 0.4, "uid-1 GPU-b": 0.0}),
        # A container before and after its restart.
        ((BEFORE, AFTER), (process(BEFORE, 7, 10), process(AFTER, 8, 20)), (region(BEFORE),), {"uid-1 GPU-a": 0.3}),
        ((), (OF_NOBODY,), (region(GHOST, GPUS[:1], slot(7)),), {"uid-1 GPU-a": 0.25}),
        ((), (), (region(GHOST, GPUS[:1], slot(7, dead=True)),), {}),
    ],
)  # fmt: skip
def test_containers_use_is_the_sum_of_their_processes(
    containers: Any, processes: Any, regions: Any, shares: Any
) -> None:
    found = read(node(containers, processes, regions)).all(UTILIZATION)
    assert len(found) == len(shares)
    assert {f"{has['pod_uid']} {has['device_uuid']}": used for has, used in found} == pytest.approx(shares)


def test_processes_are_summed_to_at_most_one() -> None:
    some, all_of_it = (
        [process(ONE, pid, used, uuid, no_slot=why) for pid, used, why in each]
        for uuid, each in zip(GPUS, (
            ((7, 30, None), (8, 20, SampleReason.NO_SLOT)), ((9, 60, None), (10, 70, SampleReason.NO_SLOT)),
        ), strict=True)
    )  # fmt: skip
    found = read(node((ONE,), (*some, *all_of_it), (region(ONE),)))
    assert [found.one(UTILIZATION, device_uuid=uuid) for uuid in GPUS] == [0.5, 1.0]
    assert found.one(MEMORY, device_uuid="GPU-b") == 2 << 20
    assert read(node((ONE,), (), (region(ONE),))).one(MEMORY) == 0


def test_use_without_id_and_owner_is_unknown() -> None:
    dark = slot(None, slot=1, unresolved=UnresolvedReason.NOT_MAPPED)
    found = read(node((), (OF_NOBODY,), (region(GHOST, GPUS[:1], slot(7), dark),)))
    assert found.all(UTILIZATION) == []
    assert found.one(UNKNOWN, value="utilization", reason="unresolved") == 1


def test_limits_have_the_labels_of_the_use() -> None:
    sliced, unlimited = container(1), container(2)
    limited = region(sliced, GPUS, slot(7), limit=(1 << 30, 0), sm_limit=(30, 100))
    free = region(unlimited, (GPUS[0], "GPU-forged"), limit=(0, 5), sm_limit=(0, 5))
    found = read(node((sliced, unlimited), (process(sliced, 7, 87),), (limited, free)))
    ((labels, memory),) = found.all("resolver_container_memory_limit_bytes")
    assert memory == 1 << 30
    assert found.all("resolver_container_core_limit_ratio") == [(labels, 0.3)]
    assert labels in [known for known, _ in found.all(MEMORY)]


def test_gpu_unknown_to_nvml_is_no_label() -> None:
    uuids = ("GPU-a", "GPU-a", "", "GPU-forged", 'GPU-b\\"', "GPU-a")
    cache = region(ONE, uuids, limit=(1 << 30,) * 6)
    found = read(node((ONE,), (), (cache,)))
    assert {labels["device_uuid"] for labels, _ in found.all(UTILIZATION)} == {"GPU-a"}
    assert found.one(UNKNOWN, value="utilization", reason="unknown_device") == 3
    away = node((ONE,), (), (cache,), joined=joined(error="hangs"))
    assert "forged" not in asyncio.run(text(away, hami_metrics=True)).decode()


def test_id_distinguishes_containers_of_equal_names() -> None:
    unnamed = {"pod_uid": "", "container_name": "", "namespace": "", "pod": ""}
    containers = tuple(container(number, **unnamed) for number in (1, 2))
    found = read(node(containers, tuple(process(each, 7 + n, 10 + n) for n, each in enumerate(containers))))
    shares = {labels["container_id"]: value for labels, value in found.all(UTILIZATION)}
    assert shares == {f"{1:064x}": 0.1, f"{2:064x}": 0.11}


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("implausible", {"gpu_processes": (process(ONE, 7, 87), process(ONE, 8, None))}),
        ("no_answer", {"joined": joined(error="GPU is lost", asked=frozenset(), listed=frozenset())}),
        ("stale", {"joined": joined(at=time.time() - 3.6, values={(1, GPUS[0]): 50})}),
        ("stale", {"joined": joined(at=time.time() - 7.6)}),
        ("device_failed", {"joined": joined(asked=frozenset(GPUS[1:]))}),
        (
            "unsupported",
            {
                "joined": joined(asked=frozenset(GPUS[1:])),
                "inventory": Inventory(1, 0.0, "550", (gpu("GPU-a", 0, samples="unsupported", mig=True),)),
            },
        ),
    ],
)
def test_unknown_value_has_no_series(reason: str, changes: dict[str, Any]) -> None:
    busy = node((ONE,), (process(ONE, 7, 87),), (region(ONE),))
    assert read(busy).one(UTILIZATION) == 0.87
    for processes in (busy.gpu_processes, ()) if "joined" in changes else (busy.gpu_processes,):
        found = read(busy._replace(**{"gpu_processes": processes} | changes))
        assert found.all(UTILIZATION) == []
        unknown = found.all(UNKNOWN, value="utilization")
        assert {labels["reason"]: number for labels, number in unknown if number} == {reason: 1}


def test_unknown_memory_is_not_0() -> None:
    for changes, processes in (
        ({}, (process(ONE, 7, 87, memory=None),)),
        ({"joined": joined(listed=frozenset())}, ()),
    ):
        found = read(node((ONE,), processes, (region(ONE),), **changes))
        assert found.all(MEMORY) == []
        assert found.one(UNKNOWN, value="memory", reason="not_told") == 1
        assert found.one(UTILIZATION) is not None


def test_mig_instance_in_a_file_belongs_to_its_gpu() -> None:
    instance = MigInstance("MIG-1", 3, 0, 10 << 30, 1 << 30, "2g.10gb")
    mig = gpu("GPU-a", 0, samples="unsupported", mig=True, mig_instances=(instance,), utilization=None)
    found = read(
        node(
            (ONE,),
            (),
            (region(ONE, ("MIG-1",)),),
            joined=joined(asked=frozenset(), listed=frozenset()),
            inventory=Inventory(1, 0.0, "550", (mig,)),
        ),
        hami_metrics=True,
    )
    info = {"mig_uuid": "MIG-1", "profile": "2g.10gb", "gpu_instance_id": "3", "compute_instance_id": "0"}
    assert found.one("hami_mig_device_info", device_uuid="MIG-1", pod=ONE.pod or "", **info) == 1
    assert found.all(UTILIZATION) == found.all("resolver_gpu_utilization_ratio") == []
    assert found.one(UNKNOWN, value="utilization", reason="unsupported") == 1
    labels = {"device_index": "0", "mig_uuid": "MIG-1", "gpu_instance": "3", "compute_instance": "0"}
    assert found.one("resolver_gpu_mig_memory_bytes", **labels) == 10 << 30
    assert found.one("resolver_gpu_mig_memory_used_bytes", **labels) == 1 << 30


def test_processes_have_series_if_requested() -> None:
    host = process(None, 9, 12, no_slot=SampleReason.NOT_IN_CONTAINER, memory=None)
    processes = (process(ONE, 7, 30), process(ONE, 8, None), host, host)
    snapshot = node((ONE,), processes, (region(ONE),))
    name = "resolver_process_utilization_ratio"
    assert read(snapshot).all(name) == []
    found = read(snapshot, metrics_per_process=True)
    assert {labels["host_pid"]: value for labels, value in found.all(name)} == {"7": 0.3, "9": 0.12}
    assert {labels["host_pid"] for labels, _ in found.all("resolver_process_memory_bytes")} == {"7", "8"}
    ((labels, _),) = found.all(name, host_pid="7")
    assert (labels["pod"], labels["ns_pid"], labels["device_index"]) == ("pod-1", "2", "0")
    down = snapshot._replace(joined=joined(error="hangs"))
    assert read(down, metrics_per_process=True).all(name) == []


def test_number_of_series_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "MAX_SERIES", 10)
    containers = tuple(container(number) for number in range(25))
    regions = tuple(
        region(each, ("GPU-forged", "GPU-a", *(f"GPU-{n}" for n in range(14)))) for each in containers
    )
    processes = tuple(process(containers[0], pid, 1) for pid in range(30))
    found = read(node(containers, processes, regions), metrics_per_process=True)
    assert len(found.all(UTILIZATION)) == len(found.all(MEMORY)) == 10
    assert len(found.all("resolver_process_utilization_ratio")) == 10
    assert found.one("resolver_series_left_out") == 15 + 20
    assert len(found.series) < 400


def test_hamis_names_have_hamis_labels_and_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_NAME", "gpu-node-1")
    cache = region(ONE, GPUS, limit=(8 << 30, 0))
    snapshot = node((ONE,), (process(ONE, 7, 87, GPUS[1]),), (cache,))
    assert not [name for name, _ in read(snapshot).series if not name.startswith(("resolver_", "process_"))]
    found = read(snapshot, hami_metrics=True)
    values = "default", "pod-1", "main", "1", "GPU-b", "vGPU"
    labels, old = (
        dict(zip(FAMILIES[name].labels, values, strict=True))
        for name in ("hami_container_device_utilization_ratio", "Device_utilization_desc_of_container")
    )
    for name, has, value in (
        ("hami_container_device_utilization_ratio", labels, 87),
        ("Device_utilization_desc_of_container", old, 87),
        ("hami_vgpu_memory_used_bytes", labels, 1 << 20),
        ("hami_container_device_memory_bytes", labels, 1 << 20),
        ("vGPU_device_memory_usage_in_bytes", old, 1 << 20),
    ):
        assert (has, value) in found.all(name)
        assert len(found.all(name)) == 2
    assert found.one("hami_vgpu_memory_limit_bytes") == 8 << 30
    assert found.one("vGPU_device_memory_limit_in_bytes", vdeviceid="0") == 8 << 30
    host = {"device_index": "0", "device_uuid": "GPU-a", "device_type": "NVIDIA-A100", "node": "gpu-node-1"}
    assert found.one("hami_host_gpu_utilization_ratio", **host) == 37
    assert found.one("HostCoreUtilization", deviceidx="0", nodeid="gpu-node-1", deviceuuid="GPU-a") == 37
    assert found.one("HostGPUMemoryUsage", deviceidx="1") == 2 << 30
    assert found.one("hami_host_gpu_power_usage_watts", device_index="1") == 180.5


def test_whole_gpu_container_has_hami_names() -> None:
    whole, sliced = container(1), container(2)
    processes = (
        process(whole, 7, 30, GPUS[1], no_slot=SampleReason.NO_SHARED_REGION),
        process(whole, 7, 60, GPUS[0], no_slot=SampleReason.NO_SHARED_REGION),
        process(sliced, 8, 9),
    )
    found = read(node((whole, sliced), processes, (region(sliced),)), hami_metrics=True)
    name = "hami_container_device_utilization_ratio"
    assert found.one(name, pod="pod-1", vdevice_index="0", device_uuid=GPUS[0]) == 60
    assert found.one(name, pod="pod-1", vdevice_index="1", device_uuid=GPUS[1]) == 30
    assert found.one("hami_vgpu_memory_used_bytes", pod="pod-1", vdevice_index="1") == 1 << 20
    assert len(found.all(name)) == 3


def test_unknown_values_have_no_hami_series() -> None:
    nameless, down = container(1, pod="", namespace=""), container(2)
    found = read(node((nameless,), (process(nameless, 7, 87),), (region(nameless),)), hami_metrics=True)
    assert found.all("hami_container_device_utilization_ratio") == []
    assert found.one(UTILIZATION) == 0.87
    broken = node((down,), (process(down, 7, 87),), (region(down),), joined=joined(error="hangs"))
    found = read(broken, hami_metrics=True)
    silent = [name for name, _ in found.series if name.startswith(("hami_", "Host", "vGPU", "Device"))]
    assert silent == []


def counts(*devices: tuple[int, int, int, int], last_kernel: int = 0) -> HamiCounts:
    return HamiCounts(tuple(Counted(*each) for each in devices), last_kernel)


def test_memory_kinds_and_last_kernel_are_the_files() -> None:
    cache = region(ONE, GPUS, slot(7))
    said = counts((10, 20, 30, 61), (1, 2, 3, 6), last_kernel=int(time.time()) - 100)
    found = read(node((ONE,), (), (cache,), hami_counts={cache.path: said}), hami_metrics=True)
    for name, value in (
        ("hami_vgpu_memory_context_bytes", 10),
        ("hami_vgpu_memory_module_bytes", 20),
        ("hami_vgpu_memory_buffer_bytes", 30),
    ):
        assert found.one(name, vdevice_index="0", pod="pod-1", device_uuid="GPU-a") == value
    ((labels, total),) = found.all("Device_memory_desc_of_container", vdeviceid="0")
    assert total == 61
    assert [labels[kind] for kind in ("context", "module", "data", "offset")] == ["10", "20", "30", "1"]
    assert found.one("hami_container_last_kernel_elapsed_seconds", vdevice_index="1") in (100, 101)
    assert found.one("Device_last_kernel_of_container", vdeviceid="1") in (100, 101)


SHARED = region(ONE, GPUS[:1], slot(7), pod_uid="", container_name="")
KINDS, ELAPSED = "hami_vgpu_memory_buffer_bytes", "hami_container_last_kernel_elapsed_seconds"


@pytest.mark.parametrize(
    ("cache", "said", "devices", "implausible"),
    [
        (region(ONE, GPUS, slot(7)), None, [], 0),  # the counts were not read
        (region(ONE, GPUS, slot(7)), counts(), [], 0),  # an owner is unknown
        (region(ONE, GPUS, slot(7)), counts((1, 2, 3, 6)), [], 0),  # counts of another file
        (
            region(ONE, GPUS, slot(7)),
            counts((1, 2, 2**64 - 1813876, 2**64 - 1813876), (1, 2, 3, 6)),
            ["1"],
            1,
        ),
        (region(ONE, GPUS, slot(7)), counts((1, 2, 81 << 30, 81 << 30), (1, 2, 3, 6)), ["1"], 1),
        (region(ONE, GPUS[:1], slot(7)), counts((1, 2, 3, 6), last_kernel=1 << 63), ["0"], 0),  # in future
        (SHARED, counts((1, 2, 3, 6), last_kernel=5), [], 0),  # two containers share the file
    ],
)
def test_unknown_or_impossible_counts_have_no_series(
    cache: RegionReport, said: HamiCounts | None, devices: list[str], implausible: int
) -> None:
    both = tuple(container(number, regions=(cache.path,)) for number in (1, 2))
    known = {cache.path: said} if said else {}
    found = read(
        node(both if cache is SHARED else (ONE,), (), (cache,), hami_counts=known), hami_metrics=True
    )
    assert found.all("hami_container_device_utilization_ratio")
    assert [labels["vdevice_index"] for labels, _ in found.all(KINDS)] == devices
    assert len(found.all("Device_memory_desc_of_container")) == len(devices)
    assert found.one(UNKNOWN, value="hami_memory", reason="implausible") == implausible
    assert not found.all(ELAPSED)


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("resolver_repairs_total", RepairReason),
        ("resolver_dry_run_repairs_total", RepairReason),
        ("resolver_region_rejections_total", RegionReason),
        ("resolver_rejected_regions", RegionReason),
        ("resolver_unresolved_slots", UnresolvedReason),
        ("resolver_unresolved_samples", SampleReason),
    ],
)
def test_every_reason_exists_from_the_start(name: str, reasons: Any) -> None:
    found = read(node(()))
    assert {labels["reason"]: value for labels, value in found.all(name)} == dict.fromkeys(reasons, 0)


def test_daemon_counters_are_published() -> None:
    slots = (
        slot(7, stuck="its watcher does not run"),
        slot(None, slot=1, unresolved=UnresolvedReason.NOT_MAPPED),
        slot(None, slot=2, dead=True),
    )
    counters = {"repairs_missing": 3, "would_repair_stale": 2, "rejected_symlink": 4, "conflicts": 5}
    counters |= {"broker_answers": 6, "broker_refused_ended": 7, "broker_busy": 8}
    snapshot = node(
        (ONE,),
        (),
        (region(ONE, GPUS[:1], *slots, quarantined=True),),
        counters=counters,
        rejected={"/containers/x/y.cache": RegionReason.SYMLINK},
        joined=joined(orphans=(Sample(9, "GPU-a", 5, SampleReason.NOT_IN_CONTAINER, None),)),
        missing_dirs=("/containers",),
        source={"name": "netlink", "not_used": {"bpf": "no BTF"}, "counters": {"lost": 2}},
        holder="77",
    )
    found = read(snapshot, broker="/run/x.sock")
    for name, labels, value in (
        ("resolver_repairs_total", {"reason": "missing"}, 3),
        ("resolver_dry_run_repairs_total", {"reason": "stale"}, 2),
        ("resolver_region_rejections_total", {"reason": "symlink"}, 4),
        ("resolver_conflicts_total", {}, 5),
        ("resolver_broker_answers_total", {}, 6),
        ("resolver_broker_refused_total", {"reason": "ended"}, 7),
        ("resolver_broker_busy_total", {}, 8),
        ("resolver_slots", {"state": "resolved"}, 1),
        ("resolver_slots", {"state": "unresolved"}, 1),
        ("resolver_slots", {"state": "dead"}, 1),
        ("resolver_stuck_slots", {}, 1),
        ("resolver_quarantined_regions", {}, 1),
        ("resolver_rejected_regions", {"reason": "symlink"}, 1),
        ("resolver_regions", {"layout": "v1.2"}, 1),
        ("resolver_regions", {"layout": "v0"}, 0),
        ("resolver_unresolved_slots", {"reason": "not_mapped"}, 1),
        ("resolver_unresolved_samples", {"reason": "not_in_container"}, 1),
        ("resolver_missing_directories", {}, 1),
        ("resolver_source", {"resolver_source": "netlink"}, 1),
        ("resolver_source", {"resolver_source": "bpf"}, 0),
        ("resolver_source_unavailable", {"source": "bpf"}, 1),
        ("resolver_map_events_total", {"event": "lost"}, 2),
        ("resolver_hostpid_namespace", {"resolver_hostpid_namespace": "host"}, 1),
        ("resolver_hostpid_namespace_origin", {"resolver_hostpid_namespace_origin": "by_version"}, 1),
        ("resolver_hostpid_watchers", {"finding": "confirms"}, 1),
        ("resolver_hostpid_watchers", {"finding": "doubts"}, 0),
        ("resolver_driver_info", {"version": "550.54.15"}, 1),
        ("resolver_standby", {}, 1),
        ("resolver_pass_duration_seconds_count", {}, 1),
        ("resolver_pass_duration_seconds_bucket", {"le": "+Inf"}, 1),
    ):
        assert found.one(name, **labels) == value, name
    assert len(found.all("resolver_broker_refused_total")) > 3  # all reasons, before any refusal
    assert not [name for name, _ in read(snapshot).series if "broker" in name]


def test_nvml_without_an_answer_is_not_up() -> None:
    found = read(picture())
    assert found.one("resolver_nvml_up") == 0
    assert found.one("resolver_nvml_sample_age_seconds") is None
    assert found.all("resolver_unresolved_samples") == []


def test_age_of_last_answer_grows() -> None:
    found = read(node((), joined=joined(at=time.time() - 90), collected_at=time.time() - 90))
    age = found.one("resolver_nvml_sample_age_seconds")
    assert age is not None
    assert 90 <= age < 150
    assert found.one("resolver_nvml_up") == 0
    back = read(node((), joined=joined(at=time.time() + 90), collected_at=time.time() + 90))
    assert back.one("resolver_nvml_sample_age_seconds") == 0  # the clock was set back
    assert back.one("resolver_nvml_up") == 1


def test_unhealthy_gpu_has_its_reason() -> None:
    ill = gpu("GPU-b", 1, illnesses=(Illness("too_hot", "97 C", 1234.5),), power=None, ecc_uncorrected=None)
    nvlinks = {"0000:3c:00.0": 4, "0000:01:00.0": 2}
    well = gpu("GPU-a", 0, xids=(Xid(31, 2, ""), Xid(79, 1, "")), nvlinks=nvlinks)
    snapshot = node((), inventory=Inventory(1, 0.0, "550", (well, ill)))
    found = read(snapshot)
    for name, value in (
        ("resolver_gpu_memory_bytes", 80 << 30),
        ("resolver_gpu_memory_used_bytes", 2 << 30),
        ("resolver_gpu_utilization_ratio", 0.37),
        ("resolver_gpu_temperature_celsius", 61),
        ("resolver_gpu_power_watts", 180.5),
        ("resolver_gpu_ecc_uncorrected_errors_total", 0),
        ("resolver_gpu_healthy", 1),
    ):
        assert found.one(name, device_uuid="GPU-a", device_index="0") == value
    assert found.one("resolver_gpu_healthy", device_index="1") == 0
    assert found.one("resolver_gpu_power_watts", device_index="1") is None
    assert {
        labels["reason"] for labels, value in found.all("resolver_gpu_unhealthy", device_index="1") if value
    } == {"too_hot"}
    assert len(found.all("resolver_gpu_unhealthy", device_index="0")) > 3
    assert found.one("resolver_gpu_unhealthy_since_timestamp_seconds") == 1234.5
    xids = found.all("resolver_gpu_xid_errors_total")
    assert {labels["xid"]: number for labels, number in xids} == {"31": 2, "79": 1}
    links_of = found.all("resolver_gpu_nvlinks")
    assert {(labels["device_uuid"], labels["remote"]): n for labels, n in links_of} == {
        ("GPU-a", remote): links for remote, links in nvlinks.items()
    }
    down = read(snapshot._replace(joined=joined(error="hangs")))
    assert {name for name, _ in down.series if name.startswith("resolver_gpu_")} == {"resolver_gpu_info"}


def test_cost_of_the_daemon_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(picture())
    assert (found.one("process_resident_memory_bytes") or 0) > 1 << 20
    for name in ("cpu_seconds_total", "resident_memory_bytes"):
        assert found.one(f"resolver_children_{name}") is not None
    monkeypatch.setattr(collector, "children_cpu", [1e9])
    assert read(picture()).one("resolver_children_cpu_seconds_total") == 1e9


def test_every_declared_family_is_served() -> None:
    wanted: dict[str, Any] = dict.fromkeys(("hami_metrics", "metrics_per_process"), True)
    plain = asyncio.run(text(picture(), **wanted, broker="/x"))
    helped = {line.split()[2] for line in plain.decode().splitlines() if line.startswith("# HELP")}
    declared = {family.name for family in FAMILIES.values() if family.section != "reporter"}
    assert declared <= helped


NAMES = st.text(st.characters() | st.sampled_from('"\\\n\r\t{},= \x00\x85\u2028\udc80é'), max_size=12)


@settings(max_examples=60)
@example([("", "", "x" * 5000, "uid", GPUS[0])])
@given(st.lists(st.tuples(NAMES, NAMES, NAMES, NAMES, st.sampled_from(GPUS) | NAMES), max_size=6))
def test_names_are_escaped_and_restored(named: list[tuple[str, ...]]) -> None:
    containers, processes, regions = [], [], []
    for number, (namespace, pod, name, uid, uuid) in enumerate(named):
        named_container = container(number, namespace=namespace, pod=pod, container_name=name, pod_uid=uid)
        containers.append(named_container)
        processes.append(process(named_container, number + 1, 10, uuid))
        regions.append(region(named_container, (uuid,), slot(number + 1), path=f"/{number}"))
    snapshot = node(tuple(containers), tuple(processes), tuple(regions), joined=joined(asked=frozenset(GPUS)))
    for more in (False, True):
        plain = asyncio.run(text(snapshot, metrics_per_process=more, hami_metrics=more))
        found = Read(plain)
        for labels, _ in found.all(UTILIZATION):
            assert labels["device_uuid"] in GPUS
            assert len(labels["container"]) <= 256
        pods = {labels["pod"] for labels, _ in found.all(UTILIZATION)}
        for _, pod, name, uid, uuid in named:
            if uuid in GPUS and uid and name:
                assert pod.encode("utf-8", "backslashreplace").decode() in pods


BLIND = "the self-test has not run yet"


@pytest.mark.parametrize(
    ("path", "changes", "status", "says"),
    [
        ("/healthz", {"passed_at": -1}, 200, "ok\n"),
        ("/healthz", {"passed_at": -11}, 503, " s old"),
        ("/healthz", {"passed_at": -11, "interval": 1.0}, 200, "ok\n"),
        ("/healthz", {"passed_at": -30, "interval": 1.0}, 503, " s old"),
        ("/healthz", {"passed_at": 3600}, 200, "ok\n"),
        ("/healthz", {"passes": 0, "started_at": -11}, 503, " s since the start"),
        ("/healthz", {"passes": 0, "started_at": -1}, 200, "ok\n"),
        # Otherwise the upgrade's new daemon would be restarted while it waits.
        ("/healthz", {"passes": 0, "started_at": -9000, "holder": "4711"}, 200, "ok\n"),
        ("/readyz", {"passes": 0, "started_at": -9000, "holder": "4711"}, 200, "ok\n"),
        ("/readyz", {}, 200, "ok\n"),
        ("/readyz", {"source": {"not_ready": BLIND}}, 503, f"{BLIND}\n"),
        ("/", {}, 404, "/metrics"),
    ],
)
def test_health_and_readiness_give_a_reason(
    path: str, changes: dict[str, Any], status: int, says: str
) -> None:
    now = time.time()
    times = {name: now + value for name, value in changes.items() if name.endswith("_at")}
    shown = picture(**{"interval": 0.25, "passes": 5, "started_at": now - 9000} | changes | times)
    code, kind, body = asyncio.run(Page(lambda: shown, Settings()).answer(path))
    assert (code, kind) == (status, "text/plain; charset=utf-8")
    assert says in body.decode()
