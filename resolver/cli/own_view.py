"""Show a container its own GPU use: its share of each GPU, and its processes by their own PIDs.

``make view`` packs this file alone into ``resolver-view.pyz`` for images without `resolver`, so it uses only the
standard library of Python 3.8 and later.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    #: Gets the path of a route; returns its document.
    Ask = Callable[[str], dict[str, Any]]
    Parts = Sequence[str]

SOCKET = "/run/resolver/resolver.sock"
ROUTES = {"gpus": "/v1/usage", "processes": "/v1/processes", "slots": "/v1/slots"}
_SECONDS = 5.0


def main() -> int:
    """Print the view, again each ``--loop`` seconds."""
    parser = argparse.ArgumentParser(prog="resolver-view.pyz", description="Show this container's GPU use.")
    parser.add_argument("--socket", default=os.environ.get("RESOLVER_SOCKET", SOCKET), help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-l", "--loop", type=float, metavar="SECONDS", help="print it again and again")
    args = parser.parse_args()
    if args.loop is not None and not 0.1 <= args.loop <= 3600:
        parser.error(f"--loop {args.loop:g}: it takes a time from 0.1 to 3600 seconds")
    try:
        return show(lambda route: _ask(args.socket, route), as_json=args.json, every=args.loop)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.stderr.close()
        return 130


def show(
    ask: Ask, parts: Parts = ("gpus", "processes"), *, as_json: bool = False, every: float | None = None
) -> int:
    """Print these parts of the caller's view, one of `ROUTES` each, and again after ``every`` seconds.

    Returns 1 if HAMi's value of a process is not known to be right, else 0.
    """
    while True:
        documents = {part: ask(ROUTES[part]) for part in parts}
        if every is not None and sys.stdout.isatty():
            sys.stdout.write("\x1b[H\x1b[J")
        print(json.dumps(documents, indent=2) if as_json else "\n\n".join(_words(documents)))
        sys.stdout.flush()
        if every is None:
            return int(any(slot["unresolved"] for slot in documents.get("slots", {}).get("slots", ())))
        time.sleep(every)


def _words(documents: dict[str, Any]) -> Iterable[str]:
    numbers = {
        gpu["device_uuid"]: index for index, gpu in enumerate(documents.get("gpus", {}).get("gpus", ()))
    }
    error = next((part["error"] for part in documents.values() if part.get("error")), None)
    if error:
        yield f"The driver gives no values now: {error}"
    if "gpus" in documents:
        yield _table(
            ("GPU", "NAME", "CORES", "1 MIN", "5 MIN", "LIMIT", "STATE", "MEMORY", "LIMIT"),
            [(numbers[gpu["device_uuid"]], *_gpu(gpu)) for gpu in documents["gpus"]["gpus"]],
            "This container uses no GPU, or the daemon has not seen it use one yet.",
        )
    if "processes" in documents:
        yield _table(
            ("PID", "GPU", "COMMAND", "CORES", "MEMORY", "NOTE"),
            [
                (
                    process["pid"],
                    numbers.get(process["device_uuid"], process["device_uuid"]),
                    _printable(process["comm"]),
                    _percent(process["sm_util"]),
                    _size(process["memory"]),
                    "HAMi does not limit it" if process["no_slot"] else "",
                )
                for process in documents["processes"]["processes"]
            ],
            "No process of this container is on a GPU.",
        )
    if "slots" in documents:
        yield _table(
            ("PID", "SLOT", "STATE", "HAMI", "NVML", "NOTE"),
            [_slot(slot) for slot in documents["slots"]["slots"]],
            "HAMi's cache file of this container has no slot in use.",
        )


def _gpu(gpu: dict[str, Any]) -> tuple[Any, ...]:
    use: dict[str, Any] = gpu["use"] or dict.fromkeys(("used_1m", "used_5m", "core_limit", "limit_state"))
    limit, means = use["core_limit"], (use["used_1m"], use["used_5m"])
    return (
        gpu["name"],
        _percent(gpu["sm_util"]),
        *(_percent(None if mean is None else round(100 * mean)) for mean in means),
        "none" if limit is None and use["limit_state"] else _percent(limit),
        use["limit_state"] and use["limit_state"].replace("_", " "),
        _size(gpu["memory_used"]),
        _size(gpu["memory_limit"] or gpu["memory_total"]),
    )


def _slot(slot: dict[str, Any]) -> tuple[Any, ...]:
    state = "ended" if slot["dead"] else slot["unresolved"] or "right"
    values = [
        "+".join(_percent(device[name]) for device in slot["device_util"])
        for name in ("sm_util", "utilization")
    ]
    return slot["pid"], slot["slot"], state, *values, slot["why"] or ""


def _table(head: Sequence[str], rows: list[tuple[Any, ...]], empty: str) -> str:
    """Return aligned columns; ``?`` is unknown."""
    if not rows:
        return empty
    lines = [tuple(head), *(tuple("?" if cell is None else str(cell) for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


def _percent(value: int | None) -> str:
    return "?" if value is None else f"{value} %"


def _size(number: int | None) -> str:
    return "?" if number is None else f"{number / 2**20:.0f} MiB"


def _printable(name: str | None) -> str | None:
    """Escape control characters: processes choose their names, and terminals obey them."""
    return name and "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)


def _ask(path: str, route: str) -> dict[str, Any]:
    """Return a route's document, or end with the reason why the daemon gives none."""
    connection = http.client.HTTPConnection("resolver", timeout=_SECONDS)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(_SECONDS)
        connection.sock.connect(path)
        connection.request("GET", route, headers={"Accept": "application/json"})
        answer = connection.getresponse()
        document = json.loads(answer.read())
        if answer.status != 200:
            sys.exit(f"resolver-view: {document['detail']}")
        return dict(document)
    except FileNotFoundError:
        sys.exit(
            f"resolver-view: there is no {path}: the node's resolver serves no containers (its setting tenant_socket), "
            "or this container doesn't mount the socket's directory"
        )
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        sys.exit(f"resolver-view: {path} gives no answer ({error}): is resolver running on this node?")
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
