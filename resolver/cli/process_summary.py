"""A process's user, command, start, CPU time and memory, for people to read."""

import os
from types import SimpleNamespace
from typing import NamedTuple

from resolver.base.errors import AccessDenied, ProcessGone
from resolver.cli.show import duration, moment, size
from resolver.linux.procfs import HOST_PIDNS, Procfs

_ATTRIBUTES = ("username", "cmdline", "cpu_times", "memory_info", "create_time")
_MOST_SHOWN = 300  # characters of a command line: a tenant may make it megabytes long


class ProcessSummary(NamedTuple):
    """``started_at`` is Unix time, ``memory`` resident bytes. None: it ended, or this user may not read it."""

    user: str | None = None
    command_line: tuple[str, ...] | None = None
    cpu_seconds: float | None = None
    memory: int | None = None
    started_at: float | None = None

    def in_words(self) -> dict[str, str | None]:
        """Return the facts by name, in words."""
        command = None if self.command_line is None else " ".join(self.command_line)
        if command and len(command) > _MOST_SHOWN:
            command = command[:_MOST_SHOWN] + " ..."
        return {
            "user": self.user,
            "command": command,
            "started": moment(self.started_at) if self.started_at else None,
            "cpu": None if self.cpu_seconds is None else duration(self.cpu_seconds),
            "memory": None if self.memory is None else size(self.memory),
        }


def facts_of(host_pid: int, start_time: int | None = None) -> ProcessSummary:
    """Read the facts of a process; none if a later one has its PID, by ``start_time`` (ticks since boot)."""
    import psutil  # it takes longer to load than most commands to run

    try:
        if os.stat("/proc/self/ns/pid").st_ino != HOST_PIDNS:  # here the PID is another process's
            return ProcessSummary()
        facts = SimpleNamespace(**psutil.Process(host_pid).as_dict(_ATTRIBUTES, ad_value=None))
        # Checked last, this proves that no read above was of another process.
        if start_time is not None and Procfs().start_time(host_pid) != start_time:
            return ProcessSummary()
    except (psutil.NoSuchProcess, ProcessGone, AccessDenied, OSError):
        return ProcessSummary()
    used, memory = facts.cpu_times, facts.memory_info
    return ProcessSummary(
        user=facts.username,
        command_line=tuple(facts.cmdline) if facts.cmdline else None,
        cpu_seconds=used.user + used.system if used else None,
        memory=memory.rss if memory else None,
        started_at=facts.create_time,
    )
