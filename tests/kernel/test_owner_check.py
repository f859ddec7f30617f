"""With KAI's placement every container can reach every file: no process gets into another pod's slot."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.container import Container
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.regions import read_file
from tests.kernel.conftest import FAST, Start, slot_of
from tests.kernel.serving import answer, serving
from tests.patience import never, until

pytestmark = pytest.mark.usefixtures("source")

HOST = ("--hostpid-namespace", "host")
BEFORE_LISTING_S = 40.0  # watched directories are listed every two minutes
SETTLED = 1.5  # seconds; a wrong write would have happened by then


class Tree:
    def __init__(self, node: Node, start: Start) -> None:
        self.node, self._start = node, start
        self.victim = self.container("victim")
        self.attacker = self.container("attacker")
        self.root = node.placement_dir("kai")

    def container(self, name: str, pod_uid: str | None = None) -> Container:
        return self.node.container(pod_uid, name, placement="kai", watcher=False)

    def watch(self) -> Daemon:
        self.daemon = serving(self._start, self.node, *HOST, *self.node.placement_options())
        return self.daemon

    def numbered(self, container: Container, above: int, cache: str = "", **more: Any) -> Tenant:
        """Start a tenant with a PID far above the others'; it opens ``cache`` instead of its own file."""
        while container.spawn(["/bin/sleep", "1000"]).ns_pid < above + 10:
            pass
        return container.tenant(guess="none", options=["--cache", cache] if cache else [], **more)

    def rejected(self) -> dict[str, str]:
        return {each["path"]: each["reason"] for each in answer(self.daemon, "regions")["rejected"]}

    def placement(self, file: Path) -> str | None:
        regions = answer(self.daemon, "regions")["regions"]
        return next((each["placement"] for each in regions if each["path"] == str(file)), None)

    def says(self, file: Path, ns_pid: int, reason: str) -> None:
        wanted = {"path": str(file), "pid": ns_pid, "unresolved": reason}.items()
        said = f"{reason} of {ns_pid} in {file.parent.name}"
        until(lambda: any(wanted <= slot.items() for slot in answer(self.daemon, "slots")["slots"]), said)

    def exchange(self) -> None:
        """Exchange the names of the attacker's and the victim's directory, as root in a container can."""
        victims, attackers = self.victim.directory, self.attacker.directory
        victims.rename(self.root / "between")
        attackers.rename(victims)
        (self.root / "between").rename(attackers)


@pytest.fixture
def tree(node: Node, start: Start) -> Tree:
    return Tree(node, start)


def test_guest_in_victims_file_is_not_written(tree: Tree) -> None:
    mine = tree.victim.tenant(guess="wrong")
    tree.watch()
    mine.until_repaired()
    guest = tree.numbered(tree.attacker, mine.ns_pid, tree.victim.inside)
    tree.says(tree.victim.cache, guest.ns_pid, "other_pod")
    never(lambda: slot_of(tree.victim, guest.ns_pid).hostpid, "the guest's number", SETTLED)
    tree.victim.tenant(guess="none").until_repaired()  # the file's container is proven by now


@pytest.mark.parametrize(
    ("number", "reason"), [("another", "other_pod"), ("the same", "other_pod"), ("the same", "ambiguous")]
)
def test_guest_from_the_start_leaves_slot_unowned(tree: Tree, number: str, reason: str) -> None:
    """The guest is of another pod, or of another container of the same pod."""
    mine = tree.victim.tenant(guess="wrong")
    host = tree.attacker if reason == "other_pod" else tree.container("beside", tree.victim.pod_uid)
    if number == "another":
        guest = tree.numbered(host, mine.ns_pid, tree.victim.inside)
    else:
        guest = host.tenant(guess="none", options=["--cache", tree.victim.inside])
        assert guest.ns_pid == mine.ns_pid
    before = mine.hostpid
    tree.watch()
    for ns_pid in {guest.ns_pid, mine.ns_pid}:
        tree.says(tree.victim.cache, ns_pid, reason)
    never(lambda: mine.hostpid != before, "a write", SETTLED)
    guest.kill()
    mine.until_repaired()


@pytest.mark.parametrize("when", ["before", "while"])
def test_exchanged_directories_change_no_owner(tree: Tree, when: str) -> None:
    """The attacker opens the victim's file as well, with the number of the victim's process."""
    mine = tree.victim.tenant(guess="none", load=40)
    own = tree.attacker.tenant(guess="none", load=20)
    assert own.ns_pid == mine.ns_pid
    victims, attackers = (os.open(each.cache, os.O_RDONLY) for each in (tree.victim, tree.attacker))
    if when == "while":
        tree.watch()
        mine.until_repaired()
        own.until_repaired()
    tree.exchange()
    if when == "before":
        tree.watch()
    # The victim's file now has the place of the attacker's, and the attacker uses it.
    guest = tree.numbered(tree.attacker, own.ns_pid, tree.attacker.inside)
    tree.says(tree.attacker.cache, mine.ns_pid, "other_pod")
    tree.says(tree.victim.cache, own.ns_pid, "other_pod")
    tree.says(tree.attacker.cache, guest.ns_pid, "other_pod")

    def written(fd: int) -> set[int]:
        return {slot.hostpid for slot in read_file(Path(f"/proc/self/fd/{fd}")).slots}

    never(lambda: written(victims) - {0, mine.host_pid}, "another's number in the victim's file", SETTLED)
    assert written(attackers) <= {0, own.host_pid}
    guest.kill()
    tree.exchange()
    mine.until_repaired()
    own.until_repaired()
    os.close(victims)
    os.close(attackers)


def test_living_victims_load_stays_under_another_name(tree: Tree) -> None:
    mine = tree.victim.tenant(guess="none", load=64)
    daemon = tree.watch()
    mine.until_load(64)
    daemon.stop()
    tree.attacker.directory.mkdir(exist_ok=True)
    tree.exchange()
    tree.watch()
    tree.says(tree.attacker.cache, mine.ns_pid, "other_pod")
    never(lambda: slot_of(tree.attacker, mine.ns_pid).sm_util != (64,), "a change", SETTLED)


def test_forged_directory_names_are_reported(tree: Tree) -> None:
    stranger = tree.root / "00000000-8f5e-4d0c-9b1d-2f7c0d9a4e01_main"
    tree.attacker.tenant(
        guess="none", options=["--cache", f"/usr/local/vgpu/containers/{stranger.name}/usage.cache"]
    )
    for number in range(300):
        (tree.root / f"{tree.victim.pod_uid}_x{number}").mkdir()
    daemon = tree.watch()
    until(lambda: len(tree.rejected()) == 64, "the strays")
    assert set(tree.rejected().values()) == {"not_on_node"}
    assert str(stranger) in tree.rejected()
    assert daemon.said("region_found") == []
    mine = tree.victim.tenant(guess="wrong")
    mine.until_repaired()


def test_links_to_other_containers_files_are_refused(tree: Tree) -> None:
    """The attacker makes a second name for a victim's file, and leads a victim into its own."""
    mine, linked = tree.victim.tenant(guess="none"), tree.container("linked")
    linked.directory.mkdir()
    os.link(tree.victim.cache, linked.cache)
    own, led_astray = tree.attacker.tenant(guess="none"), tree.container("led-astray")
    led_astray.directory.mkdir()
    led_astray.cache.symlink_to(tree.attacker.inside)
    led = tree.numbered(led_astray, own.ns_pid)
    tree.watch()
    refused = dict.fromkeys((str(tree.victim.cache), str(linked.cache)), "hard_link")
    until(lambda: tree.rejected() == refused | {str(led_astray.cache): "symlink"}, "the refusals")
    tree.says(tree.attacker.cache, led.ns_pid, "other_pod")
    never(lambda: slot_of(tree.attacker, led.ns_pid).hostpid, "the victim's number", SETTLED)
    assert mine.hostpid == 0
    linked.cache.unlink()
    mine.until_repaired()


def test_neither_neighbour_nor_monitor_owns_a_slot(tree: Tree) -> None:
    """HAMi's monitor maps every file writable, keeps none open, and often has the PID of a tenant."""
    beside = tree.container("beside", tree.victim.pod_uid)
    mine = tree.victim.tenant(guess="none", load=64)
    guest = tree.numbered(beside, mine.ns_pid, tree.victim.inside)
    maps = (
        "import ctypes, mmap, os, sys, time; libc = ctypes.CDLL(None); fd = os.open(sys.argv[1], os.O_RDWR); "
        "libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]; "
        "libc.mmap(None, 4096, 3, mmap.MAP_SHARED, fd, 0); os.close(fd); print('ready', flush=True); time.sleep(1000)"
    )
    monitor = tree.attacker.spawn([sys.executable, "-I", "-c", maps, tree.victim.inside])
    assert monitor.read_line() == "ready"
    assert monitor.ns_pid == mine.ns_pid
    tree.watch()
    mine.until_repaired()
    tree.says(tree.victim.cache, guest.ns_pid, "other_container")
    mine.until_load(64)
    mine.kill()
    mine.until_load(0)


def test_files_stay_untouched_without_kubelets_names(node: Node, start: Start, tmp_path: Path) -> None:
    container = node.container(placement="kai", watcher=False)
    container.tenant(guess="none")
    root = str(node.placement_dir("kai"))
    nowhere = ("--container-logs-dir", str(tmp_path / "nowhere"))
    said = start(node, *FAST, *HOST, "--containers-dir", root, *nowhere).wait_for(
        "region_rejected", path=root
    )
    assert said["reason"] == "unproven"
    assert "nowhere cannot be read" in said["why"]
    assert container.region().slots[0].hostpid == 0


#: Opens a file with a path too long for the kernel to show, and becomes a tenant.
HOLDS_A_LONG_PATH = """
import os, sys
os.chdir(sys.argv[1])
for _ in range(20):
    os.makedirs("d" * 250, exist_ok=True)
    os.chdir("d" * 250)
os.set_inheritable(os.open("file", os.O_RDWR | os.O_CREAT), True)
os.chdir("/")
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_open_file_without_path_hides_no_other(tree: Tree, tmp_path: Path) -> None:
    mine = tree.victim.tenant(guess="wrong")
    theirs = tree.attacker.tenant_arguments(guess="none")
    holder = tree.attacker.spawn([sys.executable, "-c", HOLDS_A_LONG_PATH, str(tmp_path), *theirs])
    assert "ready" in holder.read_line()
    tree.watch()
    mine.until_repaired()
    second = tree.victim.tenant(guess="none")
    second.until_repaired()
    tree.says(tree.attacker.cache, holder.ns_pid, "access_denied")


def test_closed_and_later_opened_directories_keep_all_files(tree: Tree) -> None:
    """In a closed directory, kubelet's names were once read only every two minutes.

    Libsync opens KAI's directory at its first container: HAMi's files were then dropped until a full listing.
    """
    hami = tree.node.container(name="hami", watcher=False)
    repaired_first = tree.victim.tenant(guess="wrong")
    for directory in (tree.root, tree.node.containers_dir):
        directory.chmod(0o755)
    daemon = tree.watch()
    repaired_first.until_repaired()
    tree.container("new").tenant(guess="wrong").until_repaired(BEFORE_LISTING_S)
    hami.tenant(guess="wrong").until_repaired()
    tree.node.containers_dir.chmod(0o1777)
    until(lambda: daemon.said("region_gone"), "the change")
    hami.tenant(guess="wrong").until_repaired(BEFORE_LISTING_S)
    until(lambda: tree.placement(hami.cache) == "hami", "its name")
