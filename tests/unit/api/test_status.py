"""The daemon's problems as `/v1/status` reports them."""

import time
from typing import Any

import pytest

from resolver.api.status import troubles
from resolver.base.reasons import TroubleReason, UnresolvedReason
from resolver.gpu.attribution import NOTHING
from resolver.state import RegionReport, SlotReport, SlotReports
from tests.fakes.pictures import picture

LOST = SlotReport(7, 0, 0, None, False, UnresolvedReason.NO_SUCH_PROCESS, None, (0,), (None,))


@pytest.mark.parametrize(
    ("changes", "reason", "said", "grave"),
    [
        ({"passed_at": time.time() - 60}, "stalled", "passes have stopped: the last pass over the slots is", True),
        ({"source": {"not_ready": "blind"}}, "not_ready", "not ready: blind", True),
        ({"standing": {"metrics_off": "taken"}}, "metrics_off", "it serves no metrics: taken", True),
        ({"joined": NOTHING._replace(error="gone")}, "nvml_unavailable", "NVML is unavailable: gone", True),
        ({"standing": {"out_of_descriptors": "1024"}}, "out_of_descriptors", "ran out of descriptors: 1024", True),
        ({"standing": {"out_of_means": "ENOMEM"}}, "out_of_means", "it lacks resources: ENOMEM", True),
        ({"source": {"incomplete": "full"}}, "source_incomplete", "its map is incomplete: full", False),
        ({"dry_run": True}, "dry_run", "it is a dry run", False),
        ({"regions": (RegionReport("/x", None, None, "v1.2", ("GPU",), slots=SlotReports((LOST,))),)},
         "slots_unresolved", "slots are unresolved: 1 no_such_process", False),
        ({"over_budget": {"/x/uid_main": 1.7e9}}, "over_budget", "uid_main since 22:13:20 UTC", False),
        ({"counters": {"internal_errors": 1}}, "internal_errors", "internal errors: 1 time since", False),
    ],
)  # fmt: skip
def test_every_trouble_has_a_next_step(
    changes: dict[str, Any], reason: str, said: str, *, grave: bool
) -> None:
    well = {"passed_at": time.time() + 3600, "joined": NOTHING._replace(error=""), "interval": 1.0}
    assert troubles(picture(**well)) == []
    (found,) = troubles(picture(**well | changes))
    assert (found.reason, found.grave) == (reason, grave)
    assert said in str(found)
    assert (
        found.fix == TroubleReason(reason).for_terminal()[1].replace("SOURCE", "scan") or reason == "stalled"
    )
    assert "PID" not in found.fix
