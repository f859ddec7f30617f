"""What every engine is asked for, and the tenants in its containers, with the truth from the driver's stand-in."""

import os
import struct
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.fakes.chain import Chain
from tests.fakes.node import Node
from tests.fakes.regions import ProcSlot, read_file
from tests.patience import until
from tests.runtime.engines.machine import Machine

#: Where HAMi's device plugin mounts a container's directory, and where its library has the file without one.
IN_HAMI, ALONE = "/usr/local/vgpu", "/tmp/cudevshr.cache"  # noqa: S108
NAME = "tenant-of-gpu"


class Mount(NamedTuple):
    source: Path
    target: str
    read_only: bool = False


class Asked(NamedTuple):
    """The settings of a container that all engines have."""

    name: str
    command: Sequence[str]
    mounts: Sequence[Mount]
    env: Mapping[str, str]


class Engine(ABC):
    """A running engine. Its containers have the names of their requests."""

    enters = True

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    @abstractmethod
    def start(self, asked: Asked, *options: str) -> None:
        """Starts a container in the background; ``options`` are the engine's own."""

    @abstractmethod
    def enter(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Run a command in a container in the background."""

    @abstractmethod
    def ids(self, name: str) -> dict[str, str]:
        """Return every id of a container by the engine's command that prints it, the full id first."""

    def names(self, name: str) -> list[str]:  # noqa: ARG002 - others have some
        """Return the engine's other names of a container, which the kernel lacks."""
        return []

    @abstractmethod
    def stop(self, name: str) -> None:
        """End and remove a container."""


def volume(mount: Mount) -> str:
    """A mount in the words of Docker and Podman."""
    return f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}"


class Tenants:
    """Processes with HAMi's cache protocol, in one container of an engine.

    ``in_hami``: in the directory that HAMi has for the container on the node; otherwise in the container alone.
    """

    def __init__(
        self,
        node: Node,
        engine: Engine,
        *options: str,
        in_hami: bool = True,
        name: str = NAME,
        pod_uid: str | None = None,
        container: str = "train",
    ) -> None:
        self.node, self.engine, self.name = node, engine, name
        self.pod_uid = pod_uid or str(uuid.uuid4())
        self.directory = node.containers_dir / f"{self.pod_uid}_{container}"
        self.found: list[Chain] = []
        self._in_container = f"{IN_HAMI}/{uuid.uuid4()}.cache" if in_hami else ALONE
        mounts = [Mount(node.built, str(node.built), read_only=True), Mount(node.root, str(node.root))]
        if in_hami:
            self.directory.mkdir()
            self.directory.chmod(0o777)
            mounts.insert(0, Mount(self.directory, IN_HAMI))
        self.env = {
            "PATH": "/bin",
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": self._in_container,
            **node.stand_in(),
        }
        self._in_hami, self._driver = in_hami, True
        self._asked = Asked(name, self._command(), mounts, self.env)
        self._options = options

    def main(self) -> Chain:
        return self._started(lambda: self.engine.start(self._asked, *self._options))

    def another(self) -> Chain:
        return self._started(lambda: self.engine.enter(self.name, self._command(), self.env))

    def unseen(self) -> ProcSlot:
        """Start the container, or one more tenant, without a driver; return the new slot."""
        before = len(self.slots())
        self._driver = False
        if before:
            self.engine.enter(self.name, self._command(), self.env)
        else:
            self.engine.start(self._asked._replace(command=self._command()), *self._options)
        until(lambda: len(self.slots()) > before, "a tenant's slot", 20)
        return self.slots()[-1]

    def slots(self) -> Sequence[ProcSlot]:
        try:
            return [slot for slot in read_file(self.file).slots if slot.status]
        except (FileNotFoundError, ValueError, struct.error):  # it is only being made
            return []

    def slot(self, chain: Chain) -> ProcSlot:
        slot = read_file(self.file).slot(chain.ns_pid)
        assert slot is not None, f"{chain} has no slot in {read_file(self.file)}"
        return slot

    @property
    def file(self) -> Path:
        """The host's path of the cache file."""
        if self._in_hami:
            return self.directory / os.path.basename(self._in_container)
        return Path(f"/proc/{self.found[0].host_pid}/root{ALONE}")

    def stop(self) -> None:
        self.engine.stop(self.name)

    def _command(self) -> list[str]:
        """Return the command of a tenant whose standard input, a FIFO that it also writes to, never ends."""
        tenant = [str(self.node.built / "tenant"), "--cache", "$CUDA_DEVICE_MEMORY_SHARED_CACHE"]
        tenant += ["--uuid", self.node.gpu.devices[0].uuid, "--guess", "wrong", "--load", "30"]
        if self._driver:
            tenant += ["--driver-socket", str(self.node.driver_socket)]
        fifo = f"/tmp/in-{uuid.uuid4()}"  # noqa: S108 - in a container
        return ["sh", "-c", f"mkfifo {fifo} && exec {' '.join(tenant)} <>{fifo}"]

    def _started(self, launch: Callable[[], None]) -> Chain:
        before = {client.chain for client in self.node.gpu.clients()}
        launch()
        new: set[Chain] = set()

        def connected() -> bool:
            new.update({client.chain for client in self.node.gpu.clients() if client.on} - before)
            return bool(new)

        until(connected, "a tenant that uses the GPU", 20)
        (chain,) = new
        self.found.append(chain)
        return chain
