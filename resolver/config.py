"""The settings: defaults, then a TOML file, then the environment, then flags; the later wins.

The same names everywhere: ``nvml_interval`` in the file, ``RESOLVER_NVML_INTERVAL`` in the environment,
``--nvml-interval`` on the command line.
"""

from __future__ import annotations

import os
import re
import tomllib
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from resolver.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


class HostpidNamespace(StrEnum):
    """Which number ``hostpid`` must be: decided by the driver's version, or forced."""

    AUTO = "auto"
    HOST = "host"
    CONTAINER = "container"


class WriteUtilization(StrEnum):
    """Where ``sm_util`` is written: where no watcher puts it right, wherever it differs, or nowhere."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class SourceName(StrEnum):
    """Where PIDs come from. ``auto`` takes the best that works here."""

    AUTO = "auto"
    BPF = "bpf"
    NETLINK = "netlink"
    SCAN = "scan"


class BrokerAnswer(StrEnum):
    """What our host PID broker tells: the number that the driver's samples will carry, or always the host PID."""

    POLICY = "policy"
    HOST = "host"


class LogFormat(StrEnum):
    """How log lines look; ``auto``: for people on a terminal, JSON otherwise."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


class LogLevel(StrEnum):
    """The least important lines that are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


OFF = "off"  # for ``metrics_addr``

Seconds = Annotated[float, msgspec.Meta(ge=0.01, le=3600)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting with its default. Intervals are in seconds; in text ``250ms``, ``1s``, ``2m`` work too."""

    containers_dir: tuple[str, ...] = ("/usr/local/vgpu/containers",)
    interval: Seconds = 0.25
    nvml_interval: Seconds = 1.0
    dry_run: bool = False
    wait: bool = False  # for the daemon that writes on this node to end, then take over
    hostpid_namespace: HostpidNamespace = HostpidNamespace.AUTO
    write_utilization: WriteUtilization = WriteUtilization.AUTO
    source: SourceName = SourceName.AUTO
    log_format: LogFormat = LogFormat.AUTO
    log_level: LogLevel = LogLevel.INFO
    map_size: Annotated[int, msgspec.Meta(ge=1024, le=4194304)] = 32768
    run_dir: str = "/run/resolver"
    socket: str = ""  # the API's; empty: resolver.sock in run_dir
    socket_group: str = ""  # name or number of the group that may ask everything, beside root; empty: none
    socket_mode: Annotated[str, msgspec.Meta(pattern="^0?[0-7]{2}[0145]$")] = "0660"
    tenant_socket: str = ""  # where containers may ask about themselves; empty: nowhere
    metrics_addr: str = ":9395"  # HOST:PORT, every address without HOST; off: no metrics
    metrics_per_process: bool = False
    hami_metrics: bool = False
    broker: str = ""  # where HAMi's host PID broker is served; empty: not
    broker_answer: BrokerAnswer = BrokerAnswer.POLICY
    pod_logs_dir: str = "/var/log/pods"
    mapped_regions: bool = False  # those inside containers, found through the processes that map them

    @property
    def socket_path(self) -> str:
        """Where the API listens."""
        return self.socket or f"{self.run_dir}/resolver.sock"


class SettingReport(NamedTuple):
    """One setting in force: ``value`` as JSON has it, durations in seconds; ``origin`` as in `load_with_origins`."""

    name: str
    value: Any
    origin: str


#: What a running daemon cannot change; a reload that asks for it says so and keeps the old value.
FIXED_AT_START = (
    "run_dir",
    "socket",
    "socket_group",
    "socket_mode",
    "tenant_socket",
    "metrics_addr",
    "metrics_per_process",
    "hami_metrics",
    "broker",
    "broker_answer",
    "pod_logs_dir",
    "map_size",
    "log_format",
    "source",
    "dry_run",
    "wait",
)

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m)?\s*")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, None: 1.0}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_PREFIX = "RESOLVER_"


def parse_duration(text: str) -> float:
    """Seconds from ``250ms``, ``1s``, ``2m`` or a plain number of seconds; ValueError on anything else."""
    match = _DURATION.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is no duration: write 250ms, 1s or 2m")
    return float(match[1]) * _UNITS[match[2]]


def parse_address(text: str) -> tuple[str, int] | None:
    """Host and port of ``HOST:PORT``; the host is empty for every address. None for ``off``, else ValueError.

    Addresses only, and ``localhost``: a name's address would be somebody else's word, waited for at start.
    """
    if text == OFF:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("write HOST:PORT, :PORT for every address, or off")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address goes in brackets: [::1]:9395")
    if host == "localhost":
        return "127.0.0.1", int(port)
    if host:
        import socket  # only where one is given

        try:
            socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            raise ValueError(
                f"{host!r} is no address: write one such as 127.0.0.1 or [::1], not a name"
            ) from None
    return host, int(port)


def load(
    flags: Mapping[str, Any] | None = None, file: str | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Put the settings together; `UsageError` names the place, the value and what is allowed instead.

    ``flags`` holds only what was given. ``file`` falls back to ``RESOLVER_CONFIG``.
    """
    return load_with_origins(flags, file, environ)[0]


def load_with_origins(
    flags: Mapping[str, Any] | None = None, file: str | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Settings, dict[str, str]]:
    """The same, with the place that each setting comes from.

    It is ``default``, ``file <path>``, ``environment <variable>`` or ``command line``, for every name.
    """
    environ = os.environ if environ is None else environ
    file = file or environ.get(_PREFIX + "CONFIG")
    merged: dict[str, Any] = {}
    origins = dict.fromkeys(Settings.__struct_fields__, "default")
    for origin, values in (
        (f"file {file}", _from_file(file) if file else {}),
        ("environment", _from_environment(environ)),
        ("command line", dict(flags or {})),
    ):
        for name, value in values.items():
            variable = f"{_PREFIX}{name.upper()}"
            in_environment = origin == "environment"
            merged[name] = _convert(name, value, variable if in_environment else f"{name} ({origin})")
            origins[name] = f"environment {variable}" if in_environment else origin
    settings = Settings(**merged)
    _check_together(settings)
    return settings, origins


def described(settings: Settings, origins: Mapping[str, str]) -> tuple[SettingReport, ...]:
    """Every setting with where it comes from: ``unknown`` without a word in ``origins``."""
    values = msgspec.json.decode(msgspec.json.encode(settings))
    return tuple(SettingReport(name, value, origins.get(name, "unknown")) for name, value in values.items())


def _from_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise UsageError(
            f"the settings file {path} cannot be read ({error.strerror}): "
            "name another with --config or RESOLVER_CONFIG, or leave it out for the defaults"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the settings file {path} is not valid TOML: {error}") from None
    twice = [name for name in values if "-" in name and name.replace("-", "_") in values]
    if twice:
        raise UsageError(f"the settings file {path} has {twice[0]} twice, with a dash and without: keep one")
    return {name.replace("-", "_"): value for name, value in values.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Only names of settings are taken; others with our prefix may be meant for something else."""
    return {
        name: environ[_PREFIX + name.upper()]
        for name in Settings.__struct_fields__
        if environ.get(_PREFIX + name.upper())
    }


def _convert(name: str, value: Any, where: str) -> Any:
    """Check one value by the type of its setting."""
    kinds = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    if name not in kinds:
        raise UsageError(f"{where}: there is no such setting; there are {', '.join(kinds)}")
    kind = kinds[name]
    try:
        meant = _from_text(name, value) if isinstance(value, str) else value
        if name == "containers_dir":
            _check_paths(meant)
        if name == "metrics_addr" and isinstance(meant, str):
            parse_address(meant)
        if kind is not bool and isinstance(meant, bool):
            raise ValueError("neither true nor false is meaningful here")
        return msgspec.convert(meant, kind, strict=True)
    except (ValueError, TypeError, msgspec.ValidationError) as error:
        choices = ""
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            choices = f": it is one of {', '.join(kind)}"
        raise UsageError(f"{where}: {value!r} is not possible ({error}){choices}") from None


def _check_paths(value: Any) -> None:
    if not isinstance(value, (list, tuple)):
        raise TypeError("a path or a list of paths is expected")
    if not value:
        raise ValueError("at least one path is expected")
    if "" in value:
        raise ValueError("an empty path leads nowhere")


def _check_mode(text: str) -> None:
    if not re.fullmatch("0?[0-7]{3}", text):
        raise ValueError("write three octal digits, such as 0660")
    if int(text, 8) & 0o002:
        raise ValueError(
            "this socket is for root and its group, and this mode opens it to everybody: give containers a socket of "
            "their own with --tenant-socket (tenant_socket), and others on the host the group with --socket-group"
        )


def _check_together(settings: Settings) -> None:
    """What containers are given must not lead to what is root's."""
    if not settings.tenant_socket:
        return
    tenants = os.path.dirname(os.path.normpath(settings.tenant_socket))
    if not tenants.startswith("/") or tenants == "/":
        raise UsageError(
            f"tenant_socket: {settings.tenant_socket!r} is not possible (containers mount its directory): write an "
            "absolute path in a directory of its own, such as /run/resolver/tenants/resolver.sock"
        )
    for what, path in (
        ("the run directory", settings.run_dir),
        ("root's socket", os.path.dirname(settings.socket_path)),
    ):
        if os.path.commonpath([tenants, os.path.abspath(path)]) == tenants:
            raise UsageError(
                f"tenant_socket: {settings.tenant_socket!r} is not possible (containers mount its directory, and "
                f"{what} is in there): write a path in a directory of its own, such as "
                f"{settings.run_dir}/tenants/resolver.sock"
            )


def _from_text(name: str, text: str) -> Any:
    if name == "containers_dir":
        return [part for part in text.split(":") if part]
    if name in ("interval", "nvml_interval"):
        return parse_duration(text)
    if name == "map_size":
        return int(text)
    if name == "socket_mode":
        _check_mode(text)
    if name in ("dry_run", "wait", "metrics_per_process", "hami_metrics", "mapped_regions"):
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ValueError("true or false is expected")
    return text
