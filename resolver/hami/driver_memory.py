"""Verdict on a driver, measured inside a container and remembered until reboot.

The host's view of the samples shows a busy process's host PID; its container's (`resolver.workers.driver_probe`), its
host or container PID. Doubt voids the measurement.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from resolver.config import HostpidNamespace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

_FILE = "driver-truth.json"
_MOST_BYTES = 4096


class Subject(NamedTuple):
    """Process, busy on a device during the measurement, and its numbers."""

    host_pid: int
    ns_pid: int
    device_uuid: str


class DriverVerdict(NamedTuple):
    """``namespace`` is None where nothing was learnt; ``why`` is for people."""

    namespace: HostpidNamespace | None
    why: str


def judge(subjects: Iterable[Subject], seen: Mapping[str, Collection[int]]) -> DriverVerdict:
    """Return the verdict on the numbers ``seen`` in a container's samples, by device UUID.

    A subject's numbers differ and are unique.
    """
    votes = set()
    absent = 0
    for subject in subjects:
        numbers = seen.get(subject.device_uuid, ())
        host, own = subject.host_pid in numbers, subject.ns_pid in numbers
        if host and own:
            return DriverVerdict(
                None,
                f"both numbers of process {subject.host_pid} ({subject.ns_pid} inside) are in the samples",
            )
        if host or own:
            votes.add(HostpidNamespace.HOST if host else HostpidNamespace.CONTAINER)
        absent += not (host or own)
    if len(votes) == 1:
        return DriverVerdict(votes.pop(), "")
    if votes:
        return DriverVerdict(
            None, "of some processes the samples carry the host's numbers, of others their own"
        )
    return DriverVerdict(None, f"the samples carry neither number of {absent} busy processes")


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    """Content of the file."""

    format: Literal[1]
    boot_id: str
    driver_version: str
    hostpid_namespace: Literal["host", "container"]


class DriverMemory:
    """Measured behaviour by driver version, in memory and a file.

    The file holds for one boot: the open and the closed kernel module can have the same version.
    """

    def __init__(self, run_dir: str, boot_id: str | None = None) -> None:
        self.path = os.path.join(run_dir, _FILE)
        self._boot_id = boot_id or _boot_id()
        self._known: dict[str, HostpidNamespace] = {}
        self._looked = False

    def get(self, driver_version: str) -> HostpidNamespace | None:
        """Return that driver's behaviour, or None."""
        if not self._looked:
            self._looked = True
            # A file that is not just so was never there.
            with contextlib.suppress(OSError, ValueError, RecursionError, msgspec.DecodeError):
                self._known.update(self._load())
        return self._known.get(driver_version)

    def put(self, driver_version: str, namespace: HostpidNamespace) -> None:
        """Remember a verdict, even if storing it raises OSError."""
        self._known[driver_version] = namespace
        kept = _Kept(
            format=1,
            boot_id=self._boot_id,
            driver_version=driver_version,
            hostpid_namespace="host" if namespace is HostpidNamespace.HOST else "container",
        )
        temporary = f"{self.path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600)
        try:
            os.write(fd, msgspec.json.encode(kept))
        finally:
            os.close(fd)
        os.rename(temporary, self.path)

    def _load(self) -> dict[str, HostpidNamespace]:
        """Load the file. Raises OSError or ValueError unless this user wrote it since this boot."""
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077 or info.st_nlink != 1:
                raise ValueError("not a private plain file")
            if info.st_uid != os.geteuid() or info.st_size > _MOST_BYTES:
                raise ValueError("not ours")
            kept = msgspec.json.decode(os.read(fd, _MOST_BYTES + 1), type=_Kept)
        finally:
            os.close(fd)
        if kept.boot_id != self._boot_id or not self._boot_id:
            raise ValueError("of another boot")
        return {kept.driver_version: HostpidNamespace(kept.hostpid_namespace)}


def _boot_id() -> str:
    """Return the boot id; empty if hidden, when no file is believed."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            text = file.read().strip()
    except (OSError, ValueError):
        return ""
    return text if re.fullmatch(r"[0-9a-f-]{36}", text) else ""
