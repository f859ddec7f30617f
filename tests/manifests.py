"""Renders the kustomizations in `deploy/kustomize`, and validates what comes out against Kubernetes' own schemas.

Only what they use is known: `resources`, `components`, `patches` (strategic merges, in files) and `images`. Anything
else is an error, as is a patch that meets nothing: what is rendered here is what `kubectl kustomize` renders, which
`tests/unit/deploy/test_manifests.py` holds it to where there is one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import kubernetes_validate.utils
import yaml

from resolver.base.version import VERSION
from scripts.published import published

ROOT: Final = Path(__file__).parent.parent
KUSTOMIZE: Final = ROOT / "deploy/kustomize"
#: The image with its tag, under the name of deploy/published.env.
IMAGE: Final = f"{published()['IMAGE_NAME']}:{VERSION}"
#: Lists of the pod's API that are merged by a key of their entries; all others are replaced as a whole.
MERGE_KEYS: Final = {
    "containers": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
#: Kinds of the Prometheus operator and of OpenShift: Kubernetes' own schemas do not have them.
FOREIGN: Final = ("ServiceMonitor", "PodMonitor", "PrometheusRule", "SecurityContextConstraints")
_ATOMIC: Final = ("add", "args", "drop", "tolerations")
#: Kubernetes releases for validation: the oldest that has every used field, and the newest.
RELEASES: Final = ("1.25", "1.28", "1.31", "1.34", kubernetes_validate.latest_version())

Manifest = dict[str, Any]


class ManifestError(Exception):
    """A kustomization that is wrong, or that uses what this renderer does not know."""


def load(path: Path) -> list[Manifest]:
    """Every document of a file."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def render(directory: Path) -> list[Manifest]:
    """What `kubectl kustomize` prints for this directory, in no particular order."""
    return _apply(directory, [])


def _apply(directory: Path, manifests: list[Manifest]) -> list[Manifest]:
    kustomization = load(directory / "kustomization.yaml")[0]
    known = {"apiVersion", "kind", "resources", "components", "patches", "images"}
    if unknown := kustomization.keys() - known:
        raise ManifestError(f"{directory}: this renderer does not know {sorted(unknown)}")
    for name in kustomization.get("resources", ()):
        path = directory / name
        manifests = manifests + (render(path) if path.is_dir() else load(path))
    for name in kustomization.get("components", ()):
        if load(directory / name / "kustomization.yaml")[0]["kind"] != "Component":
            raise ManifestError(f"{directory}: {name} is no component")
        manifests = _apply(directory / name, manifests)
    for entry in kustomization.get("patches", ()):
        if entry.keys() - {"path", "target"}:
            raise ManifestError(f"{directory}: a patch is a file with or without a target, not {entry}")
        (patch,) = load(directory / entry["path"])
        manifests = _patched(manifests, patch, entry.get("target"))
    for image in kustomization.get("images", ()):
        if image.keys() != {"name", "newName", "newTag"}:
            raise ManifestError(f"{directory}: an image has name, newName and newTag, not {image}")
        manifests = [_with_image(each, image) for each in manifests]
    return manifests


def _patched(manifests: list[Manifest], patch: Any, target: dict[str, str] | None) -> list[Manifest]:
    if isinstance(patch, list):
        return _appended(manifests, patch, target)
    met = [each for each in manifests if _is_meant(each, patch, target)]
    if not met:
        raise ManifestError(f"nothing is there for the patch of {patch['kind']} {patch['metadata']['name']}")
    body = {name: value for name, value in patch.items() if name not in ("apiVersion", "kind", "metadata")}
    return [merge(each, body) if each in met else each for each in manifests]


def _appended(
    manifests: list[Manifest], patch: list[dict[str, Any]], target: dict[str, str] | None
) -> list[Manifest]:
    """A JSON patch (RFC 6902) that adds entries to the end of lists, and does nothing else."""
    manifests = copy.deepcopy(manifests)
    met = [each for each in manifests if {"kind": each["kind"], "name": each["metadata"]["name"]} == target]
    if not met:
        raise ManifestError(f"nothing is there for the patch of {target}")
    for manifest in met:
        for operation in patch:
            if operation.keys() != {"op", "path", "value"} or operation["op"] != "add":
                raise ManifestError(f"an operation adds a value here, not {operation}")
            *path, last = operation["path"].lstrip("/").split("/")
            place: Any = manifest
            for name in path:
                place = place[int(name) if isinstance(place, list) else name]
            if last != "-" or not isinstance(place, list):
                raise ManifestError(f"an entry is added at a list's end here, not at {operation['path']}")
            place.append(copy.deepcopy(operation["value"]))
    return manifests


def _is_meant(manifest: Manifest, patch: Manifest, target: dict[str, str] | None) -> bool:
    metadata = manifest["metadata"]
    if target is None:
        named = {"name": metadata["name"], "namespace": metadata.get("namespace")}
        return (manifest["apiVersion"], manifest["kind"]) == (
            patch["apiVersion"],
            patch["kind"],
        ) and named == {
            "namespace": None,
            **patch["metadata"],
        }
    if target.keys() != {"kind", "labelSelector"}:
        raise ManifestError(f"a target has a kind and a labelSelector here, not {target}")
    label, _, value = target["labelSelector"].partition("=")
    return bool(manifest["kind"] == target["kind"] and metadata.get("labels", {}).get(label) == value)


def merge(value: Manifest, patch: Manifest) -> Manifest:
    """A strategic merge. The server's `kubectl patch` does the same, if for the order of entries."""
    merged = copy.deepcopy(value)
    for name, new in patch.items():
        if new is None:
            merged.pop(name, None)
        elif isinstance(new, dict):
            merged[name] = merge(merged.get(name) or {}, new)
        elif isinstance(new, list) and name in MERGE_KEYS:
            merged[name] = _merge_list(merged.get(name) or [], new, MERGE_KEYS[name])
        elif isinstance(new, list) and name not in _ATOMIC:
            raise ManifestError(f"a patch of the list {name}: is it merged or replaced?")
        else:
            merged[name] = copy.deepcopy(new)
    return merged


def _merge_list(old: list[Manifest], new: list[Manifest], key: str) -> list[Manifest]:
    by_key = {entry[key]: entry for entry in old}
    for entry in new:
        known = by_key.pop(entry[key], {})
        what = entry.get("$patch", "merge")
        if what == "merge":
            by_key[entry[key]] = merge(known, entry)
        elif what != "delete" or not known:
            raise ManifestError(f"$patch: {what} of {entry[key]}, which {'is' if known else 'is not'} there")
    patched = [entry[key] for entry in new if entry[key] in by_key]
    # Patched fields come first, as in kustomize's output.
    return [by_key[name] for name in (*patched, *(each for each in by_key if each not in patched))]


def _with_image(manifest: Manifest, image: dict[str, str]) -> Manifest:
    manifest = copy.deepcopy(manifest)
    for container in _containers(manifest):
        if container["image"].partition(":")[0] == image["name"]:
            container["image"] = f"{image['newName']}:{image['newTag']}"
    return manifest


def _containers(manifest: Manifest) -> Sequence[Manifest]:
    spec = manifest.get("spec", {}).get("template", {}).get("spec", {})
    containers: list[Manifest] = spec.get("containers", [])
    return containers


def pod_of(manifests: Sequence[Manifest], name: str = "resolver") -> Manifest:
    """The pod's spec of the one DaemonSet that has a container of that name."""
    (found,) = [
        each
        for each in manifests
        if each["kind"] == "DaemonSet" and name in [container["name"] for container in _containers(each)]
    ]
    spec: Manifest = found["spec"]["template"]["spec"]
    return spec


def container_of(pod: Manifest, name: str = "resolver") -> Manifest:
    """The container of that name."""
    (found,) = [each for each in pod["containers"] if each["name"] == name]
    container: Manifest = found
    return container


def validate(manifests: Sequence[Manifest], releases: Sequence[str] = RELEASES) -> None:
    """Raises `kubernetes_validate.ValidationError` for what a server of one of these releases would refuse."""
    for release in releases:
        for manifest in manifests:
            if manifest["kind"] in FOREIGN:
                continue
            _validate(json.dumps(manifest), release)


# The library reads a release's schemas, megabytes of them, for every manifest: here once each.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


@cache
def _validate(manifest: str, release: str) -> None:
    """One manifest, as JSON: the same one is looked at once."""
    kubernetes_validate.validate(json.loads(manifest), release, strict=True)
