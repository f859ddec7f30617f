"""Control groups that a tenant makes below its own: their names and depth affect no other tenant."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.kernel.conftest import Start, command
from tests.kernel.rights import patched

#: Names that are not valid text; together, a path longer than the kernel accepts or shows.
DEEP = [(b"\xff\x1b[31m %d " % number).ljust(255, b"\xe9") for number in range(17)]


@contextmanager
def moved_down(container: Container, names: list[bytes]) -> Iterator[None]:
    """Move the container's processes into nested control groups with these names, below its own."""
    levels = [os.open(container.cgroup, os.O_RDONLY)]
    everybody = [container.init_host_pid, *(process.host_pid for process in container.processes)]
    try:
        for name in names:
            os.mkdir(name, dir_fd=levels[-1])
            levels.append(os.open(name, os.O_RDONLY, dir_fd=levels[-1]))
        _move(everybody, levels[-1])
        yield
    finally:
        _move(everybody, levels[0])
        for name in reversed(names[: len(levels) - 1]):
            os.close(levels.pop())
            os.rmdir(name, dir_fd=levels[-1])
        os.close(levels[0])


def _move(host_pids: list[int], directory: int) -> None:
    for host_pid in host_pids:
        Path(f"/proc/self/fd/{directory}/cgroup.procs").write_text(str(host_pid))


#: A daemon on an older kernel, which refuses to show too long paths; newer kernels show the beginning.
REFUSED = patched("""
    import errno, os
    read = os.read
    def refused(fd, count):
        text = read(fd, count)
        if len(text) > 2048 and os.readlink(f"/proc/self/fd/{fd}").endswith("/cgroup"):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        return text
    import resolver.cli
    os.read = refused
""")


@pytest.mark.parametrize("wrapper", [(), REFUSED], ids=["shown in part", "refused"])
def test_too_deep_cgroups_hide_no_other(node: Node, start: Start, wrapper: tuple[str, ...]) -> None:
    good, deep = node.container(name="good"), node.container(name="deep")
    tenants = {each: each.tenant(load=20, guess="none") for each in (good, deep)}
    with moved_down(deep, DEEP):
        # No daemon yet: all of the node's control groups are walked.
        for container, tenant in tenants.items():
            assert lookup(node, container, tenant) == tenant.host_pid
        daemon = start(node, "--interval", "50ms", "--nvml-interval", "50ms", wrapper=wrapper)
        for tenant in tenants.values():
            tenant.until_repaired()
        for _ in range(3):
            later = good.tenant(guess="none").until_repaired()
            assert lookup(node, good, later) == later.host_pid
        assert daemon.process.poll() is None, daemon.tail()


def lookup(node: Node, container: Container, tenant: Tenant) -> int:
    words = ("lookup", container.container_id, str(tenant.ns_pid))
    done = command(node, node.root / "run", node.pod_logs_dir, *words)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_forged_cgroup_name_belongs_to_its_maker(node: Node, start: Start) -> None:
    """A tenant with a writable cgroupfs once named its cgroup after a victim's id, which got the tenant's load."""
    victim, evil = node.container(name="victim"), node.container(name="evil")
    good, bad = victim.tenant(load=10, guess="none"), evil.tenant(load=90, guess="none")
    with moved_down(evil, [victim.container_id.encode()]):
        start(node, "--interval", "50ms", "--nvml-interval", "50ms")
        for container, tenant in ((victim, good), (evil, bad)):
            tenant.until_repaired()
            words = ("reverse", str(tenant.host_pid), "--json")
            done = command(node, node.root / "run", node.pod_logs_dir, *words)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["container_id"] == container.container_id
