"""The driver as NVML shows it: whether it answers, which GPUs, and which number ``hostpid`` must be."""

import time

from resolver.base.reasons import KERNEL_LOG, NO_MEMORY, DriverError, GpuReason
from resolver.base.text import several, some
from resolver.doctor.findings import Finding, failed, ok, together, unknown, warning
from resolver.doctor.node import Node


def nvml(node: Node) -> Finding:
    """Check that the driver answers in time, and that each GPU is healthy and reports per-process utilization."""
    from resolver.gpu.sampler import FAILED, UNSUPPORTED

    began = time.monotonic()
    collection = node.collection
    if collection.error:
        return _failed(collection.error)
    answered = f"driver {collection.inventory.driver_version}, answered in {time.monotonic() - began:.1f} s"
    gpus = collection.inventory.gpus
    if not gpus:
        return failed(
            "NVML shows no GPU",
            "the driver answers, but gives none to this process: they are hidden from this container, or all are lost",
            f"lspci -d 10de: shows what is on the bus; in a container: NVIDIA_VISIBLE_DEVICES=all; {KERNEL_LOG[1:-1]}",
        )
    names, troubles = [gpu.uuid or f"GPU {gpu.device_index}" for gpu in gpus], []
    for name, gpu in zip(names, gpus, strict=True):
        if gpu.samples == UNSUPPORTED:
            summary = f"{name}: no utilization of processes ({gpu.samples_why})"
            cause = "in MIG mode, and on some drivers, NVML has none: never 0; hostpid is repaired"
            fix = "nothing, if MIG is intended; otherwise: nvidia-smi -mig 0 -i INDEX"
            troubles.append(warning(summary, cause, fix))
        elif gpu.samples == FAILED and not gpu.illnesses:
            troubles.append(_failed(gpu.samples_why or "", f"{name}: "))
        elif gpu.legacy_call_refused:
            summary = f"{name}: {gpu.samples_why}"
            cause = "an older HAMi library there reports 0 %, which is corrected, and enforces no core limit"
            fix = "update HAMi to 2.10 and restart the pods that resolver usage shows with no_effect"
            troubles.append(warning(summary, cause, fix))
        for illness in gpu.illnesses:
            reason = GpuReason(illness.reason)
            fix = reason.for_terminal()[1].replace("INDEX", str(gpu.device_index))
            cause = illness.detail or reason.meaning
            troubles.append(failed(f"{name} is unhealthy: {reason}", cause, fix))
    unified = [
        name for name, gpu in zip(names, gpus, strict=True) if gpu.memory_total is None and gpu.healthy
    ]
    memory = f"; {some(unified)}: {NO_MEMORY}" if unified else ""
    return together(f"{answered}; {several(len(gpus), 'GPU')}: {some(names, 2)}{memory}", troubles)


def driver(node: Node) -> Finding:
    """Check which number ``hostpid`` must be with this driver, and how that is known."""
    from resolver.hami.hostpid_policy import decide, known

    if node.status and (decided := node.status.policy).namespace != "unknown":
        origin = f"{decided.origin} (from the daemon: {decided.why})"
        return ok(f"hostpid = {decided.namespace} PID, {origin}")
    inventory = node.collection.inventory
    version = inventory.driver_version
    policy = decide(node.settings.hostpid_namespace, version, vgpu=inventory.in_vgpu_guest())
    if policy.namespace is not None:
        return ok(f"hostpid = {policy.namespace} PID, {policy.origin}: {policy.why}")
    if version is None:
        cause = "without it the driver's version is not known"
        fix = "fix the problem that the check nvml names, then: resolver doctor --only driver"
        return unknown("NVML does not answer", cause, fix)
    return failed(
        f"driver {version}: not known which PIDs its samples carry",
        f"{known()}; between the two nothing is known and nothing is assumed, so no slot is repaired (driver_unknown)",
        "measure it with make gpu-check (docs/compatibility.md#measure-a-driver), then: "
        "resolver run --hostpid-namespace host (or container)",
    )


def _failed(why: str, where: str = "") -> Finding:
    error = DriverError.named_in(why)
    before, name, _ = why.partition(f"({error})")
    return failed(where + before + name, *error.for_terminal())
