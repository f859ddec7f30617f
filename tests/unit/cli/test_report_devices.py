"""`resolver report-devices` as a process: between the daemon's real API and a fake API server."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.base.version import VERSION
from resolver.gpu.attribution import NOTHING
from resolver.gpu.inventory import Inventory
from resolver.kube.device import health
from tests.fakes.kube import DEVICES, KubeServer
from tests.fakes.reported import AT, NODE, gpu
from tests.fakes.reporter import Reporter
from tests.fakes.served import Served, serving
from tests.patience import until

A, B, ILL = gpu("GPU-a", 0), gpu("GPU-b", 1), gpu("GPU-b", 1, "too_hot")


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


def test_reporter_reconnects_to_a_restarted_daemon(kube: KubeServer, tmp_path: Path) -> None:
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
    assert "daemon_unreachable" in {line["event"] for line in log}


def test_reporters_started_together_spread_requests(kube: KubeServer, daemon: Served) -> None:
    reporter = Reporter(kube, daemon.path, "--spread", "100m")
    try:
        until(lambda: reporter.ask("/healthz")[0] == 200, "healthy")
        until(lambda: reporter.metric("resolver_report_daemon_up") == 1, "the daemon")
        assert not [request for request in kube.asked if request.path.startswith(DEVICES)]
    finally:
        reporter.stop()


def test_missing_extra_names_the_package() -> None:
    program = "import sys; sys.modules['httpx2'] = None; from resolver.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "report-devices"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"pip install 'hami_resolver-{VERSION}-py3-none-any.whl[kubernetes]'" in done.stderr


@pytest.mark.parametrize(
    "module", ["resolver.daemon.service", "resolver.metrics", "resolver.api.app", "resolver.cli.devices"]
)
def test_other_commands_do_not_import_the_extra(module: str) -> None:
    program = (
        f"import sys, {module}; sys.exit('httpx2' in sys.modules or 'resolver.kube.apiserver' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
