"""`resolver report-devices` as a process of its own."""

import json
import re
import signal
import subprocess
import sys
from typing import Any

from tests.fakes.daemon import free_port
from tests.fakes.kube import KubeServer
from tests.fakes.reported import NODE
from tests.fakes.scraper import get


class Reporter:
    def __init__(self, kube: KubeServer, daemon: str, *options: str) -> None:
        self.port = free_port()
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
        try:
            return get(self.port, path)
        except OSError:
            return 0, ""

    def ready(self) -> bool:
        return self.ask("/readyz")[0] == 200

    def metric(self, name: str) -> float:
        (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", self.ask("/metrics")[1], re.MULTILINE)
        return float(value)

    def stop(self) -> list[dict[str, Any]]:
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, said
        return [json.loads(line) for line in said.splitlines()]
