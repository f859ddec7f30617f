"""A daemon that serves its API, and processes to look up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.fakes.process import Process
from tests.kernel.conftest import FAST, Start
from tests.patience import until

SLEEP = ("/bin/sleep", "1000")


def serving(start: Start, node: Node, *arguments: str, **options: Any) -> Daemon:
    """A daemon whose socket is there."""
    daemon = start(node, *FAST, *arguments, **options)
    daemon.wait_for("started")
    until(daemon.socket.exists, "its socket")
    return daemon


RECYCLER = """
while read line; do
    echo 776 > /proc/sys/kernel/ns_last_pid
    /bin/sleep 1000 &
    echo $!
    read line
    kill -9 $!
    wait $!
    echo dead
done
"""


def child_of(process: Process) -> int:
    (child,) = Path(f"/proc/{process.host_pid}/task/{process.host_pid}/children").read_text().split()
    return int(child)
