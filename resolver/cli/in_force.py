"""The settings that a command uses: those of the running daemon, else those that one would start with here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from resolver import client, config
from resolver.base.errors import ResolverError, UsageError
from resolver.base.lock_holder import UNIT_SETTINGS
from resolver.cli.ask_daemon import ask
from resolver.config.settings import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resolver.config import Settings

_SECONDS = 1.0


class _StatusSettings(Struct):
    """The part of `resolver.api.status.Status` that is used here: the whole takes longer to load than `reverse`."""

    settings: list[config.Setting]


class InForce(NamedTuple):
    """Settings, and where each comes from: for `origin_of`."""

    settings: Settings
    origins: Mapping[str, str]
    source: str

    def origin_of(self, name: str) -> str:
        """Return the origin in words: ``of the daemon at ...``, or ``by file ... (no daemon answers at ...)``."""
        return f"by {self.origins[name]} ({self.source})" if self.origins else f"of {self.source}"


def settings_in_force(socket_path: str | None) -> InForce:
    """Return the daemon's settings, else those of file and environment."""
    where = client.socket_of(socket_path)
    try:
        reported = ask(_StatusSettings, "/v1/status", where, _SECONDS).settings
        return InForce(config.load(config.values_of(reported), environ={})[0], {}, f"the daemon at {where}")
    except (ResolverError, OSError) as error:
        why = str(error).partition(". ")[0]
    try:
        return InForce(*config.load(environ=environment()), why)
    except UsageError as error:
        where = f"; variables are also read from {UNIT_SETTINGS}" if os.path.exists(UNIT_SETTINGS) else ""
        raise UsageError(f"{error}{where}") from None


def environment() -> dict[str, str]:
    """Return this process's variables, and those of the package's unit, which a shell does not have."""
    try:
        with open(UNIT_SETTINGS, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, ValueError):
        return dict(os.environ)
    pairs = (line.partition("=") for line in lines if line.startswith(PREFIX))
    return {name.strip(): value.strip().strip("'\"") for name, _, value in pairs} | dict(os.environ)
