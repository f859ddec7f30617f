"""Show HAMi's cache files slot by slot: which process has which slot, and what is wrong with it.

Reads only, takes no lock and waits for none, so that it is safe beside running containers. Exit code 1 if
a file could not be read; the others are still shown.
"""

from __future__ import annotations

import os
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any

from resolver.cli.ask_daemon import add_socket
from resolver.cli.show import printable
from resolver.errors import RegionRejected, ResolverError
from resolver.hami.directory_finder import MAX_CACHES, MAX_CONTAINERS, MAX_ENTRIES, list_caches
from resolver.hami.region import open_region
from resolver.linux.safe_open import open_directory, translate
from resolver.reasons import RegionReason

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

HELP = "show HAMi's cache files slot by slot"

_COLUMNS = ("CONTAINER", "LAYOUT", "SLOT", "PID", "HOSTPID", "STATUS", "SM %", "MEMORY", "HINT")
_RIGHT = frozenset(("SLOT", "PID", "HOSTPID", "STATUS", "SM %", "MEMORY"))
_NO_VALUE = "-"

Row = tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="a .cache file, a container's directory or a directory of them "
        "(default: the setting containers_dir; without the device plugin, give /tmp/cudevshr.cache)",
    )
    add_socket(parser)
    parser.add_argument(
        "--json", action="store_true", help="print an array with every field, by upstream's names"
    )


def run(args: argparse.Namespace) -> int:
    """Print the files; 1 if one of them could not be read, else 0."""
    paths = args.paths or _directories(args.socket)
    files = [region for path in paths for region in read_path(path)]
    if args.json:
        import json

        print(json.dumps(files, indent=1))
    elif not files:
        print(
            "There are no .cache files: no container with HAMi has started a GPU process yet.",
            file=sys.stderr,
        )
    elif sys.stdout.isatty():
        _print_rich(files)
    else:
        _print_plain(files)
    return 1 if any("error" in region for region in files) else 0


def _directories(socket_path: str | None) -> tuple[str, ...]:
    """Those that the daemon looks into. Raises `ResolverError` if none of them is there."""
    from resolver.cli.in_force import settings_in_force

    in_force = settings_in_force(socket_path)
    directories, origin = in_force.settings.containers_dir, in_force.said_of("containers_dir")
    if not any(map(os.path.isdir, directories)):
        raise ResolverError(
            f"{', '.join(directories)} is not there (containers_dir {origin}): HAMi's device plugin makes it on a GPU "
            "node. Run this on such a node, in a container that has the directory mounted, or give the PATH of a "
            ".cache file"
        )
    print(f"resolver slots: {', '.join(directories)}, containers_dir {origin}", file=sys.stderr)
    if in_force.settings.mapped_regions:
        print(
            "resolver slots: mapped_regions is on, but files inside containers are not shown", file=sys.stderr
        )
    return directories


# -- reading ----------------------------------------------------------------------------------------------


def read_path(path: str) -> Iterator[dict[str, Any]]:
    """Every region at a path, a file's or a directory's, as `SharedRegion.dump` gives it.

    What could not be read is ``{"path", "error", "reason"}``, with a `RegionReason`.
    """
    if os.path.isdir(path):
        yield from _read_directory(path)
        return
    parent, name = os.path.split(path)
    try:
        dir_fd = os.open(parent or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        yield _failed(path, translate(error))
        return
    try:
        yield _read_file(dir_fd, name, path)
    finally:
        os.close(dir_fd)


def _read_directory(path: str) -> Iterator[dict[str, Any]]:
    """The files in a container's directory, or in all directories of a containers directory."""
    try:
        dir_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        yield _failed(path, translate(error))
        return
    try:
        with os.scandir(dir_fd) as listing:
            containers = sorted(
                entry.name
                for entry in islice(listing, MAX_CONTAINERS)
                if "_" in entry.name
                and not entry.name.endswith(".cache")
                and (entry.is_symlink() or entry.is_dir(follow_symlinks=False))
            )
        yield from _read_caches(dir_fd, path, complain=not containers)
        for name in containers:
            below = os.path.join(path, name)
            try:
                container_fd = open_directory(name, dir_fd)
            except RegionRejected as why:
                yield _failed(below, why)
                continue
            try:
                yield from _read_caches(container_fd, below)
            finally:
                os.close(container_fd)
    except OSError as error:
        yield _failed(path, translate(error))
    finally:
        os.close(dir_fd)


def _read_caches(dir_fd: int, path: str, *, complain: bool = True) -> Iterator[dict[str, Any]]:
    names, complete = list_caches(dir_fd)
    for name in sorted(names):
        yield _read_file(dir_fd, name, os.path.join(path, name))
    if not complete and complain:
        detail = f"only {MAX_ENTRIES} entries and {MAX_CACHES} .cache files are looked at, and it has more"
        yield _failed(path, RegionRejected(RegionReason.TOO_MANY_ENTRIES, detail))


def _read_file(dir_fd: int, name: str, path: str) -> dict[str, Any]:
    try:
        with open_region(dir_fd, name, path) as region:
            return region.dump()
    except RegionRejected as why:
        return _failed(path, why)


def _failed(path: str, why: RegionRejected) -> dict[str, Any]:
    return {"path": path, "error": why.detail, "reason": str(why.reason)}


# -- the table --------------------------------------------------------------------------------------------


def _rows(region: dict[str, Any]) -> list[Row]:
    container = printable(_container(region["path"]))
    if "error" in region:
        name, text = os.path.basename(region["path"]), region["error"]
        if name.endswith(".cache") and container != printable(region["path"]):
            text = f"{name}: {text}"
        return [(container, *[_NO_VALUE] * 7, f"{region['reason']}: {printable(text)}")]
    if not region["slots"]:
        return [(container, region["layout"], *[_NO_VALUE] * 6, "no process has a slot")]
    slots_of: dict[int, list[int]] = {}
    for slot in region["slots"]:
        if slot["status"] != 0 and slot["hostpid"] != 0:
            slots_of.setdefault(slot["hostpid"], []).append(slot["index"])
    return [
        (
            container,
            region["layout"],
            str(slot["index"]),
            str(slot["pid"]),
            str(slot["hostpid"]),
            str(slot["status"]),
            " ".join(str(util["sm_util"]) for util in slot.get("device_util", ())) or _NO_VALUE,
            " ".join(_size(used["total"]) for used in slot["used"]) or _NO_VALUE,
            hint(slot, slots_of.get(slot["hostpid"], [])),
        )
        for slot in region["slots"]
    ]


def hint(slot: dict[str, Any], slots_with_hostpid: list[int]) -> str:
    """What looks wrong with a slot, as far as the file alone tells.

    ``slots_with_hostpid`` are the indexes of this region's live slots that hold the same ``hostpid``.
    """
    if slot["status"] == 0:
        return "ended" if slot["pid"] == 0 else "not counted (status 0)"
    if slot["pid"] <= 0:
        return "invalid pid"
    if slot["hostpid"] == 0:
        return "hostpid missing"
    others = [str(index) for index in slots_with_hostpid if index != slot["index"]]
    if others:
        return f"same hostpid as slot {', '.join(others)}"
    if slot["hostpid"] == slot["pid"]:
        return "hostpid equals pid"
    return ""


def _container(path: str) -> str:
    """``<podUID>/<containerName>``, as `resolver lookup` takes it, or the path outside such a directory."""
    is_file = path.endswith(".cache")
    pod_uid, _, name = os.path.basename(os.path.dirname(path) if is_file else path).partition("_")
    return f"{pod_uid}/{name}" if pod_uid and name else path


def _size(count: int) -> str:
    """Bytes in the largest unit that leaves a whole part."""
    size, unit = float(count), 0
    while size >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f}{'BKMGT'[unit]}" if unit else f"{count}B"


def _print_plain(files: list[dict[str, Any]]) -> None:
    rows = [_COLUMNS, *(row for region in files for row in _rows(region))]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            for cell, column, width in zip(row, _COLUMNS, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _print_rich(files: list[dict[str, Any]]) -> None:
    # Drawn only for a person at a terminal, so imported only then.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        table.add_column(
            column,
            justify="right" if column in _RIGHT else "left",
            overflow="fold",
            no_wrap=column not in ("CONTAINER", "MEMORY", "HINT"),
        )
    for region in files:
        color = "red" if "error" in region else "yellow"
        for number, row in enumerate(_rows(region)):
            file_cells = row[:2] if number == 0 else ("", "")
            dim = "dim" if row[5] == "0" else ""
            table.add_row(
                *[Text(cell) for cell in file_cells],
                *[Text(cell, style=dim) for cell in row[2:-1]],
                Text(row[-1], style=dim or color),
            )
    Console().print(table)
