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
from typing import TYPE_CHECKING

from resolver.base.errors import UsageError
from resolver.base.text import printable
from resolver.cli.ask_daemon import add_socket
from resolver.cli.container_names import Named, ambiguous, not_found
from resolver.cli.show import duration, print_indented, print_json, print_labelled, styled, wrapped

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from resolver.cli._explain.chain import Explained, Link
    from resolver.cli.documents import Documents
    from resolver.state import Container

OWN_PARTS = "gpus", "processes", "slots"
EXIT_BREAKS, EXIT_UNKNOWN = 1, 4
_STYLES = {"ok": "green", "soon": "yellow", "unknown": "yellow", "breaks": "red", "after": "dim"}
_VERDICTS = {
    "breaks": "The chain breaks at",
    "unknown": "The chain holds as far as it is known; the first unknown link is",
    "soon": "resolver is repairing",
}
_IDENTITY = ("namespace", "pod", "pod_uid", "container_name", "container_id", "runtime")
#: Columns of a link's state and name, after two blanks; the finding follows.
_STATE, _NAME = 9, 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        "candidates are on standard error), 4 it does not break, but part of it is unknown,\n"
        "or the daemon leaves work undone"
    )


def run(args: argparse.Namespace) -> int:
    from resolver.cli._explain.chain import explain
    from resolver.cli.documents import read

    documents = read(args.socket)
    if not args.cid:
        raise UsageError(
            "name a container: resolver containers lists them, or resolver slots without a daemon"
        )
    chains = [explain(documents, container) for container in _chosen(documents, args.cid)]
    if args.json:
        print_json(_document(documents, chains))
    else:
        _print(documents, chains)
    states = {str(link.state) for chain in chains for _, link in chain.every_link()}
    uncertain = "unknown" in states or any(_grave(documents))
    return EXIT_BREAKS if "breaks" in states else EXIT_UNKNOWN if uncertain else 0


def _grave(documents: Documents) -> Iterator[str]:
    for trouble in () if documents.no_daemon else documents.status.troubles:
        if trouble.grave:
            yield f"The daemon: {trouble.with_fix()}"


def _chosen(documents: Documents, text: str) -> list[Container]:
    """Return the container with this name, or all containers of the pod with this name."""
    text = text.strip().rpartition("://")[2]
    candidates = (*documents.containers, *_without_processes(documents))
    chosen = {
        Named.of(container).key: container for container in candidates if Named.of(container).is_called(text)
    }
    if not chosen:
        without = documents.no_daemon.partition(". ")[0]
        by = f" (read without a daemon: {without})" if without else ""
        raise not_found(text, f". A container that shares a PID namespace and uses no GPU is not listed{by}")
    with_file = {
        key: container for key, container in chosen.items() if container.regions or not container.container_id
    }
    if _pods(chosen) > 1 == _pods(with_file):
        chosen = with_file
    if _pods(chosen) > 1:
        raise ambiguous(text, map(Named.of, chosen.values()))
    return sorted(chosen.values(), key=lambda container: container.container_name or "")


def _pods(containers: dict[str, Container]) -> int:
    return len({container.pod_uid or key for key, container in containers.items()})


def _without_processes(documents: Documents) -> Iterator[Container]:
    """Yield containers known only by a cache file, used or ignored."""
    from resolver.state import Container  # `--help` loads no records

    names = {container.pod_uid: (container.namespace, container.pod) for container in documents.containers}
    listed = {(container.pod_uid, container.container_name) for container in documents.containers}
    regions = (region for region in documents.regions if not region.container_id)
    places = [(region.pod_uid, region.container_name) for region in regions]
    for path in (file.path for file in documents.rejected):
        directory = os.path.basename(os.path.dirname(path) if path.endswith(".cache") else path)
        places.append((directory.partition("_")[0], directory.partition("_")[2]))
    for pod_uid, name in dict.fromkeys(places):
        if pod_uid and name and (pod_uid, name) not in listed:
            yield Container("", pod_uid, name, *names.get(pod_uid, (None, None)), None, None, None, (), 0.0)


def _document(documents: Documents, chains: list[Explained]) -> dict[str, object]:
    """Return the answer of ``--json``; ``breaks`` is the first broken link, with its owner's PID."""
    containers = []
    for chain in chains:
        names = {name: getattr(chain.view.container, name) or None for name in _IDENTITY}
        owner, broken = chain.first("breaks") or (None, None)
        breaks = broken and {"ns_pid": owner and owner.ns_pid, **broken._asdict()}
        links = {"links": chain.links, "owners": chain.owners, "end": chain.end, "reported": chain.reported}
        use = {"uses": chain.view.uses, "without_slot": chain.view.without_slot}
        containers.append({**names, **links, "breaks": breaks, **use})
    return {"at": documents.status.at, "no_daemon": documents.no_daemon or None, "containers": containers}


def _print(documents: Documents, chains: list[Explained]) -> None:
    by = f"By the daemon, {duration(time.time() - documents.status.at)} ago"
    without = documents.no_daemon
    _print_wrapped(f"By a read-only check, because no daemon could be asked: {without}" if without else by)
    for trouble in _grave(documents):
        _print_wrapped(trouble, "red")
    if documents.settings_by:
        _print_wrapped(f"Settings: {documents.settings_by}")
    for chain in chains:
        print()
        container = chain.view.container
        short_id = f", {container.runtime or 'container'} {container.container_id[:12]}"
        _print_wrapped(f"{Named.of(container).title}{short_id if container.container_id else ''}", "bold")
        for link in chain.links:
            _print_link(link)
        for owner in chain.owners:
            inside = "a process" if owner.ns_pid is None else f"PID {owner.ns_pid}"
            outside = "" if owner.host_pid is None else f", {owner.host_pid} on the host"
            comm = f": {printable(owner.comm)}" if owner.comm else ""
            print(styled(f"{inside}{outside}{comm}", "bold"))
            for link in owner.links:
                _print_link(link)
        print(styled("finally", "bold"))
        _print_link(chain.end)
        print()
        _print_wrapped(_verdict(chain))
        for record in chain.view.without_slot:
            process, for_long = record.process, duration(time.time() - record.since)
            why = ". ".join("; fix: ".join(cause.for_terminal()) for cause in record.causes)
            slotless = f"PID {process.host_pid} on the host, {process.comm}, has had no slot for {for_long}"
            _print_wrapped(f"{slotless}: {why or 'the cause is not known yet'}.")


def _print_link(link: Link) -> None:
    state = "-" if link.state == "after" else "BREAKS" if link.state == "breaks" else str(link.state)
    head = f"  {styled(state.ljust(_STATE), _STYLES[link.state])}{link.name.ljust(_NAME)}"
    indent = 2 + _STATE + _NAME
    print_indented(head, indent, printable(": ".join(filter(None, (link.found, link.reason)))))
    if link.state not in ("ok", "after"):
        print_labelled(indent, cause=link.cause, fix=link.fix)


def _verdict(chain: Explained) -> str:
    for state, begin in _VERDICTS.items():
        if (first := chain.first(state)) is not None:
            owner, link = first
            of_pid = f" of PID {owner.ns_pid}" if owner and owner.ns_pid is not None else ""
            reason = f" ({link.reason})" if link.reason else ""
            return f'{begin} "{link.name}"{of_pid}{reason}.'
    return "The chain holds: HAMi's monitors of every version report NVML's values."


def _print_wrapped(text: str, style: str = "") -> None:
    for line in wrapped(printable(text)):
        print(styled(line, style))
