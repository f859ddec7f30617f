"""Docker: its PID and user namespaces, HAMi's directory, and a cache file in a container without that directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.node import Node
from tests.fakes.overlay import btrfs
from tests.kernel.conftest import Start
from tests.patience import never
from tests.runtime.engines.checks import FAST, asked, looked_up, repaired, whole
from tests.runtime.engines.conftest import Tell
from tests.runtime.engines.docker import Docker
from tests.runtime.engines.engine import Tenants
from tests.runtime.engines.machine import Machine


def test_container_in_host_pid_namespace(machine: Machine, node: Node, start: Start, tell: Tell) -> None:
    tenants = Tenants(node, Docker(machine), "--pid=host")
    assert tenants.main().host_pid == tenants.found[0].ns_pid
    tenants.another()
    tell("Docker", "`--pid=host`", whole(tenants, start))
    tenants.stop()


def test_container_in_another_ones_pid_namespace(
    machine: Machine, node: Node, start: Start, tell: Tell
) -> None:
    docker = Docker(machine)
    first = Tenants(node, docker, name="first-of-two")
    first.main()
    second = Tenants(node, docker, "--pid=container:first-of-two", name="second-of-two")
    assert second.main().pidns == first.found[0].pidns
    first.another()
    second.another()
    looked_up(first)
    tell("Docker", "`--pid=container:`", whole(second, start))
    for tenants in (second, first):
        tenants.stop()


def test_container_in_a_user_namespace(machine: Machine, node: Node, start: Start, tell: Tell) -> None:
    tenants = Tenants(node, Docker(machine, "--userns-remap=default"))
    main = tenants.main()
    assert Path(f"/proc/{main.host_pid}/ns/user").stat().st_ino != Path("/proc/self/ns/user").stat().st_ino
    tenants.another()
    tell("Docker", "`--userns-remap`", whole(tenants, start))
    tenants.stop()


@pytest.fixture
def on_btrfs(open_place: Path) -> Iterator[Path]:
    with btrfs(open_place / "btrfs.img", open_place / "m/docker") as place:
        yield place


def mapped(machine: Machine, node: Node, start: Start, tell: Tell, driver: str) -> None:
    tenants = Tenants(node, Docker(machine, driver=driver), in_hami=False)
    tenants.main()
    tenants.another()
    seen = looked_up(tenants)
    daemon = repaired(tenants, start, "--mapped-regions")
    found = daemon.wait_for("region_found", timeout_s=20)
    assert found["container"] == tenants.engine.ids(tenants.name)["docker inspect"]
    tell("Docker", f"bare, `--mapped-regions`, {driver}", {**seen, **asked(tenants, daemon)})
    tenants.stop()


@pytest.mark.parametrize("driver", ["overlay2", "vfs"])
def test_file_inside_a_container_is_repaired(
    machine: Machine, node: Node, start: Start, tell: Tell, driver: str
) -> None:
    mapped(machine, node, start, tell, driver)


def test_file_inside_a_container_on_btrfs_is_repaired(
    on_btrfs: Path, machine: Machine, node: Node, start: Start, tell: Tell
) -> None:
    mapped(machine, node, start, tell, "btrfs")


def test_file_in_user_namespace_container_is_skipped(
    machine: Machine, node: Node, start: Start, tell: Tell
) -> None:
    """Root in a user namespace can make mounts in which looking up a name never ends."""
    tenants = Tenants(node, Docker(machine, "--userns-remap=default"), in_hami=False)
    main = tenants.main()
    before = tenants.slot(main).hostpid
    seen = looked_up(tenants)
    daemon = start(node, *FAST, "--mapped-regions")
    daemon.wait_for("region_rejected", reason="access_denied", timeout_s=20)
    never(lambda: tenants.slot(main).hostpid != before, "a repair", 1.0)
    seen |= asked(tenants, daemon) | {"repair": "not written: `access_denied`"}
    tell("Docker", "bare, `--mapped-regions`, `--userns-remap`", seen)
    tenants.stop()
