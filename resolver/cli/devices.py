"""Show the node's GPUs: what they are, where they are, and whether they are well.

Needs a running daemon. With `-o device` it prints Koordinator's Device object of this node, for a server-side
`kubectl apply`.
"""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Any

from resolver import client
from resolver.cli.ask_daemon import WITHOUT, add_socket, ask, duration, moment, understood
from resolver.cli.show import on_terminal, print_json, print_table
from resolver.errors import CannotKnow, NoDaemon, UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

HELP = "show the node's GPUs and their health"
COLUMNS = ("INDEX", "UUID", "MINOR", "MODEL", "MEMORY", "NUMA", "PCI", "MIG", "HEALTH", "REASON", "SINCE")
#: How long the daemon is asked to wait for a change.
_WAIT = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_socket(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print the daemon's answer as it is")
    add("--watch", "-w", action="store_true", help="print it again when a GPU has changed, until interrupted")
    add("-o", "--output", choices=["device"], help="print the node's Device object of Koordinator instead")
    add(
        "--node",
        metavar="NAME",
        help="the node's name in Kubernetes, for -o device (default the host's name)",
    )


def run(args: argparse.Namespace) -> int:
    """Print them once, or each time that something about them changed."""
    if args.output and args.json:
        raise UsageError("--json and -o device: choose one; the Device object is JSON itself")
    if args.node and not args.output:
        raise UsageError("--node is the name of the Device object: use it with -o device")
    shown: Any = None
    for answer in _answers(args.socket) if args.watch else (ask("/v1/gpus", args.socket),):
        with understood():
            # What is measured changes every minute, and is not what this is about, but for who wants all of it.
            content = answer if args.json else [_comparable(answer), answer["error"]]
            if content == shown:
                continue
            if shown is not None and not args.json:
                print()
            shown = content
            _print(args, answer)
        sys.stdout.flush()
    return 0


def _answers(socket_path: str | None) -> Iterator[Any]:
    where, tag = client.socket_of(socket_path), ""
    while True:
        try:
            answer = client.get_changed("/v1/gpus", where, tag=tag, wait=_WAIT)
        except NoDaemon as error:
            raise NoDaemon(f"{error}. {WITHOUT}") from None
        if answer is not None:
            tag, document = answer
            yield document


def _comparable(answer: Any) -> list[tuple[Any, ...]]:
    return [
        (
            gpu["device_index"],
            gpu["uuid"],
            gpu["minor"],
            gpu["name"],
            _memory(gpu["memory_total"]),
            gpu["numa_node"],
            gpu["pci_address"],
            None if gpu["mig"] is None else len(gpu["mig_instances"]) if gpu["mig"] else "off",
            _health(gpu, answer["error"]),
            ",".join(map(_reason, gpu["illnesses"])),
            min((each["since"] for each in gpu["illnesses"]), default=None),
        )
        for gpu in answer["gpus"]
    ]


def _reason(illness: Any) -> str:
    """With the numbers of XID errors, by which people look them up."""
    numbers = re.findall(r"\bXID (\d+)", illness["detail"]) if illness["reason"] == "xid" else []
    return " ".join((str(illness["reason"]), *numbers))


def _health(gpu: Any, error: str | None) -> str:
    if gpu["illnesses"]:
        return "unhealthy"
    return "unknown" if error else "healthy"


def _print(args: argparse.Namespace, answer: Any) -> None:
    if args.output:
        print_json(_device(args.node, answer))
        return
    if args.json:
        print_json(answer)
        return
    if answer["error"]:
        age = duration(time.time() - answer["at"]) if answer["at"] else None
        said = f"what follows is {age} old" if age else "no GPU is known yet"
        print(f"NVML does not answer ({answer['error']}): {said}.", file=sys.stderr)
    rows = list(_rows(_comparable(answer)))
    if rows:
        # A person has 80 columns: the PCI address is in --json.
        narrow = ("MINOR", "NUMA", "PCI") if on_terminal() else ()
        print_table(COLUMNS, rows, right=("INDEX", "MINOR", "MEMORY", "NUMA"), without=narrow)
    elif not answer["error"]:
        print(
            "The driver knows no GPU on this node." if answer["version"] else "NVML was not asked yet.",
            file=sys.stderr,
        )


def _rows(compared: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    for *cells, since in compared:
        when = duration(time.time() - since) if since and on_terminal() else since and moment(since)
        yield *cells, when


def _memory(total: int | None) -> str | None:
    return None if total is None else f"{total / 2**30:.1f}GiB"


def _device(node: str | None, answer: Any) -> Any:
    import os

    from resolver.kube.device import Report, desired

    if answer["error"] or not answer["version"]:
        why = answer["error"] or "it was not asked yet"
        raise CannotKnow(
            f"NVML does not answer ({why}), so which GPUs are well is not known: ask again once it does"
        )
    return desired(Report(answer), node or os.uname().nodename, None, None, time.time())
