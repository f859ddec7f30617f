"""Snapshots for tests of what reads them: an empty node, with what the test changes."""

from __future__ import annotations

from typing import Any

from resolver.gpu.attribution import NOTHING
from resolver.gpu.inventory import NONE
from resolver.hami.hostpid_policy import Origin
from resolver.state import PassSeconds, Snapshot

_EMPTY = Snapshot(
    at=1_700_000_000.0,
    started_at=1_699_990_000.0,
    passes=1,
    pass_seconds=PassSeconds((0.001, 1.0), (1, 1), 1, 0.0005),
    source="scan",
    sources_not_used={},
    source_counters={},
    incomplete="",
    not_ready="",
    processes=5,
    map_size=32768,
    policy="host",
    policy_why="driver 550.54.15: samples carry host PIDs up to 565.77",
    policy_origin=Origin.BY_VERSION,
    driver_version="550.54.15",
    inventory=NONE,
    regions=(),
    rejected={},
    missing_dirs=(),
    containers=(),
    gpu_processes=(),
    joined=NOTHING,
    collected_at=0.0,
    workers=(),
    counters={},
    dry_run=False,
)


def picture(**changes: Any) -> Snapshot:
    """An empty node's snapshot, with these fields instead."""
    return _EMPTY._replace(**changes)
