"""Each scheduler's placement in real mount and PID namespaces: its mounts, names and lifecycle."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.container import Container
from tests.fakes.daemon import Daemon
from tests.fakes.halted import stopped_in_its_exit
from tests.fakes.node import Node
from tests.fakes.placements import PLACEMENTS
from tests.fakes.regions import read_file
from tests.kernel.conftest import EVERY_SOURCE, Start, write_hostpid
from tests.kernel.serving import answer, serving
from tests.patience import never, until

pytestmark = pytest.mark.usefixtures("source")


def watching(start: Start, node: Node) -> Daemon:
    return serving(start, node, *node.placement_options())


@EVERY_SOURCE
def test_every_placement_is_repaired_beside_the_others(node: Node, start: Start) -> None:
    containers = [node.container(name=f"c-{name}", placement=name) for name in PLACEMENTS]
    tenants = [each.tenant(load=10 + number, guess="wrong") for number, each in enumerate(containers)]
    daemon = watching(start, node)
    for tenant in tenants:
        tenant.until_repaired()
        tenant.until_load(tenant.load)
    assert daemon.said("region_rejected") == []


@pytest.mark.parametrize("placement", ["volcano", "koordinator", "hami"])
def test_recreated_directory_of_running_container_is_repaired(
    node: Node, start: Start, placement: str
) -> None:
    """These plugins recreate the directory at each allocation, while the container maps the deleted file."""
    old = node.container(name="main", placement=placement, watcher=False)
    before = old.tenant(load=30, guess="wrong")
    daemon = watching(start, node)
    before.until_repaired()
    kept = old.cache.open("rb")
    shutil.rmtree(old.directory)
    daemon.wait_for("region_gone", path=str(old.cache))
    again = node.container(old.pod_uid, "main", placement=placement, watcher=False)
    assert again.directory == old.directory
    after = again.tenant(load=20, guess="wrong")
    assert after.ns_pid == before.ns_pid  # still running, with the deleted file
    after.until_repaired()
    after.until_load(20)
    region = read_file(Path(f"/proc/self/fd/{kept.fileno()}"))
    assert [(slot.pid, slot.hostpid) for slot in region.slots] == [(before.ns_pid, before.host_pid)]
    kept.close()


def share(node: Node, placement: str = "dra") -> tuple[Container, Container]:
    """Start two containers of different pods with one claim and its file, or of one pod with one file."""
    first = node.container(name="first", placement=placement, watcher=False)
    claimed: dict[str, Any] = {"name": "second", "claim": first.claim}
    own = claimed if placement == "dra" else {"pod_uid": first.pod_uid, "name": "first"}
    second = node.container(placement=placement, watcher=False, **own)
    second.inside, second.cache_name = first.inside, first.cache_name
    return first, second


@EVERY_SOURCE
def test_process_hanging_in_ended_namespace_keeps_slot(node: Node, start: Start) -> None:
    """Another pod has a process with the same PID, and the BPF map no longer lists the ended namespace."""
    first, second = share(node)
    twin, hanging = second.tenant(guess="none"), first.tenant(guess="none")
    assert hanging.ns_pid == twin.ns_pid
    write_hostpid(first, hanging, hanging.host_pid)
    with stopped_in_its_exit(hanging.host_pid):
        daemon = watching(start, node)
        daemon.wait_for("region_found", path=str(first.cache))
        never(lambda: hanging.hostpid != hanging.host_pid, "another process's number")


@EVERY_SOURCE
def test_slots_of_a_shared_claim_have_their_own_pods(node: Node, start: Start) -> None:
    first, second = share(node)
    of_first = first.tenant(load=30, guess="wrong")
    while second.spawn(["/bin/sleep", "1000"]).ns_pid < of_first.ns_pid + 10:
        pass
    of_second = second.tenant(load=20, guess="wrong")
    daemon = watching(start, node)
    for tenant in (of_first, of_second):
        tenant.until_repaired()
    until(lambda: answer(daemon, "regions")["regions"], "the report of the region")

    def region() -> dict[str, Any]:
        (found,) = answer(daemon, "regions")["regions"]
        return dict(found)

    assert (region()["placement"], region()["claim"]) == ("dra", first.claim)
    until(lambda: region()["container_id"] is None, "a report with both containers")

    def slots() -> dict[int, tuple[str, str, str]]:
        found = answer(daemon, "slots")["slots"]
        return {
            slot["pid"]: (slot["container_id"], slot["pod_uid"], slot["container_name"]) for slot in found
        }

    owners = {
        tenant.ns_pid: (each.container_id, each.pod_uid, each.name)
        for tenant, each in ((of_first, first), (of_second, second))
    }
    until(lambda: slots() == owners, "the owner of each slot")
    for line in daemon.said("repair"):
        assert (line["pod_uid"], line["container_name"]) == owners[line["ns_pid"]][1:]

    def with_it() -> set[tuple[str, str, str]]:
        return {
            (each["container_id"], each["pod_uid"], each["container_name"])
            for each in answer(daemon, "containers")["containers"]
            if str(first.cache) in each["regions"]
        }

    both = {(each.container_id, each.pod_uid, each.name) for each in (first, second)}
    until(lambda: with_it() == both, "both containers of the claim, by their names")
    of_first.kill()
    until(lambda: len([slot for slot in slots().values() if slot[0]]) == 1, "the end of a process")
    never(lambda: with_it() != both, "a container without its claim while it runs", 1.0)


@pytest.mark.parametrize("placement", ["dra", "hami", "volcano"])
def test_right_hostpid_of_duplicate_pid_is_kept(node: Node, start: Start, placement: str) -> None:
    """The second process takes the first one's slot and writes its own number: neither is proven to be the owner."""
    first, second = share(node, placement)
    of_first = first.tenant(guess="none")
    daemon = watching(start, node)
    of_first.until_repaired()
    of_second = second.tenant(guess="none")
    assert of_first.ns_pid == of_second.ns_pid
    of_second.command(f"hostpid {of_second.host_pid}")

    def unresolved() -> list[Any]:
        slots = answer(daemon, "slots")["slots"]
        return [slot["unresolved"] for slot in slots]

    until(lambda: unresolved() == ["ambiguous"], "a slot without a certain owner")
    never(lambda: of_first.hostpid != of_second.host_pid, "a write into the other one's slot", 1.0)
    of_first.kill()
    of_second.command(f"hostpid {of_first.host_pid}")
    of_second.until_repaired()
