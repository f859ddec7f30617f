"""Koordinator's Device: fields from the daemon's GPUs, kept fields of an earlier object, and needless writes."""

import copy
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from resolver.api import shapes
from resolver.base.reasons import GpuReason
from resolver.gpu.inventory import Gpu, Illness
from resolver.kube.device import (
    CORDON,
    CORDONED,
    DRIVER_LABEL,
    HEALTH_LABEL,
    MESSAGES,
    MODEL_LABEL,
    NVML_UNAVAILABLE,
    OwnerReference,
    Report,
    camel,
    cordoned,
    desired,
    health,
    label_value,
    left_out,
    patch,
    quantity,
)
from tests.fakes.device_schema import wrong_with

NODE = OwnerReference("gpu-7", "2b1c0000-0000-4000-8000-000000000001")
AT = 1_700_000_000.0
LATER = AT + 3600


def gpu(uuid: str = "GPU-a", minor: int | None = 0, *reasons: str, **more: Any) -> Gpu:
    illnesses = tuple(Illness(reason, "97 C", AT) for reason in reasons)
    model, memory = "NVIDIA A100-SXM4-80GB", 80 << 30
    plain = Gpu(uuid, minor or 0, minor, model, memory, 1, 0, 50, 100.0, False, (), 0, "ok", "", illnesses)
    place = {"pci_address": "0000:3b:00.0", "numa_node": 1, "pcie_root": "pci0000:3a", "cpu_socket": 0}
    return replace(plain, **{**place, **more})


def answer(*gpus: Gpu, error: str = "") -> Any:
    return msgspec.to_builtins(shapes.Gpus(AT, 3, "550.54.15", error or None, [], list(gpus)))


def made(report: Report, before: Any = None, now: float = AT) -> Any:
    """Return the desired object, which must satisfy the published schema."""
    device = desired(report, NODE, before, now)
    assert wrong_with(device) == []
    return device


def stored(device: Any, version: str = "7") -> Any:
    kept = copy.deepcopy(device)
    kept["metadata"]["resourceVersion"] = version
    return kept


def entries(device: Any) -> dict[str, Any]:
    return {entry["id"]: entry for entry in device["spec"]["devices"]}


def test_healthy_node_has_a_complete_object() -> None:
    device = made(Report(answer(gpu("GPU-b", 1), gpu("GPU-a", 0))))
    assert device["metadata"] == {
        "name": "gpu-7",
        "labels": {MODEL_LABEL: "NVIDIA-A100-SXM4-80GB", DRIVER_LABEL: "550.54.15"},
        "ownerReferences": [
            {
                "apiVersion": "v1",
                "kind": "Node",
                "name": "gpu-7",
                "uid": NODE.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    assert [entry["id"] for entry in device["spec"]["devices"]] == ["GPU-a", "GPU-b"]  # by minor number
    assert device["spec"]["devices"][1] == {
        "type": "gpu",
        "id": "GPU-b",
        "minor": 1,
        "health": True,
        "resources": {
            "koordinator.sh/gpu-core": "100",
            "koordinator.sh/gpu-memory-ratio": "100",
            "koordinator.sh/gpu-memory": "80Gi",
        },
        "labels": {MODEL_LABEL: "NVIDIA-A100-SXM4-80GB"},
        "topology": {"socketID": 0, "nodeID": 1, "pcieID": "pci0000:3a", "busID": "0000:3b:00.0"},
    }
    assert "status" not in device


def test_unchanged_health_is_not_written() -> None:
    ill = gpu("GPU-b", 1, "too_hot")
    before = stored(made(Report(answer(gpu(temperature=50), ill))))
    again = made(Report(answer(gpu(temperature=60, memory_used=5), ill)), before, LATER)
    assert patch(before, again) == {}


def test_gone_gpus_and_an_earlier_node_of_the_name_go() -> None:
    before = stored(made(Report(answer(gpu(), gpu("GPU-b", 1)))))
    assert entries(made(Report(answer(gpu())), before)).keys() == {"GPU-a"}
    assert made(Report(answer()))["spec"] == {"devices": []}
    anew = desired(Report(answer(gpu())), OwnerReference(NODE.name, "new"), before, LATER)
    (owner,) = patch(before, anew)["metadata"]["ownerReferences"]
    assert owner["uid"] == "new"


@pytest.mark.parametrize("reason", GpuReason)
def test_ill_gpu_has_reason_and_time(reason: str) -> None:
    before = stored(made(Report(answer(gpu()))))
    ill = made(Report(answer(gpu("GPU-a", 0, reason))), before, LATER)
    (entry,) = ill["spec"]["devices"]
    assert entry["health"] is False
    assert entry["conditions"] == [
        {
            "type": "Healthy",
            "status": "False",
            "reason": camel(reason),
            "message": GpuReason(reason).meaning,
            "lastTransitionTime": "2023-11-14T22:13:20Z",
        }
    ]
    assert patch(before, ill) == {"metadata": {"resourceVersion": "7"}, "spec": {"devices": [entry]}}
    well = made(Report(answer(gpu())), stored(ill), LATER)
    assert "conditions" not in entries(well)["GPU-a"]
    assert entries(well)["GPU-a"]["health"] is True


def test_second_illness_changes_message_but_not_time() -> None:
    before = stored(made(Report(answer(gpu("GPU-a", 0, "too_hot")))))
    (condition,) = entries(made(Report(answer(gpu("GPU-a", 0, "lost", "too_hot"))), before, LATER))["GPU-a"][
        "conditions"
    ]
    assert (condition["reason"], condition["lastTransitionTime"]) == ("Lost", "2023-11-14T22:13:20Z")
    assert GpuReason.TOO_HOT.meaning in condition["message"]


def test_failing_nvml_keeps_gpus_as_unhealthy() -> None:
    before = stored(made(Report(answer(gpu(), gpu("GPU-b", 1)))))
    # A daemon that restarted meanwhile lists no GPUs.
    nothing: dict[str, Any] = {"version": 0, "driver_version": None, "error": "it hangs", "gpus": []}
    for gpus in (answer(gpu(), gpu("GPU-b", 1), error="it hangs"), answer(gpu(), error="it hangs"), nothing):
        device = made(Report(gpus, failing=True), before, LATER)
        assert {uuid: state[:2] for uuid, state in health(device).items()} == {
            "GPU-a": (False, NVML_UNAVAILABLE),
            "GPU-b": (False, NVML_UNAVAILABLE),
        }
        (condition,) = entries(device)["GPU-a"]["conditions"]
        assert condition["status"] == "Unknown"
        assert condition["lastTransitionTime"] == "2023-11-14T23:13:20Z"
        assert entries(device)["GPU-a"]["resources"] == entries(before)["GPU-a"]["resources"]
        assert patch(stored(device), made(Report(gpus, failing=True), stored(device), LATER + 60)) == {}


def test_container_without_devices_leaves_health_as_it_was() -> None:
    before = stored(made(Report(answer(gpu(), gpu("GPU-b", 1, "lost")))))
    error = "Unknown Error (Unknown)"
    nothing: dict[str, Any] = {"version": 0, "driver_version": None, "error": error, "gpus": []}
    for gpus in (answer(gpu(), gpu("GPU-b", 1, "lost"), error=error), nothing):
        device = made(Report(gpus, failing=True), before, LATER)
        assert [entry["health"] for entry in entries(device).values()] == [True, False]
        assert entries(device)["GPU-a"]["conditions"][0]["status"] == "Unknown"


def test_marked_gpu_is_unhealthy() -> None:
    gpus = answer(gpu(), gpu("GPU-b", 1), gpu("GPU-c", 2, "lost"))
    device = made(Report(gpus, cordoned=cordoned({"annotations": {CORDON: " GPU-a,GPU-c ,GPU-other\n"}})))
    assert {uuid: state[:2] for uuid, state in health(device).items()} == {
        "GPU-a": (False, CORDONED),
        "GPU-b": (True, ""),
        "GPU-c": (False, "Lost"),
    }
    assert MESSAGES[CORDONED] in entries(device)["GPU-c"]["conditions"][0]["message"]
    unhealthy = made(Report(gpus, cordoned=cordoned({"labels": {HEALTH_LABEL: "unhealthy"}})))
    assert not any(entry["health"] for entry in unhealthy["spec"]["devices"])
    assert cordoned({"annotations": {CORDON: "  ,, "}, "labels": {HEALTH_LABEL: "healthy"}}) == frozenset()
    assert cordoned({"annotations": {CORDON: "*"}}) == frozenset("*")


def test_foreign_fields_are_kept() -> None:
    before = stored(made(Report(answer(gpu()))))
    rdma = {"type": "rdma", "id": "0000:18:00.0", "minor": 0, "health": True}
    foreign = {
        "type": "Calibrated",
        "status": "True",
        "reason": "Done",
        "message": "",
        "lastTransitionTime": "2023-11-14T22:13:20Z",
    }
    before["spec"]["devices"][0] |= {"moduleID": 4, "conditions": [foreign]}
    before["spec"]["devices"][0]["labels"]["a"] = "b"
    before["spec"]["devices"].append(rdma)
    before["metadata"]["labels"]["theirs"] = "x"
    other = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u"}
    before["metadata"]["ownerReferences"].insert(0, other)
    before["status"] = {"allocations": [{"type": "gpu"}]}
    assert patch(before, made(Report(answer(gpu())), before)) == {}
    change = patch(before, made(Report(answer(gpu("GPU-a", 0, "lost"))), before))
    assert change.keys() == {"metadata", "spec"}
    assert change["metadata"] == {"resourceVersion": "7"}
    entry, kept = change["spec"]["devices"]
    assert (entry["moduleID"], entry["labels"]["a"], entry["conditions"][0]) == (4, "b", foreign)
    assert kept == rdma


def test_model_label_is_set_beside_foreign_labels() -> None:
    gpus = answer(gpu("GPU-a", 0, name="NVIDIA L40S"), gpu("GPU-b", 1))
    before = stored(made(Report(gpus)))
    before["spec"]["devices"][0]["labels"]["theirs"] = "x"
    device = made(Report(gpus), before)
    assert device["metadata"]["labels"][MODEL_LABEL] == "NVIDIA-L40S"
    labels = {uuid: entry["labels"] for uuid, entry in entries(device).items()}
    assert labels["GPU-a"] == {MODEL_LABEL: "NVIDIA-L40S", "theirs": "x"}
    assert labels["GPU-b"] == {MODEL_LABEL: "NVIDIA-A100-SXM4-80GB"}


def test_missing_values_of_broken_gpu_are_kept() -> None:
    before = stored(made(Report(answer(gpu()))))
    broken = gpu("GPU-a", None, "memory_query_failed", memory_total=None, numa_node=None)
    entry = entries(made(Report(answer(broken)), before))["GPU-a"]
    for name in ("minor", "resources", "topology"):
        assert entry[name] == entries(before)["GPU-a"][name]


def test_gpu_without_uuid_or_minor_is_left_out() -> None:
    report = Report(answer(gpu("", 0), gpu("GPU-b", None), gpu("GPU-c", 2)))
    device = made(report)
    assert entries(device).keys() == {"GPU-c"}
    assert left_out(report, device) == 2


@pytest.mark.parametrize("missing", ["numa_node", "pcie_root", "cpu_socket", "pci_address"])
def test_incomplete_topology_is_left_out(missing: str) -> None:
    place: dict[str, Any] = {missing: None}
    assert "topology" not in entries(made(Report(answer(gpu(**place)))))["GPU-a"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (24 << 30, "24Gi"),
        (85_520_809_984, "81559Mi"),
        (1 << 40, "1Ti"),
        (1536, "1536"),
        (3 << 10, "3Ki"),
        (0, "0"),
    ],
)
def test_quantity_is_exact(number: int, text: str) -> None:
    assert quantity(number) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("NVIDIA A100-SXM4-80GB", "NVIDIA-A100-SXM4-80GB"),
        (" Tesla (T4) ", "Tesla--T4"),
        ("x" * 70, "x" * 63),
        ("\u00e4", ""),
    ],
)
def test_label_value_has_only_allowed_characters(text: str, value: str) -> None:
    assert label_value(text) == value


def test_schema_refuses_wrong_types() -> None:
    for wrong in ({"minor": "0"}, {"memory": 1}, {"topology": {"nodeID": 0}}, {"resources": {"a": "x"}}):
        device = made(Report(answer(gpu())))
        device["spec"]["devices"][0] |= wrong
        assert wrong_with(device) != []
