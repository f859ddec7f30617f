"""The pages that people read."""

from pathlib import Path
from typing import Final

FOLDERS: Final = (".", "docs", "bpf", "deploy/**", "tests/fakes")


def documents(root: Path) -> list[Path]:
    paths = {path for folder in FOLDERS for path in root.glob(f"{folder}/*.md")}
    assert len(paths) > 10
    return sorted(paths)
