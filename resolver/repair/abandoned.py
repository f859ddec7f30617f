"""Cache files that nobody has open any more: their containers ended, maybe while no daemon ran.

Of such a container no PID namespace is left that could say that a number is free, so another proof is needed. Every
process with a slot keeps its file open and mapped until it ends (HAMi-core never closes it), and so does the program
that serves the file to a virtual machine, or to gVisor. A file is abandoned when the kernel says one of these:

- it grants a read lease, which it does only while nobody has the file open for writing (fcntl(2), F_SETLEASE). It is
  given back at once;
- each process that was there when the slots were seen neither maps the file nor has one of its name open. Processes in
  another pod do not count: HAMi's monitor has every file open. One that can't be read leaves the question open. Where
  all pods can reach a file, those of others count as well.

A process that comes later attaches by writing a byte, so the file's time changes, and nothing is concluded.
"""

from __future__ import annotations

import fcntl
import math
import os
import signal
import time
from typing import TYPE_CHECKING

from resolver.errors import AccessDenied, ProcessGone
from resolver.hami.discovery import PodFile
from resolver.linux.cgroup import pod_uid_of
from resolver.linux.mappings import open_names, shared_files
from resolver.linux.procfs import TooLarge
from resolver.retry import longer

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.linux.procfs import Procfs
    from resolver.repair.plan import RegionRepairs

#: CPU seconds of each pass for looking at processes, some 50 us each.
STEP_SECONDS = 0.004
#: Seconds for which a file must not have changed before it is judged: file times have the resolution of a tick.
QUIET_SECONDS = 1.0
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
#: Files that are judged in one go through all processes.
MOST_AT_ONCE = 64


class _Suspect:
    """A file none of whose slots has an owner."""

    __slots__ = ("in_use", "mtime_ns", "name", "pause", "repairs", "retry_at")

    def __init__(self, repairs: RegionRepairs) -> None:
        self.repairs = repairs
        self.name = os.path.basename(repairs.region.path)
        self.mtime_ns = repairs.region.mtime_ns
        self.in_use = False  # or that can't be excluded
        self.pause, self.retry_at = FIRST_PAUSE, 0.0


class Abandoned:
    """Judges suspects bit by bit, for some milliseconds in each pass."""

    def __init__(self, procfs: Procfs, clock: Callable[[], float] = time.time) -> None:
        """``clock`` is Unix time in seconds, as files have it."""
        self._procfs = procfs
        self._clock = clock
        self._suspects: dict[str, _Suspect] = {}
        self._going: list[_Suspect] = []  # those that are being judged
        self._left: list[int] = []  # host PIDs that are still to be read for them

    def suspect(self, repairs: RegionRepairs) -> None:
        """No process was found for a slot of this file, and no PID namespace says that its number is free."""
        known = self._suspects.get(repairs.region.path)
        if known is None or known.repairs is not repairs or known.mtime_ns != repairs.region.mtime_ns:
            self._suspects[repairs.region.path] = _Suspect(repairs)

    def forget(self, path: str) -> None:
        """The region is gone."""
        self._suspects.pop(path, None)

    def wait(self) -> float:
        """Seconds until `step` has something to do; 0 or less: now."""
        if self._left:
            return 0.0
        return min((each.retry_at for each in self._suspects.values()), default=math.inf) - self._clock()

    def step(self) -> list[RegionRepairs]:
        """Go on; returns the regions whose slots were just found to be dead."""
        done: list[RegionRepairs] = []
        if self._left:
            deadline = time.thread_time() + STEP_SECONDS
            while self._left and time.thread_time() < deadline:
                self._look_at(self._left.pop())
            if not self._left:
                done = [suspect.repairs for suspect in self._going if self._conclude(suspect)]
                self._going = []
        elif self._suspects:
            done = self._begin()
        return done

    def _begin(self) -> list[RegionRepairs]:
        """Ask for leases; where there is none, begin to go through all processes."""
        now, done = self._clock(), []
        due = [suspect for suspect in self._suspects.values() if now >= suspect.retry_at]
        for suspect in due[:MOST_AT_ONCE]:
            region = suspect.repairs.region
            if not _alone(suspect.repairs) or region.fd < 0 or region.mtime_ns != suspect.mtime_ns:
                self.forget(region.path)
            elif now - suspect.mtime_ns / 1e9 < QUIET_SECONDS:
                suspect.retry_at = now + QUIET_SECONDS
            elif nobody_writes(region.fd):
                suspect.in_use = False
                if self._conclude(suspect):
                    done.append(suspect.repairs)
            else:
                suspect.in_use = False
                self._going.append(suspect)
        if self._going:
            self._left = list(self._procfs.entries())
        return done

    def _look_at(self, host_pid: int) -> None:
        """Whether this process has any of the files."""
        pod_uid: str | None = None
        if host_pid == os.getpid():
            return  # read-only, and the slot writer's descriptors are gone with each batch
        try:
            pod_uid = pod_uid_of(self._procfs.cgroup(host_pid))
            if all(self._elsewhere(suspect, pod_uid) for suspect in self._going):
                return
            mapped = shared_files(self._procfs, host_pid)
            names = open_names(self._procfs, host_pid)
        except ProcessGone:
            return
        except (AccessDenied, TooLarge, OSError):
            mapped, names = None, None
        for suspect in self._going:
            if not self._elsewhere(suspect, pod_uid) and (
                mapped is None or names is None or suspect.repairs.shown in mapped or suspect.name in names
            ):
                suspect.in_use = True

    @staticmethod
    def _elsewhere(suspect: _Suspect, pod_uid: str | None) -> bool:
        if isinstance(suspect.repairs.place, PodFile):
            return False  # the directory's name is anybody's word
        of_region = suspect.repairs.whose.pod_uid
        return bool(pod_uid and of_region and pod_uid != of_region)

    def _conclude(self, suspect: _Suspect) -> bool:
        """Call the slots dead, if nothing happened to the file meanwhile; otherwise it is judged again later."""
        repairs, region = suspect.repairs, suspect.repairs.region
        try:
            untouched = region.fd >= 0 and os.fstat(region.fd).st_mtime_ns == suspect.mtime_ns
        except OSError:
            untouched = False
        if not untouched or not _alone(repairs):
            self.forget(region.path)
            return False
        if suspect.in_use:
            suspect.retry_at = self._clock() + suspect.pause
            suspect.pause = longer(suspect.pause, FIRST_PAUSE, LONGEST_PAUSE)
            return False
        self.forget(region.path)
        repairs.abandon()
        return True


def _alone(repairs: RegionRepairs) -> bool:
    """Whether no slot of the region has an owner: a file whose container runs is judged by its PID namespace."""
    return all(state.owner is None for state in repairs.states.values())


def nobody_writes(fd: int) -> bool:
    """Whether nobody, on this node, has that regular file open for writing; False if the kernel doesn't say so.

    ``fd`` is open for reading only. Takes CAP_LEASE, or the file's owner. A process that opens it in the
    microseconds between the two calls waits for the second one.
    """
    try:
        fcntl.fcntl(
            fd, fcntl.F_SETSIG, signal.SIGURG
        )  # ignored; SIGIO, of the default, would end this process
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
