"""The daemon's timing, settings and end; test_repairer and tests/kernel test the repair of slots."""

import asyncio
import errno
import io
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resolver import api
from resolver.api import ApiSockets
from resolver.base import journal as log
from resolver.config import Settings
from resolver.daemon import snapshots
from resolver.daemon.pace import ERRORS_BEFORE_END
from resolver.daemon.service import Service
from resolver.gpu.sampler import Collection, DeviceSamples
from resolver.workers import means
from tests.patience import happens
from tests.unit.conftest import Driver

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    written = io.StringIO()
    monkeypatch.setattr(log, "sys", SimpleNamespace(stderr=written))
    log.setup_logging("json", "debug")
    return lambda: [json.loads(line) for line in written.getvalue().splitlines()]


def settings(place: Path, **more: Any) -> Settings:
    return Settings(containers_dir=(str(place),), **{"interval": 0.01, "nvml_interval": 0.01, **more})


def events(lines: Lines) -> Counter[str]:
    return Counter(line["event"] for line in lines())


async def while_running(daemon: Service, scene: Callable[[], Any]) -> None:
    running = asyncio.create_task(daemon.run())
    try:
        await scene()
    finally:
        daemon.stop()
        async with asyncio.timeout(60):
            await running


async def test_a_reload_does_not_wait_for_the_next_pass(driver: Driver, tmp_path: Path, lines: Lines) -> None:
    daemon = Service(settings(tmp_path, interval=60.0, nvml_interval=60.0))

    async def scene() -> None:
        await happens(lambda: daemon.snapshots.passes >= 1 and daemon.decision.policy.namespace)
        daemon.reload(settings(tmp_path, interval=30.0))
        await happens(lambda: daemon.settings.interval == 30.0)

    await while_running(daemon, scene)


@pytest.mark.parametrize("errors", [3, 1000])
async def test_a_defect_is_shown_and_survived_but_not_for_ever(
    driver: Driver, tmp_path: Path, lines: Lines, errors: int
) -> None:
    left = errors

    daemon = Service(settings(tmp_path))
    real = daemon.repairer.pass_once

    async def failing(*args: Any, **kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise ZeroDivisionError("a defect")
        await real(*args, **kwargs)

    daemon.repairer.pass_once = failing  # type: ignore[method-assign]
    if errors == 3:

        async def scene() -> None:
            await happens(lambda: daemon.snapshots.passes >= 3)

        await while_running(daemon, scene)
    else:
        with pytest.raises(ZeroDivisionError, match="a defect"):
            await daemon.run()
    assert daemon.counters["internal_errors"] == min(errors, ERRORS_BEFORE_END)
    shown = [line for line in lines() if line["event"] == "internal_error"]
    assert len(shown) == min(errors, ERRORS_BEFORE_END)
    assert "ZeroDivisionError: a defect" in shown[0]["exception"]


async def test_step_without_resources_makes_daemon_not_ready(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, now, lacks = Service(settings(tmp_path, metrics_addr="off")), 0.0, True
    monkeypatch.setattr(means, "time", SimpleNamespace(monotonic=lambda: now))

    async def collect(_patience: float) -> Collection:
        if lacks:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return Collection(time.time(), "", {})

    monkeypatch.setattr(daemon.gpus, "collect", collect)

    async def scene() -> None:
        nonlocal now, lacks
        await happens(lambda: events(lines)["out_of_means"])
        await happens(lambda: daemon.snapshots.passes > 2)
        now = 11.0
        await happens(lambda: "Cannot allocate memory" in (daemon.snapshots.take().source.not_ready or ""))
        daemon.refused(OSError(errno.EMFILE, "a connection was not accepted"))
        counters = daemon.snapshots.take().counters
        assert (counters["shortages_memory"] > 1, counters["shortages_descriptors"]) == (True, 1)
        lacks = False
        await happens(lambda: events(lines)["means_restored"])
        assert "allocate" not in (daemon.snapshots.take().source.not_ready or "")

    await while_running(daemon, scene)
    causes = {line["why"].rpartition(": ")[2] for line in lines() if line["event"] == "out_of_means"}
    assert "a connection was not accepted" in causes


async def test_a_shortage_that_lasts_is_logged_once(driver: Driver, tmp_path: Path, lines: Lines) -> None:
    daemon = Service(settings(tmp_path))
    listen, left = daemon.listen, 6

    def refused() -> None:
        nonlocal left
        left -= 1
        if 0 <= left < 5:  # the first call comes before the first pass
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        listen()

    daemon.listen = refused  # type: ignore[method-assign]

    async def scene() -> None:
        await happens(lambda: "means_restored" in events(lines))

    await while_running(daemon, scene)
    assert left < 0
    assert events(lines)["out_of_means"] == events(lines)["means_restored"] == 1


async def test_slow_step_delays_the_next_without_doubling(
    driver: Driver, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[float] = []

    async def nothing() -> None:
        pass

    daemon = Service(settings(tmp_path, interval=0.05))

    async def step(**_: Any) -> None:
        began.append(time.monotonic())
        if len(began) == 3:
            await asyncio.sleep(0.3)

    monkeypatch.setattr(daemon, "pass_once", step)
    monkeypatch.setattr(daemon, "collect_once", nothing)  # a new NVML answer brings the next pass forward

    async def scene() -> None:
        await happens(lambda: len(began) >= 7)

    await while_running(daemon, scene)
    assert began[6] - began[3] >= 0.05  # the daemon doesn't catch up on missed steps


async def test_a_picture_is_renewed_after_a_pass_and_with_time(
    driver: Driver, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Service(settings(tmp_path))
    try:
        monkeypatch.setattr(snapshots, "SHOWN_SECONDS", 60.0)
        await daemon.pass_once(patient=False)
        before = daemon.snapshots.shown()
        daemon.counters["made_up"] += 1
        assert daemon.snapshots.shown() is before
        monkeypatch.setattr(snapshots, "SHOWN_SECONDS", 0.0)
        assert daemon.snapshots.shown().counters["made_up"] == 1
        monkeypatch.setattr(snapshots, "SHOWN_SECONDS", 60.0)
        await daemon.pass_once(everything=False)
        shown = daemon.snapshots.shown()
        assert (shown.counters["made_up"], shown.passes) == (1, before.passes + 1)
        daemon.snapshots.passed_at = 1.0
        await daemon.collect_once()  # NVML's answer doesn't count as a pass
        assert daemon.snapshots.take().standstill().startswith("the last pass over the slots is")
    finally:
        daemon.close()


@pytest.mark.parametrize(("quiet", "asks"), [(0.9, True), (1.01, True), (0.0, False)])
async def test_nvml_is_asked_again_to_confirm_idle(tmp_path: Path, *, quiet: float, asks: bool) -> None:
    """NVML is not asked again if the GPU was just busy."""
    daemon = Service(settings(tmp_path, nvml_interval=60))
    began, now = time.monotonic(), 5_000_000
    periods = ((now - int(quiet * 1e6), 30), (now, 0))
    samples = DeviceSamples("ok", "", {4711: 30}, start=now - 2_000_000, periods=periods)
    for _ in range(2):
        daemon.gpus.expect_idleness(Collection(time.time(), "", {"GPU-1": samples}))
    if asks:
        async with asyncio.timeout(60):
            await daemon.gpus.ask_again.wait()
        assert quiet + time.monotonic() - began >= 1.0
        daemon.gpus.ask_again.clear()
    await asyncio.sleep(0.2)
    assert not daemon.gpus.ask_again.is_set(), "each request in between would be repeated for ever"
    daemon.close()


async def test_standby_daemon_serves_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of the API only at takeover once delayed the first pass."""
    done: list[str] = []

    async def serve(*_: object) -> None:
        done.append("served")

    monkeypatch.setattr(api, "load", lambda: done.append("loaded"))
    monkeypatch.setattr(api, "serve", serve)

    service = Service(Settings(), holder="4711")
    service.sockets = ApiSockets(None, None)
    serving = asyncio.create_task(service.serve())
    await asyncio.sleep(0)
    assert done == ["loaded"]
    service.take_over()
    await serving
    service.close()
    assert done == ["loaded", "served"]
