"""Every placement in real containers: the mounts are runc's, and each tenant is process 1 of its container."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.node import Node
from tests.fakes.placements import PLACEMENTS
from tests.fakes.regions import read_file
from tests.fakes.releases import RELEASES
from tests.kernel.conftest import Daemon, until
from tests.runtime.runc import CGROUP_TOP, cgroup_mounts, remove_cgroups

_FROM_HOST = ("/usr", "/bin", "/lib", "/lib64", "/etc")


class Real:
    """A container with one tenant, as a scheduler's device plugin has it mounted."""

    def __init__(self, node: Node, work: Path, placement: str) -> None:
        row = PLACEMENTS[placement]
        self.name, self.pod_uid = f"c-{placement}", str(uuid.uuid4())
        self.container_id = secrets.token_hex(32)
        words = {
            "entry": f"{self.pod_uid}_{self.name}",
            "uuid": str(uuid.uuid4()),
            "claim": str(uuid.uuid4()),
        }
        root = node.placement_dir(placement)
        directory = root / row.directory.format(**words)
        bind, at = root / row.bind.format(**words), row.at.format(**words)
        if not row.made_inside:
            directory.mkdir()
            directory.chmod(0o777)
        self.cache = directory / row.file.format(**words)
        inside = f"{at}/{self.cache.relative_to(bind)}"
        arguments = [str(node.built / "tenant"), "--cache", inside, "--uuid", DEFAULT_DEVICES[0].uuid]
        arguments += ["--use", DEFAULT_DEVICES[0].uuid, *RELEASES["2.9.0"].arguments(), "--load", "40"]
        arguments += ["--guess", "wrong", "--driver-socket", str(node.driver_socket)]
        self._bundle, self._state = work / placement, work / "state"
        (self._bundle / "rootfs").mkdir(parents=True)
        pod = self.pod_uid.replace("-", "_")
        self.cgroup = (
            f"/{CGROUP_TOP}/kubepods.slice/kubepods-pod{pod}.slice/cri-containerd-{self.container_id}.scope"
        )
        config = self._config(arguments, node, [(bind, at)])
        (self._bundle / "config.json").write_text(json.dumps(config))

    def _config(self, arguments: list[str], node: Node, binds: list[tuple[Path, str]]) -> dict[str, Any]:
        def bound(source: str, to: str, *options: str) -> dict[str, Any]:
            return {"destination": to, "type": "bind", "source": source, "options": ["rbind", *options]}

        def fresh(to: str) -> dict[str, Any]:
            return {"destination": to, "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]}

        environment = {**node.tenant_environment(), "PATH": "/usr/bin:/bin"}
        return {
            "ociVersion": "1.0.2",
            "process": {
                "args": arguments,
                "cwd": "/",
                "user": {"uid": 0, "gid": 0},
                "env": [f"{name}={value}" for name, value in environment.items()],
            },
            "root": {"path": "rootfs"},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                *(bound(path, path, "ro") for path in _FROM_HOST if os.path.isdir(path)),
                fresh("/usr/local"),
                fresh("/tmp"),  # noqa: S108 - the container's own
                bound(str(node.built), str(node.built), "ro"),
                bound(str(node.driver_socket.parent), str(node.driver_socket.parent)),
                *(bound(str(source), to) for source, to in binds),
            ],
            "linux": {
                "namespaces": [{"type": "mount"}, {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}],
                "cgroupsPath": self.cgroup,
            },
        }

    def __enter__(self) -> Self:
        reader, self._stdin = os.pipe()
        with (self._bundle / "log").open("wb") as log:
            done = subprocess.run(
                [*self._runc(), "run", "--detach", "--bundle", self._bundle, self.container_id],
                stdin=reader,
                stdout=log,
                stderr=log,
                check=False,
            )
        os.close(reader)
        assert done.returncode == 0, (self._bundle / "log").read_text()
        state = subprocess.check_output([*self._runc(), "state", self.container_id])
        self.host_pid = int(json.loads(state)["pid"])
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._stdin)
        subprocess.run(
            [*self._runc(), "delete", "--force", self.container_id], capture_output=True, check=False
        )
        for mount in cgroup_mounts():
            remove_cgroups(mount / self.cgroup.lstrip("/"))

    def _runc(self) -> list[str | Path]:
        return ["runc", "--root", self._state]

    def hostpid(self) -> int | None:
        """What its slot says; None before it has one."""
        try:
            slot = read_file(self.cache).slot(1)
        except (FileNotFoundError, ValueError):
            return None
        return slot.hostpid if slot is not None else None


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
    for mount in cgroup_mounts():
        remove_cgroups(mount / CGROUP_TOP)


def test_every_placement_in_real_containers(tmp_path: Path, stack: ExitStack) -> None:
    """All tenants have the PID 1 in their containers, and in KAI's tree another one has its file beside."""
    node = stack.enter_context(Node(tmp_path / "node", "535.183.01"))
    started = []
    for number, placement in enumerate((*PLACEMENTS, "kai")):
        real = stack.enter_context(Real(node, tmp_path / str(number), placement))
        node.log(real)
        started.append(real)
    for real in started:
        until(lambda r=real: r.hostpid() == 999999, f"{real.name}'s slot")  # type: ignore[misc]
    run_dir = tmp_path / "run"
    options = (
        "--interval",
        "50ms",
        "--nvml-interval",
        "200ms",
        "--hostpid-namespace",
        "host",
        "--source",
        "scan",
    )
    daemon = Daemon(node, run_dir, *options, *node.placement_options())
    stack.callback(daemon.stop)
    for real in started:
        until(lambda r=real: r.hostpid() == r.host_pid, f"{real.name}'s repair")  # type: ignore[misc]
    wanted = {(real.pod_uid, real.name) for real in started if real.name != "c-dra"}
    until(
        lambda: {(line["pod_uid"], line["container_name"]) for line in daemon.said("repair")} >= wanted,
        "the names in the log",
    )
