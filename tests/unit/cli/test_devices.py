"""`resolver devices`, and waits for a new version of `/v1/gpus`, against the real API over pictures."""

import asyncio
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from resolver import client
from resolver.base.errors import NoDaemon
from resolver.cli.devices import COLUMNS
from resolver.gpu.attribution import NOTHING
from resolver.gpu.inventory import Gpu, Illness, Inventory, MigInstance
from resolver.kube.reporter import InventorySocket
from tests.fakes.command import called
from tests.fakes.reported import gpu
from tests.fakes.served import Served, serving
from tests.patience import until

AT = 1_700_000_000.0
FIRST = replace(
    gpu("GPU-a", 0), minor=1, name="NVIDIA L4", memory_total=24 << 30, nvlinks={"0000:3c:00.0": 2}
)
SECOND = replace(
    FIRST,
    uuid="GPU-b",
    device_index=1,
    minor=0,
    mig=True,
    mig_instances=(MigInstance("MIG-1", 1, 0, 5, 0),),
    illnesses=(Illness("too_hot", "97 C", AT),),
    numa_node=None,
    nvlinks=None,
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(
        tmp_path / "d.sock",
        inventory=Inventory(3, AT, "550.54.15", (FIRST, SECOND)),
        joined=NOTHING._replace(error=""),
    ) as running:
        yield running


def change(served: Served, *gpus: Gpu, error: str = "", version: int = 4) -> None:
    """Publish a new picture, as the daemon does."""

    def show() -> None:
        inventory = Inventory(version, AT, "550.54.15", gpus)
        served.shown = served.shown._replace(inventory=inventory, joined=NOTHING._replace(error=error))
        served.inventories.publish("inventory", {})

    served.call(show)


def resolver(served: Served, *arguments: str) -> subprocess.CompletedProcess[str]:
    return called("devices", "--socket", served.path, *arguments)


def rows_of(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def test_gpu_without_memory_is_named(served: Served) -> None:
    change(served, replace(FIRST, memory_total=None), SECOND)
    assert resolver(served).stderr.startswith("GPU-a: no device memory of its own, so its Device object")


# ---- waiting ------------------------------------------------------------------------------------------------------


def test_caller_with_current_version_waits_for_next(served: Served) -> None:
    first = client.get_changed("/v1/gpus", served.path, tag="", wait=30)
    assert first is not None
    tag, gpus = first
    assert gpus["version"] == 3
    answers: list[Any] = []
    waiting = threading.Thread(
        target=lambda: answers.append(client.get_changed("/v1/gpus", served.path, tag=tag, wait=60))
    )
    waiting.start()
    served.call(lambda: served.inventories.publish("inventory", {}))  # no new version
    waiting.join(0.2)
    assert waiting.is_alive()
    change(served, FIRST)
    waiting.join(60)
    assert [(answer[0] == tag, answer[1]["version"]) for answer in answers] == [(False, 4)]
    change(served, FIRST, error="it hangs")  # another answer with the same version
    failed = client.get_changed("/v1/gpus", served.path, tag=answers[0][0], wait=30)
    assert failed is not None
    assert failed[1]["error"] == "it hangs"
    assert client.get_changed("/v1/gpus", served.path, tag=failed[0], wait=1) is None


def test_caller_that_hangs_up_leaves_nothing_behind(served: Served) -> None:
    first = client.get_changed("/v1/gpus", served.path, tag="", wait=30)
    assert first is not None
    for _ in range(40):  # more clients than may wait at a time
        with client._connect(
            "/v1/gpus?wait=600", served.path, "*/*", 5.0, headers=f"If-None-Match: {first[0]}\r\n"
        ):
            pass
    until(lambda: not served.gatekeeper.inside and not served.gatekeeper.streams, "the end of all")


def test_wait_is_bounded(served: Served) -> None:
    for wait in (0, 601):
        with pytest.raises(Exception, match=r"Expected `int` [<>]= \d+ - at `\$\.wait`"):
            client.get_changed("/v1/gpus", served.path, tag="x", wait=wait)
    with pytest.raises(NoDaemon, match="no such socket"):
        client.get_changed("/v1/gpus", served.path + "x", tag="", wait=1)


# ---- the command --------------------------------------------------------------------------------------------------


def test_table_in_a_pipe_has_every_column(served: Served) -> None:
    done = resolver(served)
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = rows_of(done.stdout)
    assert head == list(COLUMNS)
    assert json.loads(resolver(served, "--json").stdout) == client.get_json("/v1/gpus", served.path)
    since = "2023-11-14T22:13:20.000Z"
    assert rows == [
        ["0", "GPU-a", "1", "NVIDIA L4", "24.0GiB", "0", "0000:3b:00.0", "off", "healthy", "-", "-", "2"],
        ["1", "GPU-b", "0", "NVIDIA L4", "24.0GiB", "-", "0000:3b:00.0", "1", "unhealthy", "too_hot", since, "-"],
    ]  # fmt: skip


def test_no_gpu_is_healthy_while_nvml_fails(served: Served) -> None:
    change(served, FIRST, SECOND, error="it hangs")
    done = resolver(served)
    assert done.returncode == 0
    assert [row[8] for row in rows_of(done.stdout)[1:]] == ["unknown", "unhealthy"]
    assert "NVML does not answer (it hangs)" in done.stderr


@pytest.mark.parametrize("marks", [["GPU-a", "GPU-b"], ["*"]])
def test_operators_mark_is_shown(served: Served, marks: list[str]) -> None:
    reporter = InventorySocket(served.path)
    for expected in ([], marks):
        answer = asyncio.run(reporter.changed())  # waits for another answer
        assert answer is not None
        assert answer["cordoned"] == expected
        asyncio.run(reporter.cordon(marks))
    rows = rows_of(resolver(served).stdout)[1:]
    assert [row[8:10] for row in rows] == [["cordoned", "cordoned"], ["unhealthy", "too_hot,cordoned"]]


def test_node_without_gpus_has_no_table(served: Served) -> None:
    change(served)
    done = resolver(served)
    assert (done.returncode, done.stdout) == (0, "")
    assert "knows no GPU" in done.stderr
