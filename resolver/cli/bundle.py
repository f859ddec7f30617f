"""Collect everything that a bug report needs in one file: doctor, status, settings, slots, events, metrics, versions.

Each part has a time limit; MANIFEST.json and standard error name parts that hang, fail or are too long. Only this user
can read the file. With --redact, pseudonyms replace UUIDs, container ids, and names of pods, namespaces, containers,
users and this host, the same in every part. Of tenants' files it contains only the headers and slots of HAMi's cache
files.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tarfile
import time
from typing import TYPE_CHECKING, BinaryIO, cast

from resolver import client
from resolver.base.errors import UsageError
from resolver.base.version import VERSION
from resolver.cli.ask_daemon import add_socket

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from resolver.cli._bundle.parts import Gathered

_STDOUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    about = "a new file, or - for standard output (default: resolver-bundle-TIME.tar.gz here)"
    parser.add_argument("-o", "--output", metavar="FILE", help=about)
    parser.add_argument("--redact", action="store_true", help="replace names with pseudonyms")
    add_socket(parser)


def run(args: argparse.Namespace) -> int:
    """Write it; returns 0 even if parts are missing, which is reported."""
    from resolver.cli._bundle.parts import gather, parts

    name = time.strftime("resolver-bundle-%Y%m%dT%H%M%SZ", time.gmtime())
    path = args.output or f"{name}.tar.gz"
    file = _opened(path)
    try:
        with file:
            gathered = []
            for each in gather(parts(client.socket_of(args.socket))):
                gathered.append(each)
                came = each.trouble.partition(". ")[0] or f"{len(each.text)} bytes"
                _say(f"{each.part.name:18} {each.seconds:5.1f} s  {came}")
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


def _write(file: BinaryIO, directory: str, gathered: Sequence[Gathered], *, redact: bool) -> None:
    texts = {each.part.name: each.text for each in gathered}
    troubles = {each.part.name: each.trouble for each in gathered}
    if redact:
        from resolver.cli._bundle.redaction import Redactor

        redactor = Redactor((socket.gethostname(), socket.gethostname().partition(".")[0]))
        for text in (*texts.values(), *troubles.values()):
            redactor.learn(text)
        texts = {name: redactor.redact(text) for name, text in texts.items()}
        troubles = {name: redactor.sentence(text) for name, text in troubles.items()}
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        _add(archive, f"{directory}/MANIFEST.json", _manifest(gathered, troubles, redact=redact))
        for name, text in texts.items():
            if text:
                _add(archive, f"{directory}/{name}", text)


def _manifest(gathered: Sequence[Gathered], troubles: dict[str, str], *, redact: bool) -> str:
    parts = {}
    for part, _, seconds, _ in gathered:
        trouble = troubles[part.name] or None
        parts[part.name] = {"about": part.about, "seconds": round(seconds, 2), "trouble": trouble}
    whole = {"resolver": VERSION, "made_at": time.time(), "redacted": redact, "root": os.geteuid() == 0}
    return json.dumps(whole | {"parts": parts}, indent=1) + "\n"


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    about = tarfile.TarInfo(name)
    about.size, about.mode, about.mtime = len(data), 0o600, int(time.time())
    archive.addfile(about, io.BytesIO(data))


def _say(text: str) -> None:
    print(f"resolver bundle: {text}", file=sys.stderr, flush=True)
