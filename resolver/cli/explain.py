"""Explain one pod: the chain from its processes to HAMi's figure, where it breaks, and the fix.

The links: processes, PID namespace, the map of PIDs, HAMi's cache file, the driver; for each slot its process, hostpid,
NVML's sample, and the value; finally the sum of HAMi's monitor. Asks the daemon; without one, root gets the same
from a read-only check of the node.

CONTAINER is NAMESPACE/POD[/NAME], the start of a pod's UID, POD_UID/NAME, NAME, or an id or its start. For a pod, it
explains every container. In a container, without an argument, it shows that container's own slots and processes,
through the socket of the setting tenant_socket.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from resolver.base.errors import Ambiguous, UsageError
from resolver.base.reasons import BypassReason
from resolver.base.text import printable
from resolver.cli.ask_daemon import add_socket, understood
from resolver.cli.container_names import Named, not_found
from resolver.cli.show import NONE, duration, print_found, print_json, print_labelled, styled, wrapped

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from resolver.cli._explain.chain import Explained, Link, SlotOwner
    from resolver.cli.documents import Documents

OWN_PARTS = "gpus", "processes", "slots"
EXIT_BREAKS, EXIT_UNKNOWN = 1, 4
_STYLES = {"ok": "green", "soon": "yellow", "unknown": "yellow", "breaks": "red", "after": "dim"}
_VERDICTS = {
    "breaks": "The chain breaks",
    "unknown": "As far as can be seen it does not break; what is not known begins",
    "soon": "It is being put right",
}
#: A line of a link: two blanks, its state, its name, what was found.
_STATE, _NAME = 9, 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "cid",
        nargs="?",
        default="",
        metavar="CONTAINER",
        help="NAMESPACE/POD[/NAME], a pod's UID, an id, the start of either, or NAME; required on the host",
    )
    add_socket(parser, "print one JSON object")
    parser.epilog = (
        "exit status: 0 the chain holds, 1 it breaks, or there is no such container, 2 wrong usage, 3 ambiguous (the\n"
        "candidates are on standard error), 4 it does not break, but part of it is unknown"
    )


def run(args: argparse.Namespace) -> int:
    """Explain; errors are the dispatcher's."""
    from resolver.cli._explain.chain import explain
    from resolver.cli._explain.known import read

    known = read(args.socket)
    if not args.cid:
        raise UsageError("the container is missing: resolver top lists their names")
    with understood():
        explained = [explain(known, each) for each in _chosen(known, args.cid)]
        if args.json:
            print_json(_document(known, explained))
        else:
            _print(known, explained)
    states = {str(link.state) for each in explained for _, link in each.every_link()}
    return EXIT_BREAKS if "breaks" in states else EXIT_UNKNOWN if "unknown" in states else 0


def _chosen(known: Documents, text: str) -> list[dict[str, Any]]:
    """Return the containers with this name: one, or all of one pod."""
    text = text.strip().rpartition("://")[2]
    every = (*known.containers, *_without_processes(known))
    found = {Named.of(each).key: each for each in every if Named.of(each).is_called(text)}
    if not found:
        by = f" (read without a daemon: {known.no_daemon.partition('. ')[0]})" if known.no_daemon else ""
        raise not_found(text, f". One that shares a PID namespace and uses no GPU is not listed{by}")
    if len({each["pod_uid"] or key for key, each in found.items()}) > 1:
        said = f"{text!r} fits {len(found)} containers of several pods: ask for one by its id"
        raise Ambiguous(said, tuple(sorted(f"{key}  {_title(each)}" for key, each in found.items())))
    return sorted(found.values(), key=lambda each: each["container_name"] or "")


def _without_processes(known: Documents) -> Iterator[dict[str, Any]]:
    """Yield containers known only by a cache file, used or ignored."""
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
            known_names = {"pod_uid": pod_uid, "container_name": name, "namespace": namespace, "pod": pod}
            yield known_names | dict.fromkeys(("container_id", "runtime", "pidns", "init_host_pid"))


def _title(container: dict[str, Any]) -> str:
    parts = [container["namespace"], container["pod"] or container["pod_uid"], container["container_name"]]
    return printable("/".join(filter(None, parts))) or NONE


def _document(known: Documents, explained: list[Explained]) -> dict[str, Any]:
    """Return the object for programs; ``breaks`` is the first broken link, with its owner's PID."""
    containers = []
    for each in explained:
        broken = each.first("breaks")
        breaks = broken and {"ns_pid": broken[0] and broken[0].ns_pid, **broken[1]._asdict()}
        containers.append({**each._asdict(), "breaks": breaks, **_use(known, each)})
    return {"at": known.status["at"], "no_daemon": known.no_daemon or None, "containers": containers}


def _print(known: Documents, explained: list[Explained]) -> None:
    by = f"By the daemon, {duration(time.time() - known.status['at'])} ago"
    _say(f"Read without a daemon, which writes nothing: {known.no_daemon}" if known.no_daemon else by)
    if known.settings_by:
        _say(f"Settings: {known.settings_by}")
    for each in explained:
        print()
        which = f", {each.runtime or 'container'} {each.container_id[:12]}" if each.container_id else ""
        _say(f"{_title(each._asdict())}{which}", "bold")
        for link in each.links:
            _print_link(link)
        for owner in each.owners:
            print(styled(_owner(owner), "bold"))
            for link in owner.links:
                _print_link(link)
        print(styled("finally", "bold"))
        _print_link(each.end)
        print()
        _say(_verdict(each))
        for without in _use(known, each)["without_slot"]:
            _say(_why_without(without))


def _use(known: Documents, each: Explained) -> dict[str, list[dict[str, Any]]]:
    """Return the container's accounts, one for each GPU, and its processes without a slot."""
    name = (each.pod_uid, each.container_name) if each.pod_uid and each.container_name else None

    def its(record: dict[str, Any]) -> bool:
        names = (record["pod_uid"], record["container_name"])
        return names == name if name else record["container_id"] == each.container_id

    without = [found for found in known.without_slot if its(found["process"])]
    return {"uses": list(filter(its, known.uses)), "without_slot": without}


def _why_without(found: dict[str, Any]) -> str:
    """Describe a process without a slot in a sentence, and the causes."""
    process = found["process"]
    causes = ["; fix: ".join(BypassReason(each).for_terminal()) for each in found["causes"]]
    for_long, why = duration(time.time() - found["since"]), ". ".join(causes) or "the cause is not known yet"
    return f"PID {process['host_pid']} on the host, {process['comm']}, has had no slot for {for_long}: {why}."


def _owner(owner: SlotOwner) -> str:
    inside = f"PID {owner.ns_pid}" if owner.ns_pid is not None else "a process"
    outside = f", {owner.host_pid} on the host" if owner.host_pid is not None else ""
    comm = f": {printable(owner.comm)}" if owner.comm else ""
    return f"{inside}{outside}{comm}"


def _print_link(link: Link) -> None:
    state = "-" if link.state == "after" else "BREAKS" if link.state == "breaks" else str(link.state)
    head = f"  {styled(state.ljust(_STATE), _STYLES[link.state])}{link.name.ljust(_NAME)}"
    indent = 2 + _STATE + _NAME
    print_found(head, indent, printable(": ".join(filter(None, (link.found, link.reason)))))
    if link.state not in ("ok", "after"):
        print_labelled(indent, cause=link.cause, fix=link.fix)


def _verdict(each: Explained) -> str:
    for state, begin in _VERDICTS.items():
        found = each.first(state)
        if found is not None:
            owner, link = found
            whose = f" of PID {owner.ns_pid}" if owner and owner.ns_pid is not None else ""
            reason = f" ({link.reason})" if link.reason else ""
            return f'{begin} at "{link.name}"{whose}{reason}.'
    return "The chain holds: HAMi's monitors of every version report NVML's values."


def _say(text: str, style: str = "") -> None:
    for line in wrapped(printable(text)):
        print(styled(line, style))
