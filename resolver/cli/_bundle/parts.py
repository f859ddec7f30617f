"""Parts of a bundle: each is a child's output, bounded in time and size, so that none can hang the rest."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_BYTES = 8 << 20
_AT_ONCE = 4
_SECONDS = 10.0
_LOOK_SECONDS = 0.02
#: One that the kernel keeps from dying is left behind after so many seconds.
_DYING_SECONDS = 1.0


class Part(NamedTuple):
    """``name`` is its file in the bundle, ``argv`` the arguments of ``python -m``."""

    name: str
    about: str
    argv: tuple[str, ...]
    seconds: float = _SECONDS


class Gathered(NamedTuple):
    """Output of a part. ``trouble`` says why it is incomplete; empty if it is not. ``code`` is the child's."""

    part: Part
    text: str
    seconds: float
    code: int | None
    trouble: str


def parts(socket_path: str) -> tuple[Part, ...]:
    """Return all parts, for the daemon at that socket."""
    ours, facts = ("resolver",), "resolver.cli._bundle.facts"
    socket = ("--socket", socket_path)

    def route(name: str) -> Part:
        return Part(f"{name}.json", f"the daemon's answer to /v1/{name}", (facts, "route", name, socket_path))

    return (
        Part("doctor.json", "every check of this node", (*ours, "doctor", "--json", *socket), 120.0),
        Part("config.json", "the settings, and where each comes from", (*ours, "config", "--json", *socket)),
        *map(route, ("status", "containers", "regions", "slots", "processes", "unresolved", "gpus")),
        Part("events.jsonl", "what happened: an event a line", (*ours, "events", "--json", *socket)),
        Part(
            "cache-files.json", "headers and slots of HAMi's cache files", (*ours, "slots", "--json", *socket)
        ),
        Part("metrics.txt", "the daemon's /metrics", (facts, "metrics", socket_path)),
        Part("kernel.json", "release, BTF, options, cgroups, security modules, limits", (facts, "kernel")),
        Part("versions.json", "of this command, Python, its libraries and the driver", (facts, "versions")),
    )


def gather(wanted: Sequence[Part]) -> Iterator[Gathered]:
    """Run a few parts at a time; yield each when all before it are done."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(_run, wanted)


def _run(part: Part) -> Gathered:
    began = time.monotonic()
    # In memory: a pod's root is read-only, and may have no place for a temporary file.
    with _memory("out") as out, _memory("err") as err:
        try:
            child = subprocess.Popen(
                (sys.executable, "-P", "-m", *part.argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            return Gathered(part, "", 0.0, None, f"it could not be started: {error.strerror}")
        trouble = _wait(child, out.fileno(), began + part.seconds)
        seconds = time.monotonic() - began
        text, said = _read(out.fileno(), MOST_BYTES), _read(err.fileno(), 2000).strip()
    code = child.returncode
    if not trouble and not text:
        trouble = said or f"it printed nothing, and ended with {code}"
    return Gathered(part=part, text=text, seconds=seconds, code=code, trouble=trouble)


def _memory(name: str) -> BinaryIO:
    return cast("BinaryIO", open(os.memfd_create(name, os.MFD_CLOEXEC), "r+b", buffering=0))


def _wait(child: subprocess.Popen[bytes], out: int, deadline: float) -> str:
    """Wait for the child, and kill it if necessary; return the reason."""
    while child.poll() is None and os.fstat(out).st_size <= MOST_BYTES and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    late = child.returncode is None
    if late:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_DYING_SECONDS)
    if os.fstat(out).st_size > MOST_BYTES:
        return f"cut off after {MOST_BYTES >> 20} MiB"
    return "it did not end within its time: what it asks hangs" if late else ""


def _read(descriptor: int, most: int) -> str:
    return os.pread(descriptor, most, 0).decode("utf-8", "replace")
