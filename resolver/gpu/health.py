"""Whether a GPU is well, from what was read of it. A reason stays until the GPU was seen to be without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resolver.gpu.inventory import Illness
from resolver.gpu.xids import BROKEN

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

LOST, RESET_REQUIRED, UNREACHABLE = "lost", "reset_required", "unreachable"
MEMORY_QUERY_FAILED, TOO_HOT, ECC_UNCORRECTED = "memory_query_failed", "too_hot", "ecc_uncorrected"
XID = "xid"

#: Every reason, with what it means.
REASONS = {
    LOST: "it fell off the bus, or its firmware does not answer",
    RESET_REQUIRED: "it does nothing more before it is reset",
    UNREACHABLE: "the driver lists it, but refuses to open it",
    MEMORY_QUERY_FAILED: "the driver does not report its memory",
    TOO_HOT: "it was over 95 C, and has not been below 90 C since",
    ECC_UNCORRECTED: "its memory had errors that could not be corrected since the driver was loaded",
    XID: "the driver reported an error after which it needs a reset, and it had none since",
}
#: While it has one of these it answers nothing.
SILENT = frozenset((LOST, RESET_REQUIRED, UNREACHABLE))
#: A GPU is too hot above the one, until it is below the other; degrees Celsius.
HOT, COOL = 95, 90
_BY_ERROR = {"GpuIsLost": LOST, "ResetRequired": RESET_REQUIRED}


def judge(
    device: dict[str, Any], before: Sequence[Illness], now: float, broken: Collection[int] = ()
) -> tuple[Illness, ...]:
    """The illnesses of a device as the NVML worker read it, given those before; sorted as in ``REASONS``.

    ``broken`` are the XID errors since it was reset that are not a program's. What could not be read says nothing:
    neither that the GPU is ill, nor that it is well again.
    """
    known = {illness.reason: illness for illness in before}
    if "error" in device:
        reason = _BY_ERROR.get(device["error"], UNREACHABLE)
        found = {reason: f"{device['text']} ({device['error']})"}
        unread = {MEMORY_QUERY_FAILED, TOO_HOT, ECC_UNCORRECTED}
    else:
        found, unread = _measured(device, hot_before=TOO_HOT in known)
    if broken:
        found[XID] = "; ".join(f"XID {xid}: {BROKEN[xid]}" for xid in sorted(broken))
    for reason in unread & known.keys():
        found.setdefault(reason, known[reason].detail)
    return tuple(
        Illness(reason, found[reason], known[reason].since if reason in known else now)
        for reason in REASONS
        if reason in found
    )


def _measured(device: dict[str, Any], *, hot_before: bool) -> tuple[dict[str, str], set[str]]:
    """What a device that answers suffers from, and what could not be seen."""
    found: dict[str, str] = {}
    failed = device["failed"]
    unread = {
        reason for name, reason in (("temperature", TOO_HOT), ("ecc", ECC_UNCORRECTED)) if name in failed
    }
    if "memory" in failed:
        found[MEMORY_QUERY_FAILED] = failed["memory"]
    degrees, errors = device["temperature"], device["ecc"]
    if degrees is not None and (degrees > HOT or (hot_before and degrees >= COOL)):
        found[TOO_HOT] = f"{degrees} C"
    if errors:
        found[ECC_UNCORRECTED] = f"{errors} uncorrected errors since the driver was loaded"
    return found, unread
