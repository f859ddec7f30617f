"""The settings in force, their origins, and a requested reload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from resolver.config import SETTINGS, described
from resolver.config.settings import FIXED_AT_START

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resolver.config import Settings


class Reloading:
    """`take` replaces ``settings`` whole; ``described`` has them with their origins, for people."""

    def __init__(self, settings: Settings, origins: Mapping[str, str]) -> None:
        self.settings = settings
        self._origins = dict(origins)
        self.described = described(settings, self._origins)
        self._wanted: tuple[Settings, dict[str, str]] | None = None

    def want(self, settings: Settings, origins: Mapping[str, str]) -> None:
        """Take these over at the next `take`."""
        self._wanted = settings, dict(origins)

    def take(self) -> dict[str, list[str]] | None:
        """Apply the reload requested since the last call; None if there was none.

        Returns the names of ``changed`` settings, and of those that ``need_a_restart`` and keep their value.
        """
        if self._wanted is None:
            return None
        (wanted, origins), self._wanted = self._wanted, None
        kept = {name: getattr(self.settings, name) for name in FIXED_AT_START}
        names = [name for name in SETTINGS if getattr(wanted, name) != getattr(self.settings, name)]
        self.settings = structs.replace(wanted, **kept)
        self._origins = origins | {name: self._origins[name] for name in self._origins.keys() & kept.keys()}
        self.described = described(self.settings, self._origins)
        return {
            "changed": [name for name in names if name not in kept],
            "need_a_restart": [name for name in names if name in kept],
        }
