"""The daemon asks nobody: no API server, no name server, nothing beyond the node.

Looked at from outside, by a tracer of system calls, with everything switched on and every child included.
"""

import re
import urllib.request
from pathlib import Path

from resolver import client
from tests.fakes.node import Node
from tests.kernel.conftest import EVERY_SOURCE, Start
from tests.patience import until

#: Calls that make a socket or name a peer.
_CALLS = "socket,connect,bind,listen,sendto,sendmsg,sendmmsg,io_uring_setup"


def scraped(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return bytes(answer.read())


@EVERY_SOURCE
def test_nothing_is_sent_beyond_the_node(node: Node, start: Start, source: str, tmp_path: Path) -> None:
    container = node.container()
    tenant = container.tenant(load=40, guess="none")
    pods = tmp_path / "pods"
    (pods / f"team-a_train-0_{container.pod_uid}").mkdir(parents=True)
    (tmp_path / "hami").mkdir(mode=0o755)
    trace = tmp_path / "trace"
    daemon = start(
        node,
        *("--interval", "50ms", "--nvml-interval", "200ms", "--pod-logs-dir", str(pods), "--hami-metrics"),
        *("--metrics-addr", "127.0.0.1:0", "--broker", str(tmp_path / "hami/hostpid/broker.sock")),
        wrapper=("strace", "-D", "-f", "-q", "-e", f"trace={_CALLS}", "-o", str(trace)),
    )
    port = int(daemon.wait_for("metrics_on")["address"].rpartition(":")[2])
    tenant.until_repaired()
    until(daemon.socket.exists, "its socket")
    path = str(daemon.socket)
    until(lambda: "train-0" in str(client.get_json("/v1/containers", path)), "the pod's name")
    until(lambda: b'pod="train-0"' in scraped(port), "its series")
    assert daemon.stop() == 0
    until(lambda: f"{daemon.process.pid} +++ exited" in trace.read_text(), "all that the tracer has to write")

    calls = trace.read_text().splitlines()
    listened = [call for call in calls if re.search(r"bind\(.*AF_INET6?, .*htons\(0\)", call)]
    assert len(listened) == 1, "the tracer sees what the daemon does"
    assert any("AF_UNIX" in call for call in calls)
    families = {family for call in calls for family in re.findall(r"socket\((\w+)", call)}
    assert families <= {"AF_UNIX", "AF_NETLINK", "AF_INET", "AF_INET6"}
    assert not any("io_uring_setup" in call for call in calls), "what goes that way would not be seen"
    outward = [call for call in calls if re.search(r"(connect|send\w+)\(.*sa_family=AF_INET", call)]
    assert outward == []
    assert sum("AF_INET" in call and " socket(" in call for call in calls) == 1, (
        "and no other socket that could"
    )
