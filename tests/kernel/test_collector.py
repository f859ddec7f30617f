"""What Prometheus reads of the real daemon on a miniature node, against what the tenants really do."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resolver.hami import layout
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.node import Node
from tests.fakes.scraper import Scraper, name_pod
from tests.fakes.state import Hang
from tests.patience import until

UTILIZATION, MEMORY = "resolver_container_utilization_ratio", "resolver_container_memory_bytes"
UNKNOWN = "resolver_container_unknown_values"
FIRST, SECOND = (device.uuid for device in DEFAULT_DEVICES)


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


def test_hami_names_count_living_processes(
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
        assert seen <= {None, 0.87}, "perhaps a last value, then none; no 0"
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
