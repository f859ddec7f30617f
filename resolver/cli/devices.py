"""Show the node's GPUs: identity, place and health.

Needs a running daemon.
"""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Any

from resolver.base.reasons import NO_MEMORY
from resolver.cli.ask_daemon import AS_IT_IS, add_socket, ask, understood
from resolver.cli.show import duration, print_json, print_table, since

if TYPE_CHECKING:
    import argparse

COLUMNS = (
    *("INDEX", "UUID", "MINOR", "MODEL", "MEMORY", "NUMA", "PCI", "MIG", "HEALTH", "REASON", "SINCE"),
    "NVLINKS",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_socket(parser, AS_IT_IS)


def run(args: argparse.Namespace) -> int:
    """Print them."""
    answer = ask("/v1/gpus", args.socket)
    with understood():
        if args.json:
            print_json(answer)
        else:
            _print(answer)
    return 0


def _row(gpu: Any, answer: Any) -> tuple[Any, ...]:
    ill = gpu["illnesses"]
    memory = None if gpu["memory_total"] is None else f"{gpu['memory_total'] / 2**30:.1f}GiB"
    mig = None if gpu["mig"] is None else len(gpu["mig_instances"]) if gpu["mig"] else "off"
    health = "unhealthy" if ill else "unknown" if answer["error"] else "healthy"
    what = [gpu[name] for name in ("device_index", "uuid", "minor", "name")]
    links = None if gpu["nvlinks"] is None else sum(gpu["nvlinks"].values())
    where = (memory, gpu["numa_node"], gpu["pci_address"], mig)
    ill_since = min((each["since"] for each in ill), default=None)
    shown = None if ill_since is None else since(ill_since, time.time())
    return (*what, *where, health, ",".join(map(_reason, ill)), shown, links)


def _reason(illness: Any) -> str:
    """Format an illness, with the searchable numbers of XID errors."""
    numbers = re.findall(r"\bXID (\d+)", illness["detail"]) if illness["reason"] == "xid" else []
    return " ".join((str(illness["reason"]), *numbers))


def _print(answer: Any) -> None:
    if answer["error"]:
        age = duration(time.time() - answer["at"]) if answer["at"] else None
        said = f"what follows is {age} old" if age else "no GPU is known yet"
        print(f"NVML does not answer ({answer['error']}): {said}.", file=sys.stderr)
    rows = [_row(gpu, answer) for gpu in answer["gpus"]]
    if rows:
        right = ("INDEX", "MINOR", "MEMORY", "NUMA", "NVLINKS")
        # A person has 80 columns: the PCI address is in --json.
        print_table(COLUMNS, rows, right=right, for_programs=("MINOR", "NUMA", "PCI", "NVLINKS"))
    if not answer["error"]:
        for gpu in answer["gpus"]:
            if gpu["memory_total"] is None and not gpu["illnesses"]:
                print(f"{gpu['uuid']}: {NO_MEMORY}.", file=sys.stderr)
    if not rows and not answer["error"]:
        known = "The driver knows no GPU on this node." if answer["version"] else "NVML was not asked yet."
        print(known, file=sys.stderr)
