"""Show each container's GPU use over time, whether its core limit holds, and processes that HAMi-core can't limit.

In a container it shows that container's use, through the socket of the setting tenant_socket.

Counts from when the daemon first saw the container on the GPU. ERROR is the largest error of GPU TIME, ? if unknown.
Energy is an estimate: the GPU's, shared by use.
"""

import argparse
import sys
import time

from resolver.api.shapes import ContainerUses, Gpus
from resolver.cli.ask_daemon import AS_IT_IS, add_socket, ask, print_answer
from resolver.cli.show import Cell, duration, print_table, size
from resolver.state import ContainerUse, Process, WithoutSlot

_NAMES = ("NAMESPACE", "POD", "NAME", "GPU")
COLUMNS = (
    *_NAMES,
    "1 MIN",
    "5 MIN",
    "LIMIT",
    "STATE",
    "IDLE FOR",
    "GPU TIME",
    "ERROR",
    "GIB HOURS",
    "WH",
    "XIDS",
)
WITHOUT = (*_NAMES, "HOST PID", "COMMAND", "MEMORY", "FOR", "REASON", "CAUSES")
OWN_PARTS = ("gpus",)
_FOR_PROGRAMS = ("NAMESPACE", "GIB HOURS", "WH", "XIDS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_socket(parser, AS_IT_IS)


def run(args: argparse.Namespace) -> int:
    gpus = ask(Gpus, "/v1/gpus", args.socket).gpus  # refused to a container, which has a view of its own
    if args.json:
        print_answer("/v1/usage", args.socket)
        return 0
    answer = ask(ContainerUses, "/v1/usage", args.socket)
    index = {gpu.uuid: gpu.device_index for gpu in gpus}
    rows = [_row(use, index) for use in answer.containers]
    without = [_without(record, index) for record in answer.without_slot]
    if rows:
        print_table(COLUMNS, rows, right=COLUMNS[3:7], for_programs=_FOR_PROGRAMS, shorten="POD")
    else:
        print("No container has used a GPU since the daemon's start.", file=sys.stderr)
    if without:
        print("\nWithout a slot, so HAMi-core limits nothing there:")
        print_table(WITHOUT, without, right=WITHOUT[3:5], for_programs=_FOR_PROGRAMS, shorten="POD")
        for cause in sorted({cause for record in answer.without_slot for cause in record.causes}):
            print(f"{cause}: {'; fix: '.join(cause.for_terminal())}")
    return 0


def _row(use: ContainerUse, index: dict[str, int]) -> tuple[Cell, ...]:
    limit = "-" if use.core_limit is None else f"{use.core_limit}%"
    return (
        *_names(use),
        index.get(use.device_uuid, use.device_uuid),
        _per_cent(use.used_1m),
        _per_cent(use.used_5m),
        limit,
        use.limit_state,
        None if use.idle_since is None else duration(time.time() - use.idle_since),
        duration(use.gpu_seconds),
        _per_cent(use.error),
        f"{use.memory_byte_seconds / 2**30 / 3600:.2f}",
        None if use.energy is None else f"{use.energy / 3600:.1f}",
        use.xids,
    )


def _without(record: WithoutSlot, index: dict[str, int]) -> tuple[Cell, ...]:
    process = record.process
    return (
        *_names(process),
        index.get(process.device_uuid, process.device_uuid),
        process.host_pid,
        process.comm,
        None if process.memory is None else size(process.memory),
        duration(time.time() - record.since),
        process.no_slot,
        ",".join(record.causes),
    )


def _names(record: ContainerUse | Process) -> tuple[Cell, ...]:
    return record.namespace, record.pod, record.container_name or (record.container_id or "")[:12]


def _per_cent(share: float | None) -> str:
    return "?" if share is None else f"{share:.0%}"
