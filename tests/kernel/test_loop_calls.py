"""The gate for the loop's system calls (`conftest.Start`), and the daemon's loop at everything that it does."""

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
from tests.kernel.serving import SLEEP, serving
from tests.patience import PATIENCE_S, until


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
    options = (
        "--source",
        source,
        "--metrics-addr",
        "127.0.0.1:0",
        "--mapped-regions",
        "--broker",
        str(broker),
    )
    daemon = serving(start, node, *options)
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
    client.get_json("/v1/regions", socket_path=where)
    assert scraper.utilization(container) is not None
    tenant.kill()
    container.stop()
    docker.container.stop()
    daemon.wait_for("region_gone")
