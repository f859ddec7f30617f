"""The public places of a release, from `deploy/published.env` or the environment."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def published() -> dict[str, str]:
    """Return ADDRESS (empty while there is none) and IMAGE_NAME."""
    text = (ROOT / "deploy/published.env").read_text()
    lines = dict(re.findall(r"(?m)^([A-Z_]+) *=[ \t]*(\S*)$", text))
    return {name: os.environ.get(name, value) for name, value in lines.items()}
