"""`resolver report-devices` as a process: between the daemon's real API and the stand-in API server."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resolver.gpu.attribution import NOTHING
from resolver.gpu.inventory import GpuReport, Inventory
from resolver.kube.device import CORDON, health
from resolver.kube.tally import FAMILIES
from tests.fakes.apiserver import Served, serving
from tests.fakes.kube import DEVICES, KubeServer
from tests.fakes.reported import AT, NODE, gpu
from tests.patience import PATIENCE_S

A, B, ILL = gpu("GPU-a", 0), gpu("GPU-b", 1), gpu("GPU-b", 1, "too_hot")
_MOST_MIB = 45
_SOON = PATIENCE_S


def until(what: Callable[[], Any], why: str) -> Any:
    deadline = time.monotonic() + _SOON
    while not (found := what()):
        assert time.monotonic() < deadline, why
        time.sleep(0.02)
    return found


class Reporter:
    """The process."""

    def __init__(self, kube: KubeServer, daemon: str, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "resolver", "report-devices", "--node", NODE, "--spread", "0s"),
                *("--socket", daemon, "--api-server", kube.url, "--service-account", str(kube.account)),
                *("--metrics-addr", f"127.0.0.1:{self.port}", "--log-format", "json", *options),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def ready(self) -> bool:
        return self.ask("/readyz")[0] == 200

    def metric(self, name: str) -> float:
        (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", self.ask("/metrics")[1], re.MULTILINE)
        return float(value)

    def stat(self, name: str) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(rf"^{name}:\s+(\d+)", text, re.MULTILINE)[0])

    def stop(self) -> list[dict[str, Any]]:
        """Its log."""
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, said
        return [json.loads(line) for line in said.splitlines()]


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[KubeServer]:
    with KubeServer(tmp_path / "kube") as server:
        server.set_node(NODE)
        yield server


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Served]:
    with serving(
        tmp_path / "d.sock",
        inventory=Inventory(1, AT, "550.54.15", (A, B)),
        joined=NOTHING._replace(error=""),
    ) as running:
        yield running


def change(daemon: Served, *gpus: GpuReport) -> None:
    def show() -> None:
        version = daemon.shown.inventory.version + 1
        daemon.shown = daemon.shown._replace(inventory=Inventory(version, AT, "550.54.15", gpus))
        daemon.inventories.publish("inventory", {})

    daemon.call(show)


def test_a_gpu_falls_ill_and_recovers_and_the_object_the_events_and_the_metrics_follow(
    kube: KubeServer, daemon: Served
) -> None:
    reporter = Reporter(kube, daemon.path)
    try:
        until(reporter.ready, "ready")
        assert {uuid: state[0] for uuid, state in health(kube.devices[NODE]).items()} == {
            "GPU-a": True,
            "GPU-b": True,
        }
        change(daemon, A, ILL)
        until(lambda: not health(kube.devices[NODE])["GPU-b"][0], "the object")
        until(lambda: [each["reason"] for each in kube.events] == ["GPUUnhealthy"], "the event")
        change(daemon, A, B)
        until(lambda: health(kube.devices[NODE])["GPU-b"][0], "the object")
        kube.set_node(NODE, {CORDON: "GPU-a"})
        until(lambda: not health(kube.devices[NODE])["GPU-a"][0], "the cordon")
        until(reporter.ready, "ready again")
        assert reporter.metric('resolver_report_writes_total{result="created"}') == 1
        assert reporter.metric('resolver_report_writes_total{result="patched"}') == 3
        assert reporter.metric("resolver_report_in_sync") == 1
        assert reporter.metric("resolver_report_daemon_up") == 1
        assert reporter.metric("resolver_report_cordoned_gpus") == 1
        assert time.time() - reporter.metric("resolver_report_last_success_timestamp_seconds") < _SOON
        text = reporter.ask("/metrics")[1]
        assert {family.name for family in FAMILIES} <= set(re.findall(r"^(\w+)", text, re.MULTILINE))
        assert reporter.ask("/healthz")[0] == 200
        assert reporter.ask("/other")[0] == 404
    finally:
        log = reporter.stop()
    assert [each["event"] for each in log].count("device_written") == 4
    assert {"started", "ended"} <= {each["event"] for each in log}


def sleeps(reporter: Reporter) -> bool:
    """For three seconds from now on."""
    switches = reporter.stat("voluntary_ctxt_switches")
    time.sleep(3)
    return reporter.stat("voluntary_ctxt_switches") - switches <= 2


def test_it_is_small_and_sleeps(kube: KubeServer, daemon: Served) -> None:
    reporter = Reporter(kube, daemon.path)
    try:
        until(reporter.ready, "ready")
        for number in range(20):
            change(daemon, A, B if number % 2 else ILL)
        until(lambda: health(kube.devices[NODE])["GPU-b"][0], "the object")
        until(lambda: sleeps(reporter), "that it sleeps")
        assert reporter.stat("VmRSS") / 1024 <= _MOST_MIB
    finally:
        reporter.stop()


def test_a_daemon_that_is_started_anew_is_found_again(kube: KubeServer, tmp_path: Path) -> None:
    reporter = Reporter(kube, str(tmp_path / "d.sock"))
    try:
        for gpus in ((A, B), (A, ILL)):
            wanted = gpus[1] is B
            inventory = Inventory(1, AT, "550.54.15", gpus)
            with serving(tmp_path / "d.sock", inventory=inventory, joined=NOTHING._replace(error="")):
                until(reporter.ready, "ready")
                assert health(kube.devices[NODE])["GPU-b"][0] is wanted
            until(lambda: reporter.ask("/readyz")[0] == 503, "not ready without a daemon")
    finally:
        log = reporter.stop()
    assert "daemon_unreachable" in {each["event"] for each in log}


def test_who_starts_together_does_not_ask_together(kube: KubeServer, daemon: Served) -> None:
    reporter = Reporter(kube, daemon.path, "--spread", "100m")
    try:
        until(lambda: reporter.ask("/healthz")[0] == 200, "healthy")
        until(lambda: reporter.metric("resolver_report_daemon_up") == 1, "the daemon")
        assert not [each for each in kube.asked if each.path.startswith(DEVICES)]
    finally:
        reporter.stop()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "this is no pod"),
        (("--api-server", "http://x"), "the token is sent by https"),
        (("--spread", "soon"), "is no duration"),
        (("--metrics-addr", "x:y"), "write HOST:PORT"),
    ],
)
def test_what_cannot_be_is_refused(options: tuple[str, ...], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "resolver", "report-devices", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert words in done.stderr


def test_without_the_extra_it_says_what_to_install() -> None:
    program = "import sys; sys.modules['httpx2'] = None; from resolver.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "report-devices"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "hami-resolver[kubernetes]" in done.stderr


@pytest.mark.parametrize(
    "module", ["resolver.daemon.service", "resolver.metrics", "resolver.api.server", "resolver.cli.devices"]
)
def test_nobody_else_pays_for_the_extra(module: str) -> None:
    program = (
        f"import sys, {module}; sys.exit('httpx2' in sys.modules or 'resolver.kube.apiserver' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
