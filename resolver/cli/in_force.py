"""The settings that a command uses: the running daemon's, or else those of a daemon started here."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from resolver import client, config
from resolver.base.errors import ResolverError, UsageError
from resolver.base.lock_holder import UNIT_SETTINGS
from resolver.cli.ask_daemon import ask
from resolver.config import Settings
from resolver.config.settings import PREFIX

_SECONDS = 1.0


class _StatusSettings(Struct):
    """Part of `resolver.api.status.Status`, whose module takes longer to load than all of `reverse`."""

    settings: list[config.Setting]


class InForce(NamedTuple):
    """Settings and their origins, empty for a daemon's; ``source`` names the daemon, or says why none was asked."""

    settings: Settings
    origins: Mapping[str, str]
    source: str

    def origin_of(self, name: str) -> str:
        """Return the origin in words: ``of the daemon at ...``, or ``by file ... (no daemon answers at ...)``."""
        return f"by {self.origins[name]} ({self.source})" if self.origins else f"of {self.source}"


def settings_in_force(socket_path: str | None) -> InForce:
    """Return the daemon's settings, or else those of the file and the environment."""
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
    """Return this process's variables, and those that only the package's unit sets."""
    try:
        with open(UNIT_SETTINGS, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, ValueError):
        return dict(os.environ)
    pairs = (line.partition("=") for line in lines if line.startswith(PREFIX))
    return {name.strip(): value.strip().strip("'\"") for name, _, value in pairs} | dict(os.environ)
