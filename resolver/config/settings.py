"""The settings, each declared once: name, type, limits, default and help.

Command line options, ``docs/config.md``, the chart's values and schema, and ``resolver doctor`` are generated from
this: after a change, run ``make tables``.
"""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from resolver.base.source_records import SourceName
from resolver.config import values


class HostpidNamespace(StrEnum):
    """Which number ``hostpid`` must be: the driver's, or a forced one."""

    AUTO = "auto"
    HOST = "host"
    CONTAINER = "container"


class WriteUtilization(StrEnum):
    """Where ``sm_util`` is written: without a correcting watcher, wherever it differs, or never."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class About(NamedTuple):
    """Description of a setting. ``meaning`` is Markdown for the documents."""

    meaning: str
    placeholder: str = ""
    live: bool = False  # SIGHUP changes it; the others are fixed at start
    check: Callable[[Any], object] | None = None  # raises ValueError, for values of the right type

    @property
    def help(self) -> str:
        return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", self.meaning).replace("`", "")


Seconds = Annotated[float, msgspec.Meta(ge=0.01, le=3600)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting with its default. Intervals are in seconds; text may be ``250ms``, ``1s`` or ``2m``."""

    containers_dir: Annotated[
        tuple[str, ...],
        About(
            "directories with the cache files of containers or claims: a list in the file, separated by `:` in the "
            "environment, repeated flags; `auto`: those of every [known scheduler](schedulers.md#where-the-files-are)",
            "DIR",
            check=values.check_paths,
        ),
    ] = ("auto",)
    interval: Annotated[
        Seconds,
        About(
            "time between two [periodic checks](how-it-works.md#when-a-cache-file-is-checked) of a cache file",
            "TIME",
            live=True,
        ),
    ] = 0.25
    nvml_interval: Annotated[Seconds, About("time between two queries of NVML", "TIME", live=True)] = 1.0
    dry_run: Annotated[bool, About("log each repair instead of writing it")] = False
    wait: Annotated[bool, About("while another daemon writes on this node, wait; take over when it ends")] = (
        False
    )
    hostpid_namespace: Annotated[
        HostpidNamespace,
        About(
            "which PID `hostpid` must be: `auto` decides by the driver's version; `host` and `container` force one",
            live=True,
        ),
    ] = HostpidNamespace.AUTO
    write_utilization: Annotated[
        WriteUtilization,
        About(
            "when to write `sm_util`: `auto` where HAMi's watcher doesn't [correct "
            "it](how-it-works.md#when-a-value-is-corrected), `always` where it differs from NVML, or `never`",
            live=True,
        ),
    ] = WriteUtilization.AUTO
    source: Annotated[
        SourceName,
        About(
            "[where PIDs come from](how-it-works.md#where-pids-come-from): `auto` uses the best source that works; "
            "`bpf`, `netlink` or `scan` only that one"
        ),
    ] = SourceName.AUTO
    log_format: Annotated[
        Literal["auto", "json", "console"],
        About("format of log lines: `json` or `console`; `auto` is `json` unless on a terminal"),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        About("least severe level to log: `debug`, `info`, `warning` or `error`", live=True),
    ] = "info"
    map_size: Annotated[
        int,
        msgspec.Meta(ge=0, le=4194304),
        About(
            "capacity of the kernel's map (`bpf`), in processes of 240 bytes each; 0: as many as "
            "[the node needs](how-it-works.md#where-pids-come-from)",
            "N",
        ),
    ] = 0
    run_dir: Annotated[
        str, About("a separate directory for the socket and the lock that stops a second daemon", "DIR")
    ] = "/run/resolver"
    socket: Annotated[
        str, About("path of the API's Unix socket; empty: `resolver.sock` in `run_dir`", "PATH")
    ] = ""
    socket_group: Annotated[
        str,
        About(
            "group that may query the API like root: its name, or its number (required in a pod); "
            "empty: none",
            "GROUP",
        ),
    ] = ""
    tenant_socket: Annotated[
        str,
        About(
            "path of a socket where containers [may query themselves](api.md#access), alone in its directory; "
            "empty: none",
            "PATH",
        ),
    ] = ""
    metrics_addr: Annotated[
        str,
        About(
            "`HOST:PORT` that serves `/metrics`; without `HOST`, every address (in a pod, `HOST` requires the host's "
            "network); `off`: none",
            "HOST:PORT",
            check=values.parse_address,
        ),
    ] = ":9395"
    metrics_tls_cert: Annotated[
        str,
        About(
            "serve `/metrics` by [TLS](security.md#metrics) with this certificate chain (PEM), read again when it "
            "changes; empty: no TLS",
            "FILE",
        ),
    ] = ""
    metrics_tls_key: Annotated[
        str, About("its private key (PEM, unencrypted); empty: in `metrics_tls_cert`", "FILE")
    ] = ""
    metrics_token_file: Annotated[
        str,
        About(
            "require the bearer token in this file for `/metrics`, read again when it changes; empty: none",
            "FILE",
        ),
    ] = ""
    metrics_per_process: Annotated[bool, About("also serve a series for each GPU process")] = False
    hami_metrics: Annotated[bool, About("also serve the values under HAMi's metric and label names")] = False
    broker: Annotated[
        str, About("serve [HAMi's host PID broker](broker.md) on this Unix socket; empty: off", "PATH")
    ] = ""
    pod_logs_dir: Annotated[
        str, About("kubelet's log directory, for the names of pods and namespaces", "DIR")
    ] = "/var/log/pods"
    container_logs_dir: Annotated[
        str,
        About(
            "kubelet's directory of links to container logs, for container names: required for "
            "[KAI's](schedulers.md#kai) files",
            "DIR",
        ),
    ] = "/var/log/containers"
    mapped_regions: Annotated[
        bool,
        About(
            "also find HAMi's files inside containers, through the processes that map them "
            "([bare Docker](node.md#bare-docker-and-podman))"
        ),
    ] = False

    @property
    def socket_path(self) -> str:
        return self.socket or f"{self.run_dir}/resolver.sock"


class Declared(NamedTuple):
    """A field of `Settings` with its declaration. ``kind`` is its type without limits."""

    name: str
    kind: Any
    type: Any
    default: Any
    about: About
    limits: msgspec.Meta | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def check(self) -> Callable[[Any], object] | None:
        is_path = self.kind is str and self.about.placeholder in ("DIR", "FILE", "PATH")
        return values.check_path if is_path else self.about.check

    @property
    def expected(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is float and self.limits is not None:
            least, most = (values.text_of(float(limit or 0)) for limit in (self.limits.ge, self.limits.le))
            return f"a duration from {least} to {most}, such as 250ms"
        if self.kind is int and self.limits is not None:
            return f"a whole number from {self.limits.ge} to {self.limits.le}"
        return {bool: "true or false", str: "text"}.get(self.kind, "a list of paths")

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the allowed words; empty for any text."""
        if isinstance(self.kind, type) and issubclass(self.kind, StrEnum):
            return tuple(map(str, self.kind))
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()


PREFIX = "RESOLVER_"


def _declared(field: msgspec.structs.FieldInfo) -> Declared:
    kind, *notes = get_args(field.type) if get_origin(field.type) is Annotated else [field.type]
    (about,) = (note for note in notes if isinstance(note, About))
    limits = next((note for note in notes if isinstance(note, msgspec.Meta)), None)
    return Declared(
        name=field.name, kind=kind, type=field.type, default=field.default, about=about, limits=limits
    )


#: All settings by name, in display order.
SETTINGS = {field.name: _declared(field) for field in msgspec.structs.fields(Settings)}

#: Fixed while the daemon runs; a reload reports the difference and keeps the old value.
FIXED_AT_START = tuple(name for name, setting in SETTINGS.items() if not setting.about.live)
