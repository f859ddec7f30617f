"""Differences between two inventories, and the conditions that make a GPU unhealthy."""

from typing import Any

import pytest
from msgspec.structs import replace

from resolver.base.event_log import KINDS
from resolver.base.reasons import GpuReason
from resolver.gpu.inventory import NONE, DeviceAnswer, Gpu, Illness, Inventory, changes
from resolver.gpu.kept_inventory import COOL, HOT, judge


def answer(failed: str = "", error: str = "", **values: Any) -> DeviceAnswer:
    """Return a healthy reading, except for these values."""
    read = Gpu("GPU-a", 0, memory_total=2, memory_used=1, temperature=50, ecc_uncorrected=0)
    return DeviceAnswer(replace(read, **values), {failed: "x"} if failed else {}, error, "GPU is lost")


WELL, LOST = answer(), answer(error="GpuIsLost")


def gpu(uuid: str = "GPU-a", index: int = 0, *reasons: str, **more: Any) -> Gpu:
    illnesses = tuple(Illness(reason, f"about {reason}", 7.0) for reason in reasons)
    plain = Gpu(uuid, index, index, "Card", 2, 1, 0, 50, 100.0, False, (), 0, "ok", "", illnesses)
    return replace(plain, **more)


def events_of(before: list[Gpu], after: list[Gpu]) -> list[tuple[str, str, Any]]:
    old, new = (Inventory(n, 0.0, "1", tuple(gpus)) for n, gpus in enumerate((before, after)))
    found = list(changes(old, new))
    assert {kind for kind, _ in found} <= KINDS.keys()
    return [
        (kind, fields["device"], fields.get("reason") or fields.get("was") or fields.get("name"))
        for kind, fields in found
    ]


@pytest.mark.parametrize(
    ("before", "after", "events"),
    [
        ([], [gpu()], [("gpu_found", "GPU-a", "Card")]),
        ([gpu()], [gpu()], []),
        ([gpu()], [gpu(temperature=90, memory_used=2)], []),
        ([gpu()], [], [("gpu_gone", "GPU-a", "healthy")]),
        ([gpu("GPU-a", 0, "lost")], [], [("gpu_gone", "GPU-a", "lost")]),
        ([gpu()], [gpu("GPU-a", 0, "lost")], [("gpu_unhealthy", "GPU-a", "lost")]),
        (
            [gpu("GPU-a", 0, "too_hot")],
            [gpu("GPU-a", 0, "lost", "too_hot")],
            [("gpu_unhealthy", "GPU-a", "lost")],
        ),
        ([gpu("GPU-a", 0, "lost", "too_hot")], [gpu("GPU-a", 0, "too_hot")], []),
        ([gpu("GPU-a", 0, "lost", "too_hot")], [gpu()], [("gpu_healthy", "GPU-a", "lost, too_hot")]),
        ([], [gpu("", 0, "lost", name="")], [("gpu_found", "", ""), ("gpu_unhealthy", "", "lost")]),
        ([gpu("", 0, "lost")], [gpu()], [("gpu_found", "GPU-a", "Card")]),
        ([gpu("", 1, "lost"), gpu()], [gpu()], [("gpu_gone", "", "lost")]),
        ([gpu("GPU-a", 0), gpu("GPU-b", 1)], [gpu("GPU-b", 0)], [("gpu_gone", "GPU-a", "healthy")]),
    ],
)
def test_health_changes_are_reported(
    before: list[Gpu], after: list[Gpu], events: list[tuple[str, str, Any]]
) -> None:
    assert events_of(before, after) == events


def test_nothing_is_told_of_the_same_version() -> None:
    assert list(changes(NONE, NONE._replace(gpus=(gpu(),)))) == []


@pytest.mark.parametrize(
    ("device", "known", "reasons"),
    [
        (WELL, [], []),
        (WELL, [*GpuReason], []),  # a healthy reading clears every reason
        (answer(temperature=HOT), [], []),
        (answer(temperature=HOT + 1), [], ["too_hot"]),
        (answer(temperature=COOL), ["too_hot"], ["too_hot"]),
        (answer(temperature=COOL - 1), ["too_hot"], []),
        (answer(temperature=None), ["too_hot"], []),  # a GPU without the sensor
        (answer("temperature", temperature=None), ["too_hot"], ["too_hot"]),
        (answer("temperature", temperature=None), [], []),
        (answer(ecc_uncorrected=3), [], ["ecc_uncorrected"]),
        (answer("ecc_uncorrected", ecc_uncorrected=None), ["ecc_uncorrected"], ["ecc_uncorrected"]),
        (answer(ecc_uncorrected=None), ["ecc_uncorrected"], []),
        (answer("memory", memory_total=None, memory_used=None), [], ["memory_query_failed"]),
        (answer(memory_total=None, memory_used=None), [], []),
        (LOST, [], ["lost"]),
        (LOST, ["too_hot", "unreachable"], ["lost", "too_hot"]),
        (answer(error="ResetRequired"), ["lost"], ["reset_required"]),
        (answer(error="Unknown"), [], ["unreachable"]),
    ],
)
def test_reasons_of_an_unhealthy_device(device: DeviceAnswer, known: list[str], reasons: list[str]) -> None:
    before = [Illness(reason, "as before", 5.0) for reason in known]
    found = judge(device, before, now=9.0)
    assert [illness.reason for illness in found] == reasons
    for illness in found:
        assert illness.since == (5.0 if illness.reason in known else 9.0)
        assert illness.detail


def test_health_detail_is_the_newest_reading() -> None:
    hot = judge(answer(temperature=97), (), 1.0)
    assert hot == (Illness("too_hot", "97 C", 1.0),)
    assert judge(answer(temperature=93), hot, 2.0) == (Illness("too_hot", "93 C", 1.0),)
    assert judge(LOST, hot, 2.0) == (
        Illness("lost", "GPU is lost (GpuIsLost)", 2.0),
        Illness("too_hot", "97 C", 1.0),
    )
