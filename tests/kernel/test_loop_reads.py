"""The daemon's loop opens nothing that a tenant can make wait: all of that is a lane's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from resolver import client
from tests.fakes import audited
from tests.fakes.node import Node
from tests.fakes.overlay import Docker
from tests.fakes.scraper import Scraper
from tests.kernel.conftest import EVERY_SOURCE, Start, hostpid_of
from tests.kernel.serving import SLEEP, serving
from tests.patience import PATIENCE_S, until

#: Of its own descriptors, only the probes' are read.
LOCKED = re.compile("/proc/.+/(mountinfo|mounts|maps|smaps.*|cmdline|environ|auxv)|/proc/[^s].*/fdinfo/.*")


@EVERY_SOURCE
def test_the_loop_opens_nothing_that_a_tenant_delays(
    node: Node, start: Start, tmp_path: Path, source: str
) -> None:
    note = tmp_path / "opened"
    note.touch()
    options = ("--source", source, "--metrics-addr", "127.0.0.1:0", "--mapped-regions")
    wrapper = (sys.executable, audited.__file__, str(note))
    daemon = serving(start, node, *options, wrapper=wrapper, anew=False)
    scraper, where = Scraper(daemon), str(daemon.socket)
    daemon.wait_for("source")
    seen = note.read_text().splitlines()
    assert seen, "nothing is noted"

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
    opened = note.read_text().splitlines()[len(seen) :]
    assert any(path.startswith("/proc/") for path in opened)
    tenants = f"{node.containers_dir}/"
    assert [path for path in opened if LOCKED.fullmatch(path) or path.startswith(tenants)] == []
