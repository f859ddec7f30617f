"""The options that every command takes that needs the daemon's settings: those of ``run``, for ``config`` as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resolver import config

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags have no defaults of their own: what is not given is left to the file and the environment."""
    parser.set_defaults(**dict.fromkeys((*config.Settings.__struct_fields__, "config")))
    add = parser.add_argument
    add("--config", metavar="FILE", help="settings in TOML, with the same names")
    add(
        "--containers-dir",
        action="append",
        metavar="DIR",
        help="HAMi's directory of containers; may be given several times (default /usr/local/vgpu/containers)",
    )
    add(
        "--mapped-regions",
        action="store_true",
        help="find HAMi's files inside containers as well, through the processes that map them",
    )
    add("--interval", metavar="TIME", help="between two passes over the slots (default 250ms)")
    add("--nvml-interval", metavar="TIME", help="between two collections from NVML (default 1s)")
    add("--dry-run", action="store_true", help="say what would be written, write nothing")
    add(
        "--wait",
        action="store_true",
        help="if another daemon writes on this node, be ready and take over when it ends",
    )
    choices = {
        "--hostpid-namespace": (
            config.HostpidNamespace,
            "which number hostpid must be (auto: by the driver)",
        ),
        "--write-utilization": (
            config.WriteUtilization,
            "where sm_util is written (auto: where no watcher puts it right)",
        ),
        "--source": (config.SourceName, "where PIDs come from (auto: the best that works here)"),
        "--broker-answer": (
            config.BrokerAnswer,
            "what the broker tells (policy: the number that the driver's samples will carry)",
        ),
        "--log-format": (config.LogFormat, "how log lines look (auto: by where they go)"),
        "--log-level": (config.LogLevel, "the least important lines that are shown (default info)"),
    }
    for flag, (kind, text) in choices.items():
        add(flag, choices=[member.value for member in kind], help=text)
    add("--map-size", metavar="N", help="processes that the kernel's map has room for (default 32768)")
    add("--socket", metavar="PATH", help="where the API listens (default resolver.sock in the run directory)")
    add(
        "--socket-group", metavar="GROUP", help="who may ask the API everything, beside root (default nobody)"
    )
    add("--socket-mode", metavar="MODE", help="the socket's file mode, for root and the group (default 0660)")
    add(
        "--tenant-socket",
        metavar="PATH",
        help="a socket for containers, which may ask about themselves there (default: none)",
    )
    add(
        "--metrics-addr",
        metavar="HOST:PORT",
        help="where Prometheus finds /metrics (default :9395, every address); off: nowhere",
    )
    add("--metrics-per-process", action="store_true", help="a series for each GPU process as well")
    add("--hami-metrics", action="store_true", help="the same values under HAMi's own names as well")
    add("--broker", metavar="PATH", help="serve HAMi's host PID broker on this Unix socket (default: not)")
    add(
        "--pod-logs-dir",
        metavar="DIR",
        help="where kubelet keeps logs: pods' names are told by it (default /var/log/pods)",
    )
    add(
        "--run-dir",
        metavar="DIR",
        help="where the lock is that keeps a second instance out (default /run/resolver)",
    )


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line names, for `resolver.config.load`."""
    flags = {name: getattr(args, name) for name in config.Settings.__struct_fields__}
    return {name: value for name, value in flags.items() if value not in (None, False)}
