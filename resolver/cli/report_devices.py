"""Keep Koordinator's Device object for this node up to date, and post events on the node and on pods.

A separate process that reads the daemon's socket, because the daemon has no credentials. It writes only changes. It
needs the wheel's extra `kubernetes`, which the image and the Debian package have.
"""

import argparse
import os

from resolver.base.errors import UsageError
from resolver.cli.ask_daemon import add_socket
from resolver.cli.parser import seconds

_ADDRESS = ":9396"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "the node's name in Kubernetes (or RESOLVER_NODE; default the host's name)"
    add("--node", metavar="NAME", help=about)
    add_socket(parser)
    add("--api-server", metavar="URL", help="the API server's URL (default: the pod's cluster)")
    add("--service-account", metavar="DIR", help="directory with token and ca.crt (default: the pod's)")
    about = "address that serves /metrics (or RESOLVER_REPORT_METRICS_ADDR; default "
    add("--metrics-addr", metavar="HOST:PORT", help=f"{about}{_ADDRESS}); off: none")
    about = "longest random delay before the first request (default 10s)"
    add("--spread", metavar="TIME", type=seconds, default="10s", help=about)
    add("--node-condition", action="store_true", help="also keep the node's condition GPUUnhealthy")
    about = "events on pods, of: limit-exceeded, limit-without-effect, without-library, held-idle, xid; off: none "
    add("--pod-events", metavar="KINDS", default=None, help=f"{about}(default all but held-idle)")
    add(
        "--hami-cordon", action="store_true", help="also enter unhealthy GPUs into HAMi's cordon of this node"
    )
    add("--log-format", choices=["auto", "json", "console"], default="auto", help="format of log lines")
    about = "least severe level to log (default info)"
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info", help=about)


def run(args: argparse.Namespace) -> int:
    import asyncio
    import importlib.util

    from resolver.config import parse_address

    try:
        address = parse_address(
            args.metrics_addr or os.environ.get("RESOLVER_REPORT_METRICS_ADDR") or _ADDRESS
        )
    except ValueError as error:
        raise UsageError(f"--metrics-addr: {error}") from None
    if importlib.util.find_spec("httpx2") is None:
        from resolver.base.version import VERSION

        raise UsageError(
            "the package httpx2 is missing: install the wheel's file with its extra, as in "
            f"pip install 'hami_resolver-{VERSION}-py3-none-any.whl[kubernetes]'"
        )
    asyncio.run(_report(args, address))
    return 0


async def _report(args: argparse.Namespace, address: tuple[str, int] | None) -> None:
    import asyncio
    import contextlib
    import signal

    from resolver import client
    from resolver.base.journal import Journal, setup_logging
    from resolver.base.text import cause
    from resolver.base.version import VERSION
    from resolver.kube.apiserver import ACCOUNT_DIR, ApiServer, in_cluster
    from resolver.kube.pod_events import DEFAULT, PodEvent, PodEvents, parse_kinds
    from resolver.kube.reporter import InventorySocket, Plan, Reporter
    from resolver.kube.tally import Tally
    from resolver.serve import pages

    setup_logging(args.log_format, args.log_level)
    journal = Journal()
    node = args.node or os.environ.get("RESOLVER_NODE") or os.uname().nodename
    server = ApiServer(args.api_server or in_cluster(os.environ), args.service_account or ACCOUNT_DIR)
    tally = Tally(server.requests)
    try:
        kinds = parse_kinds(DEFAULT if args.pod_events is None else args.pod_events)
    except ValueError:
        raise UsageError(
            f"--pod-events {args.pod_events}: it takes off, or some of {', '.join(PodEvent)}"
        ) from None
    socket_path = client.socket_of(args.socket)
    plan = Plan(node, args.spread, args.node_condition, args.hami_cordon)
    reporter = Reporter(server, InventorySocket(socket_path), plan, tally, journal)
    pod_events = PodEvents(server, socket_path, node, kinds, tally, journal)
    try:
        listener = pages.listen(*address) if address else None
    except OSError as error:
        why = f"--metrics-addr cannot be listened on: {cause(error)}"
        raise UsageError(f"{why}; name another, or off") from None
    journal.log.info("started", version=VERSION, node=node)
    loop = asyncio.get_running_loop()
    working = asyncio.ensure_future(asyncio.gather(reporter.run(), pod_events.run()))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, working.cancel)
    serving = listener and asyncio.create_task(pages.serve(listener, tally.answer))
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await working
    finally:
        if serving:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        await server.close()
    journal.log.info("ended")
