"""Renders the kustomizations in `deploy/kustomize` by kubectl, and validates manifests by Kubernetes' own schemas."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
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


def load(path: Path) -> list[Manifest]:
    """Return every document of a file."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def kubectl() -> str:
    """Return the program of the requirements, else this machine's."""
    program = Path(sys.executable).with_name("kubectl")
    return str(program) if program.exists() else "kubectl"


@cache
def _rendered(directory: Path) -> str:
    command = [kubectl(), "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def render(directory: Path) -> list[Manifest]:
    """Return what `kubectl kustomize` prints for this directory."""
    return [each for each in yaml.load_all(_rendered(directory), Loader=yaml.CSafeLoader) if each]


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
            raise ValueError(f"a patch of the list {name}: is it merged or replaced?")
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
            raise ValueError(f"$patch: {what} of {entry[key]}, which {'is' if known else 'is not'} there")
    patched = [entry[key] for entry in new if entry[key] in by_key]
    # Patched fields come first, as in kustomize's output.
    return [by_key[name] for name in (*patched, *(each for each in by_key if each not in patched))]


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
