"""A daemon that serves its API, and processes to look up."""

import sys
from pathlib import Path
from typing import Any

from resolver.linux.procfs import Procfs
from tests.fakes.container import Container
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.fakes.process import Process
from tests.kernel.conftest import FAST, Start
from tests.patience import until

SLEEP = ("/bin/sleep", "1000")


def serving(start: Start, node: Node, *arguments: str, **options: Any) -> Daemon:
    daemon = start(node, *FAST, *arguments, **options)
    daemon.wait_for("started")
    until(daemon.socket.exists, "its socket")
    return daemon


#: Prints the TID of its second thread.
THREAD = """
import threading, time
threading.Thread(target=lambda: (print(threading.get_native_id(), flush=True), time.sleep(1000))).start()
"""

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
        children = Path(f"/proc/{self.process.host_pid}/task/{self.process.host_pid}/children")
        pids = map(int, children.read_text().split())
        return next((pid for pid in pids if Procfs().ns_pids(pid)[-1] == number), 0)
