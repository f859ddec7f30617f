"""The check of the loop's system calls (`conftest.Start`), and a daemon's loop through all its work."""

import re
import threading
from pathlib import Path

from resolver import client
from resolver.linux.procfs import Procfs
from tests.fakes.loop_calls import unlisted
from tests.fakes.node import Node
from tests.fakes.overlay import Docker
from tests.fakes.scraper import Scraper
from tests.fakes.traced import Call, Tracer
from tests.kernel.conftest import EVERY_SOURCE, Start, write_hostpid
from tests.kernel.serving import SLEEP, answer, serving
from tests.patience import PATIENCE_S, until

METRICS = ("--metrics-addr", "127.0.0.1:0")


def test_call_without_a_line_is_named(tracer: Tracer, tmp_path: Path) -> None:
    tenants = tmp_path / "containers" / "uid_main"
    tenants.mkdir(parents=True)
    (tenants / "a.cache").touch()
    tid = threading.get_native_id()
    tracer.watch(tid)
    Path("/proc/1/status").read_bytes()
    Procfs(careful=True).cgroup(1)
    (tenants / "a.cache").read_bytes()
    seen = tracer.take(tid)
    names = {call for call in unlisted(seen) if call.name == "openat"}
    assert Call("openat", "/proc/#/status") in names
    assert any(call.about.endswith("/containers/uid_main/a.cache") for call in names)
    assert Call("openat", "cgroup in proc") not in names
    assert seen[Call("openat", "cgroup in proc")].times == 1
    assert tracer.take(tid) == {}


@EVERY_SOURCE
def test_the_loop_calls_nothing_that_a_tenant_delays(node: Node, start: Start, source: str) -> None:
    broker = node.root / "hostpid" / "broker.sock"
    daemon = serving(start, node, *METRICS, "--mapped-regions", "--broker", str(broker))
    scraper, where = Scraper(daemon), str(daemon.socket)
    daemon.wait_for("source")
    daemon.wait_for("broker_on")

    container, docker = node.container(broker_dir=broker.parent), Docker(node)
    tenant, mapped = container.tenant(load=30, guess="wrong"), docker.tenant(load=20)
    processes = [container.spawn(SLEEP) for _ in range(8)]
    pairs = [(container.container_id, each.ns_pid) for each in processes]

    def found() -> list[int]:
        answers = client.look_up_many(pairs, socket_path=where, seconds=PATIENCE_S)["answers"]
        return [each.get("host_pid") for each in answers]

    tenant.until_repaired()
    write_hostpid(container, tenant, 1)
    tenant.until_repaired()
    until(lambda: docker.hostpid(mapped) == mapped.host_pid, "a repair in a container")
    until(lambda: found() == [each.host_pid for each in processes], "every process")
    client.reverse(tenant.host_pid, socket_path=where, seconds=PATIENCE_S)
    answer(daemon, "regions")
    until(lambda: scraper.utilization(container) is not None, "its load")
    tenant.kill()
    container.stop()
    docker.container.stop()
    daemon.wait_for("region_gone")


#: Calls that make a socket or name a peer.
SOCKETS = "socket,connect,bind,listen,sendto,sendmsg,sendmmsg,io_uring_setup"


@EVERY_SOURCE
def test_nothing_is_sent_beyond_the_node(node: Node, start: Start, source: str, tmp_path: Path) -> None:
    """With every option on, neither the daemon nor a child contacts any server, not even a name server."""
    container = node.container()
    tenant = container.tenant(load=40, guess="none")
    pods = tmp_path / "pods"
    (pods / f"team-a_train-0_{container.pod_uid}").mkdir(parents=True)
    (tmp_path / "hami").mkdir(mode=0o755)
    trace = tmp_path / "trace"
    calls_of = ("strace", "-D", "-f", "-q", "-e", f"trace={SOCKETS}", "-o", str(trace))
    broker = ("--broker", str(tmp_path / "hami/hostpid/broker.sock"))
    options = (*METRICS, *broker, "--pod-logs-dir", str(pods), "--hami-metrics")
    daemon = serving(start, node, *options, wrapper=calls_of)
    scraper = Scraper(daemon)
    tenant.until_repaired()
    until(lambda: "train-0" in str(answer(daemon, "containers")), "the pod's name")
    until(lambda: 'pod="train-0"' in scraper.text(), "its series")
    assert daemon.stop() == 0
    ended = re.compile(rf"^{daemon.process.pid} +\+\+\+ exited", re.MULTILINE)
    until(lambda: ended.search(trace.read_text()), "all that the tracer has to write")

    calls = trace.read_text().splitlines()
    listened = [call for call in calls if re.search(r"bind\(.*AF_INET6?, .*htons\(0\)", call)]
    assert len(listened) == 1, "the tracer sees what the daemon does"
    assert any("AF_UNIX" in call for call in calls)
    families = {family for call in calls for family in re.findall(r"socket\((\w+)", call)}
    assert families <= {"AF_UNIX", "AF_NETLINK", "AF_INET", "AF_INET6"}
    assert not any("io_uring_setup" in call for call in calls), "the tracer would not see its calls"
    outward = [call for call in calls if re.search(r"(connect|send\w+)\(.*sa_family=AF_INET", call)]
    assert outward == []
    assert sum("AF_INET" in call and " socket(" in call for call in calls) == 1, (
        "and no other socket that could"
    )
