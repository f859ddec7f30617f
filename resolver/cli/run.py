"""The daemon: keeps HAMi's slots true until it is stopped.

Settings come from --config, the environment (RESOLVER_*) and the options below; the later wins. SIGHUP reads
them again, SIGTERM and SIGINT end it. It needs root on the node, in the host's PID namespace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any

from resolver import config, log
from resolver.errors import UsageError
from resolver.nodelock import NodeLock
from resolver.procfs import Procfs
from resolver.service import Service

if TYPE_CHECKING:
    from resolver.config import Settings
    from resolver.snapshot import Snapshot


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
    add("--interval", metavar="TIME", help="between two passes over the slots (default 250ms)")
    add("--nvml-interval", metavar="TIME", help="between two collections from NVML (default 1s)")
    add("--dry-run", action="store_true", help="say what would be written, write nothing")
    add(
        "--once",
        action="store_true",
        help="one pass and a summary; exit code 1 if anything stayed unresolved",
    )
    choices = {
        "--hostpid-namespace": (
            config.HostpidNamespace,
            "which number hostpid must be (auto: by the driver)",
        ),
        "--write-utilization": (
            config.WriteUtilization,
            "where sm_util is written (auto: where no watcher does)",
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


def run(args: argparse.Namespace) -> int:
    """Run until stopped (0), or once (0, or 1 if anything stayed unresolved)."""
    flags = {name: getattr(args, name) for name in config.Settings.__struct_fields__}
    flags = {name: value for name, value in flags.items() if value not in (None, False)}

    def load() -> Settings:
        return config.load(flags, args.config)

    settings = load()
    log.setup(settings.log_format, settings.log_level)
    Procfs().require_host_view()
    with contextlib.nullcontext() if settings.dry_run else NodeLock(settings.run_dir):
        if args.once:
            return asyncio.run(_once(settings))
        asyncio.run(_forever(settings, load))
    return 0


async def _forever(settings: Settings, load: Any) -> None:
    service = Service(settings, in_charge=True)

    def reload() -> None:
        try:
            service.reload(load())
        except UsageError as error:
            service.journal.log.error("settings_refused", why=str(error), kept="the settings in force")

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, service.stop)
    loop.add_signal_handler(signal.SIGINT, service.stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    await service.run()


async def _once(settings: Settings) -> int:
    service = Service(settings)
    try:
        if settings.source != config.SourceName.AUTO:
            await service.start_source()
        await service.collect_once()
        # The second look tells a process that is gone from one that was only missed.
        for _ in range(2):
            await service.pass_once(patient=False)
        await service.collect_once()
        await service.pass_once(patient=False)
        snapshot = service.picture()
    finally:
        service.close()
    print(summary(snapshot, dry_run=settings.dry_run))
    return 1 if snapshot.unresolved() or (not snapshot.regions and snapshot.missing_dirs) else 0


def summary(snapshot: Snapshot, *, dry_run: bool) -> str:
    """What one pass found and did, for people."""
    slots = [slot for region in snapshot.regions for slot in region.slots]
    done = "would_repair_" if dry_run else "repairs_"
    repairs = {name.removeprefix(done): n for name, n in snapshot.counters.items() if name.startswith(done)}
    lines = [
        f"{len(snapshot.regions)} regions, {len(slots)} slots in use, {sum(slot.dead for slot in slots)} of them dead",
        f"{'would repair' if dry_run else 'repaired'}: "
        + (", ".join(f"{n} {reason}" for reason, n in sorted(repairs.items())) or "nothing"),
        f"hostpid: {snapshot.policy} ({snapshot.policy_why})",
        f"NVML: {snapshot.joined.error or f'driver {snapshot.driver_version}'}",
    ]
    lines += [f"{path} does not exist: is HAMi installed on this node?" for path in snapshot.missing_dirs]
    lines += [f"left alone: {path}: {reason}" for path, reason in sorted(snapshot.rejected.items())]
    lines += [
        f"unresolved: {region.pod_uid}_{region.container_name} slot {slot.slot} pid {slot.ns_pid}: {slot.unresolved}"
        for region, slot in snapshot.unresolved()
    ]
    return "\n".join(lines)
