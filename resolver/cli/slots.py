"""Show HAMi's cache files slot by slot: each slot's process, and its visible faults.

Only reads and takes no locks, so it is safe while containers run. Exit code 1 if a file could not be read; it still
shows the others.
"""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

from resolver import client
from resolver.base.errors import RegionRejected, ResolverError
from resolver.base.reasons import RegionReason, RepairReason, UnresolvedReason
from resolver.base.text import printable
from resolver.cli.ask_daemon import add_socket, ask
from resolver.cli.show import NONE, on_terminal, print_json, print_table, size
from resolver.hami.layout import is_plausible
from resolver.hami.placements import (
    AUTO,
    MAX_CACHES,
    MAX_CONTAINERS,
    MAX_ENTRIES,
    is_entry,
    list_caches,
    searched,
)
from resolver.hami.region import SharedRegion, open_region
from resolver.linux.safe_open import open_directory, translate

#: A path, and the file there, or why it can't be read.
_Entry = tuple[str, SharedRegion | RegionRejected]


COLUMNS = ("CONTAINER", "LAYOUT", "SLOT", "PID", "HOSTPID", "STATUS", "GPU", "SM %", "MEMORY", "HINT")
_RIGHT = frozenset(("SLOT", "PID", "HOSTPID", "STATUS", "SM %", "MEMORY"))
#: Columns for programs only: people rarely need them, and the others fit 80 columns.
_FOR_PROGRAMS = frozenset(("LAYOUT", "STATUS"))
_FIELDS = itemgetter("index", "pid", "hostpid", "status")
DRIVER_FILE = "/proc/driver/nvidia/version"

Row = tuple[str, ...]


class Facts(NamedTuple):
    """Facts of the node: ``hostpid`` must be a host PID, and GPUs' bytes of memory by UUID."""

    host_pids: bool = False
    memory: dict[str, int | None] = {}  # noqa: RUF012 - never changed


class SlotRow(NamedTuple):
    """The fields of a slot that show its faults."""

    number: int
    pid: int
    hostpid: int
    status: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = (
        "a .cache file, a container's directory or a directory of them (default: the setting containers_dir)"
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help=about)
    add_socket(parser, "print an array with every field, under HAMi's names")


def run(args: argparse.Namespace) -> int:
    """Print the files; 1 if one of them could not be read, else 0."""
    paths = args.paths or _directories(args.socket)
    facts = read_facts(args.socket)
    files = [_dump(*entry, facts.memory) for path in paths for entry in read_path(path)]
    rejected = [file for file in files if "error" in file]
    if args.json:
        print_json(files)
    elif not files:
        print("There are no .cache files: no container with HAMi has used a GPU yet.", file=sys.stderr)
    elif rows := [row for file in files if "error" not in file for row in _rows(file, facts)]:
        print_table(COLUMNS, rows, right=_RIGHT, for_programs=_FOR_PROGRAMS, shorten="CONTAINER")
        sys.stdout.flush()
    for file in () if args.json else rejected:
        print(printable("resolver slots: {path}: {reason}: {error}".format(**file)), file=sys.stderr)
    return 1 if rejected else 0


def _directories(socket_path: str | None) -> tuple[str, ...]:
    """Return the daemon's directories. Raises `ResolverError` if none exists."""
    from resolver.cli.in_force import settings_in_force

    in_force = settings_in_force(socket_path)
    directories, origin = searched(in_force.settings.containers_dir), in_force.origin_of("containers_dir")
    existing = tuple(filter(os.path.isdir, directories))
    if not existing:
        raise ResolverError(
            f"none of these directories exists: {', '.join(directories)}. They are containers_dir {origin}. "
            "HAMi's device plugin makes one on a GPU node: run this on such a node, in a container that has it "
            "mounted, or give the PATH of a .cache file"
        )
    if AUTO in in_force.settings.containers_dir:
        directories = existing
    print(f"resolver slots: {', '.join(directories)}, containers_dir {origin}", file=sys.stderr)
    if in_force.settings.mapped_regions:
        print("resolver slots: files inside containers (mapped_regions) are not shown", file=sys.stderr)
    return directories


def read_facts(socket_path: str | None) -> Facts:
    """Return the running daemon's facts, else those of the driver's version."""
    if os.path.exists(client.socket_of(socket_path)):
        from resolver.api.shapes import Gpus  # without a daemon no record is loaded
        from resolver.api.status import Status

        with contextlib.suppress(ResolverError):
            policy = ask(Status, "/v1/status", socket_path, 1.0).policy
            gpus = ask(Gpus, "/v1/gpus", socket_path, 1.0).gpus
            return Facts(policy.namespace == "host", {gpu.uuid: gpu.memory_total for gpu in gpus})
    try:
        with open(DRIVER_FILE, encoding="utf-8") as file:
            version = re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", file.read())
    except (OSError, ValueError):
        return Facts()
    from resolver.hami.hostpid_policy import by_version

    return Facts(version is not None and by_version(version[1]).namespace == "host")


# -- reading ----------------------------------------------------------------------------------------------


def read_path(path: str) -> Iterator[_Entry]:
    """Yield every cache file at a path, open until the next one, or why it can't be read."""
    parent, name = (path, "") if os.path.isdir(path) else os.path.split(path)
    with contextlib.ExitStack() as held:
        try:
            dir_fd = os.open(parent or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, dir_fd)
            yield from _read_file(dir_fd, name, path) if name else _read_directory(dir_fd, path)
        except OSError as error:
            yield path, translate(error)


def _read_directory(dir_fd: int, path: str) -> Iterator[_Entry]:
    """Yield the files in a container's directory, or in all directories of a containers directory."""
    with os.scandir(dir_fd) as listing:
        containers = sorted(
            entry.name
            for entry in islice(listing, MAX_CONTAINERS)
            if is_entry(path, entry.name)
            and not entry.name.endswith(".cache")
            and (entry.is_symlink() or entry.is_dir(follow_symlinks=False))
        )
    yield from _read_caches(dir_fd, path, complain=not containers)
    for name in containers:
        below = os.path.join(path, name)
        try:
            container_fd = open_directory(name, dir_fd)
        except RegionRejected as why:
            yield below, why
            continue
        try:
            yield from _read_caches(container_fd, below)
        finally:
            os.close(container_fd)


def _read_caches(dir_fd: int, path: str, *, complain: bool = True) -> Iterator[_Entry]:
    names, complete = list_caches(dir_fd)
    for name in sorted(names):
        yield from _read_file(dir_fd, name, os.path.join(path, name))
    if not complete and complain:
        detail = f"only {MAX_ENTRIES} entries and {MAX_CACHES} .cache files are read, and it has more"
        yield path, RegionRejected(RegionReason.TOO_MANY_ENTRIES, detail)


def _read_file(dir_fd: int, name: str, path: str) -> Iterator[_Entry]:
    try:
        with open_region(dir_fd, name, path) as region:
            yield path, region
    except RegionRejected as why:
        yield path, why


def _dump(path: str, region: SharedRegion | RegionRejected, memory: dict[str, int | None]) -> dict[str, Any]:
    """Return `SharedRegion.dump` with None for impossible counts of bytes, or why the file can't be read."""
    try:
        if isinstance(region, RegionRejected):
            raise region
        dump = region.dump()
    except RegionRejected as why:
        return {"path": path, "error": why.detail, "reason": str(why.reason)}
    bounds = [(memory.get(uuid), limit) for uuid, limit in zip(dump["uuids"], dump["limit"], strict=True)]
    for slot in dump["slots"]:
        for used, (most, limit) in zip(slot["used"], bounds, strict=True):
            used |= {
                name: count if is_plausible(count, most, limit) else None for name, count in used.items()
            }
    return dump


# -- the table --------------------------------------------------------------------------------------------


def _rows(file: dict[str, Any], facts: Facts) -> Iterator[Row]:
    """Yield a row for each slot and GPU; a person gets short ids."""
    container, uuids = _container(file["path"]), file["uuids"]
    if on_terminal():
        uuids = [uuid.removeprefix("GPU-")[: 8 if uuid.startswith("GPU-") else 12] for uuid in uuids]
    slots = [SlotRow(*_FIELDS(slot)) for slot in file["slots"]]
    if not slots:
        yield (container, file["layout"], *[NONE] * 7, "no process has a slot")
    numbers: dict[int, list[int]] = {}
    for slot in slots:
        if slot.status != 0:
            numbers.setdefault(slot.hostpid, []).append(slot.number)
    for slot, fields in zip(slots, file["slots"], strict=True):
        fault = hint(slot, numbers.get(slot.hostpid, []), host_pids=facts.host_pids)
        memory = [size(used["total"]) for used in fields["used"]]
        utils = [str(device["sm_util"]) for device in fields.get("device_util", ())] or [NONE] * len(memory)
        for values in [*zip(uuids, utils, memory, strict=True)] or [(NONE, NONE, NONE)]:
            yield (container, file["layout"], *map(str, slot), *values, fault)


def hint(slot: SlotRow, slots_with_hostpid: list[int], *, host_pids: bool) -> str:
    """Name a slot's visible fault; a container PID is a question where ``hostpid`` must be one of the host's."""
    if slot.status == 0:
        return "ended" if slot.pid == 0 else "status 0"
    if slot.pid <= 0:
        return UnresolvedReason.INVALID_PID
    if slot.hostpid == 0:
        return RepairReason.MISSING
    others = [str(number) for number in slots_with_hostpid if number != slot.number]
    if others:
        return f"{RepairReason.DUPLICATE} of {','.join(others)}"
    return f"{RepairReason.WRONG_NAMESPACE}?" if host_pids and slot.hostpid == slot.pid else ""


def _container(path: str) -> str:
    """Return ``<podUID>/<containerName>``, as `resolver lookup` takes it, or the path outside such a directory."""
    pod_uid, _, name = os.path.basename(os.path.dirname(path)).partition("_")
    return f"{pod_uid[: 8 if on_terminal() else None]}/{name}" if pod_uid and name else path
