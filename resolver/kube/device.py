"""Koordinator's ``Device`` object, made from the daemon's GPUs. Pure: no I/O.

The API server takes ``spec.devices`` as one value, and replacing the object drops the scheduler's ``status``. So a
change is a merge patch of one ``resourceVersion``, limited to our GPUs, two labels and one owner reference.
"""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from resolver.base.reasons import DriverError, GpuReason

#: An object of the API server's, or a part of one, as JSON has it.
Json = dict[str, Any]

API_VERSION, KIND = "scheduling.koordinator.sh/v1alpha1", "Device"
MODEL_LABEL, DRIVER_LABEL = "node.koordinator.sh/gpu-model", "node.koordinator.sh/gpu-driver-version"
#: The operator's mark, on the node: UUIDs of GPUs that are to be reported unhealthy, or ``*`` for all of them.
CORDON = "hami-resolver/unhealthy-gpus"
#: HAMi's own mark (2.10), UUIDs too.
HAMI_CORDON = "hami.io/device-cordon"
#: The same for all GPUs, as a label with the value ``unhealthy``.
HEALTH_LABEL = "hami-resolver/gpu-health"


def camel(reason: str) -> str:
    """Return ``TooHot`` for ``too_hot``, as Kubernetes writes reasons."""
    return "".join(word.title() for word in reason.split("_"))


_CONDITION = "Healthy"
#: Fields of an entry that the reporter writes; other programs may add labels or virtual functions.
_OURS = frozenset(("type", "id", "minor", "health", "resources", "topology", "conditions"))
CORDONED, NVML_UNAVAILABLE = "Cordoned", "NvmlUnavailable"
#: Text of a condition by reason. It is constant while the reason stays: each change is a write.
MESSAGES = {camel(reason): reason.meaning for reason in GpuReason} | {
    CORDONED: f"an operator's mark: the node's annotation {CORDON} or {HAMI_CORDON}, or its label {HEALTH_LABEL}",
    NVML_UNAVAILABLE: "NVML does not answer: this is the last known state",
}


class OwnerReference(NamedTuple):
    """The node that the object belongs to."""

    name: str
    uid: str


class Health(NamedTuple):
    """State of a GPU in the object; without a reason while healthy."""

    healthy: bool
    reason: str = ""
    message: str = ""


class Report(NamedTuple):
    """Input of the object: the daemon's answer to ``/v1/gpus``, and facts beyond it.

    ``failing`` is set once NVML has been silent for too long. ``cordoned`` are UUIDs.
    """

    gpus: Json
    failing: bool = False
    cordoned: frozenset[str] = frozenset()

    @property
    def blind(self) -> bool:
        """Whether the daemon's container has lost its devices, which says nothing about their health."""
        return self.failing and DriverError.named_in(self.gpus["error"] or "") is DriverError.UNKNOWN


def entries(node: Json, annotation: str) -> list[str]:
    """Return the UUIDs in a node's annotation, in order: they are separated by commas or blanks."""
    return re.findall(r"[^,\s]+", (node.get("annotations") or {}).get(annotation) or "")


def cordoned(node: Json) -> frozenset[str]:
    """Return the marked GPUs by a node's metadata."""
    whole = (node.get("labels") or {}).get(HEALTH_LABEL) == "unhealthy"
    return frozenset(entries(node, CORDON)) | frozenset("*" * whole)


def quantity(number: int) -> str:
    """Format bytes in the largest binary unit without a remainder."""
    for shift, unit in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if number and number % (1 << shift) == 0:
            return f"{number >> shift}{unit}"
    return str(number)


def label_value(text: str) -> str:
    """Make a valid label value, at most 63 characters; forbidden ones become ``-``."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("-._")


def rfc3339(at: float) -> str:
    """Format Unix time as Kubernetes does."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def desired(report: Report, owner: OwnerReference, before: Json | None, now: float) -> Json:
    """Return the wanted object, based on ``before``; foreign parts stay, ``status`` is left out.

    A GPU that the driver no longer counts goes, unless NVML fails. One without UUID or minor number is left out.
    """
    old = _devices(before)
    by_uuid = {entry.get("id"): entry for entry in old if entry.get("type") == "gpu"}
    gpus = [
        _entry(gpu, by_uuid.get(gpu["uuid"], {}), report, now) for gpu in report.gpus["gpus"] if gpu["uuid"]
    ]
    if report.failing:
        reported = {entry["id"] for entry in gpus}
        gpus += [_unknown(entry, report, now) for uuid, entry in by_uuid.items() if uuid not in reported]
    gpus = sorted((entry for entry in gpus if "minor" in entry), key=lambda entry: entry["minor"])
    # The object has room for one model; each GPU's entry has its own label.
    model = next((gpu["name"] for gpu in report.gpus["gpus"] if gpu["name"]), "")
    labels = {MODEL_LABEL: label_value(model), DRIVER_LABEL: label_value(report.gpus["driver_version"] or "")}
    metadata: Json = {"name": owner.name, "labels": {name: value for name, value in labels.items() if value}}
    metadata["ownerReferences"] = _owners(owner, (before or {}).get("metadata", {}))
    foreign = [entry for entry in old if entry.get("type") != "gpu"]
    spec = {"devices": [*gpus, *foreign]}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def patch(before: Json, wanted: Json) -> Json:
    """Return the merge patch between two objects, for exactly that version; empty if equal."""
    had, metadata, changed = before["metadata"], {}, {}
    current = had.get("labels") or {}
    if labels := {
        name: value for name, value in wanted["metadata"]["labels"].items() if current.get(name) != value
    }:
        metadata["labels"] = labels
    owners = wanted["metadata"]["ownerReferences"]
    if owners != had.get("ownerReferences"):
        metadata["ownerReferences"] = owners
    if wanted["spec"]["devices"] != _devices(before):
        changed["spec"] = {"devices": wanted["spec"]["devices"]}
    if not metadata and not changed:
        return {}
    return {"metadata": metadata | {"resourceVersion": had["resourceVersion"]}} | changed


def health(device: Json | None) -> dict[str, Health]:
    """Return the health of an object's GPUs by UUID."""
    healthy = {}
    for entry in _devices(device):
        if entry.get("type") == "gpu" and entry.get("id"):
            condition = _condition_of(entry)
            reason, message = condition.get("reason", ""), condition.get("message", "")
            healthy[entry["id"]] = Health(bool(entry.get("health")), reason, message)
    return healthy


def _devices(device: Json | None) -> list[Json]:
    return list(((device or {}).get("spec") or {}).get("devices") or [])


def left_out(report: Report, device: Json) -> int:
    """Count the daemon's GPUs that the object lacks."""
    present = health(device).keys()
    return sum(gpu["uuid"] not in present for gpu in report.gpus["gpus"])


def _entry(gpu: Json, before: Json, report: Report, now: float) -> Json:
    """Describe a GPU; constant facts that the driver doesn't give are taken from ``before``."""
    entry: Json = {name: value for name, value in before.items() if name not in _OURS}
    entry |= {"type": "gpu", "id": gpu["uuid"]}
    minor = gpu["minor"] if gpu["minor"] is not None else before.get("minor")
    if minor is not None:
        entry["minor"] = minor
    reasons = [camel(illness["reason"]) for illness in gpu["illnesses"]]
    since = min((illness["since"] for illness in gpu["illnesses"]), default=now)
    if gpu["uuid"] in report.cordoned or "*" in report.cordoned:
        reasons.append(CORDONED)
    if report.failing:
        reasons.append(NVML_UNAVAILABLE)
    was_well = report.blind and bool(before.get("health"))
    entry["health"] = not reasons or (reasons == [NVML_UNAVAILABLE] and was_well)
    memory = (before.get("resources") or {}).get("koordinator.sh/gpu-memory")
    if gpu["memory_total"] is not None:
        memory = quantity(gpu["memory_total"])
    entry["resources"] = {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory-ratio": "100"}
    if memory is not None:
        entry["resources"]["koordinator.sh/gpu-memory"] = memory
    if model := label_value(gpu["name"]):
        entry["labels"] = {**(before.get("labels") or {}), MODEL_LABEL: model}
    if topology := _topology(gpu) or before.get("topology"):
        entry["topology"] = topology
    status = "Unknown" if reasons == [NVML_UNAVAILABLE] else "False"
    if conditions := _conditions(status, reasons, before, since):
        entry["conditions"] = conditions
    return entry


def _unknown(entry: Json, report: Report, now: float) -> Json:
    # Only the object knows it while NVML fails.
    healthy = report.blind and bool(entry.get("health"))
    conditions = _conditions("Unknown", [NVML_UNAVAILABLE], entry, now)
    return {**entry, "health": healthy, "conditions": conditions}


def _conditions(status: str, reasons: Sequence[str], before: Json, since: float) -> list[Json]:
    """Return the conditions of others, then ours; its time is the last change of ``status``, by any reporter."""
    others = [
        condition for condition in before.get("conditions") or [] if condition.get("type") != _CONDITION
    ]
    if not reasons:
        return others
    earlier = _condition_of(before)
    at = earlier["lastTransitionTime"] if earlier.get("status") == status else rfc3339(since)
    message = "; ".join(MESSAGES.get(reason, reason) for reason in reasons)
    condition = {"type": _CONDITION, "status": status, "reason": reasons[0], "message": message}
    return [*others, condition | {"lastTransitionTime": at}]


def _condition_of(entry: Json) -> Json:
    return next(
        (condition for condition in entry.get("conditions") or [] if condition.get("type") == _CONDITION), {}
    )


def _topology(gpu: Mapping[str, Any]) -> Json | None:
    """Return the complete topology or nothing: the schema requires all parts."""
    place = {"socketID": gpu["cpu_socket"], "nodeID": gpu["numa_node"], "pcieID": gpu["pcie_root"]}
    if None in place.values() or gpu["pci_address"] is None:
        return None
    return {**place, "busID": gpu["pci_address"]}


def _owners(owner: OwnerReference, metadata: Json) -> list[Json]:
    """Add our owner reference to the others, replacing one to an earlier node of that name."""
    node = {"apiVersion": "v1", "kind": "Node", "name": owner.name, "uid": owner.uid}
    others = [
        owner
        for owner in metadata.get("ownerReferences") or ()
        if (owner.get("apiVersion"), owner.get("kind")) != ("v1", "Node")
    ]
    return [*others, node | {"controller": True, "blockOwnerDeletion": True}]
