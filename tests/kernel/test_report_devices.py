"""The demo's node from end to end: its GPUs in the API server, one falls ill and recovers, and everything follows.

Driver, daemon, socket and reporter are real processes; only the GPU and the API server are stand-ins.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from resolver.kube.device import CORDON, health
from tests.fakes.command import run
from tests.fakes.daemon import Daemon
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.kube import KubeServer
from tests.fakes.node import Node
from tests.fakes.reported import NODE
from tests.fakes.reporter import Reporter
from tests.kernel.conftest import Start
from tests.patience import PATIENCE_S, until

FIRST, SECOND = DEFAULT_DEVICES
_SOON = PATIENCE_S


def shown(kube: KubeServer) -> dict[str, tuple[bool, str]]:
    """Health and reason of each GPU in the object."""
    return {uuid: state[:2] for uuid, state in health(kube.devices.get(NODE)).items()}


def devices(daemon: Daemon) -> Any:
    """What the command says of them."""
    return json.loads(run("devices", "--json", "--socket", daemon.socket).stdout)


def test_a_gpu_of_the_node_falls_ill_and_recovers(node: Node, start: Start, tmp_path: Path) -> None:
    daemon = start(node, "--nvml-interval", "200ms")
    daemon.wait_for("gpu_found", count=2)
    socket = daemon.socket
    until(socket.exists, "its socket")
    with KubeServer(tmp_path / "kube") as kube:
        kube.set_node(NODE)
        reporter = Reporter(kube, str(socket))
        try:
            healthy = {FIRST.uuid: (True, ""), SECOND.uuid: (True, "")}
            until(lambda: shown(kube) == healthy, "both GPUs")
            spec = {each["id"]: each for each in kube.devices[NODE]["spec"]["devices"]}
            assert [spec[gpu.uuid]["minor"] for gpu in DEFAULT_DEVICES] == [1, 0]
            assert spec[FIRST.uuid]["resources"]["koordinator.sh/gpu-memory"] == "24Gi"
            node.gpu.set_devices([replace(FIRST, lost=True), SECOND])
            until(lambda: shown(kube) == healthy | {FIRST.uuid: (False, "Lost")}, "one is ill")
            until(lambda: [each["reason"] for each in kube.events] == ["GPUUnhealthy"], "an event")
            assert FIRST.uuid in kube.events[0]["message"]
            assert [gpu["healthy"] for gpu in devices(daemon)["gpus"]] == [False, True]
            node.gpu.set_devices(DEFAULT_DEVICES)
            until(lambda: shown(kube) == healthy, "it is well again")
            kube.set_node(NODE, {CORDON: SECOND.uuid})
            until(lambda: shown(kube)[SECOND.uuid] == (False, "Cordoned"), "the operator's mark")
            until(lambda: len(kube.events) == 2, "its event, of the other GPU")
            until(reporter.ready, "ready")
            assert reporter.metric('resolver_report_writes_total{result="created"}') == 1
            assert reporter.metric('resolver_report_writes_total{result="patched"}') == 3
            assert reporter.metric('resolver_report_events_total{result="posted"}') == 2
            assert reporter.metric("resolver_report_in_sync") == 1
        finally:
            reporter.stop()
