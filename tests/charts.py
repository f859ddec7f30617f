"""Renders the chart in `deploy/chart/resolver` with Helm itself, of the version that the lock file names."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from scripts.published import published
from tests.manifests import ROOT, Manifest

CHART: Final = ROOT / "deploy/chart/resolver"
#: Without a repository nothing is rendered: no image is published.
IMAGE: Final = {"image": {"repository": published()["IMAGE_NAME"]}}


class RefusedError(Exception):
    """Helm's words when it renders nothing."""


def helm(*arguments: str | Path, values: Mapping[str, Any] | None = None) -> str:
    """What Helm prints, run once for the same arguments and values. It reads nothing of this user's or a cluster's."""
    given = None if values is None else yaml.dump(dict(values), Dumper=yaml.CSafeDumper)
    done = _helm(tuple(map(str, arguments)), given)
    if done.returncode:
        raise RefusedError(done.stderr)
    assert done.stderr == ""
    return done.stdout


@cache
def _helm(arguments: tuple[str, ...], values: str | None) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("helm")
    if not program.exists():
        pytest.fail(
            f"{program} is missing: make setup-dev installs it, on x86-64 only (nobody publishes it for others)",
            pytrace=False,
        )
    return subprocess.run(
        [program, *arguments, *(() if values is None else ("--values", "-"))],
        input=values,
        # It ends before it is worth collecting any memory.
        env={"PATH": os.defpath, "HOME": "/nonexistent", "KUBECONFIG": "/nonexistent", "GOGC": "off"},
        capture_output=True,
        text=True,
        check=False,
    )


def render(
    values: Mapping[str, Any] | None = None, *, namespace: str = "resolver", chart: Path = CHART
) -> list[Manifest]:
    """Every object that an installation would make, with an image if none is given; `RefusedError` if there is none."""
    text = helm("template", "resolver", chart, "--namespace", namespace, values=with_image(values or {}))
    return [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each]


def with_image(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add an image to values that name none."""
    image = values.get("image", {})
    return {**values, "image": {**IMAGE["image"], **image} if isinstance(image, dict) else image}


def the(kind: str, manifests: Sequence[Manifest]) -> Manifest:
    (found,) = [each for each in manifests if each["kind"] == kind]
    return found


def environment(container: Manifest) -> dict[str, str]:
    names = [each["name"] for each in container["env"]]
    assert len(names) == len(set(names))
    return {each["name"]: each.get("value", "") for each in container["env"]}
