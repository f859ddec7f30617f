"""Print the host PID of a process that is known by its PID inside a container.

CONTAINER is an id as any tool prints it (with or without containerd://, docker://, cri-o://), the first 6 or more
characters of one, NAMESPACE/POD[/NAME], a pod's UID or the start of one, POD_UID/NAME, or NAME, where only one
container fits. PID is a number of the container's own PID namespace.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from resolver import client
from resolver.errors import Ambiguous, CannotKnow, NotFound

if TYPE_CHECKING:
    import argparse
    from typing import Any

HELP = "print the host PID of a PID inside a container"
EXIT_AMBIGUOUS = 3
#: Of these nobody is asked for names first.
_IS_ID = re.compile(r"(?:[a-z0-9-]+://)?[0-9a-f]{6,64}")
_FULL_ID = re.compile(r"(?:[a-z0-9-]+://)?([0-9a-f]{64})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "cid", metavar="CONTAINER", help="id, start of an id, NAMESPACE/POD[/NAME], POD_UID[/NAME] or NAME"
    )
    parser.add_argument("ns_pid", metavar="PID", type=int, help="the PID as the container sees it")
    parser.add_argument(
        "--pidns",
        metavar="INODE",
        type=int,
        help="PID is one of this (nested) PID namespace of the container",
    )
    parser.add_argument(
        "--socket", metavar="PATH", help="where a running daemon answers (or RESOLVER_SOCKET)"
    )
    parser.add_argument("--json", action="store_true", help="print all that is known about the process")
    parser.epilog = (
        "exit status: 0 found, 1 not found, 2 wrong usage, 3 ambiguous (the candidates are on standard\n"
        "error), 4 cannot know (what is missing, and how to give it, is on standard error)"
    )


def run(args: argparse.Namespace) -> int:
    """Answer on standard output; errors but ambiguity are the dispatcher's."""
    try:
        if not _IS_ID.fullmatch(args.cid):
            from resolver.cli.container_names import resolve

            args.cid = resolve(args.cid, args.socket)
        answer = _from_daemon(args)
        if answer is not None:
            print(answer.rstrip())
            return 0
        found = _by_id_or_name(args)
    except Ambiguous as error:
        print(f"resolver lookup: {error}", *error.candidates, sep="\n  ", file=sys.stderr)
        return EXIT_AMBIGUOUS
    except OSError as error:  # out of descriptors or memory: no answer, and not the answer that there is none
        raise CannotKnow(f"the system refused to tell: {error}") from error
    if args.json:
        import json

        print(json.dumps(found, indent=2))
    else:
        print(found["host_pid"])
    return 0


def _by_id_or_name(args: argparse.Namespace) -> dict[str, Any]:
    """What looks like the start of an id may be that of a pod's UID: only if no id begins with it."""
    try:
        return _by_ourselves(args)
    except NotFound:
        from resolver.cli.container_names import resolve

        given, args.cid = args.cid, resolve(args.cid, args.socket)
        if args.cid == given:
            raise
        return _by_ourselves(args)


def _by_ourselves(args: argparse.Namespace) -> dict[str, Any]:
    """What the kernel says. Who may not see it asks a daemon that lets its group know, whatever the name."""
    from resolver.linux.procfs import Procfs
    from resolver.lookup.forward import lookup

    try:
        return lookup(Procfs(), args.cid, args.ns_pid, pidns=args.pidns)._asdict()
    except CannotKnow:
        from urllib.parse import quote

        query = f"container={quote(args.cid)}&pid={args.ns_pid}"
        query += f"&pidns={args.pidns}" if args.pidns is not None else ""
        try:
            found: dict[str, Any] = client.get_json(f"/v1/lookup?{query}", args.socket)
        except CannotKnow:
            found = {}
        if type(found.get("host_pid")) is not int:
            raise  # why we cannot see it ourselves tells more
        return found


def _from_daemon(args: argparse.Namespace) -> str | None:
    """What a running daemon knows at once; None if there is none, or if the kernel has to be asked all the same.

    It is asked for full ids only: whether the start of one is unique takes a look at every container. An answer
    that does not look like one, or is about something else, is none.
    """
    container_id = _FULL_ID.fullmatch(args.cid)
    if container_id is None or args.pidns is not None or args.ns_pid < 1:
        return None
    answer = client.get(
        f"/v1/lookup?container={container_id[1]}&pid={args.ns_pid}",
        socket_path=client.socket_of(args.socket),
        accept="application/json" if args.json else "text/plain",
    )
    if answer is None or answer[0] != 200:
        return None
    if not args.json:
        return answer[1] if re.fullmatch(r"[1-9][0-9]{0,9}\n", answer[1]) else None
    import json

    try:
        found = json.loads(answer[1])
        about, host_pid = (found["container_id"], found["container_pid"]), found["host_pid"]
    except (ValueError, KeyError, TypeError):
        return None
    return answer[1] if about == (container_id[1], args.ns_pid) and type(host_pid) is int else None
