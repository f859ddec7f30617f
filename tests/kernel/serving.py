"""A daemon that serves its API, and processes to look up."""

import sys
from typing import Any

from resolver import client
from resolver.linux.procfs import Procfs
from tests.fakes.bpf.lives import children_of
from tests.fakes.container import Container
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.fakes.process import Process
from tests.fakes.regions import LAYOUTS
from tests.kernel.conftest import FAST, Start
from tests.patience import PATIENCE_S, until

SLEEP = ("/bin/sleep", "1000")


def serving(start: Start, node: Node, *arguments: str, **options: Any) -> Daemon:
    daemon = start(node, *FAST, *arguments, **options)
    daemon.wait_for("started")
    until(daemon.socket.exists, "its socket")
    return daemon


def answer(daemon: Daemon, route: str) -> Any:
    """Return the API's answer, however long it takes."""
    return client.get_json(f"/v1/{route}", str(daemon.socket), seconds=PATIENCE_S)


#: Prints the TID of its second thread.
THREAD = """
import threading, time
threading.Thread(target=lambda: (print(threading.get_native_id(), flush=True), time.sleep(1000))).start()
"""

#: Takes a slot with a load, runs Python code, and after a line of input becomes another program.
CLAIMS = """
import ctypes, mmap, os, struct, sys
path, procs, slot_size, proc_num, status, util, load, then, *program = sys.argv[1:]
region = mmap.mmap(os.open(path, os.O_RDWR), 0)
(count,) = struct.unpack_from("<i", region, int(proc_num))
at = int(procs) + count * int(slot_size)
struct.pack_into("<ii", region, at, os.getpid(), 0)
struct.pack_into("<Q", region, at + int(util), int(load))
struct.pack_into("<i", region, at + int(status), 1)
struct.pack_into("<i", region, int(proc_num), count + 1)
exec(then)
print("ready", flush=True)
sys.stdin.readline()
os.execv(program[0], program)
"""


def claiming(container: Container, *program: str, load: int = 0, then: str = "") -> Process:
    layout = LAYOUTS[container.layout]
    assert layout.device_util is not None
    places = (layout.procs, layout.slot_size, layout.proc_num, layout.status, layout.device_util + 16, load)
    words = (f"/usr/local/vgpu/{container.cache_name}", *map(str, places), then, *program)
    process = container.spawn([sys.executable, "-I", "-c", CLAIMS, *words])
    assert process.read_line() == "ready"
    return process


ORDERED = """
import os, signal, sys
while line := sys.stdin.readline():
    what, number = line.split()
    if what == "as":
        open("/proc/sys/kernel/ns_last_pid", "w").write(str(int(number) - 1))
        if os.fork() == 0:
            signal.pause()
    else:
        os.kill(int(number), signal.SIGKILL)
        options = os.WEXITED | (os.WNOWAIT if what == "zombie" else 0)
        os.waitid(os.P_PID, int(number), options)
    print(flush=True)
"""


class Orders:
    """A process in a container that makes and kills children with chosen numbers."""

    def __init__(self, container: Container) -> None:
        self.process: Process = container.spawn([sys.executable, "-c", ORDERED])

    def __call__(self, order: str) -> int:
        """Carry out ``as N``, ``zombie N`` or ``kill N``; the host PID of N, 0 if it is gone."""
        self.process.write_line(order)
        self.process.read_line()
        number = int(order.split()[1])
        pids = children_of(self.process.host_pid)
        return next((pid for pid in pids if Procfs().ns_pids(pid)[-1] == number), 0)
