"""The demo's node from end to end: its GPUs in the API server, one falls ill and recovers, and everything follows.

Driver, daemon, socket and reporter are real processes; only the GPU and the API server are stand-ins.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from resolver.kube.device import CORDON, health
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.kube import KubeServer
from tests.fakes.node import Node
from tests.fakes.reported import NODE
from tests.fakes.state import Hang
from tests.kernel.conftest import Daemon, Start, until
from tests.patience import PATIENCE_S
from tests.unit.test_report_devices import Reporter

FIRST, SECOND = DEFAULT_DEVICES
_SOON = PATIENCE_S


def shown(kube: KubeServer) -> dict[str, tuple[bool, str]]:
    """Health and reason of each GPU in the object."""
    return {uuid: state[:2] for uuid, state in health(kube.devices.get(NODE)).items()}


def devices(daemon: Daemon) -> Any:
    """What the command says of them."""
    where = str(daemon.run_dir / "resolver.sock")
    done = subprocess.run(
        [sys.executable, "-m", "resolver", "devices", "--json", "--socket", where],
        capture_output=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


def test_a_gpu_of_the_node_falls_ill_and_recovers(node: Node, start: Start, tmp_path: Path) -> None:
    daemon = start(node, "--nvml-interval", "200ms")
    daemon.wait_for("gpu_found", count=2)
    socket = daemon.run_dir / "resolver.sock"
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


def test_a_driver_that_hangs_takes_no_gpu_away(node: Node, start: Start, tmp_path: Path) -> None:
    daemon = start(node, "--nvml-interval", "200ms")
    daemon.wait_for("gpu_found", count=2)
    socket = daemon.run_dir / "resolver.sock"
    until(socket.exists, "its socket")
    with KubeServer(tmp_path / "kube") as kube:
        kube.set_node(NODE)
        reporter = Reporter(kube, str(socket))
        try:
            until(lambda: len(shown(kube)) == 2, "both GPUs")
            node.gpu.set_faults(hang=Hang.COUNT | Hang.DEVICE | Hang.PROCESS_LIST)
            daemon.wait_for("nvml_unavailable")
            unknown = (False, "NvmlUnavailable")
            until(
                lambda: shown(kube) == {FIRST.uuid: unknown, SECOND.uuid: unknown}, "nothing is known", _SOON
            )
            node.gpu.set_faults()
            until(lambda: all(state[0] for state in shown(kube).values()), "all is well again")
            assert len(shown(kube)) == 2
        finally:
            reporter.stop()


def test_a_daemon_ends_at_once_though_somebody_waits_for_a_change(node: Node, start: Start) -> None:
    daemon = start(node, "--nvml-interval", "200ms")
    daemon.wait_for("gpu_found", count=2)
    where = str(daemon.run_dir / "resolver.sock")
    until((daemon.run_dir / "resolver.sock").exists, "its socket")
    with subprocess.Popen(
        [sys.executable, "-m", "resolver", "devices", "--watch", "--socket", where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline()
        daemon.stop()
        assert watching.wait(timeout=_SOON) == 4
        assert watching.stderr is not None
        assert "no daemon answers" in watching.stderr.read()
