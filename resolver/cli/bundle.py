"""Collect everything that a bug report needs in one file: doctor, status, settings, slots, events, metrics, versions.

Each part has a time limit; MANIFEST.json and standard error name parts that hang, fail or are too long. Only this user
can read the file. With --redact, pseudonyms replace UUIDs, container ids, and names of pods, namespaces, containers,
users and this host, the same in every part. Of tenants' files it contains only the headers and slots of HAMi's cache
files.
"""

import argparse
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import BinaryIO, NamedTuple, cast

from resolver import client
from resolver.base.errors import ResolverError, UsageError
from resolver.base.retry import started
from resolver.base.version import VERSION
from resolver.cli._bundle import facts
from resolver.cli._bundle.redaction import Redactor
from resolver.cli.ask_daemon import add_socket

MOST_LETTERS = 8 << 20
_SECONDS = 10.0
_LISTS = ("status", "containers", "regions", "slots", "processes", "unresolved", "gpus")
_STDOUT = "-"


class Part(NamedTuple):
    """``name`` is its file in the bundle; ``collect`` returns its text, or an object for JSON."""

    name: str
    about: str
    collect: Callable[[], object]
    seconds: float = _SECONDS


class Gathered(NamedTuple):
    """Output of a part. ``trouble`` says why it is incomplete; None if it is not."""

    part: Part
    text: str = ""
    seconds: float = 0.0
    trouble: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "a new file, or - for standard output (default: resolver-bundle-TIME.tar.gz here)"
    parser.add_argument("-o", "--output", metavar="FILE", help=about)
    parser.add_argument("--redact", action="store_true", help="replace names with pseudonyms")
    add_socket(parser)


def run(args: argparse.Namespace) -> int:
    """Write the bundle and report missing parts; return 0 even then."""
    name = time.strftime("resolver-bundle-%Y%m%dT%H%M%SZ", time.gmtime())
    path = args.output or f"{name}.tar.gz"
    file = _opened(path)
    try:
        with file:
            gathered = []
            for output in gather(parts(client.socket_of(args.socket))):
                gathered.append(output)
                came = output.trouble.partition(". ")[0] if output.trouble else f"{len(output.text)} bytes"
                _say(f"{output.part.name:18} {output.seconds:5.1f} s  {came}")
            _write(file, name, gathered, redact=args.redact)
    except BaseException:
        if path != _STDOUT:
            os.unlink(path)  # a partial file would block the next try
        raise
    if path != _STDOUT:
        print(path)
    names = "names are pseudonyms" if args.redact else "--redact replaces the names in it"
    _say(f"look through it before you send it: tar -tzf FILE; {names}")
    return 0


def _opened(path: str) -> BinaryIO:
    """Open a new file that only this user can read, or standard output."""
    if path == _STDOUT:
        if sys.stdout.isatty():
            raise UsageError(
                "a .tar.gz is not written to a terminal: give -o FILE, or redirect standard output"
            )
        return cast("BinaryIO", os.fdopen(os.dup(1), "wb"))
    try:
        return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
    except OSError as error:
        raise UsageError(f"{path} cannot be made ({error.strerror}): give another with -o FILE") from None


def _write(file: BinaryIO, directory: str, gathered: list[Gathered], *, redact: bool) -> None:
    if redact:
        redactor = Redactor((socket.gethostname(), socket.gethostname().partition(".")[0]))
        for _, text, _, trouble in gathered:
            redactor.learn(text)
            redactor.learn(trouble or "")
        gathered = [
            output._replace(
                text=redactor.redact(output.text),
                trouble=output.trouble and redactor.sentence(output.trouble),
            )
            for output in gathered
        ]
    parts = {
        part.name: {"about": part.about, "seconds": round(seconds, 2), "trouble": trouble}
        for part, _, seconds, trouble in gathered
    }
    whole = {"resolver": VERSION, "made_at": time.time(), "redacted": redact, "root": os.geteuid() == 0}
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        _add(archive, f"{directory}/MANIFEST.json", json.dumps(whole | {"parts": parts}, indent=1) + "\n")
        for output in gathered:
            if output.text:
                _add(archive, f"{directory}/{output.part.name}", output.text)


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    about = tarfile.TarInfo(name)
    about.size, about.mode, about.mtime = len(data), 0o600, int(time.time())
    archive.addfile(about, io.BytesIO(data))


def _say(text: str) -> None:
    print(f"resolver bundle: {text}", file=sys.stderr, flush=True)


def parts(socket_path: str) -> tuple[Part, ...]:

    def command(name: str, about: str, *words: str, seconds: float = _SECONDS) -> Part:
        return Part(name, about, partial(_output, *words, "--json", "--socket", socket_path), seconds)

    def route(name: str) -> Part:
        ask = partial(client.get_json, f"/v1/{name}", socket_path)
        return Part(f"{name}.json", f"the daemon's answer to /v1/{name}", ask)

    return (
        command("doctor.json", "every check of this node", "doctor", seconds=120.0),
        command("config.json", "the settings, and the origin of each", "config"),
        *map(route, _LISTS),
        command("events.jsonl", "one event per line", "events"),
        command("cache-files.json", "headers and slots of HAMi's cache files", "slots"),
        Part("metrics.txt", "the daemon's /metrics", partial(facts.metrics, socket_path)),
        Part("kernel.json", "release, BTF, options, cgroups, security modules, limits", facts.kernel),
        Part("versions.json", "of this command, Python, its libraries and the driver", facts.versions),
    )


def gather(wanted: Sequence[Part]) -> Iterator[Gathered]:
    """Start all parts; yield each, in this order, when it has ended or its time is over."""
    began = time.monotonic()
    for part, result in [(part, started(partial(_collected, part), name=part.name)) for part in wanted]:
        try:
            output = result.result(max(began + part.seconds - time.monotonic(), 0.0))
        except TimeoutError:
            trouble = "it did not end within its time: it waits for something that hangs"
            output = Gathered(part, seconds=part.seconds, trouble=trouble)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other parts go on
            output = Gathered(part, trouble=str(error) or type(error).__name__)
        if len(output.text) > MOST_LETTERS:
            trouble = f"cut off after {MOST_LETTERS >> 20} MiB"
            output = output._replace(text=output.text[:MOST_LETTERS], trouble=trouble)
        yield output


def _collected(part: Part) -> Gathered:
    began, content = time.monotonic(), part.collect()
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    return Gathered(part, text, time.monotonic() - began)


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
