"""Print this node's events: repairs, starts and ends of containers, changes of source, GPUs and NVML.

Prints one event per line: time, kind and fields. The daemon keeps the last 1024.
"""

import argparse
import json
from collections.abc import Iterable, Mapping

from msgspec import convert
from msgspec.structs import asdict

from resolver import client
from resolver.api.shapes import Containers, Events
from resolver.base.errors import NoDaemon, NotFound, UsageError
from resolver.base.event_log import KINDS, Event
from resolver.base.text import printable
from resolver.cli.ask_daemon import add_socket, ask
from resolver.cli.show import moment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_socket(parser, "print one JSON object per line")
    add = parser.add_argument
    add("--follow", "-f", action="store_true", help="then wait for more, until interrupted")
    about = "only this kind; repeatable"
    add("--kind", metavar="KIND", action="append", choices=list(KINDS), help=about)
    add("--pod", metavar="POD", help="only those of a pod: NAMESPACE/POD, its UID or the start of one")
    parser.epilog = "kinds of events:\n" + "\n".join(f"  {kind:20} {text}" for kind, text in KINDS.items())


def run(args: argparse.Namespace) -> int:
    if args.pod and args.pod.count("/") > 1:
        raise UsageError(f"--pod {args.pod}: use NAMESPACE/POD, or a pod's UID")
    events: Iterable[Event] = ask(Events, "/v1/events", args.socket).events
    pods = _Pods(args.pod or "")
    if args.pod:
        for container in ask(Containers, "/v1/containers", args.socket).containers:
            pods.learn(asdict(container))
        for event in events:
            pods.learn(event.fields)
    if args.follow:  # the stream begins with the kept events
        stream = client.stream_events(args.socket, after="0", kinds=args.kind or ())
        events = (convert(event, Event) for event in stream)
    elif args.pod and not any(map(pods.is_chosen, pods.names)):
        raise NotFound(f"no pod here is or was called {args.pod!r}: resolver containers lists them")
    for event in events:
        uid = pods.learn(event.fields)
        if (not args.kind or event.kind in args.kind) and (not args.pod or pods.is_chosen(uid)):
            # In a pipe's buffer an event would wait for the next ones.
            words = " ".join(f"{printable(name)}={_value(value)}" for name, value in event.fields.items())
            line = f"{moment(event.at)}  {printable(event.kind).ljust(18)}  {words}".rstrip()
            print(json.dumps(asdict(event)) if args.json else line, flush=args.follow)
    if args.follow:
        raise NoDaemon(f"the daemon at {client.socket_of(args.socket)} ended: ask again once it runs")
    return 0


class _Pods:
    """Names of pods by UID (NAMESPACE/POD), and the chosen one."""

    def __init__(self, chosen: str) -> None:
        self._chosen = chosen
        self.names: dict[str, str] = {}

    def learn(self, fields: Mapping[str, object]) -> str:
        """Remember the pod of a container or an event; returns its UID, empty without one."""
        uid = str(fields.get("pod_uid") or "") or str(fields.get("container", "")).partition("_")[0]
        if uid:
            name = f"{fields['namespace']}/{fields['pod']}" if fields.get("pod") else ""
            self.names[uid] = name or self.names.get(uid, "")
        return uid

    def is_chosen(self, uid: str) -> bool:
        by_uid = "/" not in self._chosen and uid.startswith(self._chosen)
        return bool(uid) and (self.names[uid] == self._chosen or by_uid)


def _value(value: object) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    plain = value.isascii() and value.isprintable() and not set(value) & set(" \"'=\\")
    return value if value and plain else json.dumps(value)
