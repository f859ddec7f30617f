"""A real Prometheus scrapes the real daemon: the dashboard's queries have data, alerts fire, and none without cause."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.container import Container
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.monitored import PODS, TARGET, dashboard, jobs, legend, name_pods, queries
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.prometheus import HamiMonitor, Prometheus
from tests.fakes.regions import LAYOUTS
from tests.fakes.scene import full_scene, settle
from tests.fakes.state import Hang
from tests.kernel.conftest import (
    WRITER,
    Daemon,
    Start,
    hostpid_of,
    slot_of,
    until,
    write_at,
    write_hostpid,
)
from tests.kernel.test_sources import NO_BTF, patched

FAST = ("--interval", "100ms", "--nvml-interval", "500ms")
MENDED = "What the sources lost, missed and mended"
UTILIZATION = "resolver_container_utilization_ratio"


def address(daemon: Daemon) -> str:
    """Where its metrics are."""
    return str(daemon.wait_for("metrics_on")["address"])


def lie(container: Container, tenant: Tenant) -> None:
    """A slot of this container says that it is of the container's first process, which never used HAMi."""
    layout, slot = LAYOUTS[container.layout], slot_of(container, tenant.ns_pid)
    write_at(container.cache, layout.procs + slot.index * layout.slot_size, struct.pack("<i", 1))


def test_every_query_of_the_dashboard_returns_data(
    node: Node, start: Start, source: str, tmp_path: Path
) -> None:
    """The demo's node, scraped as docs/monitoring.md says; values against what the processes really do."""
    cases = full_scene(node)
    settle(cases)
    node.gpu.set_devices((DEFAULT_DEVICES[0], replace(DEFAULT_DEVICES[1], ecc=(2, 2))))
    containers = list(dict.fromkeys(case.container for case in cases))
    names = name_pods(containers, tmp_path / "pods")
    daemon = start(node, *FAST, "--metrics-addr", "127.0.0.1:0", "--pod-logs-dir", str(tmp_path / "pods"))
    began = time.time()
    with (
        HamiMonitor([each for each in containers if each.name in PODS], names) as monitor,
        Prometheus(tmp_path / "prometheus", jobs(address(daemon), monitor.address)) as prometheus,
    ):
        wanted = {
            (*PODS[name], name): sum(
                case.load or 0 for case in cases if case.container.name == name and not case.ended
            )
            / 100
            for name in PODS
        }

        def told() -> dict[tuple[str, ...], float]:
            found = prometheus.query(
                f"sum by (namespace, pod, container) ({UTILIZATION}{{namespace!='', node='gpu-node-1'}})"
            )
            return {
                tuple(each.labels[label] for label in ("namespace", "pod", "container")): round(each.value, 2)
                for each in found
            }

        until(lambda: told() == wanted, "every container's true load")
        (nameless,) = prometheus.query(f'{UTILIZATION}{{container="legacy"}}')
        assert not {"pod", "namespace"} & nameless.labels.keys(), "the target's own pod is nobody else's"
        until(
            lambda: prometheus.query("resolver_source == 1")[0].labels["resolver_source"] == source,
            f"source {source}",
        )
        # Two scrapes with every family: what a rate needs. A scan counts nothing: it loses nothing.
        empty = {MENDED} if source == "scan" else set()
        until(lambda: _without_data(prometheus, {}) == empty, "data for every query")
        assert _without_data(prometheus, {"node": TARGET["node"]}) == empty
        assert _without_data(prometheus, {"node": "gpu-node-1|gpu-node-2", "pod": "train-0"}) == empty
        here = {"namespace": "ml", "pod": "train-0", "node": TARGET["node"]}
        for variable in dashboard()["templating"]["list"][1:]:
            values = prometheus.label_values(re.sub(r"\$\w+", ".*", variable["query"]["query"]))
            assert here[variable["name"]] in values
        for query in queries(dashboard()["panels"]):
            if not query.instant and query.panel not in empty:
                until(
                    lambda q=query: prometheus.query_range(q.concrete(), began, time.time()),  # type: ignore[misc]
                    f"a curve for {query.panel}",
                )


def _without_data(prometheus: Prometheus, chosen: dict[str, str]) -> set[str]:
    """The panels with a query that returns nothing, or no number. Fails where a legend could not be made of it."""
    found = set()
    asked = list(queries(dashboard()["panels"]))
    assert len(asked) > 40
    for query in asked:
        answer = prometheus.query(query.concrete(**chosen))
        if not any(math.isfinite(each.value) for each in answer):
            found.add(query.panel)
        labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        for each in answer:
            # What is unknown of a container is no label; all the rest must be there.
            assert labels <= each.labels.keys() | {"namespace", "pod"}, (query, each.labels)
        series = [legend(query.legend, each.labels) for each in answer]
        assert len(set(series)) == len(series) or not query.legend, f"names twice: {query.panel} {series}"
    return found


class Fires:
    """What Alertmanager would get."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus

    def now(self) -> set[str]:
        """The names of those that fire."""
        return set(self._prometheus.firing())

    def silence(self, for_s: float = 2.5) -> None:
        """Until none has fired for so long that every rule was evaluated. Here nothing waits, as it would outside."""
        since = time.monotonic()

        def silent() -> bool:
            nonlocal since
            if self.now():
                since = time.monotonic()
            return time.monotonic() - since > for_s

        until(silent, f"no alert where nothing is wrong: {self.now()}")

    def wait(self, name: str, **labels: str) -> None:
        """Until it fires with these labels."""

        def there() -> bool:
            return any(labels.items() <= alert.items() for alert in self._prometheus.firing().get(name, ()))

        until(there, f"{name} {labels}")

    def gone(self, name: str) -> None:
        """Until it does not fire any more."""
        until(lambda: name not in self.now(), f"the end of {name}")


# ---- alerts -------------------------------------------------------------------------------------------------------


def hurried(rules: str) -> str:
    """The shipped rules, with a second for a minute and nothing to wait for: who fires, not when, is asked here."""
    rules = re.sub(r"^ +for: .*\n", "", rules, flags=re.MULTILINE)
    return re.sub(r"\[\d+[mh]\]", "[20s]", rules)


@pytest.fixture
def alerts(root: Path) -> str:
    return hurried((root / "deploy/alerts/resolver.rules.yaml").read_text())


def test_alerts_fire_for_what_they_are_about_and_for_nothing_else(
    node: Node, start: Start, source: str, alerts: str, tmp_path: Path
) -> None:
    container, other = node.container(name="train"), node.container(name="serve", watcher=False)
    tenant, fought = container.tenant(load=40, guess="none"), other.tenant(load=20, guess="none")
    directories = f"{node.containers_dir}:{tmp_path / 'missing'}"
    daemon = start(node, *FAST, "--metrics-addr", "127.0.0.1:0")
    at = address(daemon)
    with Prometheus(tmp_path / "prometheus", jobs(at), alerts) as prometheus:
        fires = Fires(prometheus)
        until(lambda: prometheus.query("resolver_ready == 1"), "a scrape of a daemon that is ready")
        until(lambda: hostpid_of(container, tenant) == tenant.host_pid, "a repair")
        until(lambda: prometheus.query(f"sum({UTILIZATION}) > 0.5"), "its load")
        fires.silence()

        node.gpu.set_devices((replace(DEFAULT_DEVICES[0], lost=True), *DEFAULT_DEVICES[1:]))
        fires.wait(
            "ResolverGpuUnhealthy", reason="lost", device_index="0", severity="critical", node="gpu-node-1"
        )
        node.gpu.set_devices(DEFAULT_DEVICES)
        lie(container, tenant)
        fires.wait("ResolverSlotsUnresolved", severity="warning")

        stopped: set[int] = set()

        def hangs() -> bool:
            """Each writer, one after the other: one that is late may have had no time, three in a row did not."""
            with contextlib.suppress(KeyError, ProcessLookupError):  # between two of them
                writer = daemon.children()[WRITER]
                if writer not in stopped:
                    os.kill(writer, signal.SIGSTOP)
                    stopped.add(writer)
                    # somebody to be written about, by a writer that is stopped already
                    other.tenant(guess="none")
            return "ResolverQuarantine" in fires.now()

        until(hangs, "ResolverQuarantine")
        node.gpu.set_faults(hang=Hang.UTILIZATION)
        fires.wait("ResolverNvmlFailing")
        node.gpu.set_faults()
        fires.gone("ResolverDown")
        daemon.stop()
        fires.wait("ResolverDown", instance=at)
        fires.wait("ResolverAbsent", severity="critical")

        options = ("--source", "auto", "--metrics-addr", at, "--containers-dir", directories)
        start(node, *FAST, *options, wrapper=patched(NO_BTF))
        fires.wait("ResolverSourceDegraded")
        fires.wait("ResolverDirectoryMissing")
        fires.gone("ResolverAbsent")

        def fight() -> bool:
            if hostpid_of(other, fought) == fought.host_pid:
                write_hostpid(other, fought, 0)
            return "ResolverConflicts" in fires.now()

        until(fight, "ResolverConflicts")
