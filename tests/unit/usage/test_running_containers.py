"""The list of running containers, and tenants that make it expensive."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from resolver.base.event_log import EventLog
from resolver.base.journal import Journal
from resolver.containers.log_names import ContainerNames
from resolver.linux.procfs import MAX_TENANT_FILE, Procfs
from resolver.usage.running_containers import Census
from tests.fakes.direct import at_once
from tests.fakes.procs import FakeProc

UID = "3f6f7b9e-2d0c-4a8b-9a51-0d3c5e1f7a21"
CONTAINER = "ab" * 32


def scene(
    tmp_path: Path,
    comm: str,
    mounts: str,
    names: ContainerNames | None = None,
    events: EventLog | None = None,
) -> Census:
    """Return a census that has read one process in a pod."""
    cgroup = f"0::/kubepods/besteffort/pod{UID}/{CONTAINER}"
    process = FakeProc(tmp_path).put(4711, mounts=mounts, cgroup=cgroup)
    if not mounts:
        (process / "mountinfo").unlink()
        (process / "mountinfo").mkdir()  # reading it fails
    (process / "comm").write_text(f"{comm}\n")
    no_map, names = cast("Any", None), names or ContainerNames("", "")
    census = Census(Procfs(str(tmp_path)), no_map, no_map, names, Journal(events))
    at_once(census.identify(CONTAINER, 4711, 4026532000, None))
    return census


def mount(root: str) -> str:
    return f"40 30 8:1 {root} /usr/local/vgpu rw - ext4 /dev/sda1 rw\n"


ENDLESS = f"41 40 0:50 /{'x' * 4000} /mnt rw - tmpfs tmpfs rw\n" * (MAX_TENANT_FILE // 4000)


@pytest.mark.parametrize(
    ("comm", "mounts", "containers"),
    [
        ("train", mount(f"/vgpu/containers/{UID}_main") + ENDLESS, [(CONTAINER, "main")]),
        ("train", "", [(CONTAINER, None)]),
        ("pause", mount(f"/k/pods/{UID}/etc-hosts"), []),  # a pod's sandbox only holds its namespaces
        ("pause", mount(f"/k/pods/{UID}/containers/main/1"), [(CONTAINER, "main")]),
    ],
    ids=["endless mount table", "unreadable mount table", "sandbox", "container named pause"],
)
def test_container_is_named_by_its_mounts(
    tmp_path: Path, comm: str, mounts: str, containers: list[tuple[str, str | None]]
) -> None:
    reports = scene(tmp_path, comm, mounts).containers()
    assert [(report.container_id, report.container_name) for report in reports] == containers


def test_kubelets_name_counts_and_not_that_of_hamis_directory(tmp_path: Path) -> None:
    """In a pod with an init container, HAMi's directory may have the init container's name."""
    links = tmp_path / "links"
    links.mkdir()
    (links / f"pod_ns_main-{CONTAINER}.log").symlink_to("/nowhere")
    names = ContainerNames(str(links), str(tmp_path / "none"))
    names.refresh()
    (report,) = scene(tmp_path, "train", mount(f"/vgpu/containers/{UID}_init"), names).containers()
    assert report.container_name == "main"


def test_event_of_a_new_container_has_its_pods_names(tmp_path: Path) -> None:
    (tmp_path / "pods" / f"ml_train-0_{UID}").mkdir(parents=True)
    names, events = ContainerNames("", str(tmp_path / "pods")), EventLog()
    names.refresh()
    scene(tmp_path, "train", mount(f"/vgpu/containers/{UID}_main"), names, events)
    (event,) = events.after(0)
    assert (event.fields["namespace"], event.fields["pod"]) == ("ml", "train-0")


async def test_map_is_asked_for_new_containers_every_few_seconds(tmp_path: Path) -> None:
    """Asking with each of NVML's answers took a fifth of an idle daemon's CPU time."""
    asked = list[object]()

    async def done(*what: object) -> None:
        asked.extend(what)

    pidmap = SimpleNamespace(catch_up=done, inits=dict)
    namespaces = SimpleNamespace(steps=list, made_by_runtime=list)
    names = ContainerNames("", "")
    census = Census(Procfs(str(tmp_path)), cast("Any", pidmap), cast("Any", namespaces), names, Journal())
    user = {CONTAINER: 4711}
    for users, times in (({}, 1), ({}, 1), (user, 2), (user, 2)):
        await census.refresh(users, {})
        assert len(asked) == times
    census.next_scan = 0.0
    await census.refresh(user, {})
    assert len(asked) == 3
