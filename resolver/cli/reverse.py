"""Print the container and pod of a host process, and its PID in every PID namespace.

Needs no running daemon. A thread's id stands for its process; standard error then says so.
"""

import argparse
import os
import sys

from resolver.base.errors import CannotKnow
from resolver.cli import EXIT_CANNOT_KNOW
from resolver.cli.ask_daemon import add_socket
from resolver.cli.parser import number
from resolver.cli.process_summary import facts_of
from resolver.cli.show import NONE, print_json, print_pairs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("host_pid", metavar="HOST_PID", type=number, help="the PID as the host sees it")
    add_socket(parser, "print one JSON object")
    parser.epilog = (
        "exit status: 0 found, in a container or not, 1 no such process, 2 wrong usage, 4 unknown\n"
        "(the missing part and its fix are on standard error)"
    )


def run(args: argparse.Namespace) -> int:
    import msgspec

    from resolver.cli.in_force import settings_in_force
    from resolver.containers.log_names import PodNames
    from resolver.linux.procfs import Procfs
    from resolver.lookup.reverse import reverse

    names = PodNames(settings_in_force(args.socket).settings.pod_logs_dir)
    try:
        answer = reverse(Procfs(), args.host_pid, names)
    except OSError as error:  # out of descriptors or memory, which is no proof of absence
        raise CannotKnow(f"the kernel refused: {error}") from error
    facts = facts_of(answer.host_pid, answer.start_time)
    if args.json:
        print_json({**msgspec.to_builtins(answer), **facts._asdict()})
    else:
        values = [(name, getattr(answer, name)) for name in answer.__struct_fields__ if name != "levels"]
        shown = [pair for pair in values if pair[1] is not None or pair[0] not in ("tid", "no_container")]
        ns_pids = " ".join(str(level.ns_pid) for level in answer.levels)
        pidns = " ".join(str(level.pidns or NONE) for level in answer.levels)
        print_pairs([*shown, ("ns_pids", ns_pids), ("pidns", pidns), *facts.in_words().items()])
    if answer.tid is not None:
        _say(f"{answer.tid} is a thread of process {answer.host_pid}")
    if os.geteuid() != 0 and any(level.pidns is None for level in answer.levels):
        _say(
            "its PIDs in the container are hidden from this user: ask as root (sudo), or with CAP_SYS_PTRACE"
        )
        return EXIT_CANNOT_KNOW
    return 0


def _say(text: str) -> None:
    sys.stdout.flush()
    print(f"resolver reverse: {text}", file=sys.stderr)
