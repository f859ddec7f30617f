"""Command line options for the daemon's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resolver.config.settings import SETTINGS
from resolver.config.values import text_of

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting, without a default, so that the file and the environment still count."""
    parser.set_defaults(**dict.fromkeys((*SETTINGS, "config")))
    parser.add_argument("--config", metavar="FILE", help="settings in TOML, with the same names")
    for setting in SETTINGS.values():
        about, default = setting.about, text_of(setting.default)
        if setting.kind is bool:
            parser.add_argument(setting.flag, action="store_true", help=about.help)
            continue
        parser.add_argument(
            setting.flag,
            action="store" if isinstance(setting.default, (str, int, float)) else "append",
            metavar=about.placeholder or None,
            choices=setting.choices or None,
            help=f"{about.help} (default {default})" if default else about.help,
        )


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings on the command line, for `resolver.config.load`."""
    flags = {name: getattr(args, name) for name in SETTINGS}
    return {name: value for name, value in flags.items() if value not in (None, False)}
