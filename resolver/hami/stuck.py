"""The loop closed: whether a slot that was put right comes to show what NVML sees.

Where the tenants' own watcher keeps ``sm_util``, nobody writes it but that watcher. A process that NVML sees busy, in
a slot whose ``hostpid`` is right, must show some ``sm_util`` within two of the watcher's periods (120 ms each) after
NVML's next sample. One that shows 0 for longer is *stuck*: said with its reason, once for each process in a slot.
Nothing is done about it, since whatever is wrong is not known to be the number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.config import HostpidNamespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resolver.hami.policy import Policy
    from resolver.hami.repairs import RegionRepairs, SlotState

#: For so many seconds it must have been busy and at 0, at every look, through at least two of NVML's answers.
EVIDENCE_SECONDS = 3.0


class Evidence:
    """What speaks for a slot being stuck: since when, and in which answer of NVML's (its time) it was first seen."""

    __slots__ = ("answer", "since", "told")

    def __init__(self) -> None:
        self.since: float | None = None
        self.answer = 0.0
        self.told = False


def look(
    repairs: RegionRepairs,
    policy: Policy,
    truth: Callable[[int, str], int | None],
    answered_at: float,
    now: float,
) -> Iterator[SlotState]:
    """Take in how a region looks now; gives the slots that were just found to be stuck, ``state.stuck`` says why.

    ``truth(host_pid, uuid)`` is the utilization in per cent as of NVML's answer at ``answered_at`` (Unix time).
    """
    view = repairs.view
    watched = view is not None and repairs.maintained()
    for state in repairs.told_apart():
        evidence = state.evidence
        if view is None or not watched or not _contradicts(state, view.uuids, policy, truth):
            evidence.since, state.stuck = None, ""
        elif evidence.since is None:
            evidence.since, evidence.answer = now, answered_at
        elif now - evidence.since >= EVIDENCE_SECONDS and answered_at > evidence.answer and not state.stuck:
            alive = any(any(slot.sm_util) for slot in view.slots)
            state.stuck = _reason(state, policy, watcher_runs=alive)
            if not evidence.told:
                evidence.told = True
                yield state


def _contradicts(
    state: SlotState, uuids: tuple[str, ...], policy: Policy, truth: Callable[[int, str], int | None]
) -> bool:
    """Whether NVML sees the process busy, and its slot is right, and says 0."""
    slot, owner = state.slot, state.owner
    if owner is None or state.reason is not None or not slot.sm_util or any(slot.sm_util):
        return False
    if slot.hostpid != policy.wanted(owner.process.host_pid, slot.pid):
        return False
    return any((truth(owner.process.host_pid, uuid) or 0) > 0 for uuid in uuids)


def _reason(state: SlotState, policy: Policy, *, watcher_runs: bool) -> str:
    hostpid = state.slot.hostpid
    if watcher_runs:
        why = f"the container's watcher runs, but finds no sample of {hostpid}, which this slot's hostpid is"
    else:
        why = "no watcher writes: sm_util of every slot of this container is 0"
    namespace = "host" if policy.namespace is HostpidNamespace.HOST else "container"
    if policy.origin == "by version":
        return (
            f"{why}; or the driver's samples do not carry {namespace} PIDs as its version says: with CAP_SYS_ADMIN "
            "that is measured"
        )
    if policy.origin == "forced":
        return f"{why}; or --hostpid-namespace {namespace} is wrong for this driver: try auto"
    return why
