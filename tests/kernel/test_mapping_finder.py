"""Regions inside containers, as HAMi-core makes them under bare Docker: on an overlay, in no directory of the host."""

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.descriptors import links
from tests.fakes import silent_fuse
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.fakes.overlay import CACHE, Docker, btrfs
from tests.fakes.process import Tenant
from tests.fakes.regions import read_file
from tests.kernel.conftest import EVERY_SOURCE, Start
from tests.patience import never, until

FAST = ("--interval", "50ms", "--nvml-interval", "100ms", "--mapped-regions", "--hostpid-namespace", "host")


def repaired(docker: Docker, tenant: Tenant) -> None:
    until(lambda: docker.hostpid(tenant) == tenant.host_pid, "a repair")


@EVERY_SOURCE
def test_region_inside_a_container_is_repaired(node: Node, start: Start, source: str) -> None:
    first = Docker(node)
    before = [first.tenant(load=30) for _ in range(4)]  # each of them leads to the region
    daemon = start(node, *FAST)
    daemon.wait_for("source", source=source)
    for tenant in (*before, first.tenant(load=30)):
        repaired(first, tenant)
    daemon.wait_for("region_found")
    assert len(daemon.said("region_found")) == 1
    assert not daemon.said("region_rejected")


def test_region_is_kept_while_a_process_maps_it(node: Node, start: Start) -> None:
    """An upper directory on a separate file system has other inode numbers than one beside the lower ones."""
    docker, other = Docker(node), Docker(node, "other", upper="tmpfs")
    daemon = start(node, *FAST, "--source", "scan")
    one = docker.tenant(load=30)
    repaired(docker, one)
    two, third = docker.tenant(load=20), other.tenant(load=40)
    repaired(docker, two)
    repaired(other, third)
    both = {docker.container.container_id, other.container.container_id}
    until(lambda: {line["container"] for line in daemon.said("region_found")} == both, "both in the log")
    one.kill()  # the region was found through this process
    never(lambda: daemon.said("region_gone"), "its end", 1.2)
    four = docker.tenant(load=10)
    repaired(docker, four)
    for tenant in (two, four):
        tenant.kill()
    # After the last process, no file of the container stays open.
    daemon.wait_for("region_gone", container=docker.container.container_id)
    until(lambda: opened(daemon) == 1, "the end of the descriptor")
    assert not daemon.said("region_rejected")


def opened(daemon: Daemon) -> int:
    return sum("cudevshr" in link for link in links(daemon.process.pid))


def test_without_the_setting_nothing_is_looked_for(node: Node, start: Start) -> None:
    docker = Docker(node)
    daemon = start(node, *(each for each in FAST if each != "--mapped-regions"), "--source", "scan")
    tenant = docker.tenant(load=30)
    never(lambda: docker.hostpid(tenant) == tenant.host_pid or daemon.said("region_found"), "a repair", 1.5)


PLACE, NEW = "/tmp/place", "/tmp/new"  # noqa: S108
#: The tenant covers its file's directory {d} with {n}; {c} is its file.
OVER = "mkdir {n}; %s; mount --bind {n} {d}"
#: The process keeps its file, which is repaired; the covering file is not.
COVERED = {
    "symbolic link": OVER % "ln -s /tmp/back/cudevshr.cache {n}/cudevshr.cache",
    "fifo": OVER % "mkfifo {n}/cudevshr.cache",
    "device": OVER % "mknod {n}/cudevshr.cache c 1 5",
    "another file of the same form": OVER % "cp {c} {n}",
    "another kind of file system": "mount -t proc none {d}",
    "mount over the file": "mkdir {n}; cp {c} {n}/cudevshr.cache; mount --bind {n}/cudevshr.cache {c}",
}
REFUSED = {
    "second name": ("ln {c} {c}.second", "hard_link"),
    "grown": ("printf xy >>{c}", "unknown_size"),
    "renamed": ("mv {c} {c}.real; ln -s {c}.real {c}", None),
    "deleted": ("rm {c}", None),
}


def hostile(node: Node, tricks: dict[str, str]) -> dict[str, tuple[Docker, Tenant]]:
    path, made = f"{PLACE}/cudevshr.cache", {}
    for trick, commands in tricks.items():
        docker = Docker(node, trick.replace(" ", "-"))
        docker.run(f"mkdir {PLACE}")
        made[trick] = docker, docker.tenant(load=30, cache=path)
        docker.run("mkdir /tmp/back; mount --bind /tmp/place /tmp/back")
        docker.run(commands.format(c=path, d=PLACE, n=NEW))
    return made


def test_covered_file_is_repaired_and_its_cover_is_not(node: Node, start: Start) -> None:
    """The process's own descriptor leads to its file, even if the path now leads to another."""
    sums = "find /tmp/new -type f -exec sha256sum {} + || true"
    made = hostile(node, COVERED)
    before = {trick: docker.run(sums) for trick, (docker, _) in made.items()}
    assert before["another file of the same form"]
    daemon = start(node, *FAST, "--source", "scan")
    for docker, tenant in made.values():
        until(lambda d=docker, t=tenant: d.hostpid(t, "/tmp/back/cudevshr.cache") == t.host_pid, "a repair")  # type: ignore[misc] # noqa: S108
    assert {trick: docker.run(sums) for trick, (docker, _) in made.items()} == before
    assert not daemon.said("region_rejected")


#: Opens the first argument for writing, then becomes the program in the rest.
OPENS = "import os, sys; os.set_inheritable(os.open(sys.argv[1], os.O_RDWR), True); os.execv(sys.argv[2], sys.argv[2:])"
READS = f"""
import mmap, os, sys, time
fd = os.open({CACHE!r}, os.O_RDONLY)
m = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
print('ready', flush=True); time.sleep(600)
"""


def other_file_systems(node: Node) -> set[tuple[str, str]]:
    """Start containers with files on ramfs, on a tenant's FUSE and in its own mounts; return them with the reasons."""
    ramfs, fuse, mounts = (Docker(node, name) for name in ("ramfs", "fuse", "mounts"))
    ramfs.run(f"mkdir {PLACE}", f"mount -t ramfs none {PLACE}", f"chmod 1777 {PLACE}")
    ramfs.tenant(load=30, cache=f"{PLACE}/cudevshr.cache")
    server = shlex.quote(Path(silent_fuse.__file__).read_text())
    fuse.run(f"mkdir {PLACE}", f"/usr/bin/python3 -c {server} {PLACE} >/dev/null 2>&1")
    arguments = fuse.container.tenant_arguments(load=30, guess="wrong")
    opens = ["/usr/bin/python3", "-c", OPENS, f"{PLACE}/cudevshr.cache", *arguments, "--cache", "/tmp/cache"]  # noqa: S108
    fuse.container.spawn(opens).read_line()
    arguments = mounts.container.tenant_arguments(load=30, guess="wrong")
    mapped = ["/usr/bin/unshare", "--user", "--map-root-user", *arguments, "--cache", CACHE]
    mounts.container.spawn(mapped).read_line()
    reasons = ((ramfs, "other_device"), (fuse, "other_device"), (mounts, "access_denied"))
    return {(docker.container.container_id, reason) for docker, reason in reasons}


def test_files_that_prove_no_owner_are_refused(node: Node, start: Start) -> None:
    """All tricks at once, beside an honest container: when its second process is repaired, all files were checked."""
    sums = f"find {PLACE} -type f -exec sha256sum {{}} + || true"
    made = hostile(node, {trick: commands for trick, (commands, _) in REFUSED.items()})
    before = {trick: docker.run(sums) for trick, (docker, _) in made.items()}
    wanted = other_file_systems(node) | {
        (made[trick][0].container.container_id, reason)
        for trick, (_, reason) in REFUSED.items()
        if reason is not None
    }
    # Another container's region, lent read-only: a reader owns nothing in it.
    honest, thief, lent = Docker(node, "honest"), Docker(node, "thief"), node.root / "lent.cache"
    first = honest.tenant(load=30)
    shutil.copyfile(honest.file(), lent)
    thief.run(f"touch {CACHE}", f"mount --bind {lent} {CACHE}", f"mount -o remount,bind,ro {CACHE}")
    thief.container.spawn(["/usr/bin/python3", "-c", READS]).read_line()
    data = lent.read_bytes()
    daemon = start(node, *FAST, "--source", "scan")

    def refused() -> set[tuple[str, str]]:
        lines = daemon.said("region_rejected")
        return {(line["path"].removeprefix("container ").split(":")[0], line["reason"]) for line in lines}

    until(lambda: refused() >= wanted, "every refusal")
    assert refused() == wanted
    for tenant in (first, honest.tenant(load=30)):
        repaired(honest, tenant)
    never(lambda: len(daemon.said("repair")) > 2 or len(daemon.said("region_found")) > 1, "a repair", 1.0)
    until(lambda: opened(daemon) == 1, "one file that is held open")
    assert {trick: docker.run(sums) for trick, (docker, _) in made.items()} == before
    assert lent.read_bytes() == data


def test_a_file_that_two_containers_share_is_never_guessed(node: Node, start: Start) -> None:
    """Processes with one number in two PID namespaces map the file: nothing shows which one owns the slot."""
    docker, other = Docker(node), Docker(node, "two")
    shared = node.root / "shared"
    shared.mkdir(mode=0o777)
    for each in (docker, other):
        each.run("mkdir /tmp/place", f"mount --bind {shared} /tmp/place")
    first = docker.tenant(load=30, guess="none", cache=f"{PLACE}/cudevshr.cache")
    second = other.tenant(load=30, guess="none", cache=f"{PLACE}/cudevshr.cache")
    assert first.ns_pid == second.ns_pid
    daemon = start(node, *FAST, "--source", "scan")
    daemon.wait_for("region_found")
    never(lambda: daemon.said("repair"), "a repair", 1.5)
    assert len(daemon.said("region_found")) == 1


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with btrfs(tmp_path / "btrfs.img", tmp_path / "btrfs") as place:
        subprocess.check_call(["btrfs", "--quiet", "subvolume", "create", str(place / "base")])
        yield place


@pytest.mark.parametrize("first_found", ["one", "two"])
def test_files_of_two_snapshots_are_never_taken_for_one_another(
    node: Node, start: Start, place: Path, first_found: str
) -> None:
    """Two containers whose roots are snapshots of one subvolume: maps shows one device and one inode for both files."""
    one, two = Docker(node, "one", btrfs=place), Docker(node, "two", btrfs=place)
    dockers = {"one": one, "two": two}
    daemon = start(node, *FAST, "--source", "scan")
    daemon.wait_for("gpu_found")
    first = dockers.pop(first_found)
    (second,) = dockers.values()
    # The first container's slot has a PID of a process of the second.
    early = first.tenant(load=30)
    repaired(first, early)
    numbers = [second.tenant(load=10) for _ in range(3)]
    shown = {shown_in_maps(tenant) for tenant in (early, numbers[0])}
    assert len(shown) == 1, f"the kernel shows {shown}: this test shows nothing here"
    foreign = numbers[2]
    assert foreign.ns_pid != early.ns_pid
    first.claim(foreign.ns_pid)
    for tenant in numbers:
        repaired(second, tenant)
    repaired(first, early)
    slot = read_file(first.file()).slot(foreign.ns_pid)
    assert slot is not None
    assert slot.hostpid == 0, "a process of another container was written"
    both = {one.container.container_id, two.container.container_id}
    until(lambda: {line["container"] for line in daemon.said("region_found")} == both, "both in the log")
    assert all(
        line["host_pid"] == early.host_pid
        for line in daemon.said("repair", container=first.container.container_id)
    )


def shown_in_maps(tenant: Tenant) -> str:
    lines = Path(f"/proc/{tenant.host_pid}/maps").read_text().splitlines()
    (line,) = (line for line in lines if line.endswith(CACHE))
    return " ".join(line.split()[3:5])
