"""The list of containers, where a tenant makes it expensive."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from resolver.containers.pod_names import PodNames
from resolver.daemon.running_containers import Census
from resolver.linux.procfs import MAX_TENANT_FILE, Procfs
from resolver.log.journal import Journal

UID = "3f6f7b9e-2d0c-4a8b-9a51-0d3c5e1f7a21"
CONTAINER = "ab" * 32


def test_a_mount_table_without_end_is_a_container_like_any(tmp_path: Path) -> None:
    """It was an error in each collection, and ten of those in a row ended the daemon."""
    process = tmp_path / "4711"
    process.mkdir()
    (process / "cgroup").write_text(f"0::/kubepods/besteffort/pod{UID}/{CONTAINER}\n")
    first = f"40 30 8:1 /vgpu/containers/{UID}_main /usr/local/vgpu rw - ext4 /dev/sda1 rw\n"
    line = f"41 40 0:50 /{'x' * 4000} /mnt rw - tmpfs tmpfs rw\n"
    (process / "mountinfo").write_text(first + line * (MAX_TENANT_FILE // len(line) + 10))
    census = Census(
        Procfs(str(tmp_path)),
        cast("Any", SimpleNamespace()),
        cast("Any", SimpleNamespace()),
        PodNames(str(tmp_path / "none")),
        Journal(),
    )
    census._look(CONTAINER, 4711, 4026532000, None)
    (report,) = census.containers()
    assert (report.container_id, report.container_name) == (CONTAINER, "main")
