"""Explain one pod: the chain from its processes to the number that HAMi reports, where it breaks, and what to do.

The links: processes, PID namespace, the map of PIDs, HAMi's cache file, the driver; of each slot its process, hostpid,
NVML's sample, and the value; at last what HAMi's monitor makes of it. Asks the daemon; where none answers, root gets
the same from a read-only check of the node.

CONTAINER is NAMESPACE/POD[/NAME], the start of a pod's UID, POD_UID/NAME, NAME, or an id or its start. Of a pod
every container is explained.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

from resolver.cli.ask_daemon import add_config, add_socket, duration, understood
from resolver.cli.container_names import Named, is_id
from resolver.cli.show import NONE, on_terminal, print_json, printable, styled
from resolver.errors import Ambiguous, NotFound

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from resolver.cli._explain.chain import Explained, Link, SlotOwner
    from resolver.cli._explain.known import Known

HELP = "explain why a pod's utilization is what it is: the chain, and where it breaks"
EXIT_BREAKS, EXIT_AMBIGUOUS, EXIT_UNKNOWN = 1, 3, 4
_WIDTH = 80
_STYLES = {"ok": "green", "soon": "yellow", "unknown": "yellow", "breaks": "red", "after": "dim"}
#: A line of a link: two blanks, its state, its name, what was found.
_STATE, _NAME = 9, 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "cid",
        metavar="CONTAINER",
        help="NAMESPACE/POD[/NAME], a pod's UID or its start, NAME, or an id or its start",
    )
    add_socket(parser)
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = (
        "exit status: 0 the chain holds, 1 it breaks, or there is no such container, 2 wrong usage, 3 ambiguous (the\n"
        "candidates are on standard error), 4 it does not break, but something of it is not known"
    )


def run(args: argparse.Namespace) -> int:
    """Explain; errors but ambiguity are the dispatcher's."""
    from resolver.cli._explain.chain import LinkState, explain
    from resolver.cli._explain.known import processes_in, read

    known = read(args.socket, args.config)
    with understood():
        try:
            chosen = _chosen(known, args.cid)
        except Ambiguous as error:
            print(f"resolver explain: {error}", *error.candidates, sep="\n  ", file=sys.stderr)
            return EXIT_AMBIGUOUS
        explained = [
            explain(known, each, processes_in(each["container_id"]) if each["container_id"] else None)
            for each in chosen
        ]
        if args.json:
            print_json(_document(known, explained))
        else:
            _print(known, explained)
    states = {link.state for each in explained for _, link in each.every_link()}
    if LinkState.BREAKS in states:
        return EXIT_BREAKS
    return EXIT_UNKNOWN if LinkState.UNKNOWN in states else 0


def _chosen(known: Known, text: str) -> list[dict[str, Any]]:
    """The containers that are called so: one, or all of one pod."""
    text = text.strip().rpartition("://")[2]
    candidates = {_key(each): each for each in (*known.containers, *_without_processes(known))}
    found = {
        key: each
        for key, each in candidates.items()
        if (is_id(text) and (each["container_id"] or "").startswith(text)) or _named(each).is_called(text)
    }
    if not found:
        by = f" (read without a daemon: {known.no_daemon.partition('. ')[0]})" if known.no_daemon else ""
        raise NotFound(
            f"no container here is called {text!r}: use NAMESPACE/POD, NAMESPACE/POD/NAME, POD_UID/NAME, NAME or an "
            "id; resolver containers lists them. One that shares a PID namespace and uses no GPU is not "
            f"listed{by}"
        )
    if len(found) > 1 and len({each["pod_uid"] or key for key, each in found.items()}) > 1:
        raise Ambiguous(
            f"{text!r} fits {len(found)} containers of several pods: ask for one by its id",
            tuple(sorted(f"{key}  {_title(each)}" for key, each in found.items())),
        )
    return sorted(found.values(), key=lambda each: each["container_name"] or "")


def _named(container: dict[str, Any]) -> Named:
    namespace, pod, pod_uid, name = (
        container[each] or "" for each in ("namespace", "pod", "pod_uid", "container_name")
    )
    return Named(namespace=namespace, pod=pod, pod_uid=pod_uid, name=name, key=_key(container))


def _without_processes(known: Known) -> Iterator[dict[str, Any]]:
    """Containers of which no more than a cache file is known, or one that is ignored."""
    names = {each["pod_uid"]: (each["namespace"], each["pod"]) for each in known.containers}
    listed = {(each["pod_uid"], each["container_name"]) for each in known.containers}
    places = [(each["pod_uid"], each["container_name"]) for each in known.regions if not each["container_id"]]
    for each in known.rejected:
        path: str = each["path"]
        directory = os.path.basename(os.path.dirname(path) if path.endswith(".cache") else path)
        places.append((directory.partition("_")[0], directory.partition("_")[2]))
    for pod_uid, name in dict.fromkeys(places):
        if pod_uid and name and (pod_uid, name) not in listed:
            namespace, pod = names.get(pod_uid, (None, None))
            yield {
                "container_id": None,
                "pod_uid": pod_uid,
                "container_name": name,
                "namespace": namespace,
                "pod": pod,
                "runtime": None,
                "pidns": None,
                "init_host_pid": None,
            }


def _key(container: dict[str, Any]) -> str:
    return container["container_id"] or f"{container['pod_uid']}/{container['container_name']}"


def _title(container: dict[str, Any]) -> str:
    parts = [container["namespace"], container["pod"] or container["pod_uid"], container["container_name"]]
    return printable("/".join(filter(None, parts))) or NONE


# ---- as JSON ------------------------------------------------------------------------------------------------------


def _document(known: Known, explained: list[Explained]) -> dict[str, Any]:
    return {
        "at": known.status["at"],
        "no_daemon": known.no_daemon or None,
        "containers": [_container_document(each) for each in explained],
    }


def _container_document(each: Explained) -> dict[str, Any]:
    from resolver.cli._explain.chain import LinkState

    broken = each.worst(LinkState.BREAKS)
    fields = each._asdict()
    fields["links"] = [link._asdict() for link in each.links]
    fields["owners"] = [
        owner._asdict() | {"links": [link._asdict() for link in owner.links]} for owner in each.owners
    ]
    fields["end"] = each.end._asdict()
    fields["reported"] = [device._asdict() for device in each.reported]
    fields["breaks"] = broken and {"ns_pid": broken[0] and broken[0].ns_pid, **broken[1]._asdict()}
    return fields


# ---- for people ---------------------------------------------------------------------------------------------------


def _print(known: Known, explained: list[Explained]) -> None:
    columns = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns) if on_terminal() else _WIDTH
    own = f"Read without a daemon, which writes nothing: {known.no_daemon}"
    daemons = f"By the daemon, {duration(time.time() - known.status['at'])} ago"
    _wrapped(own if known.no_daemon else daemons, columns)
    if known.settings_by:
        _wrapped(f"Settings: {known.settings_by}", columns)
    for each in explained:
        print()
        which = f", {each.runtime or 'container'} {each.container_id[:12]}" if each.container_id else ""
        _wrapped(f"{_title(each._asdict())}{which}", columns, style="bold")
        for link in each.links:
            _print_link(link, columns)
        for owner in each.owners:
            print(styled(_owner(owner), "bold"))
            for link in owner.links:
                _print_link(link, columns)
        print(styled("at last", "bold"))
        _print_link(each.end, columns)
        print()
        _wrapped(_verdict(each), columns)


def _owner(owner: SlotOwner) -> str:
    inside = f"PID {owner.ns_pid}" if owner.ns_pid is not None else "a process"
    outside = f", {owner.host_pid} on the host" if owner.host_pid is not None else ""
    comm = f": {printable(owner.comm)}" if owner.comm else ""
    return f"{inside}{outside}{comm}"


def _print_link(link: Link, columns: int) -> None:
    state = "-" if link.state == "after" else "BREAKS" if link.state == "breaks" else str(link.state)
    head = f"  {styled(state.ljust(_STATE), _STYLES[link.state])}{link.name.ljust(_NAME)}"
    found = f"{link.found}: {link.reason}" if link.reason else link.found
    indent = 2 + _STATE + _NAME
    for number, line in enumerate(_lines(found, columns - indent)):
        print((head if number == 0 else " " * indent) + line)
    if link.state in ("ok", "after"):
        return
    for label, text in (("cause", link.cause), ("fix", link.fix)):
        for number, line in enumerate(_lines(text, columns - indent - 7) if text else ()):
            print(" " * indent + styled((label if number == 0 else "").ljust(7), "dim") + line)


def _verdict(each: Explained) -> str:
    from resolver.cli._explain.chain import LinkState

    for state, begin in (
        (LinkState.BREAKS, "The chain breaks"),
        (LinkState.UNKNOWN, "As far as can be seen it does not break; what is not known begins"),
        (LinkState.SOON, "It is being put right"),
    ):
        worst = each.worst(state)
        if worst is not None:
            owner, link = worst
            whose = f" of PID {owner.ns_pid}" if owner and owner.ns_pid is not None else ""
            reason = f" ({link.reason})" if link.reason else ""
            return f'{begin} at "{link.name}"{whose}{reason}.'
    return "The chain holds: what HAMi's monitor reports is what NVML measures."


def _lines(text: str, room: int) -> list[str]:
    return textwrap.wrap(printable(text), max(24, room), break_on_hyphens=False) or [""]


def _wrapped(text: str, columns: int, style: str = "") -> None:
    for line in _lines(text, columns):
        print(styled(line, style))
