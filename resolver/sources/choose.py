"""Takes the best source that works here, or the one that was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.sources.scan import ScanSource

if TYPE_CHECKING:
    from resolver.procfs import Procfs
    from resolver.sources import Source


def choose(name: str, procfs: Procfs) -> Source:
    """The source for a setting's ``auto`` or ``scan``. The scan is the only one there is yet."""
    if name not in ("auto", "scan"):
        raise ValueError(f"no source {name!r}")
    return ScanSource(procfs)
