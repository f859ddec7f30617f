"""Print the host PID of a process that is known by its PID inside a container.

CONTAINER is an id as any tool prints it (with or without containerd://, docker://, cri-o://), the first 6 or more
characters of one, NAMESPACE/POD[/NAME], a pod's UID or the start of one, POD_UID/NAME, or NAME, where only one
container fits. PID is a number of the container's own PID namespace.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

from resolver import client
from resolver.errors import Ambiguous, CannotKnow, NotFound

TYPE_CHECKING = False  # as typing's: neither it nor argparse nor re is loaded for the plain question
if TYPE_CHECKING:
    import argparse
    from typing import Any

    Arguments = argparse.Namespace | SimpleNamespace

HELP = "print the host PID of a PID inside a container"
EXIT_AMBIGUOUS = 3
#: A daemon that takes longer is not waited for: the kernel knows as well.
_SECONDS = 0.1
#: Where only the daemon can answer.
_PATIENCE = 5.0
_SHORTEST_ID, _FULL_ID = 6, 64
_HEX, _DIGITS = frozenset("0123456789abcdef"), frozenset("0123456789")
_SCHEME = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")


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


def parsed(words: list[str]) -> SimpleNamespace | None:
    """CONTAINER PID [--json] [--socket PATH], spelt out, as argparse has it; None for all that is left to argparse."""
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
    if len(names) != 2 or not names[0] or not names[1] or not _DIGITS.issuperset(names[1]):
        return None
    args.cid, args.ns_pid = names[0], int(names[1])
    return args


def _id_in(text: str) -> str:
    """The id, or the start of one, without its scheme; empty if it is no id."""
    scheme, mark, bare = text.rpartition("://")
    if mark and not (scheme and _SCHEME.issuperset(scheme)):
        return ""
    return bare if _HEX.issuperset(bare) and _SHORTEST_ID <= len(bare) <= _FULL_ID else ""


def run(args: Arguments) -> int:
    """Answer on standard output; errors but ambiguity are the dispatcher's."""
    try:
        if not _id_in(args.cid):
            from resolver.cli.container_names import resolve

            args.cid = resolve(args.cid, args.socket)
        print(_answer(args))
    except Ambiguous as error:
        print(f"resolver lookup: {error}", *error.candidates, sep="\n  ", file=sys.stderr)
        return EXIT_AMBIGUOUS
    except OSError as error:  # out of descriptors or memory: no answer, and not the answer that there is none
        raise CannotKnow(f"the kernel refused: {error}") from error
    return 0


def _answer(args: Arguments) -> str:
    """The daemon's if it has one at once, the kernel's otherwise."""
    asked = _put_to_daemon(args)
    if asked is not None:
        with asked:
            try:
                answer = _from_daemon(asked, args, _SECONDS)
            except TimeoutError:
                return _first_answer(asked, args)
        if answer is not None:
            return answer
    return _in_words(_by_id_or_name(args), args)


def _first_answer(asked: client.Asked, args: Arguments) -> str:
    """The daemon is late: the kernel is asked beside it, and the first answer counts, of two at once the kernel's.

    Its owner goes to standard error. What the kernel hides from this user, the daemon may still answer.
    """
    import threading
    import time
    from contextlib import suppress

    answers: list[dict[str, Any] | Exception] = []

    def look() -> None:
        try:
            answers.append(_by_kernel(args))
        except CannotKnow as error:
            answers.append(error)
            return
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            answers.append(error)
        with suppress(OSError):
            asked.hang_up()

    began, kernel = time.monotonic(), threading.Thread(target=look, daemon=True)
    try:
        kernel.start()
    except RuntimeError:  # the node has no thread left
        return _in_words(_by_ourselves(args), args)
    try:
        answer = _from_daemon(asked, args, _PATIENCE)
    except TimeoutError:
        answer = None
    if answer is not None and (not answers or isinstance(answers[0], CannotKnow)):
        waited = _SECONDS + time.monotonic() - began
        print(f"resolver lookup: the daemon was late, its answer took {waited:.1f} s", file=sys.stderr)
        return answer
    kernel.join()
    print(
        f"resolver lookup: the daemon does not answer within {_SECONDS:g} s, the kernel does", file=sys.stderr
    )
    if isinstance(answers[0], Exception):
        raise answers[0]
    return _in_words(answers[0], args)


def _in_words(found: dict[str, Any], args: Arguments) -> str:
    if args.json:
        import json

        return json.dumps(found, indent=2)
    return str(found["host_pid"])


def _by_id_or_name(args: Arguments) -> dict[str, Any]:
    """What looks like the start of an id may be that of a pod's UID: only if no id begins with it."""
    try:
        return _by_ourselves(args)
    except NotFound:
        if len(_id_in(args.cid)) == _FULL_ID:
            raise
        from resolver.cli.container_names import resolve

        given, args.cid = args.cid, resolve(args.cid, args.socket)
        if args.cid == given:
            raise
        return _by_ourselves(args)


def _by_kernel(args: Arguments) -> dict[str, Any]:
    from resolver.linux.procfs import Procfs
    from resolver.lookup.forward import lookup

    return lookup(Procfs(), args.cid, args.ns_pid, pidns=args.pidns)._asdict()


def _by_ourselves(args: Arguments) -> dict[str, Any]:
    """What the kernel says. Who may not see it asks a daemon that lets its group know, whatever the name."""
    try:
        return _by_kernel(args)
    except CannotKnow:
        from urllib.parse import quote

        query = f"container={quote(args.cid)}&pid={args.ns_pid}"
        query += f"&pidns={args.pidns}" if args.pidns is not None else ""
        try:
            found: dict[str, Any] = client.get_json(f"/v1/lookup?{query}", args.socket, seconds=_PATIENCE)
        except CannotKnow:
            found = {}
        if type(found.get("host_pid")) is not int:
            raise  # our own error says more
        return found


def _put_to_daemon(args: Arguments) -> client.Asked | None:
    """A running daemon is asked for full ids only: checking that a prefix is unique means reading every container."""
    container_id = _id_in(args.cid)
    if len(container_id) < _FULL_ID or args.pidns is not None or args.ns_pid < 1:
        return None
    return client.put(
        f"/v1/lookup?container={container_id}&pid={args.ns_pid}",
        socket_path=client.socket_of(args.socket),
        accept="application/json" if args.json else "text/plain",
    )


def _from_daemon(asked: client.Asked, args: Arguments, seconds: float) -> str | None:
    """What the daemon knows; None if the kernel has to be asked all the same. TimeoutError: nothing yet.

    An answer that does not look like one, or is about something else, is none.
    """
    answer = asked.answer(seconds)
    if answer is None or answer[0] != 200:
        return None
    if not args.json:
        number = answer[1].removesuffix("\n")
        plain = 0 < len(number) <= 10 and _DIGITS.issuperset(number) and number[0] != "0"
        return number if plain and number != answer[1] else None
    import json

    try:
        found = json.loads(answer[1])
        about, host_pid = (found["container_id"], found["container_pid"]), found["host_pid"]
    except (ValueError, KeyError, TypeError):
        return None
    return answer[1].rstrip() if about == (_id_in(args.cid), args.ns_pid) and type(host_pid) is int else None
