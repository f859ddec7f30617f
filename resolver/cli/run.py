"""Run the daemon, which repairs HAMi's slots until it is stopped.

Settings come from --config, the environment (RESOLVER_*) and the options below; later ones override earlier ones.
SIGHUP reads the file again; SIGTERM and SIGINT end it. It needs root on the node, in the host's PID namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver import config

if TYPE_CHECKING:
    import argparse
    import contextlib
    from collections.abc import Callable, Iterator

    from resolver.config import Settings
    from resolver.daemon.service import Service
    from resolver.hami.discovery import Ownership
    from resolver.hami.region import RegionView
    from resolver.repair.plan import Order
    from resolver.repair.region import RegionRepairs
    from resolver.repair.slots import OwnedSlot
    from resolver.state import Snapshot

    #: A repair that a dry run leaves out: its container, the file, and cells of the table.
    _LeftOut = tuple[Ownership, str, tuple[int, str, str, str]]

_LEFT_OUT = ("CONTAINER", "PID", "HOSTPID -> NEW", "REASON", "CORE LIMIT")
_BEGINS = "begins at"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config.add_arguments(parser)
    about = "one pass and a summary; exit code 1 if anything stayed unresolved"
    parser.add_argument("--once", action="store_true", help=about)


def run(args: argparse.Namespace) -> int:
    """Run until stopped (0), or once (0, or 1 if anything stayed unresolved)."""
    # Imported late: --help must not load the daemon.
    import contextlib
    import functools

    from resolver.base.lean import lean

    with lean():
        import asyncio

    from resolver.base.journal import setup_logging
    from resolver.linux.host_view import require_host_view
    from resolver.linux.node_lock import Held, NodeLock
    from resolver.linux.procfs import Procfs

    load = functools.partial(config.load, config.given(args), args.config)
    settings, origins = load()
    setup_logging(settings.log_format, settings.log_level)
    require_host_view(Procfs())
    _require_rights()
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


def _require_rights() -> None:
    """Raise `CannotKnow` for a user without the right to see other processes' containers."""
    import os

    from resolver.base.errors import CannotKnow
    from resolver.linux.capabilities import held

    if os.geteuid() != 0 and "SYS_PTRACE" not in held():
        raise CannotKnow(
            "the daemon needs root to see which files other users' processes map: run it with sudo, or give it "
            "CAP_SYS_PTRACE"
        )


async def _forever(
    settings: Settings,
    origins: dict[str, str],
    load: Callable[[], tuple[Settings, dict[str, str]]],
    holder: str,
    held: contextlib.ExitStack,
) -> None:
    """Run the daemon. ``holder``: PID of the daemon to wait for; empty if there is none."""
    import asyncio
    import signal

    from resolver.base.errors import UsageError
    from resolver.daemon.service import Service

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
    # A task begins once the service has given up its rights: a thread keeps those of the moment it was made in.
    taking_over = loop.create_task(_take_over(service, settings.run_dir, held)) if holder else None
    await service.run()
    if taking_over is not None and taking_over.done():
        taking_over.result()


async def _take_over(service: Service, run_dir: str, held: contextlib.ExitStack) -> None:
    """Wait for the right to write, in a thread that only the other daemon's end wakes.

    A failure stops the service.
    """
    from resolver.base.errors import CannotKnow
    from resolver.base.retry import in_a_thread
    from resolver.linux.node_lock import NodeLock

    try:
        try:
            waiting = in_a_thread(lambda: NodeLock(run_dir, wait=True), name="waits for the lock")
        except RuntimeError:
            raise CannotKnow(
                "no thread can be started to wait for the lock: raise the limit on tasks (TasksMax, pids.max)"
            ) from None
        held.enter_context(await waiting)
        service.take_over()
    except Exception:
        service.stop()
        raise


async def _once(settings: Settings) -> int:
    from resolver.daemon.once import once

    left_out: list[_LeftOut] = []

    def leave_out(repairs: RegionRepairs, state: OwnedSlot, order: Order) -> None:
        change = f"{state.slot.hostpid} -> {order.new >> 32}"
        cells = (state.slot.pid, change, str(order.reason), _core_limit(repairs.view, state))
        left_out.append((repairs.ownership, repairs.region.path, cells))

    snapshot = await once(settings, leave_out)
    print(*summary(snapshot, dry_run=settings.dry_run), sep="\n")
    if left_out:
        _print_left_out(left_out, snapshot)
    return 1 if any(snapshot.unresolved()) or (not snapshot.regions and snapshot.missing_dirs) else 0


def summary(snapshot: Snapshot, *, dry_run: bool) -> Iterator[str]:
    from resolver.base.counters import CounterByReason
    from resolver.base.reasons import RepairReason
    from resolver.hami.placements import searched

    in_use, dead, *_ = snapshot.slot_counts()
    yield f"{len(snapshot.regions)} regions, {in_use} slots in use, {dead} of them dead"
    verb, counted = "repaired", CounterByReason.REPAIRS
    if dry_run:
        verb, counted = "would repair", CounterByReason.WOULD_REPAIR
    done = counted.counts(snapshot.counters, RepairReason)
    yield f"{verb}: {', '.join(f'{n} {reason}' for reason, n in sorted(done.items()) if n) or 'nothing'}"
    yield f"hostpid: {snapshot.policy.namespace} ({snapshot.policy.why})"
    yield f"NVML: {snapshot.joined.error or f'driver {snapshot.driver_version}'}"
    if missing := searched(tuple(snapshot.missing_dirs)):
        yield f"missing directory: {', '.join(missing)}: is HAMi installed on this node?"
    yield from (f"skipped: {path}: {reason}" for path, reason in sorted(snapshot.rejected.items()))
    for region, slot in snapshot.unresolved():
        name = f"{region.pod_uid or ''}_{region.container_name or ''}"
        yield f"unresolved: {name} slot {slot.slot} pid {slot.pid}: {slot.unresolved}"


def _print_left_out(left_out: list[_LeftOut], snapshot: Snapshot) -> None:
    from resolver.cli.show import on_terminal, print_table

    pods = {
        container.pod_uid: f"{container.namespace}/{container.pod}"
        for container in snapshot.containers
        if container.pod
    }
    rows = []
    for owner, path, cells in left_out:
        pod = pods.get(owner.pod_uid or None) or owner.pod_uid[: 8 if on_terminal() else None]
        rows.append(("/".join(filter(None, (pod, owner.container_name))) or path, *cells))
    print()
    print_table(_LEFT_OUT, sorted(rows), right=("PID",), shorten="CONTAINER")
    limited = sum(row[-1].startswith(_BEGINS) for row in rows)
    if limited:
        print(f"\nIn {limited} of them a core limit takes effect: HAMi needs the right hostpid for it.")


def _core_limit(view: RegionView, state: OwnedSlot) -> str:
    """Return the core limit per device, and if HAMi will enforce it with a right `hostpid`; empty without one."""
    from resolver.state import LimitState

    limits = view.sm_limit
    if not any(0 < limit < 100 for limit in limits):
        return ""
    # One number where all devices have the same, as most do.
    shown = limits[:1] if len(set(limits)) == 1 else limits
    text = " ".join(str(limit) if 0 < limit < 100 else "-" for limit in shown)
    policy = state.variables[0] if state.variables else None
    decided = LimitState.of(policy, switch=bool(view.utilization_switch))
    return (
        f"{_BEGINS} {text} %" if decided is LimitState.IN_FORCE else f"{text} %, {decided.replace('_', ' ')}"
    )
