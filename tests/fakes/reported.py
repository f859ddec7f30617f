"""The real reporter against the stand-in API server, with a daemon whose answers a test sets."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from resolver.api import shapes
from resolver.base.errors import NoDaemon
from resolver.base.journal import Journal
from resolver.gpu.inventory import Gpu, Illness
from resolver.kube import reporter as reporter_module
from resolver.kube.apiserver import ApiServer
from resolver.kube.device import health
from resolver.kube.reporter import InventorySocket, Plan, Reporter
from resolver.kube.tally import Tally
from tests.fakes.kube import KubeServer
from tests.patience import PATIENCE_S

NODE = "gpu-7"
AT = 1_700_000_000.0


def gpu(uuid: str, minor: int, *reasons: str, **more: Any) -> Gpu:
    illnesses = tuple(Illness(reason, "as it is", AT) for reason in reasons)
    memory = 24 << 30
    plain = Gpu(uuid, minor, minor, "NVIDIA L4", memory, 1, 0, 50, 60.0, False, (), 0, "ok", "", illnesses)
    place: dict[str, Any] = {"pci_address": f"0000:{0x3B + minor:02x}:00.0", "numa_node": 0}
    place |= {"pcie_root": "pci0000:3a", "cpu_socket": 0}
    return replace(plain, **(place | more))


class Told:
    """A daemon: `say` changes its answer, `down` lets it answer no more."""

    def __init__(self) -> None:
        self._answer: Any = None
        self._version = 0
        self._given = 0
        self._news = asyncio.Event()
        self._why = ""
        self.cordoned: list[str] = []

    def say(self, *gpus: Gpu, error: str = "", version: int | None = None) -> None:
        self._version += 1
        number = self._version if version is None else version
        answer = shapes.Gpus(
            AT, number, "550.54.15" if gpus else None, error or None, self.cordoned, list(gpus)
        )
        self._answer, self._why = msgspec.to_builtins(answer), ""
        self._news.set()

    def down(self) -> None:
        self._why, self._given = "nothing listens there", 0
        self._news.set()

    async def cordon(self, uuids: list[str]) -> None:
        self.cordoned = self._answer["cordoned"] = uuids

    async def changed(self) -> Any:
        while not self._why and (self._answer is None or self._given == self._version):
            self._news.clear()
            await self._news.wait()
        if self._why:
            raise NoDaemon(self._why)
        self._given = self._version
        return self._answer


class Run:
    def __init__(self, kube: KubeServer, **plan: Any) -> None:
        self.kube = kube
        self.server = ApiServer(kube.url, str(kube.account))
        self.daemon, self.tally = Told(), Tally(self.server.requests)
        chosen = Plan(NODE, **{"spread": 0.0} | plan)
        self.reporter = Reporter(
            self.server, cast("InventorySocket", self.daemon), chosen, self.tally, Journal()
        )

    @property
    def device(self) -> Any:
        return self.kube.devices.get(NODE)

    def health(self) -> dict[str, bool]:
        return {uuid: state[0] for uuid, state in health(self.device).items()}

    def reasons(self) -> dict[str, str]:
        return {uuid: state[1] for uuid, state in health(self.device).items()}

    async def until(self, what: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, (
                f"{self.tally.not_in_sync!r}, {self.tally.writes}, {self.kube.defects}, {self.device}"
            )
            await asyncio.sleep(0.01)

    async def in_sync(self) -> None:
        await self.until(lambda: not self.tally.not_in_sync)


@contextlib.asynccontextmanager
async def reporting(kube: KubeServer, **plan: Any) -> AsyncIterator[Run]:
    """A reporter that runs, and ends at once when it is left; it must not have ended before."""
    run = Run(kube, **plan)
    working = asyncio.create_task(run.reporter.run())
    try:
        yield run
        assert not working.done(), working
    finally:
        working.cancel()
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(asyncio.CancelledError):
                await working
            await run.server.close()


def impatient(monkeypatch: Any) -> None:
    """Shorten the reporter's deliberate waits."""
    monkeypatch.setattr(reporter_module, "NVML_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(reporter_module, "APART_SECONDS", 0.05)
