"""The driver as NVML shows it: whether it answers, which GPUs, and which number ``hostpid`` must be."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from resolver.base.reasons import KERNEL_LOG, DriverError, GpuReason
from resolver.base.text import several
from resolver.doctor.findings import Finding, failed, ok, some, together, unknown, warning

if TYPE_CHECKING:
    from resolver.doctor.node import Node


def nvml(node: Node) -> Finding:
    """Check that the driver answers in time, and that each GPU is healthy and reports per-process utilization."""
    from resolver.gpu.sampler import FAILED, UNSUPPORTED

    began = time.monotonic()
    collection = node.collection
    if collection.error:
        return _failed(collection.error)
    answered = f"driver {collection.driver_version}, answered in {time.monotonic() - began:.1f} s"
    devices = collection.devices
    reports = {gpu.uuid: gpu for gpu in collection.inventory.gpus}
    if not devices and not reports:
        return failed(
            "NVML shows no GPU",
            "the driver answers, but gives none to this process: they are hidden from this container, or all are lost",
            f"lspci -d 10de: shows what is on the bus; in a container: NVIDIA_VISIBLE_DEVICES=all; {KERNEL_LOG[1:-1]}",
        )
    troubles = []
    for uuid, device in devices.items():
        if device.status == UNSUPPORTED:
            found = f"{uuid}: no utilization of processes ({device.why})"
            cause = "in MIG mode, and on some drivers, NVML has none: never 0; hostpid is repaired"
            fix = "nothing, if MIG is intended; otherwise: nvidia-smi -mig 0 -i INDEX"
            troubles.append(warning(found, cause, fix))
        elif device.status == FAILED and not (uuid in reports and reports[uuid].illnesses):
            troubles.append(_failed(device.why, f"{uuid}: "))
    troubles += [
        failed(
            f"{uuid or f'GPU {gpu.device_index}'} is unhealthy: {illness.reason}",
            illness.detail or GpuReason(illness.reason).meaning,
            GpuReason(illness.reason).for_terminal()[1].replace("INDEX", str(gpu.device_index)),
        )
        for uuid, gpu in reports.items()
        for illness in gpu.illnesses
    ]
    return together(f"{answered}; {several(len(devices), 'GPU')}: {some(devices, 2)}", troubles)


def driver(node: Node) -> Finding:
    """Check which number ``hostpid`` must be with this driver, and how that is known."""
    from resolver.hami.driver_memory import DriverMemory
    from resolver.hami.hostpid_policy import decide, known

    status = node.status
    policy = status["policy"] if status else None
    if policy and policy["namespace"] != "unknown":
        origin = f"{policy['origin']} (from the daemon: {policy['why']})"
        return ok(f"hostpid = {policy['namespace']} PID, {origin}")
    version = node.collection.driver_version
    measured = DriverMemory(node.settings.run_dir).get(version) if version else None
    policy = decide(node.settings.hostpid_namespace, version, measured)
    if policy.namespace is not None:
        return ok(f"hostpid = {policy.namespace} PID, {policy.origin}: {policy.why}")
    if version is None:
        cause = "without it the driver's version is not known"
        fix = "fix the problem that the check nvml names, then: resolver doctor --only driver"
        return unknown("NVML does not answer", cause, fix)
    return failed(
        f"driver {version}: not known which PIDs its samples carry",
        f"{known()}; between the two nothing is known and nothing is assumed, so no slot is repaired (driver_unknown)",
        "let the daemon measure it (CAP_SYS_ADMIN, and a GPU process in a container), or, if you know it: "
        "resolver run --hostpid-namespace host (or container)",
    )


def _failed(why: str, where: str = "") -> Finding:
    """Explain an error of NVML or of its caller."""
    error = DriverError.named_in(why)
    before, name, _ = why.partition(f"({error})")
    return failed(where + before + name, *error.for_terminal())
