"""The real daemon's metrics on a miniature node, against the tenants' actual use."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resolver.hami import layout
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.node import Node
from tests.fakes.scraper import Scraper, name_pod
from tests.fakes.state import Hang
from tests.kernel.conftest import NVML, write_at
from tests.patience import until

UTILIZATION, MEMORY = "resolver_container_utilization_ratio", "resolver_container_memory_bytes"
UNKNOWN = "resolver_container_unknown_values"
FIRST, SECOND = (device.uuid for device in DEFAULT_DEVICES)


def test_busy_container_never_reads_0(
    node: Node, scraping: Callable[..., Scraper], source: str, tmp_path: Path
) -> None:
    busy, idle, without_slot = node.container(name="train"), node.container(), node.container(name="etl")
    name_pod(tmp_path, busy, "ml", "train-0")
    busy.tenant(load=60, guess="none", memory=300 << 20)
    killed = busy.tenant(load=27, memory=200 << 20)
    idle.tenant(load=0)
    stranger = without_slot.tenant(load=40)
    without_slot.cache.unlink()
    scraper = scraping("--hami-metrics")
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
    assert found.one(MEMORY, pod_uid=busy.pod_uid) == 500 << 20
    assert found.one("resolver_source", resolver_source=source) == 1
    until(lambda: any(value for _, value in scraper.read().all("resolver_repairs_total")), "its repair")
    stranger.set_load(0)
    until(lambda: scraper.utilization(without_slot) == 0, "its end of work")

    # HAMi's metrics count only living processes.
    train = {"pod": "train-0", "container": "train", "device_uuid": FIRST}
    context = "hami_vgpu_memory_context_bytes"
    for name, size in (
        (context, 500 << 20),
        ("hami_vgpu_memory_used_bytes", 500 << 20),
        ("hami_vgpu_memory_buffer_bytes", 0),
    ):
        until(lambda n=name, s=size: scraper.read().one(n, **train) == s, name)  # type: ignore[misc]
    killed.kill()
    until(lambda: scraper.read().one(context, **train) == 300 << 20, "without the one that was killed")
    at = layout.LAYOUTS[busy.layout].last_kernel_time
    assert at is not None
    write_at(busy.cache, at, (int(time.time()) - 60).to_bytes(8, "little"))
    elapsed = "hami_container_last_kernel_elapsed_seconds"
    until(lambda: 60 <= (scraper.read().one(elapsed, **train) or 0) < 3600, "the last kernel")


def test_metrics_answer_and_name_a_hanging_nvml(
    node: Node, scraping: Callable[..., Scraper], source: str
) -> None:
    busy, idle = node.container(), node.container()
    busy.tenant(load=87)
    idle.tenant(load=0)
    scraper = scraping("--hami-metrics", "--metrics-per-process")
    until(lambda: scraper.utilization(busy) == pytest.approx(0.87), "its load")
    until(lambda: scraper.utilization(idle) == 0, "no load")
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
        assert scraper.get("/healthz")[0] == 200
        until(lambda: scraper.read().one("resolver_worker_failures_total", worker="nvml_worker"), "a failure")

        def answered() -> bool:
            """Check that one worker keeps waiting for the driver while the daemon answers."""
            worker, age = scraper.daemon.children().get(NVML), "resolver_nvml_sample_age_seconds"
            ages = [scraper.read().one(age) or 0.0 for _ in range(5)]
            return worker == scraper.daemon.children().get(NVML) and min(ages) > 0.5

        until(answered, "answers that wait for no driver")
    finally:
        node.gpu.set_faults()
    until(lambda: scraper.utilization(busy) == pytest.approx(0.87), "its load again")
    assert scraper.read().one("resolver_nvml_up") == 1
