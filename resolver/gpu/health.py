"""A GPU's health. A reason stays until the GPU was seen without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.base.reasons import GpuReason
from resolver.gpu.inventory import Illness

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from resolver.gpu.inventory import DeviceAnswer

#: While it has one of these it answers nothing.
SILENT = frozenset((GpuReason.LOST, GpuReason.RESET_REQUIRED, GpuReason.UNREACHABLE))
#: A GPU is too hot above the one, until it is below the other; degrees Celsius.
HOT, COOL = 95, 90
_BY_VALUE = {
    "memory": GpuReason.MEMORY_QUERY_FAILED,
    "temperature": GpuReason.TOO_HOT,
    "ecc_uncorrected": GpuReason.ECC_UNCORRECTED,
}
_BY_ERROR = {"GpuIsLost": GpuReason.LOST, "ResetRequired": GpuReason.RESET_REQUIRED}
#: XID errors, the driver's numbers for errors of a GPU, that make it unhealthy: NVIDIA's catalogue requires a reset or
#: a hardware check. Programs cause most others.
BROKEN = {
    48: "a memory error of two bits, which cannot be corrected",
    62: "its internal controller halted",
    64: "a broken row of memory could not be replaced",
    79: "it fell off the bus",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "a memory error that was not recovered from",
}
#: XIDs caused by programs.
OF_PROGRAMS = {
    13: "a fault of a program in the graphics engine",
    31: "a program accessed memory that it does not have",
    43: "a program stopped because of an error",
    45: "work was removed after an earlier error, or when its program ended",
    68: "a fault of a program in the video decoder",
    94: "a contained memory error: the programs that used it ended",
    109: "a context switch took too long",
}


def judge(
    device: DeviceAnswer, before: Sequence[Illness], now: float, broken: Collection[int] = ()
) -> tuple[Illness, ...]:
    """Return a device's illnesses from its reading and those before, sorted as in `GpuReason`.

    ``broken`` are its hardware XID errors since the last reset. An unreadable value proves nothing.
    """
    earlier = {illness.reason: illness for illness in before}
    reasons: dict[str, str] = {}
    unread: set[str] = {reason for name, reason in _BY_VALUE.items() if device.error or name in device.failed}
    if device.error:
        reasons[_BY_ERROR.get(device.error, GpuReason.UNREACHABLE)] = f"{device.text} ({device.error})"
    elif "memory" in device.failed:
        reasons[GpuReason.MEMORY_QUERY_FAILED] = device.failed["memory"]
    degrees, errors = device.gpu.temperature, device.gpu.ecc_uncorrected
    if degrees is not None and degrees > (COOL - 1 if GpuReason.TOO_HOT in earlier else HOT):
        reasons[GpuReason.TOO_HOT] = f"{degrees} C"
    if errors:
        reasons[GpuReason.ECC_UNCORRECTED] = f"{errors} uncorrected errors since the driver was loaded"
    if broken:
        reasons[GpuReason.XID] = "; ".join(f"XID {xid}: {BROKEN[xid]}" for xid in sorted(broken))
    for reason in unread & earlier.keys():
        reasons.setdefault(reason, earlier[reason].detail)
    return tuple(
        Illness(reason, reasons[reason], earlier[reason].since if reason in earlier else now)
        for reason in GpuReason
        if reason in reasons
    )


def meaning(xid: int) -> str:
    """Describe an XID, or say where to look it up."""
    return BROKEN.get(xid) or OF_PROGRAMS.get(xid) or "see NVIDIA's catalogue of XID errors"
