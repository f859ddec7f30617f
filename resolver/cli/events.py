"""Print this node's events: repairs, starts and ends of containers, changes of source, GPUs and NVML.

Prints one event per line: time, kind and fields. The daemon keeps the last 1024.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from msgspec import convert
from msgspec.structs import asdict

from resolver import client
from resolver.api.shapes import Containers, Events
from resolver.base.errors import NoDaemon, NotFound, UsageError
from resolver.base.event_log import KINDS, Event
from resolver.base.text import printable
from resolver.cli.ask_daemon import add_socket, ask
from resolver.cli.show import moment, on_terminal, styled, wrapped

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

_BAD = (
    "conflict",
    "region_quarantined",
    "source_failed",
    "slot_stuck",
    "nvml_contradicts_watchers",
    "gpu_unhealthy",
    "gpu_gone",
)
_GOOD = ("repair", "gpu_healthy", "nvml_available")
#: Fields that identify an event's subject; a terminal shows one name.
_NAMES = ("container", "container_id", "pod_uid", "container_name", "namespace", "pod")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_socket(parser, "print one JSON object per line")
    add = parser.add_argument
    add("--follow", "-f", action="store_true", help="then wait for more, until interrupted")
    about = "only this kind; repeatable"
    add("--kind", metavar="KIND", action="append", choices=list(KINDS), help=about)
    add("--pod", metavar="POD", help="only those of a pod: NAMESPACE/POD, its UID or the start of one")
    parser.epilog = "kinds of events:\n" + "\n".join(f"  {kind:20} {text}" for kind, text in KINDS.items())


def run(args: argparse.Namespace) -> int:
    """Print the kept ones, then perhaps those that come."""
    if args.pod and args.pod.count("/") > 1:
        raise UsageError(f"--pod {args.pod}: use NAMESPACE/POD, or a pod's UID")
    events: Iterable[Event] = ask(Events, "/v1/events", args.socket).events
    printed = _Printed(args, list(events))
    if args.follow:  # the kept ones come first there, too
        stream = client.stream_events(args.socket, after="0", kinds=args.kind or ())
        events = (convert(event, Event) for event in stream)
    elif args.pod and not printed.has_pod():
        raise NotFound(f"no pod here is or was called {args.pod!r}: resolver containers lists them")
    for event in events:
        printed.learn_pod(event.fields)
        if printed.selects(event):
            print(printed.line(event), flush=args.follow)  # the reader of a pipe waits for it
    if args.follow:
        raise NoDaemon(f"the daemon at {client.socket_of(args.socket)} ended: ask again once it runs")
    return 0


class _Printed:
    """Selection and format of events, with pod names by UID."""

    def __init__(self, args: argparse.Namespace, kept: Sequence[Event]) -> None:
        self._kinds, self._pod, self._as_json = args.kind or (), args.pod or "", args.json
        self._compact = on_terminal() and not args.json
        self._pods: dict[str, str] = {}  # UID -> NAMESPACE/POD
        if self._pod or self._compact:
            for container in ask(Containers, "/v1/containers", args.socket).containers:
                self.learn_pod(asdict(container))
            for event in kept:
                self.learn_pod(event.fields)

    def learn_pod(self, fields: dict[str, Any]) -> None:
        """Remember the pod of a container or an event, with its name if there is one."""
        if uid := _pod_uid(fields):
            name = f"{fields['namespace']}/{fields['pod']}" if fields.get("pod") else ""
            self._pods[uid] = name or self._pods.get(uid, "")

    def has_pod(self) -> bool:
        """Check if the chosen pod runs or has an event."""
        return any(map(self._is_chosen, self._pods))

    def _is_chosen(self, uid: str) -> bool:
        return self._pods.get(uid) == self._pod or ("/" not in self._pod and uid.startswith(self._pod))

    def selects(self, event: Event) -> bool:
        """Check if an event is selected."""
        if self._kinds and event.kind not in self._kinds:
            return False
        uid = _pod_uid(event.fields)
        return not self._pod or (bool(uid) and self._is_chosen(uid))

    def line(self, event: Event) -> str:
        """Format an event."""
        if self._as_json:
            return json.dumps(asdict(event))
        kind, fields = printable(event.kind), event.fields
        color = "red" if kind in _BAD else "green" if kind in _GOOD else "bold"
        words = {name: f"{printable(name)}={_value(value)}" for name, value in fields.items()}
        if not self._compact:
            return f"{moment(event.at)}  {kind.ljust(18)}  {' '.join(words.values())}".rstrip()
        # At a terminal: names instead of ids, broken at the line's end.
        uid, when = _pod_uid(fields), moment(event.at)[5:19].replace("T", " ")
        name = fields.get("container_name") or str(fields.get("container", "")).partition("_")[2]
        subject = "/".join(filter(None, (self._pods.get(uid) or uid[:8], name)))
        rest = (word for name, word in words.items() if name not in _NAMES and fields[name] is not None)
        text = " ".join(filter(None, (when, kind, printable(subject), *rest)))
        return "\n    ".join(wrapped(text, 4)).replace(kind, styled(kind, color), 1)


def _pod_uid(fields: dict[str, Any]) -> str:
    """Return the UID of the event's pod; empty without one."""
    return fields.get("pod_uid") or str(fields.get("container", "")).partition("_")[0]


def _value(value: Any) -> str:
    """Format a value: bare if it is one plain word, else as JSON."""
    if not isinstance(value, str):
        return json.dumps(value)
    plain = value.isascii() and value.isprintable() and not set(value) & set(" \"'=\\")
    return value if value and plain else json.dumps(value)
