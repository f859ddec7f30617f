"""Answers of commands for the documents: the command's own text about a made-up daemon."""

from __future__ import annotations

import contextlib
import io
from unittest.mock import patch

from msgspec.structs import replace

from resolver.api.shapes import UnresolvedCounts
from resolver.api.status import Found, Totals, state_of
from resolver.cli import status
from resolver.cli.process_summary import ProcessSummary
from resolver.cli.show import print_pairs
from resolver.state import PassSeconds, Worker
from tests.fakes.pictures import picture

_DIRECTORY = "/usr/local/vgpu/containers"


def status_sample() -> list[str]:
    """Return the output of `resolver status`."""
    source = {"name": "netlink", "processes": 412, "not_used": {"bpf": "this kernel has no BTF"}}
    shown = state_of(picture(source=source, policy={"watchers": {"confirms": 5, "doubts": 0}}), {})
    shown = replace(
        shown,
        host_pid=1841,
        started_at=shown.at - 11_520,
        passes=46_080,
        pass_seconds=PassSeconds((), (), 46_080, 50.7),
        troubles=[],
        driver=replace(shown.driver, collected_at=shown.at - 0.4, gpus=8),
        totals=Totals(12, 6, 0, 10, 1, 3, 0, 0, 9),
        core_limits={"in_force": 3},
        found=[Found("hami", _DIRECTORY, 6)],
        workers=[Worker(name, 1, 0, None) for name in ("nvml worker", "slot writer", "reader")],
        counters={"repairs_missing": 7, "repairs_stale": 4, "repairs_wrong_namespace": 1},
    )
    text, cost = io.StringIO(), ProcessSummary(cpu_seconds=34.6, memory=36_280_730)
    with patch.object(status, "facts_of", lambda _: cost), contextlib.redirect_stdout(text):
        print_pairs(status.lines(shown, UnresolvedCounts({}, {})))
    return ["```console", "$ resolver status", *text.getvalue().splitlines(), "```"]
