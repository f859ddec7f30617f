"""Show a container's GPU use from inside: its share of each GPU, and its processes by their PIDs there.

``make view`` packs this module with `resolver.cli.show` into ``resolver-view.pyz`` for images without `resolver`, so
both use only the standard library of Python 3.8 and later.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import sys
import time
from types import SimpleNamespace

from resolver.cli.show import print_json, print_table, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from resolver.api.own import OwnGpu, OwnProcess, OwnSlot
    from resolver.cli.show import Cell

    Row = tuple[Cell, ...]

SOCKET = "/run/resolver/resolver.sock"
_NOTES = {None: "", "not_found_yet": "HAMi's slot is not found yet"}
ROUTES = {"gpus": "/v1/usage", "processes": "/v1/processes", "slots": "/v1/slots"}
_SECONDS = 5.0


def main() -> int:
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
    ask: Callable[[str], bytes],
    parts: Sequence[str] = ("gpus", "processes"),
    *,
    as_json: bool = False,
    every: float | None = None,
) -> int:
    """Print these parts of the caller's view, one of `ROUTES` each, and again after ``every`` seconds.

    ``ask`` gets a route's path. Returns 1 if HAMi's value of a process is not known to be right, else 0.
    """
    while True:
        bodies = {part: ask(ROUTES[part]) for part in parts}
        if every is not None and sys.stdout.isatty():
            sys.stdout.write("\x1b[H\x1b[J")
        documents = {part: json.loads(body, object_hook=_record) for part, body in bodies.items()}
        if as_json:
            print_json({part: json.loads(body) for part, body in bodies.items()})
        else:
            _print(documents)
        sys.stdout.flush()
        if every is None:
            return int("slots" in documents and any(slot.unresolved for slot in documents["slots"].slots))
        time.sleep(every)


def _record(fields: dict[str, object]) -> SimpleNamespace:
    """Return a JSON object as a record: `resolver.api.own` has its shape."""
    return SimpleNamespace(**fields)


def _print(documents: Mapping[str, SimpleNamespace]) -> None:
    if errors := list(filter(None, (getattr(part, "error", None) for part in documents.values()))):
        print(f"The driver gives no values now: {errors[0]}\n")
    gpus = documents["gpus"].gpus if "gpus" in documents else ()
    numbers = {gpu.device_uuid: index for index, gpu in enumerate(gpus)}
    for number, (part, document) in enumerate(documents.items()):
        columns, row, empty = _TABLES[part]
        rows = [row(record, numbers) for record in getattr(document, part)]
        print(end="\n" * bool(number))
        if rows:
            print_table(columns, rows)
        else:
            print(empty)


def _gpu(gpu: OwnGpu, numbers: Mapping[str, int]) -> Row:
    use = gpu.use
    limit, state = (use.core_limit, use.limit_state) if use else (None, None)
    means = (use.used_1m, use.used_5m) if use else (None, None)
    return (
        numbers[gpu.device_uuid],
        gpu.name or "?",
        _percent(gpu.sm_util),
        *(_percent(None if mean is None else round(100 * mean)) for mean in means),
        "none" if limit is None and state else _percent(limit),
        state and state.replace("_", " "),
        size(gpu.memory_used),
        size(gpu.memory_limit or gpu.memory_total),
    )


def _process(process: OwnProcess, numbers: Mapping[str, int]) -> Row:
    gpu, note = numbers.get(process.device_uuid), _NOTES.get(process.no_slot, "HAMi does not limit it")
    values = process.comm or "?", _percent(process.sm_util), size(process.memory), note
    return process.pid, process.device_uuid if gpu is None else gpu, *values


def _slot(slot: OwnSlot, _numbers: Mapping[str, int]) -> Row:
    state = "ended" if slot.dead else slot.unresolved or "right"
    ours = "+".join(_percent(device.sm_util) for device in slot.device_util)
    nvml = "+".join(_percent(device.utilization) for device in slot.device_util)
    return "?" if slot.pid is None else slot.pid, slot.slot, state, ours, nvml, slot.why


#: Each part's columns, the row of a record, and the sentence for none.
_TABLES: dict[str, tuple[tuple[str, ...], Callable[..., Row], str]] = {
    "gpus": (
        ("GPU", "NAME", "CORES", "1 MIN", "5 MIN", "LIMIT", "STATE", "MEMORY", "LIMIT"),
        _gpu,
        "This container uses no GPU, or the daemon has not seen it use one yet.",
    ),
    "processes": (
        ("PID", "GPU", "COMMAND", "CORES", "MEMORY", "NOTE"),
        _process,
        "No process of this container is on a GPU.",
    ),
    "slots": (
        ("PID", "SLOT", "STATE", "HAMI", "NVML", "NOTE"),
        _slot,
        "HAMi's cache file of this container has no slot in use.",
    ),
}


def _percent(value: int | None) -> str:
    return "?" if value is None else f"{value}%"


def _ask(path: str, route: str) -> bytes:
    """Return a route's answer, or end with the reason why the daemon gives none."""
    connection = http.client.HTTPConnection("resolver", timeout=_SECONDS)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(_SECONDS)
        connection.sock.connect(path)
        connection.request("GET", route, headers={"Accept": "application/json"})
        answer = connection.getresponse()
        body = answer.read()
        detail = json.loads(body, object_hook=_record)  # a partial answer raises ValueError
        if answer.status == 200:
            return body
        sys.exit(f"resolver-view: {detail.detail}")
    except FileNotFoundError:
        sys.exit(
            f"resolver-view: there is no {path}: the node's resolver serves no containers (its setting tenant_socket), "
            "or this container doesn't mount the socket's directory"
        )
    except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
        sys.exit(f"resolver-view: {path} gives no answer ({error}): is resolver running on this node?")
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
