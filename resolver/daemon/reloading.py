"""The settings in force, where each comes from, and those that a reload brings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.config import FIXED_AT_START, Settings, described

if TYPE_CHECKING:
    from collections.abc import Mapping


class Reloading:
    """``settings`` are replaced whole, by `take`; ``described`` are the same for people, with their origins."""

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

        Settings that can't change while running keep their value. Returns the names of ``changed`` settings and of
        those that would ``need_a_restart``.
        """
        if self._wanted is None:
            return None
        (wanted, origins), self._wanted = self._wanted, None
        fixed = {name: getattr(self.settings, name) for name in FIXED_AT_START}
        ignored = [name for name, value in fixed.items() if getattr(wanted, name) != value]
        new = {name: getattr(wanted, name) for name in Settings.__struct_fields__} | fixed
        changed = [name for name, value in new.items() if value != getattr(self.settings, name)]
        self.settings = Settings(**new)
        self._origins = origins | {
            name: self._origins[name] for name in FIXED_AT_START if name in self._origins
        }
        self.described = described(self.settings, self._origins)
        return {"changed": changed, "need_a_restart": ignored}
