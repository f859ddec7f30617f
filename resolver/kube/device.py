"""Koordinator's ``Device`` object, made of the daemon's GPUs. Pure: no I/O, and nothing heavy is imported.

``scheduling.koordinator.sh/v1alpha1``, cluster-scoped, called as its node. The list ``spec.devices`` has no keys for a
server-side apply (it is one value to the API server), and the kind has no status subresource: replacing the
object drops the scheduler's ``status``. So a change is a merge patch of the fields that are ours, with the
``resourceVersion`` that was read: GPUs in the list, two labels, one owner reference. What else is there stays.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.gpu.health import REASONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    #: An object of the API server's, or a part of one, as JSON has it.
    Json = dict[str, Any]

API_VERSION, KIND = "scheduling.koordinator.sh/v1alpha1", "Device"
MODEL_LABEL, DRIVER_LABEL = "node.koordinator.sh/gpu-model", "node.koordinator.sh/gpu-driver-version"
#: The operator's mark, on the node: UUIDs of GPUs that are to be reported unhealthy, or ``*`` for all of them.
CORDON = "hami-resolver/unhealthy-gpus"


def camel(reason: str) -> str:
    """``too_hot`` as Kubernetes writes reasons: ``TooHot``."""
    return "".join(word.title() for word in reason.split("_"))


_CONDITION = "Healthy"
#: What is ours in an entry; another program may know of its module, its labels or its virtual functions.
_OURS = frozenset(("type", "id", "minor", "health", "resources", "topology", "conditions"))
CORDONED, NVML_UNAVAILABLE = "Cordoned", "NvmlUnavailable"
#: By reason: what a condition says. The text does not change while the reason stays: each change is a write.
MESSAGES = {camel(reason): text for reason, text in REASONS.items()} | {
    CORDONED: f"an operator's mark: the node's annotation {CORDON}",
    NVML_UNAVAILABLE: "NVML does not answer: this is what was known of it before",
}


class OwnerReference(NamedTuple):
    """The node that the object belongs to."""

    name: str
    uid: str


class Report(NamedTuple):
    """What is to be reported: the daemon's answer to ``/v1/gpus``, and what goes beyond it.

    ``failing`` is whether NVML has not answered for so long that it counts. ``cordoned`` are UUIDs.
    """

    gpus: Json
    failing: bool = False
    cordoned: frozenset[str] = frozenset()


def cordoned(value: str) -> frozenset[str]:
    """The UUIDs in the annotation; separated by commas or blanks."""
    return frozenset(re.split(r"[,\s]+", value.strip())) - {""}


def quantity(number: int) -> str:
    """Bytes as Kubernetes writes them: the largest binary unit that leaves no rest."""
    for shift, unit in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if number and number % (1 << shift) == 0:
            return f"{number >> shift}{unit}"
    return str(number)


def label_value(text: str) -> str:
    """A text as a label's value may be: blanks, and what is not allowed, become ``-``; 63 characters at most."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("-._")


def rfc3339(at: float) -> str:
    """Unix time as Kubernetes has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def desired(report: Report, name: str, owner: OwnerReference | None, before: Json | None, now: float) -> Json:
    """The object as it should be, given that of ``before``; its foreign parts are kept, ``status`` is left out.

    A GPU that the driver does not count any more is left out, unless NVML fails, which proves nothing. So is one whose
    UUID or minor number is unknown: the scheduler identifies GPUs by them.
    """
    old = _devices(before)
    known = {each.get("id"): each for each in old if each.get("type") == "gpu"}
    gpus = [
        _entry(gpu, known.get(gpu["uuid"], {}), report, now) for gpu in report.gpus["gpus"] if gpu["uuid"]
    ]
    if report.failing:
        reported = {entry["id"] for entry in gpus}
        gpus += [_unknown(entry, now) for uuid, entry in known.items() if uuid not in reported]
    gpus = sorted((entry for entry in gpus if "minor" in entry), key=lambda entry: entry["minor"])
    metadata: Json = {"name": name, "labels": _labels(report.gpus)}
    if owner is not None:
        metadata["ownerReferences"] = _owners(owner, (before or {}).get("metadata", {}))
    foreign = [each for each in old if each.get("type") != "gpu"]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": {"devices": [*gpus, *foreign]},
    }


def patch(before: Json, wanted: Json) -> Json:
    """The merge patch from one object to the other, for just that version of it; empty if nothing is to be done."""
    metadata: Json = {}
    had = before["metadata"]
    labels = {
        name: value
        for name, value in wanted["metadata"]["labels"].items()
        if (had.get("labels") or {}).get(name) != value
    }
    if labels:
        metadata["labels"] = labels
    owners = wanted["metadata"].get("ownerReferences")
    if owners is not None and owners != had.get("ownerReferences"):
        metadata["ownerReferences"] = owners
    changed: Json = {}
    if wanted["spec"]["devices"] != _devices(before):
        changed["spec"] = {"devices": wanted["spec"]["devices"]}
    if not metadata and not changed:
        return {}
    return {"metadata": metadata | {"resourceVersion": had["resourceVersion"]}} | changed


def health(device: Json | None) -> dict[str, tuple[bool, str, str]]:
    """``{uuid: (healthy, reason, message)}`` of an object's GPUs; without reason while healthy."""
    found = {}
    for entry in _devices(device):
        if entry.get("type") == "gpu" and entry.get("id"):
            condition = _condition_of(entry)
            found[entry["id"]] = (
                bool(entry.get("health")),
                condition.get("reason", ""),
                condition.get("message", ""),
            )
    return found


def _devices(device: Json | None) -> list[Json]:
    return list(((device or {}).get("spec") or {}).get("devices") or [])


def left_out(report: Report, device: Json) -> int:
    """How many GPUs of the daemon's are not in the object."""
    there = health(device).keys()
    return sum(gpu["uuid"] not in there for gpu in report.gpus["gpus"])


def _entry(gpu: Json, known: Json, report: Report, now: float) -> Json:
    """One GPU. What cannot change is taken from ``known`` where the driver does not say it now."""
    entry: Json = {name: value for name, value in known.items() if name not in _OURS}
    entry |= {"type": "gpu", "id": gpu["uuid"]}
    minor = gpu["minor"] if gpu["minor"] is not None else known.get("minor")
    if minor is not None:
        entry["minor"] = minor
    reasons = [camel(each["reason"]) for each in gpu["illnesses"]]
    since = min((each["since"] for each in gpu["illnesses"]), default=now)
    if gpu["uuid"] in report.cordoned or "*" in report.cordoned:
        reasons.append(CORDONED)
    if report.failing:
        reasons.append(NVML_UNAVAILABLE)
    entry["health"] = not reasons
    memory = (known.get("resources") or {}).get("koordinator.sh/gpu-memory")
    if gpu["memory_total"] is not None:
        memory = quantity(gpu["memory_total"])
    entry["resources"] = {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory-ratio": "100"}
    if memory is not None:
        entry["resources"]["koordinator.sh/gpu-memory"] = memory
    if topology := _topology(gpu) or known.get("topology"):
        entry["topology"] = topology
    conditions = _other_conditions(known)
    if reasons:
        status = "Unknown" if reasons == [NVML_UNAVAILABLE] else "False"
        conditions.append(_condition(status, reasons, known, since))
    if conditions:
        entry["conditions"] = conditions
    return entry


def _unknown(entry: Json, now: float) -> Json:
    """A GPU that the object has and the daemon does not know, while nobody can be asked."""
    condition = _condition("Unknown", [NVML_UNAVAILABLE], entry, now)
    return {**entry, "health": False, "conditions": [*_other_conditions(entry), condition]}


def _condition(status: str, reasons: Sequence[str], known: Json, since: float) -> Json:
    """The time is that of the last change of ``status``, also of one that an earlier reporter wrote."""
    before = _condition_of(known)
    at = before["lastTransitionTime"] if before.get("status") == status else rfc3339(since)
    message = "; ".join(MESSAGES.get(reason, reason) for reason in reasons)
    return {
        "type": _CONDITION,
        "status": status,
        "reason": reasons[0],
        "message": message,
        "lastTransitionTime": at,
    }


def _other_conditions(entry: Json) -> list[Json]:
    return [each for each in entry.get("conditions") or [] if each.get("type") != _CONDITION]


def _condition_of(entry: Json) -> Json:
    return next((each for each in entry.get("conditions") or [] if each.get("type") == _CONDITION), {})


def _topology(gpu: Mapping[str, Any]) -> Json | None:
    """All of it or nothing: the object's schema wants each of the three."""
    place = {"socketID": gpu["cpu_socket"], "nodeID": gpu["numa_node"], "pcieID": gpu["pcie_root"]}
    if None in place.values() or gpu["pci_address"] is None:
        return None
    return {**place, "busID": gpu["pci_address"]}


def _labels(gpus: Mapping[str, Any]) -> dict[str, str]:
    """Of the first GPU that has a name: the label is the node's, which has one model in Koordinator's eyes."""
    model = next((each["name"] for each in gpus["gpus"] if each["name"]), "")
    labels = {MODEL_LABEL: label_value(model), DRIVER_LABEL: label_value(gpus["driver_version"] or "")}
    return {name: value for name, value in labels.items() if value}


def _owners(owner: OwnerReference, metadata: Json) -> list[Json]:
    """Ours among those that are there, in the place of one to an earlier node of that name."""
    ours = {
        "apiVersion": "v1",
        "kind": "Node",
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return [*_others(metadata.get("ownerReferences") or ()), ours]


def _others(references: Iterable[Json]) -> list[Json]:
    return [each for each in references if (each.get("apiVersion"), each.get("kind")) != ("v1", "Node")]
