"""The use that a real daemon reports, compared with the containers' actual use, on one GPU and on several."""

import json
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench import integral
from tests.fakes.cachefiles import poke
from tests.fakes.command import run
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.node import Node
from tests.fakes.regions import LAYOUTS
from tests.fakes.scraper import Scraper, name_pod
from tests.kernel.conftest import Start, slot_of, write_at
from tests.kernel.serving import answer, serving
from tests.patience import until

FIRST, SECOND = (device.uuid for device in DEFAULT_DEVICES)
SECONDS = "resolver_container_gpu_seconds_total"
JOULES = "resolver_container_energy_estimate_joules_total"


def said(scraper: Scraper, *words: str) -> str:
    return run(*words, "--socket", scraper.daemon.socket).stdout


def used(scraper: Scraper) -> dict[str, Any]:
    while not (document := said(scraper, "usage", "--json")):
        pass  # the daemon answered too late
    return dict(json.loads(document))


@pytest.mark.long
def test_usage_states_differ_between_containers(
    node: Node, scraping: Callable[..., Scraper], tmp_path: Path
) -> None:
    busy, idle = node.container(name="busy", sm_limit=30), node.container(name="idle", sm_limit=0)
    stranger = node.container(name="stranger")
    for container in (busy, idle, stranger):
        name_pod(tmp_path, container, "ml", container.name)
    tenant = busy.tenant(load=60, devices=DEFAULT_DEVICES[:1])
    idle.tenant(load=0)
    stranger.tenant(load=20)
    stranger.cache.unlink()
    scraper = scraping()
    until(lambda: scraper.read().one(SECONDS, container="busy", device_uuid=FIRST), "something used")
    node.gpu.raise_xid(0, 31)
    until(lambda: scraper.read().one("resolver_container_gpu_xids_total", container="busy"), "the error")
    (event,) = scraper.daemon.said("gpu_xid")
    assert event["containers"] == [f"ml/{each}/{each}" for each in ("busy", "idle", "stranger")]
    until(lambda: used(scraper)["without_slot"], "the one without a slot")
    until(lambda: used(scraper)["without_slot"][0]["causes"], "the causes")
    found = used(scraper)
    (without,) = found["without_slot"]
    assert (without["process"]["container_name"], without["causes"]) == ("stranger", ["not_preloaded"])
    assert "LD_PRELOAD" in said(scraper, "explain", stranger.pod_uid)
    assert "LD_PRELOAD" not in said(scraper, "explain", busy.pod_uid)
    by_name = {(use["container_name"], use["device_uuid"]): use for use in found["containers"]}
    first, other = by_name["busy", FIRST], by_name["idle", FIRST]
    assert (first["core_limit"], first["limit_state"]) == (30, "in_force")  # less than a minute has passed
    assert (other["core_limit"], other["limit_state"]) == (None, "no_limit")
    assert first["idle_since"] is None
    assert other["idle_since"] is not None
    assert other["gpu_seconds"] == 0
    assert other["memory_byte_seconds"] > first["memory_byte_seconds"] * 0.5
    assert first["energy"] > by_name["stranger", FIRST]["energy"] > other["energy"] == 0
    read = scraper.read()
    assert read.one("resolver_container_gpu_idle_seconds", container="busy", device_uuid=FIRST) is None
    idle_for = read.one("resolver_container_gpu_idle_seconds", container="idle", device_uuid=FIRST)
    assert idle_for is not None
    assert idle_for > 20
    assert read.one("resolver_processes_without_slot", container="stranger", device_uuid=FIRST) == 1
    assert read.one("resolver_processes_without_slot", container="busy", device_uuid=FIRST) is None
    shown = said(scraper, "usage")
    assert "in_force" in shown
    assert "not_preloaded: its container has no /etc/ld.so.preload" in shown
    tenant.set_load(0)
    until(lambda: used(scraper)["containers"][0]["idle_since"], "idleness")


def test_gpu_seconds_equal_use_of_processes(tmp_path: Path) -> None:
    rows = list(integral.measure(tmp_path, 20, restart=False))
    assert len(rows) == 20
    assert [row for row in rows if row[1] is None or row[1] > 10] == []


def test_limit_state_follows_policy_and_switch(node: Node, scraping: Callable[..., Scraper]) -> None:
    """In HAMi-core, a process's environment wins over its cache file's switch."""
    expected = {}
    for name, policy, switch, state, dry in (
        ("force-on", "force", 1, "in_force", "begins at 50 %"),
        ("force-off", "force", 0, "in_force", "begins at 50 %"),
        ("disable-on", "disable", 1, "disabled", "50 %, disabled"),
        ("disable-off", "disable", 0, "disabled", "50 %, disabled"),
        ("default-on", "", 1, "in_force", "begins at 50 %"),
        ("default-off", "", 0, "switched_off", "50 %, switched off"),
    ):
        container = node.container(name=name)
        environment = {"GPU_CORE_UTILIZATION_POLICY": policy} if policy else {}
        container.tenant(load=20, guess="none", environment=environment)
        poke(container.cache, LAYOUTS[container.layout].proc_num + 4, "i", switch)
        expected[name] = state, dry
    options = ("--dry-run", "--run-dir", node.root / "run", "--containers-dir", node.containers_dir)
    table = run("run", "--once", *options, env=node.environment()).stdout
    for name, (_, dry) in expected.items():
        (line,) = (line for line in table.splitlines() if f"/{name} " in line)
        assert line.endswith(f"  {dry}")
    scraper, states = scraping(), {(name, state) for name, (state, _) in expected.items()}
    until(
        lambda: (
            {(use["container_name"], use["limit_state"]) for use in used(scraper)["containers"]} == states
        ),
        "the states",
    )


@pytest.mark.parametrize("count", [1, 4])
def test_whole_gpu_container_has_same_series_as_shared(
    node: Node, scraping: Callable[..., Scraper], tmp_path: Path, count: int
) -> None:
    devices = [replace(DEFAULT_DEVICES[0], uuid=f"GPU-{n}{'0' * 35}", minor=n) for n in range(count)]
    node.gpu.set_devices(devices)
    share = node.container(name="share", sm_limit=50, devices=devices)
    whole = node.container(name="whole", devices=devices)
    host_pids: dict[str, int] = {}
    for container, load in ((share, 30), (whole, 40)):
        name_pod(tmp_path, container, "ml", container.name)
        host_pids[container.name] = container.tenant(load=load, devices=devices).host_pid
    whole.cache.unlink()  # HAMi's device plugin gives such a container no file
    scraper = scraping("--hami-metrics")
    loads = {"share": 30, "whole": 40}

    def values(name: str) -> dict[tuple[str, str], float]:
        found = scraper.read().all(name, namespace="ml")
        assert len({frozenset(labels) for labels, _ in found}) <= 1, "the same labels"
        return {(labels["container"], labels["device_uuid"]): value for labels, value in found}

    wanted = {(name, device.uuid): load for name, load in loads.items() for device in devices}
    until(lambda: values("hami_container_device_utilization_ratio") == wanted, "the load of both")
    memory = dict.fromkeys(wanted, 512 << 20)
    assert values("hami_vgpu_memory_used_bytes") == memory

    def sums() -> list[dict[tuple[str, str], float]]:
        """Return the driver's GPU-seconds, the daemon's GPU-seconds, and the daemon's joules."""
        used = {each: node.gpu.used.get((host_pids[each[0]], int(each[1][4])), 0.0) for each in wanted}
        return [used, values(SECONDS), values(JOULES)]

    began = sums()

    def tracked() -> bool:
        """Compare over a growing period, in which a starved daemon's gaps weigh less."""
        used, seconds, joules = (
            {each: now[each] - before.get(each, 0.0) for each in wanted}
            for now, before in zip(sums(), began, strict=True)
        )
        return min(used.values()) > 1 and all(
            abs(seconds[each] / used[each] - 1) < 0.1
            and abs(joules["whole", each[1]] / joules["share", each[1]] - 4 / 3) < 0.15
            for each in wanted
        )

    until(tracked, "the seconds and energy that were used")
    since = values("resolver_container_gpu_since_timestamp_seconds")
    assert all(0 <= time.time() - at < 300 for at in since.values())
    assert since.keys() == wanted.keys()
    shown = {(each["container_name"], each["device_uuid"]) for each in used(scraper)["containers"]}
    assert shown == wanted.keys()
    tree = json.loads(said(scraper, "top", "--json"))
    states = {
        (each["container_name"], each["limit_state"]) for gpu in tree["gpus"] for each in gpu["containers"]
    }
    assert states == {("share", "in_force"), ("whole", "no_limit")}


def test_missing_slot_or_file_is_unknown_at_first(node: Node, start: Start) -> None:
    """One container's only slot has no owner; another has no file, which the daemon searches for ten seconds."""
    main, whole = node.container(name="main"), node.container(name="whole")
    tenant = main.tenant(load=20)
    whole.tenant(load=20)
    whole.cache.unlink()  # HAMi's device plugin gives such a container no file
    layout = LAYOUTS[main.layout]
    slot = layout.procs + slot_of(main, tenant.ns_pid).index * layout.slot_size
    write_at(main.cache, slot, struct.pack("<i", -5))
    daemon = serving(start, node)
    seen: dict[str, list[str]] = {"main": [""], "whole": [""]}

    def reason(name: str) -> str:
        for process in answer(daemon, "processes")["processes"]:
            seen[process["container_name"] or "main"].append(process["no_slot"])
        return seen[name][-1]

    until(lambda: reason("main") == "no_slot", "the process without a slot")
    until(lambda: reason("whole") == "no_shared_region", "the end of the search")
    assert time.monotonic() - daemon.started_at > 10
    assert {*seen["main"]} <= {"", "not_found_yet", "no_slot"}
    assert {*seen["whole"]} <= {"", "not_found_yet", "no_shared_region"}
