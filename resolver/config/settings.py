"""The settings, each declared once: name, type, limits, default, and what is said of it.

The options of the command line, ``docs/config.md``, the chart's values with their schema, and what ``resolver doctor``
reads in a command line are made of this: after a change here, ``make tables``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_origin

import msgspec

from resolver.config import values

if TYPE_CHECKING:
    from collections.abc import Callable


class HostpidNamespace(StrEnum):
    """Which number ``hostpid`` must be: decided by the driver's version, or forced."""

    AUTO = "auto"
    HOST = "host"
    CONTAINER = "container"


class WriteUtilization(StrEnum):
    """Where ``sm_util`` is written: where no watcher corrects it, wherever it differs, or never."""

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
    """What our host PID broker answers: the number that the driver's samples will carry, or always the host PID."""

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


class Chart(NamedTuple):
    """How a setting stands in the Helm chart, where that differs from the daemon's own."""

    path: str = ""  # dotted; empty: below ``settings``, under its name
    says: str = ""  # empty: what the documents say
    pattern: str = ""  # what a pod can have, as a regular expression
    default: Any = None  # None: the daemon's


class About(NamedTuple):
    """What is said of a setting. ``meaning`` is Markdown for the documents; empty: ``help``, which is plain."""

    help: str
    placeholder: str = ""
    meaning: str = ""
    live: bool = False  # SIGHUP changes it; the others are fixed at start
    check: Callable[[Any], object] | None = (
        None  # raises ValueError or TypeError, beside what the type refuses
    )
    chart: Chart = Chart()


Seconds = Annotated[float, msgspec.Meta(ge=0.01, le=3600)]
_PATH = "^/[^:]*$"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting with its default. Intervals are in seconds; in text ``250ms``, ``1s``, ``2m`` work too."""

    containers_dir: Annotated[
        tuple[str, ...],
        About(
            "directory of the containers' cache files; may be given several times; auto: all known ones",
            "DIR",
            "directories of containers, or of claims, in which cache files are searched; `auto`: those of every "
            "[scheduler that is known](placements.md). Several: a list in the file, the flag more than once, `:` "
            "between them in the environment",
            live=True,
            check=values.check_paths,
            chart=Chart(
                says="Directories of containers, or of claims, on the node; each is mounted, writable",
                default=("/usr/local/vgpu/containers",),
            ),
        ),
    ] = ("auto",)
    interval: Annotated[
        Seconds,
        About(
            "time between two checks of a cache file by the clock",
            "TIME",
            meaning="time between two checks of a cache file by the clock: where something is waited for, or the "
            "kernel doesn't report its processes. Other files are checked at once when a process attaches, and "
            "else every 16 intervals ([how it works](how-it-works.md#when-a-cache-file-is-checked))",
            live=True,
        ),
    ] = 0.25
    nvml_interval: Annotated[Seconds, About("time between two samplings by NVML", "TIME", live=True)] = 1.0
    dry_run: Annotated[
        bool,
        About(
            "say what would be written, write nothing",
            chart=Chart(
                says="Say what would be written, and write nothing: HAMi's directories are mounted read-only then"
            ),
        ),
    ] = False
    wait: Annotated[
        bool,
        About(
            "if another daemon writes on this node, be ready and take over when it ends",
            chart=Chart(
                says="Be ready beside the pod that writes on the node, and take over when it ends: what an upgrade "
                "without a gap needs",
                default=True,
            ),
        ),
    ] = False
    hostpid_namespace: Annotated[
        HostpidNamespace,
        About(
            "which number hostpid must be; auto: by the driver",
            meaning="which number `hostpid` must be: `auto` takes what the driver was measured to do, else its "
            "version; `host` and `container` force it",
            live=True,
        ),
    ] = HostpidNamespace.AUTO
    write_utilization: Annotated[
        WriteUtilization,
        About(
            "where sm_util is written; auto: where no watcher puts it right",
            meaning="where `sm_util` is written: `auto` where no watcher of HAMi's puts it right "
            "([how that is determined](how-it-works.md#does-it-help)), `always` wherever it differs from NVML, `never`",
            live=True,
            chart=Chart(
                says="Where `sm_util` is written: `auto` (where no watcher of HAMi's puts it right), `always` or "
                "`never`"
            ),
        ),
    ] = WriteUtilization.AUTO
    source: Annotated[
        SourceName,
        About(
            "where PIDs come from; auto: the best that works here",
            meaning="where PIDs come from: `auto` takes the best that works here, `bpf`, `netlink` or `scan` that one "
            "only; see [sources.md](sources.md)",
            chart=Chart(path="source"),
        ),
    ] = SourceName.AUTO
    log_format: Annotated[
        LogFormat,
        About(
            "how log lines look; auto: JSON unless on a terminal",
            meaning="how log lines look: `json`, `console`; `auto` is for people on a terminal and JSON otherwise",
            chart=Chart(says="How log lines look: `json`, `console`; `auto` is JSON in a pod"),
        ),
    ] = LogFormat.AUTO
    log_level: Annotated[LogLevel, About("the least important lines that are shown", live=True)] = (
        LogLevel.INFO
    )
    map_size: Annotated[
        int,
        msgspec.Meta(ge=0, le=4194304),
        About(
            "processes that the kernel's map has room for; 0: as many as the node needs",
            "N",
            "processes that the kernel's map has room for, with `bpf`; 210 bytes each; 0: as many as "
            "[the node needs](sources.md#how-large-the-map-is)",
            chart=Chart(
                says="Processes that the kernel's map has room for, with `bpf`; 0: as many as the node needs"
            ),
        ),
    ] = 0
    run_dir: Annotated[
        str,
        About(
            "our own directory, for the lock that keeps a second instance out, and the socket",
            "DIR",
            chart=Chart(
                says="Its own directory on the node, for the lock and the API's socket", pattern=_PATH
            ),
        ),
    ] = "/run/resolver"
    socket: Annotated[
        str,
        About(
            "where the API listens; empty: resolver.sock in the run directory",
            "PATH",
            "where the API listens and `resolver lookup` is answered: a Unix socket's path; empty: `resolver.sock` in "
            "`run_dir`",
            chart=Chart(
                says="The API's socket; empty: `resolver.sock` in `run_dir`. It has to be in there",
                pattern="^(/[^:]+)?$",
            ),
        ),
    ] = ""
    socket_group: Annotated[
        str,
        About(
            "name or number of the group that may ask the API everything, beside root; empty: none",
            "GROUP",
            chart=Chart(
                says="Number of the group that may ask the API everything, beside root; empty: none",
                pattern="^[0-9]*$",
            ),
        ),
    ] = ""
    socket_mode: Annotated[
        str,
        msgspec.Meta(pattern="^0?[0-7]{2}[0145]$"),
        About(
            "the socket's file mode, for root and the group; one that opens it to everybody is refused",
            "MODE",
            check=values.check_mode,
        ),
    ] = "0660"
    tenant_socket: Annotated[
        str,
        About(
            "a socket for containers, which may ask about themselves there; empty: none",
            "PATH",
            "a socket for containers, in a directory of its own; what they may ask there: see "
            "[api.md](api.md#who-may-ask); empty: none",
            chart=Chart(
                says="A socket for containers, which may ask about themselves there, in a directory of its own below "
                "`run_dir`; empty: none",
                pattern="^(/[^:]+/[^:]+)?$",
            ),
        ),
    ] = ""
    metrics_addr: Annotated[
        str,
        About(
            "where Prometheus finds /metrics, without HOST on every address; off: not served",
            "HOST:PORT",
            "`HOST:PORT` where Prometheus finds `/metrics`; without a host on every address; `off`: not served",
            check=values.check_address,
            chart=Chart(
                says="`:PORT` of metrics and probes; `off`: neither. An address beside the port needs `hostNetwork`",
                pattern=r"^(off|(\[[0-9a-fA-F:.]+\]|[0-9.]*|localhost):[0-9]{1,5})$",
            ),
        ),
    ] = ":9395"
    metrics_per_process: Annotated[bool, About("a series for each GPU process as well")] = False
    gpu_details: Annotated[
        bool,
        About(
            "clocks, throttling, power limit, energy, PCIe, corrected errors and video engines of each GPU as well"
        ),
    ] = False
    hami_metrics: Annotated[
        bool, About("the same values under HAMi's own metric and label names as well")
    ] = False
    broker: Annotated[
        str,
        About(
            "serve HAMi's host PID broker on this Unix socket; empty: not",
            "PATH",
            "serve HAMi's host PID broker on this Unix socket, see [broker.md](broker.md); empty: not",
            chart=Chart(
                says="Serve HAMi's host PID broker on this socket, at least two directories deep; empty: not",
                pattern="^(/[^:]+/[^:]+/[^:]+)?$",
            ),
        ),
    ] = ""
    broker_answer: Annotated[
        BrokerAnswer,
        About(
            "what the broker answers; policy: the number that the driver's samples will carry",
            meaning="what the broker answers a process: `policy`: the number that this driver's samples will carry; "
            "`host`: always the host PID, as HAMi's own",
        ),
    ] = BrokerAnswer.POLICY
    pod_logs_dir: Annotated[
        str,
        About(
            "kubelet's directory of logs, from which the names of pods and namespaces are read",
            "DIR",
            chart=Chart(pattern=_PATH),
        ),
    ] = "/var/log/pods"
    container_logs_dir: Annotated[
        str,
        About(
            "kubelet's links to containers' logs, from which KAI's containers are known",
            "DIR",
            "kubelet's links to the logs of containers. Their names give the name for a container's id, without which "
            "no file of [KAI's](placements.md#kai) is touched",
            chart=Chart(
                says="Kubelet's links to the logs of containers, without whose names no file of KAI's is touched",
                pattern=_PATH,
            ),
        ),
    ] = "/var/log/containers"
    mapped_regions: Annotated[
        bool,
        About(
            "find HAMi's files inside containers as well, through the processes that map them",
            meaning="find HAMi's files inside containers as well, through the processes that map them "
            "([docker.md](docker.md))",
            live=True,
            chart=Chart(
                says="Find HAMi's files inside containers as well, for containers that Kubernetes did not start"
            ),
        ),
    ] = False

    @property
    def socket_path(self) -> str:
        """Where the API listens."""
        return self.socket or f"{self.run_dir}/resolver.sock"


class Declared(NamedTuple):
    """A field of `Settings` with all that is declared of it. ``kind`` is its type without limits."""

    name: str
    kind: Any
    type: Any
    default: Any
    about: About
    limits: msgspec.Meta | None

    @property
    def flag(self) -> str:
        """Its option on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it may be; empty where it may be others."""
        known = isinstance(self.kind, type) and issubclass(self.kind, StrEnum)
        return tuple(map(str, self.kind)) if known else ()


PREFIX = "RESOLVER_"


def _declared(field: msgspec.structs.FieldInfo) -> Declared:
    kind, *notes = get_args(field.type) if get_origin(field.type) is Annotated else [field.type]
    (about,) = (note for note in notes if isinstance(note, About))
    limits = next((note for note in notes if isinstance(note, msgspec.Meta)), None)
    return Declared(
        name=field.name, kind=kind, type=field.type, default=field.default, about=about, limits=limits
    )


#: All, by name, in the order in which they are shown.
SETTINGS = {field.name: _declared(field) for field in msgspec.structs.fields(Settings)}

#: What a running daemon cannot change; a reload that asks for it says so and keeps the old value.
FIXED_AT_START = tuple(name for name, setting in SETTINGS.items() if not setting.about.live)
