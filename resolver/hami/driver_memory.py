"""What a driver was seen to do: judged from one look out of a container, and remembered for as long as the node runs.

A look compares two views of the same samples. In the host's view a busy process has its host PID; in the view from
inside its container (`resolver.workers.driver_probe`) it has either that same number, or its own. Whatever leaves a
doubt is no measurement.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from typing import TYPE_CHECKING, NamedTuple

from resolver.config import HostpidNamespace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

_FILE = "driver-truth.json"
_MOST_BYTES = 4096
_FORMAT = 1


class Subject(NamedTuple):
    """A process that was busy on a device when the look was taken, and its two numbers."""

    host_pid: int
    ns_pid: int
    device_uuid: str


class MemoryVerdict(NamedTuple):
    """``namespace`` is None where nothing was learnt; ``why`` says why, for people."""

    namespace: HostpidNamespace | None
    why: str


def judge(subjects: Iterable[Subject], seen: Mapping[str, Collection[int]]) -> MemoryVerdict:
    """Which numbers a container's samples carry. ``seen``: by the device's UUID, the numbers met in there.

    Every subject has two different numbers, and neither is any other process's.
    """
    votes = set()
    absent = 0
    for subject in subjects:
        numbers = seen.get(subject.device_uuid, ())
        host, own = subject.host_pid in numbers, subject.ns_pid in numbers
        if host and own:
            return MemoryVerdict(
                None,
                f"both numbers of process {subject.host_pid} ({subject.ns_pid} inside) are in the samples",
            )
        if host or own:
            votes.add(HostpidNamespace.HOST if host else HostpidNamespace.CONTAINER)
        absent += not (host or own)
    if len(votes) == 1:
        return MemoryVerdict(votes.pop(), "")
    if votes:
        return MemoryVerdict(
            None, "of some processes the samples carry the host's numbers, of others their own"
        )
    return MemoryVerdict(None, f"the samples carry neither number of {absent} busy processes")


class DriverMemory:
    """What was measured, by the driver's version: in memory, and in a file for the next start.

    The file holds for one boot of the node: a driver is exchanged by loading another kernel module, mostly with a
    reboot, and two modules (the open and the closed one) can have the same version.
    """

    def __init__(self, run_dir: str, boot_id: str | None = None) -> None:
        self.path = os.path.join(run_dir, _FILE)
        self._boot_id = boot_id or _boot_id()
        self._known: dict[str, HostpidNamespace] = {}
        self._looked = False

    def get(self, driver_version: str) -> HostpidNamespace | None:
        """What that driver does, or None."""
        if not self._looked:
            self._looked = True
            # A file that is not just so was never there.
            with contextlib.suppress(OSError, ValueError, RecursionError):
                self._known.update(self._load())
        return self._known.get(driver_version)

    def put(self, driver_version: str, namespace: HostpidNamespace) -> None:
        """Remember it. Raises OSError if it cannot be written down; it is known all the same."""
        self._known[driver_version] = namespace
        content = {
            "format": _FORMAT,
            "boot_id": self._boot_id,
            "driver_version": driver_version,
            "hostpid_namespace": namespace.value,
        }
        temporary = f"{self.path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600)
        try:
            os.write(fd, json.dumps(content).encode())
        finally:
            os.close(fd)
        os.rename(temporary, self.path)

    def _load(self) -> dict[str, HostpidNamespace]:
        """Raises OSError or ValueError for anything but what `put` writes, by this user, since this boot."""
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077 or info.st_nlink != 1:
                raise ValueError("not a private plain file")
            if info.st_uid != os.geteuid() or info.st_size > _MOST_BYTES:
                raise ValueError("not ours")
            content = json.loads(os.read(fd, _MOST_BYTES + 1))
        finally:
            os.close(fd)
        if not isinstance(content, dict) or content.keys() != {
            "format",
            "boot_id",
            "driver_version",
            "hostpid_namespace",
        }:
            raise ValueError("other fields")
        version, namespace = content["driver_version"], content["hostpid_namespace"]
        if content["format"] != _FORMAT or content["boot_id"] != self._boot_id or not self._boot_id:
            raise ValueError("of another boot, or another resolver")
        if not isinstance(version, str) or namespace not in ("host", "container"):
            raise ValueError("other values")
        return {version: HostpidNamespace(namespace)}


def _boot_id() -> str:
    """Empty where the kernel does not show it: then only what this process saw itself is used."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            text = file.read().strip()
    except (OSError, ValueError):
        return ""
    return text if re.fullmatch(r"[0-9a-f-]{36}", text) else ""
