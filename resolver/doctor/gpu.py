"""The driver as NVML shows it: whether it answers, which GPUs, and which number ``hostpid`` must be."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from resolver.doctor.findings import Finding, State, failed, ok, several, some, together, warning

if TYPE_CHECKING:
    from resolver.doctor.node import Node

_TOLERATED_AHEAD = 0.5  # seconds; clocks are read one after the other
_ASK_SECONDS = 10.0
_KERNEL_LOG = "dmesg | grep -iE 'nvrm|xid' | tail"

#: By NVML's name of the error: what it means, and what to do.
_ERRORS = {
    "LibraryNotFound": (
        "the driver's library libnvidia-ml.so.1 is not found: no driver, or not mounted into this container",
        (
            "on the host: ldconfig -p | grep libnvidia-ml, and install the driver if that prints nothing; in a "
            "container: runtimeClassName: nvidia with NVIDIA_VISIBLE_DEVICES=all, or mount the library and set "
            "LD_LIBRARY_PATH"
        ),
    ),
    "DriverNotLoaded": (
        "the library is there, the kernel module is not loaded, or its device nodes are missing",
        f"modprobe nvidia && nvidia-modprobe -u -c 0; ls -l /dev/nvidia*; {_KERNEL_LOG}",
    ),
    "LibRmVersionMismatch": (
        "the driver was upgraded while the old kernel module stayed loaded: library and module are of two versions",
        (
            "cat /proc/driver/nvidia/version; drain the node, then reboot it, or: rmmod nvidia_uvm nvidia_drm "
            "nvidia_modeset nvidia && modprobe nvidia"
        ),
    ),
    "NoPermission": (
        "the driver refuses this user",
        "run it as root; in a container: allow the devices /dev/nvidiactl and /dev/nvidia0 (device cgroup)",
    ),
    "GpuIsLost": (
        "a GPU has fallen off the bus",
        f"{_KERNEL_LOG}; drain the node and power-cycle it",
    ),
    "ResetRequired": (
        "a GPU needs a reset before it answers again",
        "stop what uses it, then: nvidia-smi --gpu-reset -i INDEX; or reboot the drained node",
    ),
    "FunctionNotFound": (
        "the driver is older than anything that HAMi supports",
        "upgrade the driver; nvidia-smi shows its version",
    ),
}
_HANG = (
    "a call into the driver hangs; the worker that made it was killed, and the daemon goes on without utilization",
    (
        f"see whether nvidia-smi hangs, too; {_KERNEL_LOG}; systemctl restart nvidia-persistenced, or reboot the "
        "drained node"
    ),
)
_OTHER = ("NVML answers with an error", f"compare with nvidia-smi; {_KERNEL_LOG}")


def nvml(node: Node) -> Finding:
    """Whether the driver's library is there and answers in time."""
    began = time.monotonic()
    collection = node.collection
    if not collection.error:
        return ok(f"driver {collection.driver_version}, answered in {time.monotonic() - began:.1f} s")
    return _failed(collection.error)


def gpus(node: Node) -> Finding:
    """Whether each GPU is healthy and reports the utilization of its processes."""
    from resolver.gpu.sampler import FAILED, UNSUPPORTED

    collection = node.collection
    if collection.error:
        return _no_answer()
    devices = collection.devices
    reports = {gpu.uuid: gpu for gpu in collection.inventory.gpus}
    if not devices and not reports:
        return failed(
            "NVML shows no GPU",
            "the driver answers, but gives none to this process: they are hidden from this container, or all are lost",
            f"lspci -d 10de: shows what is on the bus; in a container: NVIDIA_VISIBLE_DEVICES=all; {_KERNEL_LOG}",
        )
    troubles = []
    for uuid, device in devices.items():
        if device.status == UNSUPPORTED:
            troubles.append(
                warning(
                    f"{uuid}: no utilization of processes ({device.why})",
                    "in MIG mode, and on some drivers, NVML has none: it is unsupported, never 0; hostpid is "
                    "repaired all the same",
                    "nothing, if MIG is intended; otherwise: nvidia-smi -mig 0 -i INDEX",
                )
            )
        elif device.status == FAILED and not (uuid in reports and reports[uuid].illnesses):
            troubles.append(_failed(device.why, f"{uuid}: "))
    troubles += [
        failed(
            f"{uuid or f'GPU {gpu.device_index}'} is unhealthy: {illness.reason}",
            illness.detail or f"the driver reports {illness.reason}",
            f"nvidia-smi -q -i {gpu.device_index} shows it in full; {_KERNEL_LOG}",
        )
        for uuid, gpu in reports.items()
        for illness in gpu.illnesses
    ]
    return together(f"{several(len(devices), 'GPU')}: {some(devices, 2)}", troubles)


def driver(node: Node) -> Finding:
    """Which number ``hostpid`` must be with this driver, and how that is known."""
    from resolver.hami.driver_memory import DriverMemory
    from resolver.hami.hostpid_policy import decide, known

    status = node.status
    policy = status["policy"] if status else None
    if policy and policy["namespace"] != "unknown":
        return ok(
            f"hostpid = {policy['namespace']} PID, {policy['origin']} (from the daemon: {policy['why']})"
        )
    collection = node.collection
    version = collection.driver_version
    measured = DriverMemory(node.settings.run_dir).get(version) if version else None
    policy = decide(node.settings.hostpid_namespace, version, measured)
    if policy.namespace is not None:
        return ok(f"hostpid = {policy.namespace} PID, {policy.origin}: {policy.why}")
    if version is None:
        return _no_answer()
    return failed(
        f"driver {version}: not known which PIDs its samples carry",
        f"{known()}; between the two nothing is known and nothing is assumed, so no slot is repaired (driver_unknown)",
        "let the daemon measure it (CAP_SYS_ADMIN, and a GPU process in a container), or, if you know it: "
        "resolver run --hostpid-namespace host (or container)",
    )


def _failed(why: str, where: str = "") -> Finding:
    """An error of NVML's, or of who asked it, with what is known about it."""
    for match in re.finditer(r"\((\w+)\)", why):
        if match[1] in _ERRORS:
            return failed(where + why[: match.end()], *_ERRORS[match[1]])
    return failed(where + why, *(_HANG if "did not answer within" in why else _OTHER))


def _no_answer() -> Finding:
    return Finding(
        state=State.UNKNOWN,
        found="NVML does not answer",
        cause="without it neither the driver's version nor any GPU is known",
        fix="fix what the check nvml names, then: resolver doctor --only gpus --only driver",
    )


def sample_clock(node: Node) -> Finding:
    """Whether the driver stamps utilization samples by the clock of this node."""
    if node.collection.error:
        return _no_answer()
    import asyncio

    newest, now = asyncio.run(_newest_stamp(list(node.collection.devices)))
    if newest is None:
        return ok("no samples: no process was busy on a GPU lately")
    ahead = newest - now
    if ahead > _TOLERATED_AHEAD:
        return failed(
            f"the newest sample is {ahead:.1f} s ahead of this clock",
            "the clock was set back after the driver started, or the driver counts otherwise: samples of later "
            "count as of now, and a process that ended looks busy until the clock has caught up",
            "timedatectl; let one program keep the time, and restart nvidia-persistenced (or drain and reboot)",
        )
    return ok(f"the newest sample is {max(0.0, -ahead):.1f} s old")


async def _newest_stamp(uuids: list[str]) -> tuple[float | None, float]:
    """The newest time stamp of all samples that the driver keeps, and the time now (both Unix time)."""
    import json

    from resolver.gpu.sampler import Sampler

    sampler = Sampler()
    try:
        stamps = []
        for uuid in uuids:
            request = json.dumps({"call": "samples", "uuid": uuid, "since": 0})
            answer = json.loads(await sampler.worker.request(request.encode(), limit=_ASK_SECONDS))
            stamps += [stamp / 1e6 for _pid, stamp, _sm in answer.get("samples", [])]
        return max(stamps, default=None), time.time()
    finally:
        sampler.stop()
