"""A reader of one daemon's metrics, and the names of pods that kubelet would give."""

import http.client
import time
from pathlib import Path

from tests.fakes.container import Container
from tests.fakes.daemon import Daemon
from tests.fakes.exposition import Read
from tests.fakes.gpu import DEFAULT_DEVICES

UTILIZATION = "resolver_container_utilization_ratio"
FIRST = DEFAULT_DEVICES[0].uuid


def get(port: int | str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Scraper:
    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.port = int(str(daemon.wait_for("metrics_on")["address"]).rpartition(":")[2])
        self.slowest = 0.0

    def get(self, path: str) -> tuple[int, str]:
        began = time.monotonic()
        try:
            return get(self.port, path)
        finally:
            self.slowest = max(self.slowest, time.monotonic() - began)

    def text(self) -> str:
        status, text = self.get("/metrics")
        assert status == 200, text
        return text

    def read(self) -> Read:
        return Read(self.text().encode())

    def utilization(self, container: Container, device: str = FIRST) -> float | None:
        return self.read().one(UTILIZATION, pod_uid=container.pod_uid, device_uuid=device)


def name_pod(tmp_path: Path, container: Container, namespace: str, pod: str) -> None:
    (tmp_path / "pods" / f"{namespace}_{pod}_{container.pod_uid}").mkdir(parents=True)
