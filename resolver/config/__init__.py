"""The settings: defaults, then a TOML file, then the environment, then flags; the later wins.

``nvml_interval`` in the file is ``RESOLVER_NVML_INTERVAL`` in the environment and ``--nvml-interval`` on the command
line.
"""

import argparse
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from resolver.base.lean import lean

with lean():
    import msgspec

from resolver.base.errors import UsageError
from resolver.config.settings import (
    FIXED_AT_START,
    PREFIX,
    SETTINGS,
    Declared,
    HostpidNamespace,
    Settings,
    WriteUtilization,
)
from resolver.config.values import OFF, parse_address, parse_bool, parse_duration, text_of

__all__ = (
    "OFF",
    "SETTINGS",
    "HostpidNamespace",
    "Settings",
    "WriteUtilization",
    "add_arguments",
    "given",
    "parse_address",
    "parse_duration",
    "text_of",
)


#: Names with our prefix that are no settings: the file's, and those of ``resolver report-devices``.
OTHER_VARIABLES = {f"{PREFIX}CONFIG", f"{PREFIX}NODE", f"{PREFIX}REPORT_METRICS_ADDR"}

#: Bytes of a socket's path: the kernel takes 107, and the daemon makes the socket under a longer name.
_LONGEST_SOCKET = 99
#: Variables of Kubernetes for a Service ``resolver`` or ``resolver-*`` (pkg/kubelet/envvars/envvars.go).
_OF_A_SERVICE = re.compile(r"\w+_(SERVICE_(HOST|PORT)|PORT_[0-9]+_|PORT=\w+://)")


class Setting(msgspec.Struct, frozen=True):
    """One setting in force, with its origin; durations in seconds."""

    name: str
    value: Any
    origin: str


def load(
    flags: Mapping[str, Any] | None = None, file: str | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Settings, dict[str, str]]:
    """Combine the settings of all sources. Raises `UsageError` with the place, the value and the allowed ones.

    ``flags`` holds only the given options. ``file`` falls back to ``RESOLVER_CONFIG``. The origin of each setting is
    ``default``, ``file <path>``, ``environment <variable>`` or ``command line``.
    """
    environ = os.environ if environ is None else environ
    file = file or environ.get(PREFIX + "CONFIG")
    merged: dict[str, Any] = {}
    origins = dict.fromkeys(SETTINGS, "default")
    for origin, values in (
        (f"file {file}", _from_file(file) if file else {}),
        ("environment", _from_environment(environ)),
        ("command line", dict(flags or {})),
    ):
        for name, value in values.items():
            variable = SETTINGS[name].variable if name in SETTINGS else name
            in_environment = origin == "environment"
            merged[name] = _convert(name, value, variable if in_environment else f"{name} ({origin})")
            origins[name] = f"environment {variable}" if in_environment else origin
    settings = Settings(**merged)
    _check_together(settings)
    return settings, origins


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


def described(settings: Settings, origins: Mapping[str, str]) -> tuple[Setting, ...]:
    """Pair every setting with its origin, or ``unknown``."""
    values = msgspec.to_builtins(settings).items()
    return tuple(Setting(name, value, origins.get(name, "unknown")) for name, value in values)


def changed(described: Iterable[Setting]) -> str:
    """Summarize the settings that differ from their defaults: ``interval=1s (command line), ...``."""
    changed = (
        f"{setting.name}={text_of(setting.value) or 'none'} ({setting.origin})"
        for setting in described
        if text_of(setting.value) != text_of(SETTINGS[setting.name].default)
    )
    return ", ".join(changed) or "all at their defaults"


def values_of(settings: Iterable[Setting]) -> dict[str, Any]:
    """Return the settings in ``/v1/status`` by name."""
    return {setting.name: setting.value for setting in settings}


class Reloading:
    """`take` replaces ``settings`` whole; ``described`` has them with their origins, for people."""

    def __init__(self, settings: Settings, origins: Mapping[str, str]) -> None:
        self.settings, self.described = settings, described(settings, origins)
        self._wanted: tuple[Settings, Mapping[str, str]] | None = None

    def want(self, settings: Settings, origins: Mapping[str, str]) -> None:
        self._wanted = settings, origins

    def take(self) -> dict[str, list[str]] | None:
        """Apply the reload requested since the last call; None if there was none.

        Returns the names of ``changed`` settings, and of those that ``need_a_restart`` and keep their value.
        """
        if self._wanted is None:
            return None
        (wanted, origins), self._wanted = self._wanted, None
        kept = {name: getattr(self.settings, name) for name in FIXED_AT_START}
        names = [name for name in SETTINGS if getattr(wanted, name) != getattr(self.settings, name)]
        origins_kept = {setting.name: setting.origin for setting in self.described if setting.name in kept}
        self.settings = msgspec.structs.replace(wanted, **kept)
        self.described = described(self.settings, {**origins, **origins_kept})
        return {
            "changed": [name for name in names if name not in kept],
            "need_a_restart": [name for name in names if name in kept],
        }


def _from_file(path: str) -> dict[str, Any]:
    import tomllib  # only daemons with a file need it

    try:
        with open(path, "rb") as file:
            _require_trusted(path, os.fstat(file.fileno()))
            values = tomllib.load(file)
    except OSError as error:
        raise UsageError(
            f"the settings file {path} cannot be read ({error.strerror}): "
            "name another with --config or RESOLVER_CONFIG, or leave it out for the defaults"
        ) from None
    except ValueError as error:  # TOML's, or Unicode's
        raise UsageError(f"{path} is not valid TOML: {error}; put text in quotes, save it as UTF-8") from None
    twice = [name for name in values if "-" in name and name.replace("-", "_") in values]
    if twice:
        raise UsageError(f"the settings file {path} has {twice[0]} twice, with a dash and without: keep one")
    return {name.replace("-", "_"): value for name, value in values.items()}


def _require_trusted(path: str, info: os.stat_result) -> None:
    """Raise `UsageError` if another user can change the file: settings decide root's writes."""
    if info.st_uid not in (0, os.geteuid()):
        why = f"belongs to user {info.st_uid}: chown it to root"
    elif info.st_mode & stat.S_IWOTH:
        why = "can be written by every user: chmod o-w"
    else:
        return
    raise UsageError(f"the settings file {path} {why}, or name another with --config")


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the non-empty variables. Raises `UsageError` for a name that resembles a setting's."""
    allowed = [*(setting.variable for setting in SETTINGS.values()), *OTHER_VARIABLES]
    for variable, value in environ.items():
        foreign = not variable.startswith(PREFIX) or not value or _OF_A_SERVICE.match(f"{variable}={value}")
        if not foreign and variable not in allowed:
            names = [name.removeprefix(PREFIX) for name in allowed]
            raise _no_such(variable, variable.removeprefix(PREFIX).upper(), names, PREFIX)
    return {
        name: environ[setting.variable] for name, setting in SETTINGS.items() if environ.get(setting.variable)
    }


def _no_such(where: str, name: str, known: Collection[str], prefix: str = "") -> UsageError:
    """Suggest the setting meant by a misspelt name, which must not be ignored."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    hint = (
        f"did you mean {prefix}{near[0]}?"
        if near
        else f"remove it; there are {', '.join(prefix + name for name in known)}"
    )
    return UsageError(f"{where}: there is no such setting; {hint}")


def _convert(name: str, value: Any, where: str) -> Any:
    setting = SETTINGS.get(name)
    if setting is None:
        raise _no_such(where, name, SETTINGS)
    try:
        meant = _from_text(setting, value) if isinstance(value, str) else value
        converted = msgspec.convert(meant, setting.type, strict=True)
        if setting.check is not None:
            setting.check(converted)
    except ValueError as error:
        ours = setting.check is not None and not isinstance(error, msgspec.ValidationError)
        raise UsageError(
            f"{where}: {value!r} is not possible: {error if ours else f'write {setting.expected}'}"
        ) from None
    return converted


def _check_together(settings: Settings) -> None:
    """Refuse too long socket paths, a key alone, and a tenant socket that leads containers to root's files."""
    for path in (settings.socket_path, settings.tenant_socket, settings.broker):
        if len(path.encode(errors="replace")) > _LONGEST_SOCKET:
            raise UsageError(
                f"{path} is too long for a Unix socket: choose a path of at most {_LONGEST_SOCKET} bytes"
            )
    if settings.metrics_tls_key and not settings.metrics_tls_cert:
        raise UsageError("metrics_tls_key takes metrics_tls_cert, the certificate of that key")
    if not settings.tenant_socket:
        return
    tenants = os.path.dirname(os.path.normpath(settings.tenant_socket))
    roots = {"the run directory": settings.run_dir, "root's socket": os.path.dirname(settings.socket_path)}
    why = ": write a path" if tenants == "/" else ""
    for name, path in roots.items():
        if not why and os.path.commonpath([tenants, os.path.abspath(path)]) == tenants:
            why = f", and {name} is in there: write a path"
    if why:
        raise UsageError(
            f"tenant_socket: {settings.tenant_socket!r} is not possible: containers mount its directory{why} in a "
            "directory of its own, such as /run/resolver/tenants/resolver.sock"
        )


def _from_text(setting: Declared, text: str) -> Any:
    parsers: dict[type, Callable[[str], Any]] = {bool: parse_bool, float: parse_duration, int: int}
    parse = parsers.get(setting.kind)
    if parse is not None:
        return parse(text)
    return text if isinstance(setting.default, str) else [part for part in text.split(":") if part]
