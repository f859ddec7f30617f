"""Print whose process a host PID is: the container, the pod, and its number in every PID namespace.

Needs no running daemon. The id of a thread is taken for its process, and that is said on standard error.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from resolver.cli import EXIT_CANNOT_KNOW
from resolver.cli.ask_daemon import add_config, add_socket, duration, moment
from resolver.cli.process_summary import facts_of
from resolver.cli.show import NONE, print_json, print_pairs
from resolver.errors import CannotKnow

if TYPE_CHECKING:
    import argparse

    from resolver.cli.process_summary import ProcessSummary
    from resolver.lookup.reverse import Reversed

HELP = "print the container and the PIDs of a host PID"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("host_pid", metavar="HOST_PID", type=int, help="the PID as the host sees it")
    parser.add_argument(
        "--pod-logs-dir",
        metavar="DIR",
        help="kubelet's directory of logs, from which pods' names are read (default: the setting pod_logs_dir)",
    )
    add_socket(parser)
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = (
        "exit status: 0 found, in a container or not, 1 no such process, 2 wrong usage, 4 cannot know\n"
        "(what is missing, and how to give it, is on standard error)"
    )


def run(args: argparse.Namespace) -> int:
    """Print it; errors are the dispatcher's."""
    from resolver.containers.pod_names import PodNames
    from resolver.linux.procfs import Procfs
    from resolver.lookup.reverse import reverse

    directory, origin = args.pod_logs_dir, ""
    if not directory:
        from resolver.cli.in_force import settings_in_force

        in_force = settings_in_force(args.socket, args.config)
        directory, origin = in_force.settings.pod_logs_dir, in_force.said_of("pod_logs_dir")
    try:
        found = reverse(Procfs(), args.host_pid, PodNames(directory))
    except OSError as error:  # out of descriptors or memory: no answer, and not the answer that there is none
        raise CannotKnow(f"the kernel refused: {error}") from error
    facts = facts_of(found.host_pid, found.start_time)
    if args.json:
        print_json({**found.document(), **facts._asdict()})
    else:
        _print(found, facts)
    if origin and found.container_id is not None:
        _say(f"pods' names by {directory}, pod_logs_dir {origin}")
    if found.tid is not None:
        _say(f"{found.tid} is a thread of process {found.host_pid}")
    if os.geteuid() != 0 and any(level.pidns is None for level in found.levels):
        _say(
            "its numbers in the container are hidden from this user: ask as root (sudo), or with CAP_SYS_PTRACE"
        )
        return EXIT_CANNOT_KNOW
    return 0


def _say(text: str) -> None:
    sys.stdout.flush()
    print(f"resolver reverse: {text}", file=sys.stderr)


def _print(found: Reversed, facts: ProcessSummary) -> None:
    shown = {
        "user": facts.user,
        "command": facts.command,
        "started": moment(facts.started_at) if facts.started_at else None,
        "cpu": f"{duration(facts.cpu_seconds)}" if facts.cpu_seconds is not None else None,
        "memory": f"{facts.memory / 2**20:.1f} MiB" if facts.memory is not None else None,
    }
    levels = {
        "ns_pids": " ".join(str(level.ns_pid) for level in found.levels),
        "pidns": " ".join(str(level.pidns or NONE) for level in found.levels),
    }
    values = {name: value for name, value in found._asdict().items() if name != "levels"} | levels | shown
    if found.tid is None:
        del values["tid"]
    if found.no_container is None:
        del values["no_container"]
    print_pairs(list(values.items()))
