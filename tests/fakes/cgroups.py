"""Cgroups for containers in miniature: the runtimes' path formats, on all hierarchies of this node."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fakes.process import NodeError

_REMOVED_S: Final = 60.0
PREFIX: Final = "resolver-node-"
NODE_CONTAINER_ID: Final = "d0" * 32  # the outer container of a node that is a container itself (kind)


#: The path below the hierarchy's root, by format. `slice` and `pods` are the pod's cgroup as the systemd and
#: the cgroupfs driver name it, `id` is the container's, `node` that of the outer container on a kind node.
FORMATS: Final = {
    "containerd-systemd": "{slice}/cri-containerd-{id}.scope",
    "containerd-cgroupfs": "{pods}/{id}",
    "containerd-mixed": "system.slice/{last_slice}:cri-containerd:{id}",
    "crio-systemd": "{slice}/crio-{id}.scope",
    "crio-systemd-child": "{slice}/crio-{id}.scope/container",
    "crio-cgroupfs": "{pods}/crio-{id}",
    "docker-systemd": "{slice}/docker-{id}.scope",
    "docker-cgroupfs": "{pods}/{id}",
    "docker-alone-systemd": "system.slice/docker-{id}.scope",
    "docker-alone-cgroupfs": "docker/{id}",
    "podman-systemd": "machine.slice/libpod-{id}.scope/container",
    "podman-cgroupfs": "libpod_parent/libpod-{id}",
    "kind-systemd": "kubelet.slice/{kubelet_slice}/cri-containerd-{id}.scope",
    "kind-cgroupfs": "docker/{node}/kubelet/{pods}/{id}",
}


def cgroup_path(cgroup_format: str, qos: str, pod_uid: str, container_id: str) -> str:
    """One container's path, relative. `qos` is guaranteed, burstable or besteffort. Raises KeyError."""
    pod = pod_uid.replace("-", "_")
    levels = ["kubepods", f"kubepods-{qos}", f"kubepods-{qos}-pod{pod}"]
    if qos == "guaranteed":  # this class has no cgroup level
        levels = ["kubepods", f"kubepods-pod{pod}"]
    return FORMATS[cgroup_format].format(
        slice="/".join(f"{level}.slice" for level in levels),
        last_slice=f"{levels[-1]}.slice",
        kubelet_slice="/".join(f"kubelet-{level}.slice" for level in levels),
        pods=f"kubepods/pod{pod_uid}" if qos == "guaranteed" else f"kubepods/{qos}/pod{pod_uid}",
        id=container_id,
        node=NODE_CONTAINER_ID,
    )


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted cgroup file system; `controllers` is empty for version 2."""

    mount: Path
    controllers: str


def hierarchies() -> list[Hierarchy]:
    """All mounted hierarchies, version 2 first, then systemd's own, then the rest."""
    found: list[Hierarchy] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        kind, _, options = right.split(" ", 2)
        mount = Path(left.split(" ")[4])
        if kind == "cgroup2":
            found.append(Hierarchy(mount, ""))
        elif kind == "cgroup":
            found.append(Hierarchy(mount, options.split("rw,", 1)[-1]))
    return sorted(
        found, key=lambda h: (h.controllers != "", "name=systemd" not in h.controllers, str(h.mount))
    )


class CgroupTree:
    """Our own subtree in one hierarchy, and the directories made in it. Removed by `close()`.

    Raises NodeError when no cgroup can be made anywhere.
    """

    def __init__(self) -> None:
        refusals = []
        for hierarchy in hierarchies():
            remove_leftovers(hierarchy.mount, PREFIX)
            self.root = hierarchy.mount / f"{PREFIX}{os.getpid()}-{time.monotonic_ns():x}"
            try:
                self.root.mkdir()
            except OSError as error:
                refusals.append(f"{error.strerror} in {hierarchy.mount}")
            else:
                return
        raise NodeError(f"no cgroup can be made: {'; '.join(refusals) or 'no hierarchy is mounted'}")

    def make(self, cgroup_format: str, qos: str, pod_uid: str, container_id: str) -> Path:
        directory = self.root / cgroup_path(cgroup_format, qos, pod_uid, container_id)
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def close(self) -> None:
        remove(self.root)


def processes(directory: Path) -> list[int]:
    found: list[int] = []
    for below, _, files in os.walk(directory):
        if "cgroup.procs" in files:
            with contextlib.suppress(OSError):
                found += map(int, (Path(below) / "cgroup.procs").read_text().split())
    return found


def remove(root: Path, *, kill: bool = False) -> None:
    """Remove a cgroup directory and those below. Processes in it must have ended, unless they are to be killed."""
    deadline = time.monotonic() + _REMOVED_S
    while kill and (living := processes(root)):
        for host_pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(host_pid, signal.SIGKILL)
        for frozen in root.rglob("freezer.state"):
            with contextlib.suppress(OSError):
                frozen.write_text("THAWED")
        assert time.monotonic() < deadline, f"processes {living} in {root} cannot be killed"
        time.sleep(0.005)
    for directory, _, _ in os.walk(root, topdown=False):
        while True:
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)  # the last process has died and is just being taken out
            else:
                break


def remove_leftovers(mount: Path, prefix: str) -> None:
    """Remove the cgroups, called by prefix and PID, of runs that were killed, with their processes."""
    for old in mount.glob(f"{prefix}*"):
        maker = old.name.removeprefix(prefix).split("-", 1)[0]
        if not Path(f"/proc/{maker}").exists():
            with contextlib.suppress(OSError):
                remove(old, kill=True)
