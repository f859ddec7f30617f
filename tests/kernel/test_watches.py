"""Tenants' file events, not the clock, wake a real daemon, in real containers.

The interval is a minute, so an event must have caused a repair within seconds.
"""

import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.fakes.process import Process
from tests.kernel.conftest import Start
from tests.kernel.rights import patched
from tests.patience import until

SLOW = ("--interval", "60s", "--nvml-interval", "60s", "--hostpid-namespace", "host", "--source", "scan")
SECONDS = 30.0  # far less than a minute, and plenty on a busy machine
QUEUE = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
#: Makes a file and removes it, again and again: two events that the kernel does not merge.
TOUCHES = """
import os, sys, time
print("ready", flush=True)
until, most = time.monotonic() + float(sys.argv[1]), int(sys.argv[2])
while most > 0 and time.monotonic() < until:
    most -= 1
    os.close(os.open(sys.argv[3], os.O_CREAT | os.O_RDWR))
    os.unlink(sys.argv[3])
print("done", flush=True)
"""

#: A daemon that checks new processes often for 0.2 s only, instead of a minute.
AFTER_A_WHILE = patched("""
    from resolver.repair import schedule
    assert (schedule.STARTED, len(schedule.STEPS)) == (60.0, 2)
    schedule.STARTED, schedule.STEPS = 0.2, ()
""")


def touches(container: Container, seconds: float, most: int = 1 << 40) -> Process:
    path = "/usr/local/vgpu/other"
    process = container.spawn([sys.executable, "-c", TOUCHES, str(seconds), str(most), path])
    assert process.read_line() == "ready"
    return process


def test_attachment_guess_container_and_end_wake_the_daemon(node: Node, start: Start) -> None:
    container = node.container()
    first = container.tenant(guess="none")
    daemon = start(node, *SLOW)
    first.until_repaired(SECONDS)
    tenant = container.tenant(guess="wrong", init_waits=True).until_repaired(SECONDS)
    tenant.init()
    tenant.until_repaired(SECONDS)
    daemon.wait_for("repair", ns_pid=tenant.ns_pid, count=2)
    late = node.container(name="late", watcher=False)
    brief = late.tenant(load=40, guess="none").until_repaired(SECONDS)
    daemon.wait_for("repair", host_pid=brief.host_pid)
    index = brief.stored.index
    store_sm_util(late, index, 40)
    brief.kill()
    until(lambda: late.region().slots[index].sm_util == (0,), "that its load is gone", SECONDS)


def test_lost_events_make_every_file_checked(node: Node, start: Start) -> None:
    good, bad = node.container(name="good"), node.container(name="bad")
    for container in (good, bad):
        container.tenant(guess="none")
    daemon = start(node, *SLOW, wrapper=AFTER_A_WHILE)
    daemon.wait_for("repair", count=2)
    time.sleep(1.0)
    daemon.signal(signal.SIGSTOP)
    try:
        assert touches(bad, 60.0, QUEUE).read_line() == "done"
        tenant = good.tenant(guess="none")  # the full queue causes no wake-up
    finally:
        daemon.signal(signal.SIGCONT)
    tenant.until_repaired(SECONDS)
    daemon.stop()
    assert daemon.counters()["watch_overflows"] == 1


def test_slots_of_six_stopped_seconds_are_repaired(node: Node, start: Start) -> None:
    """A stopped daemon charged the pause to the container that it was reading, which then waited for a minute."""
    containers = [node.container(name=f"c{number}") for number in range(4)]
    before = [container.tenant(guess="none") for container in containers]
    daemon = start(node, "--hostpid-namespace", "host", "--source", "netlink")
    for tenant in before:
        tenant.until_repaired()
    daemon.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        tenants = [container.tenant(guess="none") for container in containers for _ in range(10)]
        time.sleep(max(0.0, began + 6.0 - time.monotonic()))
    finally:
        daemon.signal(signal.SIGCONT)
    deadline = time.monotonic() + SECONDS
    for tenant in tenants:
        tenant.until_repaired(deadline - time.monotonic())


def test_slots_are_repaired_by_the_clock_without_inotify(node: Node, start: Start, tmp_path: Path) -> None:
    """The call fails as if the user had used up all instances; the real limit applies to the whole machine."""
    source, library = tmp_path / "refused.c", tmp_path / "refused.so"
    source.write_text(
        "#include <errno.h>\nint inotify_init1(int f) { (void)f; errno = EMFILE; return -1; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    container = node.container()
    options = ("--interval", "50ms", "--hostpid-namespace", "host", "--source", "scan")
    daemon = start(node, *options, wrapper=("env", f"LD_PRELOAD={library}"))
    assert "max_user_instances" in daemon.wait_for("not_watched")["why"]
    for _ in range(2):
        container.tenant(guess="none").until_repaired()
    late = node.container(name="late")
    late.tenant(guess="none").until_repaired()
    assert len(daemon.said("not_watched")) == 1


def store_sm_util(container: Container, index: int, value: int) -> None:
    """Store a value through a shared mapping, as tenants do; keep the file open: a close is an event."""
    layout = container.region().layout
    assert layout.device_util is not None
    offset = layout.procs + index * layout.slot_size + layout.device_util + 16
    fd, page = os.open(container.cache, os.O_RDWR), offset - offset % mmap.PAGESIZE
    with mmap.mmap(fd, mmap.PAGESIZE, offset=page) as mapped:
        struct.pack_into("<Q", mapped, offset - page, value)
