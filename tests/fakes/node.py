"""A GPU node in miniature: real namespaces, real cgroups, real processes; only the GPU is a stand-in.

    with Node(tmp_path, "535.183.01") as node:
        container = node.container("0f0e...", "train", cgroup_format="crio-systemd", sm_limit=50)
        tenant = container.tenant(load=87)
        tenant.host_pid, tenant.ns_pid, tenant.slot()

A node and its containers are made in the main thread: Linux ties "die with your parent" to the thread
that forked.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.fakes import build
from tests.fakes.cgroups import CgroupTree
from tests.fakes.container import Container
from tests.fakes.gpu import DEFAULT_DEVICES, Device, Gpu
from tests.fakes.placements import EVERY, PLACEMENTS
from tests.fakes.process import NodeError


class Node:
    """The node: a driver, a containers directory, and the containers. Everything is gone when it is left."""

    def __init__(
        self,
        root: Path,
        driver_version: str,
        devices: Sequence[Device] = DEFAULT_DEVICES,
        library: Path | None = None,
    ) -> None:
        """Take ``library``, a directory with NVIDIA's own; then processes take turns on a GPU."""
        self.root = root
        self._library = library
        self.containers_dir = root / "vgpu" / "containers"
        self.driver_socket = root / "driver.sock"
        self.state_file = root / "nvml-state"
        self.pod_logs_dir = root / "log" / "pods"
        self.container_logs_dir = root / "log" / "containers"
        self.containers: list[Container] = []
        self._driver_version, self._devices = driver_version, devices

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise NodeError(
                "a node is made in the main thread: its processes die with the thread that forked them"
            )
        self.built = build.build()
        self.library_dir = self._library or build.library_dir(self.built, self._driver_version)
        self.containers_dir.mkdir(parents=True)
        self.container_logs_dir.mkdir(parents=True, exist_ok=True)
        self.cgroups = CgroupTree()
        try:
            self.gpu = Gpu(
                self.state_file,
                self.driver_socket,
                self._driver_version,
                self._devices,
                turns=self._library is not None,
            ).__enter__()
        except BaseException:
            self.cgroups.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:  # each step runs, even if the one before fails
            for name in ("vgpu", "volcano", "kai", "bare", "log"):
                stack.callback(shutil.rmtree, self.root / name, ignore_errors=True)
            stack.callback(self.cgroups.close)
            stack.callback(self.gpu.__exit__, None, None, None)
            for container in self.containers:
                stack.callback(container.stop)

    def placement_dir(self, placement: str) -> Path:
        """Make and return the host's directory for the containers, or claims, of a scheduler."""
        row = EVERY[placement]
        directory = self.root / row.root
        if not directory.exists():
            directory.mkdir(parents=True)
            directory.chmod(row.mode)
        return directory

    def placement_options(self) -> list[str]:
        """Return options by which a daemon searches the directories of all placements, and reads kubelet's names."""
        roots = dict.fromkeys(str(self.placement_dir(name)) for name in PLACEMENTS)
        return [
            *(word for root in roots for word in ("--containers-dir", root)),
            *("--pod-logs-dir", str(self.pod_logs_dir)),
            *("--container-logs-dir", str(self.container_logs_dir)),
        ]

    def log(self, container: Container) -> None:
        """Make the directory for a pod's logs and the link to a container's log, as kubelet does at its start."""
        pod, namespace = f"pod-{container.pod_uid[:8]}", "default"
        logs = self.pod_logs_dir / f"{namespace}_{pod}_{container.pod_uid}" / container.name
        logs.mkdir(parents=True, exist_ok=True)
        link = self.container_logs_dir / f"{pod}_{namespace}_{container.name}-{container.container_id}.log"
        link.symlink_to(logs / "0.log")

    def stand_in(self) -> dict[str, str]:
        """Return variables by which a program loads the stand-in as `libnvidia-ml.so.1`, with this node's driver."""
        paths = [str(self.library_dir), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            "LD_LIBRARY_PATH": ":".join(path for path in paths if path),
            "NVML_STANDIN_STATE": str(self.state_file),
        }

    def environment(self) -> dict[str, str]:
        return os.environ | self.stand_in()

    def container(self, *arguments: Any, **options: Any) -> Container:
        container = Container(self, *arguments, **options)
        self.containers.append(container)
        return container
