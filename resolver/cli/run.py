"""The daemon: keeps HAMi's slots true until it is stopped.

Settings come from --config, the environment (RESOLVER_*) and the options below; the later wins. SIGHUP reads
them again, SIGTERM and SIGINT end it. It needs root on the node, in the host's PID namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.config import options

if TYPE_CHECKING:
    import argparse
    import asyncio
    import contextlib
    from collections.abc import Callable

    from resolver.config import Settings
    from resolver.daemon.service import Service
    from resolver.state import Snapshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings, and what to do with them."""
    options.add_arguments(parser)
    parser.add_argument(
        "--once",
        action="store_true",
        help="one pass and a summary; exit code 1 if anything stayed unresolved",
    )


def run(args: argparse.Namespace) -> int:
    """Run until stopped (0), or once (0, or 1 if anything stayed unresolved)."""
    # The daemon's weight is not for those who only want to know its options.
    import asyncio
    import contextlib

    from resolver import config, log
    from resolver.linux.node_lock import Held, NodeLock
    from resolver.linux.procfs import Procfs

    flags = options.given(args)

    def load() -> tuple[Settings, dict[str, str]]:
        return config.load_with_origins(flags, args.config)

    settings, origins = load()
    log.setup(settings.log_format, settings.log_level)
    Procfs().require_host_view()
    with contextlib.ExitStack() as held:
        holder = ""
        if not settings.dry_run:
            try:
                held.enter_context(NodeLock(settings.run_dir))
            except Held as error:
                if not settings.wait or args.once:
                    raise
                holder = error.holder
        if args.once:
            return asyncio.run(_once(settings))
        asyncio.run(_forever(settings, origins, load, holder, held))
    return 0


async def _forever(
    settings: Settings,
    origins: dict[str, str],
    load: Callable[[], tuple[Settings, dict[str, str]]],
    holder: str,
    held: contextlib.ExitStack,
) -> None:
    """``holder``: PID of the daemon whose end is to be waited for; empty if there is none."""
    import asyncio
    import signal

    from resolver.daemon.service import Service
    from resolver.errors import UsageError

    service = Service(settings, in_charge=True, origins=origins, holder=holder)

    def reload() -> None:
        try:
            service.reload(*load())
        except UsageError as error:
            service.journal.log.error("settings_refused", why=str(error), kept="the settings in force")

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, service.stop)
    loop.add_signal_handler(signal.SIGINT, service.stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    if holder:
        # Once the service has given up its rights: a thread keeps those of the moment it was made in.
        loop.call_soon(_take_over, service, settings.run_dir, held)
    await service.run()


def _take_over(service: Service, run_dir: str, held: contextlib.ExitStack) -> None:
    """Wait for the right to write, in a thread: the kernel wakes it at the other daemon's end, and nothing before."""
    from resolver.linux.node_lock import NodeLock
    from resolver.retry import in_a_thread

    def begin(lock: asyncio.Future[NodeLock]) -> None:
        if not lock.cancelled():  # this daemon was ended before it could begin
            held.enter_context(lock.result())
            service.take_over()

    in_a_thread(lambda: NodeLock(run_dir, wait=True), name="waits for the lock").add_done_callback(begin)


async def _once(settings: Settings) -> int:
    import asyncio

    from resolver.config import SourceName
    from resolver.daemon.service import Service
    from resolver.repair.reported_values import TWO_TICKS

    service = Service(settings)
    try:
        if settings.source != SourceName.AUTO:
            await service.start_source()
        await service.collect_once()
        # The second look tells a process that is gone from one that was only missed.
        for _ in range(2):
            await service.pass_once(patient=False)
        await service.collect_once()
        await service.pass_once(patient=False)
        await asyncio.sleep(TWO_TICKS)  # what differs for longer is no watcher's to put right
        await service.pass_once(patient=False)
        snapshot = service.snapshots.take()
    finally:
        service.close()
    print(summary(snapshot, dry_run=settings.dry_run))
    return 1 if snapshot.unresolved() or (not snapshot.regions and snapshot.missing_dirs) else 0


def summary(snapshot: Snapshot, *, dry_run: bool) -> str:
    """What one pass found and did, for people."""
    from resolver.reasons import RepairReason

    slots = [slot for region in snapshot.regions for slot in region.slots]
    done = "would_repair_" if dry_run else "repairs_"
    counted = {reason: snapshot.counters.get(f"{done}{reason}", 0) for reason in RepairReason}
    lines = [
        f"{len(snapshot.regions)} regions, {len(slots)} slots in use, {sum(slot.dead for slot in slots)} of them dead",
        f"{'would repair' if dry_run else 'repaired'}: "
        + (", ".join(f"{n} {reason}" for reason, n in sorted(counted.items()) if n) or "nothing"),
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
