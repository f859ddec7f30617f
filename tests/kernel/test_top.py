"""`resolver top` with the real daemon on a miniature node: it shows the values of kernel and driver."""

import re
import sys

from tests.fakes.container import Container
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.fakes.terminal import Terminal
from tests.kernel.conftest import FAST, Start
from tests.kernel.serving import serving


def command(daemon: Daemon, *options: str) -> list[str]:
    where = daemon.socket
    return [sys.executable, "-m", "resolver", "top", "--socket", str(where), *options]


def title(container: Container) -> str:
    return f"{container.pod_uid[:8]}/{container.name}"


def test_a_repaired_slot_on_the_screen(node: Node, start: Start, source: str) -> None:
    busy, idle = node.container(name="train"), node.container(name="serve")
    tenant = busy.tenant(guess="none", load=62)
    other = idle.tenant(load=0)
    daemon = serving(start, node)
    daemon.wait_for("repair", ns_pid=tenant.ns_pid)
    tenant.until_repaired()
    with Terminal(" ".join(["exec", *command(daemon, "--interval", "200ms")]), 120, 40) as terminal:
        for line in (
            rf"^ +\S+ +{tenant.host_pid} +{tenant.ns_pid} [━─]+ +62% .*✓ missing$",
            rf"^  {title(busy)} +[━─]+ +62% ",
            rf"^ +\S+ +{other.host_pid} +{other.ns_pid} ─+ +0% ",
        ):
            terminal.wait(lambda text, line=line: re.search(line, text, re.MULTILINE))  # type: ignore[misc]
        tenant.kill()
        terminal.wait(lambda text: f" {tenant.host_pid} " not in text)
        daemon.stop()
        terminal.wait("no daemon since ")
        start(node, *FAST)
        terminal.wait(lambda text: "no daemon since " not in text and title(idle) in text)
