"""A real Prometheus server on loopback, for one test: scrapes every second and answers queries."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode

import yaml
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tests.fakes.container import Container
from tests.fakes.daemon import BOUND
from tests.fakes.scraper import get
from tests.patience import until


def program(name: str) -> str:
    """Where `prometheus` or `promtool` is."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found, f"{name} is not installed: `make setup-dev` takes it out of Debian's package prometheus"
    return found


class Series(NamedTuple):
    """One series of an answer: its labels, and (Unix time, value) pairs, one of them for a query of an instant."""

    labels: dict[str, str]
    points: list[tuple[float, float]]

    @property
    def value(self) -> float:
        return self.points[-1][1]


class Prometheus:
    def __init__(self, place: Path, scrape: Sequence[Mapping[str, Any]]) -> None:
        self._place = place
        place.mkdir()
        settings: dict[str, Any] = {"global": {"scrape_interval": "1s"}, "scrape_configs": list(scrape)}
        (place / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        self._lines: list[str] = []
        self._port = 0

    def __enter__(self) -> Self:
        command = [
            program("prometheus"),
            f"--config.file={self._place / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self._place / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        ]
        self._process = subprocess.Popen(
            [*BOUND, *command],
            env={**os.environ, "GOMAXPROCS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, name="prometheus log")
        self._reader.start()
        try:
            until(self._ready, "Prometheus")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGKILL)  # nothing of it is kept
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self._lines.append(line.rstrip())
                if found := re.search(r'msg="Listening on".* address=127\.0\.0\.1:(\d+)', line):
                    self._port = int(found[1])

    def _ready(self) -> bool:
        assert self._process.poll() is None, "Prometheus ended: " + "\n".join(self._lines[-5:])
        return bool(self._port) and self._get("/-/ready")[0] == 200

    def _get(self, path: str, **parameters: object) -> tuple[int, str]:
        return get(self._port, f"{path}?{urlencode(parameters)}" if parameters else path)

    def _api(self, path: str, **parameters: object) -> Any:
        status, text = self._get(f"/api/v1/{path}", **parameters)
        answer = json.loads(text)
        assert (status, answer["status"]) == (200, "success"), f"{path} {parameters}: {text}"
        return answer["data"]

    def query(self, expression: str) -> list[Series]:
        found = self._api("query", query=expression)
        assert found["resultType"] == "vector", found
        return [Series(each["metric"], [_point(each["value"])]) for each in found["result"]]

    def query_range(self, expression: str, start: float, end: float) -> list[Series]:
        found = self._api("query_range", query=expression, start=start, end=end, step=1.0)
        return [Series(each["metric"], list(map(_point, each["values"]))) for each in found["result"]]

    def label_values(self, expression: str) -> list[str]:
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", expression)
        assert found, f"no label_values: {expression}"
        values: list[str] = self._api(f"label/{found[2]}/values", **{"match[]": found[1]})
        return values


def _point(pair: Sequence[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


class HamiMonitor(Collector):
    """The exporter of HAMi's own monitor: the utilization in these containers' cache files, under both of its names.

    `names` maps a container's pod UID to its namespace and pod.
    """

    def __init__(self, containers: Sequence[Container], names: Mapping[str, tuple[str, str]]) -> None:
        self._containers, self._names = containers, names

    def __enter__(self) -> Self:
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(0, "127.0.0.1", registry)
        self.address = f"127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Sequence[Metric]:
        new = ("namespace", "pod", "container", "vdevice_index", "device_uuid")
        old = ("podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid")
        families = (
            GaugeMetricFamily("hami_container_device_utilization_ratio", "", labels=new),
            GaugeMetricFamily("Device_utilization_desc_of_container", "", labels=old),
        )
        for container in self._containers:
            for position, (uuid, percent) in enumerate(container.monitor_view().items()):
                labels = (*self._names[container.pod_uid], container.name, str(position), uuid)
                for family in families:
                    family.add_metric(labels, percent)
        return families
