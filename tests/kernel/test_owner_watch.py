"""A slot is dead if the kernel shows that no process can own it, never because a process was not seen."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.fakes.process import Process
from tests.fakes.releases import BEHAVIOURS
from tests.kernel.conftest import DRIVER, Start, slot_of, write_sm_util
from tests.kernel.serving import claiming
from tests.patience import never, until

FAST = ("--interval", "50ms", "--nvml-interval", "100ms", "--hostpid-namespace", "host")

#: Leaves the mounts by which its container is identified.
LEAVES = """
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs("/tmp/jail/old", exist_ok=True)
def must(code):
    if code:
        raise OSError(ctypes.get_errno(), how)
if how == "chroot":
    os.chroot("/tmp/jail")
    os.chdir("/")
else:
    must(libc.unshare(0x20000))
    must(libc.mount(None, b"/", None, 0x44000, None))
    if how == "unmount":
        must(libc.umount2(b"/usr/local/vgpu", 2))
    else:
        must(libc.mount(b"tmpfs", b"/tmp/jail", b"tmpfs", 0, None))
        os.mkdir("/tmp/jail/old")
        must(libc.syscall(155, b"/tmp/jail", b"/tmp/jail/old"))
        os.chdir("/")
        must(libc.umount2(b"/old", 2))
"""


def leaving(container: Container, how: str) -> Process:
    process = claiming(container, load=41, then=f"how = {how!r}{LEAVES}")
    assert str(container.directory) not in Path(f"/proc/{process.host_pid}/mountinfo").read_text()
    return process


@pytest.mark.parametrize("how", ["chroot", "unmount", "pivot_root"])
def test_a_process_that_left_the_mounts_is_alive_and_the_owner(node: Node, start: Start, how: str) -> None:
    container = node.container(watcher=False)
    companion = container.tenant(guess="none")
    process = leaving(container, how)
    daemon = start(node, *FAST, "--source", "scan")
    companion.until_repaired()
    until(lambda: slot_of(container, process.ns_pid).hostpid == process.host_pid, "its repair")
    never(lambda: daemon.said("dead_slots_zeroed"), "a living process called dead", 1.0)


def test_process_of_unknown_container_is_alive(node: Node, start: Start) -> None:
    """Every process of the container has left its mounts: the slot gets no owner, and no zero is written."""
    container = node.container(watcher=False)
    container.tenant(guess="none").kill()
    process = leaving(container, "chroot")
    enter = ["nsenter", "--mount", "--pid", "--target", str(container.init_host_pid)]
    subprocess.check_call([*enter, "umount", "--lazy", "/usr/local/vgpu"])
    before = container.cache.read_bytes()
    other = node.container(name="other")
    daemon = start(node, *FAST, "--source", "scan")
    for _ in range(4):
        other.tenant(guess="none").until_repaired()
    assert process.host_pid
    assert container.cache.read_bytes() == before
    assert not daemon.said("dead_slots_zeroed")


def test_no_monitor_counts_a_process_that_has_ended(tmp_path: Path, start: Start) -> None:
    with Node(tmp_path, DRIVER) as node:
        lives = {}
        for row in BEHAVIOURS:
            container = node.container(name=row.name.replace(".", "-"), release=row.name, sm_limit=0)
            lives[container] = [container.tenant(load=load) for load in (30, 20, 10)]
        daemon = start(node, *FAST)

        def reported(loads: int, what: str) -> None:
            # One container after the other: ticks of 2.4 and 2.5 write wrong values, so all are seldom right at once.
            for each in lives:
                try:
                    until(lambda c=each: sum(c.monitor_view().values()) == loads, f"{what} in {each.name}")  # type: ignore[misc]
                except AssertionError:
                    print(each.monitor_views(), *each.region().slots, *daemon.lines[-20:], sep="\n")
                    raise

        reported(60, "the loads of all three")
        for first, *_ in lives.values():
            first.stop()
        reported(30, "the end of the first, in every monitor")
        for _, second, _ in lives.values():
            second.kill()
        reported(10, "the end of the killed one")
        for *_, third in lives.values():
            until(lambda t=third: t.command("compact") == {"proc_num": 1}, "no slot but the last one's")  # type: ignore[misc]
        reported(10, "no copy above proc_num")
        for *_, third in lives.values():
            third.stop()
        reported(0, "the end of the last one")


def ended(node: Node, name: str) -> Container:
    container = node.container(name=name, watcher=False)
    victim = container.tenant(load=64, guess="none")
    slot = slot_of(container, victim.ns_pid)
    write_sm_util(container, slot.index, 64)
    container.stop()
    assert victim.sm_util == (64,)
    return container


def sm_util(container: Container) -> int:
    return sum(sum(slot.sm_util) for slot in container.region().slots)


def test_process_ended_before_start_is_dead_once_file_is_closed(node: Node, start: Start) -> None:
    gone, served = ended(node, "gone"), ended(node, "served")
    served_slot = served.region().slots[0].index
    with served.cache.open("r+b"):  # like a virtual machine's file server
        daemon = start(node, *FAST, "--source", "scan")
        until(lambda: sm_util(gone) == 0, "the end of its load")
        until(lambda: daemon.said("region_abandoned"), "a word of it")
        never(lambda: sm_util(served) != 64, "a served file written to", 2.0)
    until(lambda: sm_util(served) == 0, "the end of the other one's load")
    # The guest returns: its claims are unchanged, and their processes live.
    with served.cache.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")
        file.flush()
        write_sm_util(served, served_slot, 41)
        never(lambda: sm_util(served) != 41, "a served file written to", 2.0)
