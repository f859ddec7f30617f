"""Show the node's GPUs: identity, place and health.

Needs a running daemon.
"""

import argparse
import re
import sys
import time

from resolver.api.shapes import Gpus
from resolver.base.reasons import NO_MEMORY
from resolver.cli.ask_daemon import AS_IT_IS, add_socket, ask, print_answer
from resolver.cli.show import Cell, duration, print_table, since
from resolver.gpu.inventory import Gpu, Illness

COLUMNS = (
    *("INDEX", "UUID", "MINOR", "MODEL", "MEMORY", "NUMA", "PCI", "MIG", "HEALTH", "REASON", "SINCE"),
    "NVLINKS",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_socket(parser, AS_IT_IS)


def run(args: argparse.Namespace) -> int:
    if args.json:
        print_answer("/v1/gpus", args.socket)
        return 0
    answer = ask(Gpus, "/v1/gpus", args.socket)
    rows = [_row(gpu, answer) for gpu in answer.gpus]
    if answer.error:
        age = (
            f"what follows is {duration(time.time() - answer.at)} old" if answer.at else "no GPU is known yet"
        )
        print(f"NVML does not answer ({answer.error}): {age}.", file=sys.stderr)
    elif not rows:
        reason = "The driver knows no GPU on this node." if answer.version else "NVML was not asked yet."
        print(reason, file=sys.stderr)
    if rows:
        right = ("INDEX", "MINOR", "MEMORY", "NUMA", "NVLINKS")
        # A terminal has 80 columns; --json has the rest.
        print_table(COLUMNS, rows, right=right, for_programs=("MINOR", "NUMA", "PCI", "NVLINKS"))
    for gpu in () if answer.error else answer.gpus:
        if gpu.memory_total is None and not gpu.illnesses:
            print(f"{gpu.uuid}: {NO_MEMORY}.", file=sys.stderr)
    return 0


def _row(gpu: Gpu, answer: Gpus) -> tuple[Cell, ...]:
    ill_since = min((illness.since for illness in gpu.illnesses), default=None)
    marked = not {gpu.uuid, "*"}.isdisjoint(answer.cordoned)
    health = (
        "unhealthy" if gpu.illnesses else "unknown" if answer.error else "cordoned" if marked else "healthy"
    )
    return (
        gpu.device_index,
        gpu.uuid,
        gpu.minor,
        gpu.name,
        None if gpu.memory_total is None else f"{gpu.memory_total / 2**30:.1f}GiB",
        gpu.numa_node,
        gpu.pci_address,
        None if gpu.mig is None else len(gpu.mig_instances) if gpu.mig else "off",
        health,
        ",".join([*map(_reason, gpu.illnesses), *["cordoned"] * marked]),
        None if ill_since is None else since(ill_since, time.time()),
        None if gpu.nvlinks is None else sum(gpu.nvlinks.values()),
    )


def _reason(illness: Illness) -> str:
    """Format an illness; an XID error keeps its number, for people to search for."""
    numbers = re.findall(r"\bXID (\d+)", illness.detail) if illness.reason == "xid" else []
    return " ".join((illness.reason, *numbers))
