"""Renders the kustomizations in `deploy/kustomize` by kubectl, and validates manifests by Kubernetes' own schemas."""

import json
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
from tests.programs import completed

ROOT: Final = Path(__file__).parent.parent
KUSTOMIZE: Final = ROOT / "deploy/kustomize"
#: The image with its tag, under the name of deploy/published.env.
IMAGE: Final = f"{published()['IMAGE_NAME']}:{VERSION}"
#: Kinds of the Prometheus operator and of OpenShift: Kubernetes' own schemas do not have them.
FOREIGN: Final = ("ServiceMonitor", "PodMonitor", "PrometheusRule", "SecurityContextConstraints")
#: Kubernetes releases for validation: the oldest that has every used field, and the newest.
RELEASES: Final = ("1.25", "1.28", "1.31", "1.34", kubernetes_validate.latest_version())

Manifest = dict[str, Any]


def load(path: Path) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def kubectl() -> str:
    """Return the program of the requirements, else this machine's."""
    program = Path(sys.executable).with_name("kubectl")
    return str(program) if program.exists() else "kubectl"


@cache
def _rendered(directory: Path) -> str:
    done = completed(kubectl(), "kustomize", str(directory))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def render(directory: Path) -> list[Manifest]:
    return [each for each in yaml.load_all(_rendered(directory), Loader=yaml.CSafeLoader) if each]


def merged(manifest: Manifest, patch: Manifest) -> Manifest:
    options = ("--local", "-f", "-", "--type", "strategic", "-p", json.dumps(patch), "-o", "json")
    command, given = [kubectl(), "patch", *options], json.dumps(manifest)
    done = completed(*command, input=given)
    assert (done.returncode, done.stderr) == (0, "")
    changed: Manifest = json.loads(done.stdout)
    return changed


def _containers(manifest: Manifest) -> Sequence[Manifest]:
    spec = manifest.get("spec", {}).get("template", {}).get("spec", {})
    containers: list[Manifest] = spec.get("containers", [])
    return containers


def pod_of(manifests: Sequence[Manifest], name: str = "resolver") -> Manifest:
    (found,) = [
        each
        for each in manifests
        if each["kind"] == "DaemonSet" and name in [container["name"] for container in _containers(each)]
    ]
    spec: Manifest = found["spec"]["template"]["spec"]
    return spec


def container_of(pod: Manifest, name: str = "resolver") -> Manifest:
    (found,) = [each for each in pod["containers"] if each["name"] == name]
    container: Manifest = found
    return container


def validate(manifests: Sequence[Manifest], releases: Sequence[str] = RELEASES) -> None:
    """Raises `kubernetes_validate.ValidationError` for a manifest that a server of one of these releases refuses."""
    for release in releases:
        for manifest in manifests:
            if manifest["kind"] in FOREIGN:
                continue
            _validate(json.dumps(manifest), release)


# The library reads a release's schemas, megabytes of them, for every manifest: here once each.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


@cache
def _validate(manifest: str, release: str) -> None:
    kubernetes_validate.validate(json.loads(manifest), release, strict=True)
