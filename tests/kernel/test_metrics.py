"""What Prometheus reads of the real daemon on a miniature node, against what the tenants really do."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resolver.hami import layout
from tests.fakes.container import Container
from tests.fakes.exposition import Read
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.prometheus import program
from tests.fakes.regions import LAYOUTS
from tests.fakes.state import Fault, Hang
from tests.kernel.conftest import Daemon, Start, until

FAST = ("--interval", "50ms", "--nvml-interval", "200ms")
UTILIZATION, MEMORY = "resolver_container_utilization_ratio", "resolver_container_memory_bytes"
UNKNOWN = "resolver_container_unknown_values"
FIRST, SECOND = (device.uuid for device in DEFAULT_DEVICES)


class Scraper:
    """Somebody who reads the metrics of one daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.host, _, port = str(daemon.wait_for("metrics_on")["address"]).rpartition(":")
        self.port = int(port)
        self.slowest = 0.0

    def get(self, path: str, accept: str = "") -> tuple[int, str]:
        began = time.monotonic()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request("GET", path, headers={"Accept": accept} if accept else {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()
            self.slowest = max(self.slowest, time.monotonic() - began)

    def text(self) -> str:
        status, text = self.get("/metrics")
        assert status == 200, text
        return text

    def read(self) -> Read:
        return Read(self.text().encode())

    def utilization(self, container: Container, device: str = FIRST) -> float | None:
        return self.read().one(UTILIZATION, pod_uid=container.pod_uid, device_uuid=device)


@pytest.fixture
def scraping(start: Start, node: Node, tmp_path: Path) -> Callable[..., Scraper]:
    """Starts a daemon that may be scraped."""

    def scraping(*arguments: str, **options: Any) -> Scraper:
        pods = ("--pod-logs-dir", str(tmp_path / "pods"))
        return Scraper(start(node, *FAST, "--metrics-addr", "127.0.0.1:0", *pods, *arguments, **options))

    return scraping


def name_pod(tmp_path: Path, container: Container, namespace: str, pod: str) -> None:
    (tmp_path / "pods" / f"{namespace}_{pod}_{container.pod_uid}").mkdir(parents=True)


# ---- containers ---------------------------------------------------------------------------------------------------


def test_a_busy_container_is_never_0(
    node: Node, scraping: Callable[..., Scraper], source: str, tmp_path: Path
) -> None:
    busy, idle, without_slot = node.container(name="train"), node.container(), node.container(name="etl")
    name_pod(tmp_path, busy, "ml", "train-0")
    busy.tenant(load=60, guess="none")
    busy.tenant(load=27)
    idle.tenant(load=0)
    stranger = without_slot.tenant(load=40)
    without_slot.cache.unlink()
    scraper = scraping()
    seen = set()

    def true() -> bool:
        found = scraper.read()
        seen.add(found.one(UTILIZATION, container="train"))
        return found.one(UTILIZATION, container="train") == pytest.approx(0.87)

    until(true, "what it really does")
    assert seen <= {None, 0.87}
    until(lambda: scraper.utilization(without_slot) == pytest.approx(0.4), "one without a cache file")
    found = scraper.read()
    ((labels, _),) = found.all(UTILIZATION, container="train")
    assert labels == {
        "namespace": "ml",
        "pod": "train-0",
        "container": "train",
        "pod_uid": busy.pod_uid,
        "device_uuid": FIRST,
        "device_index": "0",
    }
    assert found.one(UTILIZATION, pod_uid=idle.pod_uid) == 0.0
    assert found.one(MEMORY, pod_uid=busy.pod_uid) == 2 * (512 << 20)
    assert found.one("resolver_source", resolver_source=source) == 1
    until(lambda: any(value for _, value in scraper.read().all("resolver_repairs_total")), "its repair")
    stranger.set_load(0)
    until(lambda: scraper.utilization(without_slot) == 0, "its end of work")


def test_hamis_limits_are_those_of_the_cache_file(
    node: Node, scraping: Callable[..., Scraper], source: str
) -> None:
    limited, free = node.container(sm_limit=30), node.container(name="free", sm_limit=0)
    limited.tenant(load=60, guess="none")
    free.tenant(load=10, guess="none")
    scraper, limit = scraping(), "resolver_container_core_limit_ratio"
    until(lambda: scraper.read().one(limit, pod_uid=limited.pod_uid) == pytest.approx(0.3), "its core limit")
    until(lambda: scraper.utilization(free) == pytest.approx(0.1), "the other container")
    found = scraper.read()
    assert found.all(limit, pod_uid=free.pod_uid) == []
    # As the tenant's library wrote it.
    assert found.one("resolver_container_memory_limit_bytes", pod_uid=limited.pod_uid) == 8 << 30


def test_series_of_a_container_end_with_it(node: Node, scraping: Callable[..., Scraper], source: str) -> None:
    stays, goes, host = node.container(), node.container(), node.container(pid_namespace="host")
    for container in (stays, goes, host):
        container.tenant(load=20)
    scraper = scraping("--metrics-per-process")
    for container in (stays, goes, host):
        until(lambda c=container: scraper.utilization(c) == pytest.approx(0.2), "its load")  # type: ignore[misc]
    assert len(scraper.read().all("resolver_process_utilization_ratio")) == 3
    goes.stop()
    until(lambda: goes.pod_uid not in scraper.text(), "the end of all its series")
    assert scraper.utilization(stays) == scraper.utilization(host) == pytest.approx(0.2)
    before = stays.container_id
    stays.restart()
    stays.tenant(load=35)
    until(lambda: scraper.utilization(stays) == pytest.approx(0.35), "the load of the restarted one")
    assert before not in scraper.text()


def test_what_a_tenant_writes_is_no_label(node: Node, scraping: Callable[..., Scraper], source: str) -> None:
    container = node.container()
    container.tenant(load=30)
    scraper = scraping("--hami-metrics")
    until(lambda: scraper.utilization(container) == pytest.approx(0.3), "its load")
    layout = LAYOUTS[container.layout]
    with container.cache.open("r+b", buffering=0) as file:
        for turn in range(20):
            os.pwrite(file.fileno(), f"GPU-forged-{turn}".encode().ljust(96, b"\0"), layout.uuids)
            time.sleep(0.05)
            text = scraper.text()
            assert "forged" not in text
    assert scraper.utilization(container) == pytest.approx(0.3)
    assert scraper.read().one(UNKNOWN, value="utilization", reason="unknown_device") == 1


def test_hamis_names_say_what_hami_core_counts_of_living_processes(
    node: Node, scraping: Callable[..., Scraper], source: str, tmp_path: Path
) -> None:
    container = node.container(name="train")
    name_pod(tmp_path, container, "ml", "train-0")
    container.tenant(load=30, memory=300 << 20)
    killed = container.tenant(load=20, memory=200 << 20)
    scraper = scraping("--hami-metrics")
    labels = {"pod": "train-0", "container": "train", "device_uuid": FIRST}
    context = "hami_vgpu_memory_context_bytes"
    until(lambda: scraper.read().one(context, **labels) == 500 << 20, "both processes' contexts")
    used = "hami_vgpu_memory_used_bytes"
    until(lambda: scraper.read().one(used, **labels) == 500 << 20, "both processes' sums")
    assert scraper.read().one("hami_vgpu_memory_buffer_bytes", **labels) == 0
    killed.kill()
    until(lambda: scraper.read().one(context, **labels) == 300 << 20, "without the one that was killed")
    at = layout.LAYOUTS[container.layout].last_kernel_time
    assert at is not None
    with container.cache.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), (int(time.time()) - 60).to_bytes(8, "little"), at)
    elapsed = "hami_container_last_kernel_elapsed_seconds"
    until(lambda: 60 <= (scraper.read().one(elapsed, **labels) or 0) < 120, "the last kernel")


# ---- NVML that does not answer ------------------------------------------------------------------------------------


def test_while_nvml_hangs_metrics_answer_and_say_so(
    node: Node, scraping: Callable[..., Scraper], source: str
) -> None:
    busy, idle = node.container(), node.container()
    busy.tenant(load=87)
    idle.tenant(load=0)
    scraper = scraping("--hami-metrics", "--metrics-per-process")
    until(lambda: scraper.utilization(busy) == pytest.approx(0.87), "its load")
    until(lambda: scraper.utilization(idle) == 0, "no load")
    scraper.slowest = 0.0
    node.gpu.set_faults(hang=Hang.UTILIZATION)
    try:
        seen, reasons = set[float | None](), set[str]()

        def silent() -> bool:
            found = scraper.read()
            seen.add(found.one(UTILIZATION, pod_uid=busy.pod_uid))
            reasons.update(labels["reason"] for labels, value in found.all(UNKNOWN) if value)
            return "no_answer" in reasons

        until(silent, "the worker's end")
        assert seen == {None, 0.87}, "a last value, then none; no 0"
        assert reasons <= {"stale", "no_answer"}
        found = scraper.read()
        assert found.one("resolver_nvml_up") == 0
        for name, _ in found.series:
            assert not name.startswith((UTILIZATION, MEMORY, "resolver_process_", "hami_", "Host", "vGPU"))
        assert (found.one("resolver_nvml_sample_age_seconds") or 0) > 0.5
        assert scraper.get("/healthz")[0] == 200
        until(lambda: scraper.read().one("resolver_worker_failures_total", worker="nvml_worker"), "a failure")
        assert scraper.slowest < 5, "an answer waited for the driver"
    finally:
        node.gpu.set_faults()
    until(lambda: scraper.utilization(busy) == pytest.approx(0.87), "its load again")
    assert scraper.read().one("resolver_nvml_up") == 1


def test_a_driver_that_is_unloaded_or_loses_a_gpu_is_no_0(
    node: Node, scraping: Callable[..., Scraper], source: str
) -> None:
    one, other = node.container(), node.container(devices=DEFAULT_DEVICES[1:])
    one.tenant(load=50)
    other.tenant(load=60)
    scraper = scraping()

    def loads() -> tuple[float | None, float | None]:
        return scraper.utilization(one), scraper.utilization(other, SECOND)

    until(lambda: loads() == (0.5, 0.6), "both loads")
    node.gpu.set_devices([DEFAULT_DEVICES[0], replace(DEFAULT_DEVICES[1], lost=True)])
    seen = set()

    def lost() -> bool:
        seen.add(scraper.utilization(other, SECOND))
        return None in seen

    until(lost, "the loss")
    assert seen <= {0.6, None}
    until(lambda: scraper.utilization(one) == 0.5, "the other one's load")
    until(lambda: scraper.read().one("resolver_gpu_healthy", device_uuid=SECOND) == 0, "its illness")
    assert scraper.read().one("resolver_gpu_unhealthy", device_uuid=SECOND, reason="lost") == 1
    assert scraper.read().one(UNKNOWN, value="utilization", reason="device_failed") == 1
    node.gpu.set_devices(DEFAULT_DEVICES)
    until(lambda: loads() == (0.5, 0.6), "both loads again")
    node.gpu.set_faults(Fault.DRIVER_NOT_LOADED)
    until(lambda: loads() == (None, None), "no driver")
    assert scraper.read().one("resolver_nvml_up") == 0
    assert scraper.read().all("resolver_gpu_utilization_ratio") == []
    node.gpu.set_faults()
    until(lambda: loads() == (0.5, 0.6), "both loads again")


# ---- the daemon ---------------------------------------------------------------------------------------------------


def test_the_linter_of_prometheus_has_nothing_to_say(
    node: Node, scraping: Callable[..., Scraper], source: str, tmp_path: Path
) -> None:
    for name in ("train", "serve", "batch"):
        container = node.container(name=name)
        name_pod(tmp_path, container, "ml", name)
        container.tenant(load=20)
    scraper = scraping("--metrics-per-process", "--broker", str(tmp_path / "broker" / "broker.sock"))
    until(lambda: len(scraper.read().all(UTILIZATION)) == 3, "three containers")
    texts = ["", ""]

    def alike() -> bool:
        status, other = scraper.get("/metrics", "application/openmetrics-text;version=1.0.0")
        texts[:] = other, scraper.text()
        ours = [Read(other.encode(), as_openmetrics=True), Read(texts[1].encode())]
        return status == 200 and ours[0].series.keys() == ours[1].series.keys()

    until(alike, "the same series in both formats")
    text = texts[1]
    assert len(Read(text.encode()).all("resolver_broker_refused_total")) > 3, "reasons, before there was one"
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_it_is_ready_once_the_canary_was_found(
    node: Node, scraping: Callable[..., Scraper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RESOLVER_SOURCE", raising=False)
    scraper = scraping("--source", "auto")
    answers = []

    def ready() -> bool:
        answers.append(scraper.get("/readyz"))
        return answers[-1][0] == 200

    until(ready, "readiness")
    assert answers[-1] == (200, "ok\n")
    assert {status for status, _ in answers} <= {200, 503}
    assert all(len(why) > 10 for status, why in answers if status == 503)
    assert scraper.read().one("resolver_ready") == 1
    assert scraper.get("/healthz") == (200, "ok\n")


def test_with_everything_on_it_stays_small(
    node: Node, scraping: Callable[..., Scraper], source: str, tmp_path: Path
) -> None:
    for _ in range(4):
        node.container().tenant(load=10)
    scraper = scraping("--metrics-per-process", "--hami-metrics")
    until(lambda: len(scraper.read().all(UTILIZATION)) == 4, "four containers")
    for _ in range(60):
        scraper.get("/metrics")
        scraper.get("/metrics", "application/openmetrics-text")
    told = scraper.read().one("process_resident_memory_bytes")
    status = Path(f"/proc/{scraper.daemon.process.pid}/status").read_text()
    (resident,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    print(f"{source}: {resident / 1024:.1f} MiB with API and metrics")
    assert resident <= 45 * 1024
    assert told == pytest.approx(resident * 1024, rel=0.05)


def test_a_daemon_that_stands_still_does_not_say_it_is_well(
    node: Node, scraping: Callable[..., Scraper], source: str
) -> None:
    scraper = scraping()
    scraper.daemon.signal(signal.SIGSTOP)
    try:
        with socket.create_connection((scraper.host, scraper.port), timeout=1) as channel:
            channel.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            with pytest.raises(TimeoutError):
                channel.recv(100)
    finally:
        scraper.daemon.signal(signal.SIGCONT)
    until(lambda: scraper.get("/healthz") == (200, "ok\n"), "health")


def test_the_next_daemon_takes_the_port_over(
    node: Node, start: Start, scraping: Callable[..., Scraper], source: str, tmp_path: Path
) -> None:
    container = node.container()
    tenant: Tenant = container.tenant(load=30)
    first = scraping()
    until(lambda: first.utilization(container) == pytest.approx(0.3), "its load")
    address = f"{first.host}:{first.port}"
    second = start(node, *FAST, "--metrics-addr", address, "--wait", run_dir=tmp_path / "run")
    why = second.wait_for("metrics_off")["why"]
    assert why == f"{address} cannot be listened on: Address already in use; name another with --metrics-addr"
    first.daemon.stop()
    scraper = Scraper(second)
    assert scraper.port == first.port
    until(lambda: scraper.utilization(container) == pytest.approx(0.3), "its load, by the next one")
    assert json.dumps(tenant.slot()["hostpid"]) == str(tenant.host_pid)
    assert len(second.said("metrics_off")) == 1


COME_AND_GO = """
import contextlib, socket, sys
for _ in range(1500):
    with contextlib.suppress(ConnectionError), socket.create_connection((sys.argv[1], int(sys.argv[2]))) as client:
        client.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
"""


def test_a_flood_of_clients_that_come_and_go_breaks_no_scrape(scraping: Callable[..., Scraper]) -> None:
    """Two of them, as fast as they can: answers during and after it, and no memory kept."""
    scraper = scraping("--source", "scan")
    status = Path(f"/proc/{scraper.daemon.process.pid}/status")

    def resident() -> int:
        return next(
            int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmRSS")
        )

    for _ in range(20):
        scraper.text()
    before = resident()
    argv = [sys.executable, "-c", COME_AND_GO, scraper.host, str(scraper.port)]
    flood = [subprocess.Popen(argv) for _ in range(2)]
    while any(each.poll() is None for each in flood):
        scraper.text()
    for _ in range(3):
        scraper.text()
    assert resident() - before < 8 << 10


def test_a_bad_address_is_refused_at_start(node: Node, start: Start) -> None:
    daemon = start(node, "--metrics-addr", "example.org:9395")
    assert daemon.wait() == 2
    assert (
        "'example.org' is no address: write one such as 127.0.0.1 or [::1], not a name"
        in daemon.other_output[-1]
    )
