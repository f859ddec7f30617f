"""The public places of a release, from `deploy/published.env` or the environment, and the texts that name them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNSET = "# ADDRESS in deploy/published.env is empty: make tables"


def published() -> dict[str, str]:
    """Return ADDRESS (empty while there is none, without a slash at its end) and IMAGE_NAME."""
    text = (ROOT / "deploy/published.env").read_text()
    lines: dict[str, str] = dict(re.findall(r"(?m)^([A-Z_]+) *=[ \t]*(\S*)$", text))
    return {name: os.environ.get(name, value).rstrip("/") for name, value in lines.items()}


def _lines(indent: str, *lines: str) -> list[str]:
    """Return the lines with the address in them, or a comment while there is none."""
    address = published()["ADDRESS"]
    return [indent + line.replace("@", address) for line in (lines if address else (UNSET,))]


def chart() -> list[str]:
    """Return the chart's address."""
    return _lines("", "home: @", "icon: @/raw/main/docs/icon.svg", "sources:", "  - @")


def chart_annotations() -> list[str]:
    """Return the chart's links for Artifact Hub."""
    lines = ("artifacthub.io/links: |", "  - name: Documentation", "    url: @/blob/main/docs/README.md")
    return _lines("  ", *lines)


def insights() -> list[str]:
    """Return the address of security-insights.yml."""
    return _lines("  ", "url: @/blob/main/security-insights.yml")


def insights_project() -> list[str]:
    """Return the project's addresses in security-insights.yml."""
    repository = ("repositories:", "  - name: resolver", "    url: @", "    comment: All of it")
    guide = ("documentation:", "  detailed-guide: @/blob/main/docs/README.md")
    return _lines("  ", "homepage: @", *repository, *guide)


def insights_repository() -> list[str]:
    """Return the repository's addresses in security-insights.yml."""
    of_files = ("license:", "  url: @/blob/main/LICENSE", "  expression: Apache-2.0")
    places = ("  distribution-points:", "    - uri: @/releases", "      comment: Every file, with SHA256SUMS")
    return _lines("  ", "url: @", *of_files, "release:", "  automated-pipeline: true", *places)


def pack(source: Path, place: Path) -> None:
    """Copy the chart with its address and, if the image is published, its name."""
    import shutil

    from scripts.tables import written

    shutil.copytree(source, place)
    text = (place / "Chart.yaml").read_text()
    for name, lines in (("address", chart()), ("address-annotations", chart_annotations())):
        text = written(text, name, lines)
    (place / "Chart.yaml").write_text(text)
    values = (place / "values.yaml").read_text()
    if published()["ADDRESS"]:
        values = values.replace('  repository: ""', f"  repository: {published()['IMAGE_NAME']}", 1)
    (place / "values.yaml").write_text(values)


if __name__ == "__main__":
    pack(ROOT / "deploy/chart/resolver", Path(sys.argv[1]))
