"""Print this node's events: repairs, starts and ends of containers, changes of source, GPUs and NVML.

Prints one event per line: time, kind and fields. The daemon keeps the last 1024.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from resolver import client
from resolver.base.errors import NoDaemon, NotFound, UsageError
from resolver.base.event_names import KINDS
from resolver.base.text import printable
from resolver.cli.ask_daemon import add_socket, ask, understood
from resolver.cli.show import moment, on_terminal, styled, wrapped

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

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
#: Fields that say whose an event is; at a terminal they are one name.
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
    kept = ask("/v1/events", args.socket)
    with understood():
        events = kept["events"]
        shown = _Shown(args, events)
        if args.follow:  # the kept ones come first there, too
            events = client.stream_events(args.socket, after="0", kinds=args.kind or ())
        elif args.pod and not shown.knows_pod():
            raise NotFound(f"no pod here is or was called {args.pod!r}: resolver containers lists them")
        for event in events:
            shown.learn(event["fields"])
            if shown.wants(event):
                print(shown.line(event), flush=args.follow)  # the reader of a pipe waits for it
    if args.follow:
        raise NoDaemon(f"the daemon at {client.socket_of(args.socket)} ended: ask again once it runs")
    return 0


class _Shown:
    """Selection and format of events, with pod names by UID."""

    def __init__(self, args: argparse.Namespace, kept: Sequence[dict[str, Any]]) -> None:
        self._kinds, self._pod, self._as_json = args.kind or (), args.pod or "", args.json
        self._compact = on_terminal() and not args.json
        self._pods: dict[str, str] = {}  # UID -> NAMESPACE/POD
        if self._pod or self._compact:
            running = ask("/v1/containers", args.socket)["containers"]
            for fields in (*running, *(event["fields"] for event in kept)):
                self.learn(fields)

    def learn(self, fields: dict[str, Any]) -> None:
        """Remember the pod of a container or an event, with its name if there is one."""
        if uid := _pod_uid(fields):
            name = f"{fields['namespace']}/{fields['pod']}" if fields.get("pod") else ""
            self._pods[uid] = name or self._pods.get(uid, "")

    def knows_pod(self) -> bool:
        """Check if the chosen pod runs or has an event."""
        return any(map(self._is_chosen, self._pods))

    def _is_chosen(self, uid: str) -> bool:
        return self._pods.get(uid) == self._pod or ("/" not in self._pod and uid.startswith(self._pod))

    def wants(self, event: dict[str, Any]) -> bool:
        """Check if an event is selected."""
        if self._kinds and event["kind"] not in self._kinds:
            return False
        uid = _pod_uid(event["fields"])
        return not self._pod or (bool(uid) and self._is_chosen(uid))

    def line(self, event: dict[str, Any]) -> str:
        """Format an event."""
        if self._as_json:
            return json.dumps({name: event[name] for name in ("number", "at", "kind", "fields")})
        kind, fields = printable(event["kind"]), event["fields"]
        color = "red" if kind in _BAD else "green" if kind in _GOOD else "bold"
        words = {name: f"{printable(name)}={_value(value)}" for name, value in fields.items()}
        if not self._compact:
            return f"{moment(event['at'])}  {kind.ljust(18)}  {' '.join(words.values())}".rstrip()
        # At a terminal: names instead of ids, broken at the line's end.
        uid, when = _pod_uid(fields), moment(event["at"])[5:19].replace("T", " ")
        name = fields.get("container_name") or str(fields.get("container", "")).partition("_")[2]
        whose = "/".join(filter(None, (self._pods.get(uid) or uid[:8], name)))
        rest = (each for name, each in words.items() if name not in _NAMES and fields[name] is not None)
        text = " ".join(filter(None, (when, kind, printable(whose), *rest)))
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
