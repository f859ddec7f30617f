"""Parts of a bundle: each is collected in a thread, bounded in time and size, so that none can hang the rest."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver import client
from resolver.base.errors import ResolverError
from resolver.base.retry import started
from resolver.cli._bundle import facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MOST_LETTERS = 8 << 20
_SECONDS = 10.0
_LISTS = ("status", "containers", "regions", "slots", "processes", "unresolved", "gpus")


class Part(NamedTuple):
    """``name`` is its file in the bundle; ``collect`` returns its text, or what becomes JSON."""

    name: str
    about: str
    collect: Callable[[], Any]
    seconds: float = _SECONDS


class Gathered(NamedTuple):
    """Output of a part. ``trouble`` says why it is incomplete; empty if it is not."""

    part: Part
    text: str
    seconds: float
    trouble: str


def parts(socket_path: str) -> tuple[Part, ...]:
    """Return all parts, for the daemon at that socket."""

    def command(name: str, about: str, *words: str, seconds: float = _SECONDS) -> Part:
        return Part(name, about, partial(_output, *words, "--json", "--socket", socket_path), seconds)

    def route(name: str) -> Part:
        ask = partial(client.get_json, f"/v1/{name}", socket_path)
        return Part(f"{name}.json", f"the daemon's answer to /v1/{name}", ask)

    return (
        command("doctor.json", "every check of this node", "doctor", seconds=120.0),
        command("config.json", "the settings, and where each comes from", "config"),
        *map(route, _LISTS),
        command("events.jsonl", "what happened: an event a line", "events"),
        command("cache-files.json", "headers and slots of HAMi's cache files", "slots"),
        Part("metrics.txt", "the daemon's /metrics", partial(facts.metrics, socket_path)),
        Part("kernel.json", "release, BTF, options, cgroups, security modules, limits", facts.kernel),
        Part("versions.json", "of this command, Python, its libraries and the driver", facts.versions),
    )


def gather(wanted: Sequence[Part]) -> Iterator[Gathered]:
    """Start all parts; yield each, in this order, when it has ended or its time is over."""
    began = time.monotonic()
    running = [(part, started(partial(_collected, part), name=part.name)) for part in wanted]
    for part, result in running:
        try:
            text, seconds = result.result(max(began + part.seconds - time.monotonic(), 0.0))
            trouble = ""
        except TimeoutError:
            text, seconds, trouble = "", part.seconds, "it did not end within its time: what it asks hangs"
        except Exception as error:  # noqa: BLE001 - whatever it is, the other parts go on
            text, seconds, trouble = "", 0.0, str(error) or type(error).__name__
        if len(text) > MOST_LETTERS:
            text, trouble = text[:MOST_LETTERS], f"cut off after {MOST_LETTERS >> 20} MiB"
        yield Gathered(part, text, seconds, trouble)


def _collected(part: Part) -> tuple[str, float]:
    """Return a part's text, and how long it took."""
    began = time.monotonic()
    found = part.collect()
    text = found if isinstance(found, str) else json.dumps(found, indent=1) + "\n"
    return text, time.monotonic() - began


def _output(*words: str) -> str:
    """Run one of our commands. Raises ResolverError if it prints nothing."""
    done = subprocess.run(
        (sys.executable, "-P", "-m", "resolver", *words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd="/",
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if not done.stdout:
        raise ResolverError(done.stderr.strip() or f"it printed nothing, and ended with {done.returncode}")
    return done.stdout
