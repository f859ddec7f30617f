"""The daemon's loop at everything that it does, seen by the gate for its system calls (`conftest.Start`)."""

from __future__ import annotations

from resolver import client
from tests.fakes.node import Node
from tests.fakes.overlay import Docker
from tests.fakes.scraper import Scraper
from tests.kernel.conftest import EVERY_SOURCE, Start, hostpid_of
from tests.kernel.serving import SLEEP, serving
from tests.patience import PATIENCE_S, until


@EVERY_SOURCE
def test_the_loop_calls_nothing_that_a_tenant_delays(node: Node, start: Start, source: str) -> None:
    options = ("--source", source, "--metrics-addr", "127.0.0.1:0", "--mapped-regions")
    daemon = serving(start, node, *options)
    scraper, where = Scraper(daemon), str(daemon.socket)
    daemon.wait_for("source")

    container, docker = node.container(), Docker(node)
    tenant, mapped = container.tenant(load=30, guess="wrong"), docker.tenant(load=20)
    processes = [container.spawn(SLEEP) for _ in range(8)]
    pairs = [(container.container_id, each.ns_pid) for each in processes]

    def found() -> list[int]:
        answers = client.look_up_many(pairs, socket_path=where, seconds=PATIENCE_S)["answers"]
        return [each.get("host_pid") for each in answers]

    until(lambda: hostpid_of(container, tenant) == tenant.host_pid, "a repair")
    until(lambda: docker.hostpid(mapped) == mapped.host_pid, "a repair in a container")
    until(lambda: found() == [each.host_pid for each in processes], "every process")
    client.reverse(tenant.host_pid, socket_path=where, seconds=PATIENCE_S)
    client.get_json("/v1/regions", socket_path=where)
    assert scraper.utilization(container) is not None
    tenant.kill()
    container.stop()
    docker.container.stop()
    daemon.wait_for("region_gone")
