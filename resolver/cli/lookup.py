"""Print the host PID of a process, given its container and its PID there.

CONTAINER is an id as any tool prints it (with or without containerd://, docker://, cri-o://), the first 6 or more
characters of one, NAMESPACE/POD[/NAME], a pod's UID or the start of one, POD_UID/NAME, or NAME, if only one
container matches. PID is the process's PID in the container's PID namespace.
"""

from __future__ import annotations

from types import SimpleNamespace

from resolver import client
from resolver.base.errors import CannotKnow, NotFound

TYPE_CHECKING = False  # typing, argparse and re take longer to load than a plain look-up
if TYPE_CHECKING:
    import argparse
    from typing import Any

    Arguments = argparse.Namespace | SimpleNamespace

QUICK_SECONDS = 0.1  # for the daemon's answer, before the kernel is asked
_PATIENCE = 5.0  # seconds for it when only the daemon can answer
_SHORTEST_ID, _FULL_ID = 6, 64
_HEX, _DIGITS = frozenset("0123456789abcdef"), frozenset("0123456789")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from resolver.cli.parser import number

    add = parser.add_argument
    about = "id or its start, NAMESPACE/POD[/NAME], POD_UID[/NAME] or NAME"
    add("cid", metavar="CONTAINER", help=about)
    add("ns_pid", metavar="PID", type=number, help="the PID as the container sees it")
    about = "take PID from this nested PID namespace of the container"
    add("--pidns", metavar="INODE", type=number, help=about)
    add("--socket", metavar="PATH", help="the daemon's socket (or RESOLVER_SOCKET)")
    add("--json", action="store_true", help="print everything known about the process")
    parser.epilog = (
        "exit status: 0 found, 1 not found, 2 wrong usage, 3 ambiguous (the candidates are on standard\n"
        "error), 4 unknown (the missing part and its fix are on standard error)"
    )


def parsed(words: list[str]) -> SimpleNamespace | None:
    """Parse CONTAINER PID [--json] [--socket PATH] in full spelling; return None to leave the rest to argparse."""
    args, names, left = SimpleNamespace(pidns=None, socket=None, json=False), [], iter(words)
    for word in left:
        if word == "--json":
            args.json = True
        elif word == "--socket":
            args.socket = next(left, "")
            if not args.socket or args.socket.startswith("-"):
                return None
        elif word.startswith("-"):
            return None
        else:
            names.append(word)
    if len(names) != 2 or not names[0] or not 0 < len(names[1]) <= 10 or not _DIGITS.issuperset(names[1]):
        return None
    args.cid, args.ns_pid = names[0], int(names[1])
    return args


def _id_in(text: str) -> str:
    """Return the id, or the start of one, without its scheme; empty for anything else."""
    bare = text.rpartition("://")[2]
    return bare if _HEX.issuperset(bare) and _SHORTEST_ID <= len(bare) <= _FULL_ID else ""


def run(args: Arguments) -> int:
    try:
        if not _id_in(args.cid):
            from resolver.cli.container_names import resolve

            args.cid = resolve(args.cid, args.socket)
        process = {} if (text := ask_daemon(args)) else _by_id_or_name(args)
    except OSError as error:  # out of descriptors or memory, which is no proof of absence
        raise CannotKnow(f"the kernel refused: {error}") from error
    if args.json and not text:
        import json

        text = json.dumps(process, indent=2)
    print(text or process["host_pid"])
    return 0


def _by_id_or_name(args: Arguments) -> dict[str, Any]:
    """Look up the text as an id, or else as the start of a pod's UID, which may look like an id."""
    try:
        return _from_kernel(args)
    except NotFound:
        if len(_id_in(args.cid)) == _FULL_ID:
            raise
        from resolver.cli.container_names import resolve

        given, args.cid = args.cid, resolve(args.cid, args.socket, is_no_id=True)
        if args.cid == given:
            raise
        return _from_kernel(args)


def _from_kernel(args: Arguments) -> dict[str, Any]:
    """Ask the kernel; without the right to read its answer, ask the daemon."""
    from resolver.linux.procfs import Procfs
    from resolver.lookup import forward

    asked = (args.cid, args.ns_pid)
    try:
        return forward.lookup(Procfs(), *asked, pidns=args.pidns)._asdict()
    except CannotKnow:
        try:
            answer = client.look_up(*asked, pidns=args.pidns, socket_path=args.socket, seconds=_PATIENCE)
        except CannotKnow:
            answer = {}
        if type(answer.get("host_pid")) is not int:
            raise  # the kernel's error is more specific
        return answer


def ask_daemon(args: Arguments) -> str | None:
    """Return the daemon's answer; None if the kernel has to be asked.

    The daemon is asked for a full id only: for a prefix it would read every container. A malformed answer, or one
    about another process, is ignored.
    """
    container_id = _id_in(args.cid)
    if len(container_id) < _FULL_ID or args.pidns is not None or args.ns_pid < 1:
        return None
    answer = client.get(
        f"/v1/lookup?container={container_id}&pid={args.ns_pid}",
        socket_path=client.socket_of(args.socket),
        accept="application/json" if args.json else "text/plain",
        seconds=QUICK_SECONDS,
    )
    if answer is None or answer[0] != 200:
        return None
    if not args.json:
        number = answer[1].removesuffix("\n")
        plain = 0 < len(number) <= 10 and _DIGITS.issuperset(number) and number[0] != "0"
        return number if plain and number != answer[1] else None
    import json

    try:
        reply = json.loads(answer[1])
        about, host_pid = (reply["container_id"], reply["container_pid"]), reply["host_pid"]
    except (ValueError, KeyError, TypeError):
        return None
    return answer[1].rstrip() if about == (container_id, args.ns_pid) and type(host_pid) is int else None
