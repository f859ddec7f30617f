"""Capabilities and system calls of the daemon and its children over its life.

The daemon's own are effective, those of children stay permitted; docs/security.md has the tables.
"""

import os
from collections.abc import Collection

from resolver.base.journal import Journal
from resolver.base.source_records import SOURCE_RECORDS
from resolver.linux import capabilities, seccomp
from resolver.pids.bpf_load import lift_locked_memory_limit


class Rights:
    """Capabilities and system calls of this process, which only shrink. ``steps`` are the allowed sources."""

    def __init__(self, steps: Collection[str], journal: Journal) -> None:
        release = os.uname().release
        sources = [SOURCE_RECORDS[name] for name in steps]
        # Optional: tenants' files are 0666 unless the tenant has a umask.
        self._running = frozenset({"DAC_OVERRIDE"}).union(*(source.keeps(release) for source in sources))
        self._to_start = frozenset[str]().union(*(source.rights for source in sources))
        self._at_first = frozenset[str]().union(*(source.at_first for source in sources))
        self._journal = journal
        # Of the dangerous ones: the canary's, those of the children that start a source, and to fetch descriptors.
        self._calls = {"unshare", "pidfd_getfd"}.union(*(source.calls for source in sources))
        self._filtered = False
        lift_locked_memory_limit()  # while the rights allow it

    def source_started(self) -> None:
        """Drop the rights of a source's first start, too."""
        self._at_first = frozenset()
        self.give_up()

    def give_up(self) -> None:
        """Keep only the rights needed from now on."""
        try:
            capabilities.limit(self._running, self._to_start | self._at_first)
        except OSError as error:
            self._journal.log.warning("capabilities_kept", why=str(error))
        # Of the dangerous system calls, refuse all but those needed; `capabilities.limit` has prepared it.
        if not self._filtered:
            self._filtered = seccomp.forbid_dangerous(*self._calls)
            unfiltered = "it can make every call that its rights allow, if it is taken over"
            why = "" if self._filtered else unfiltered
            self._journal.trouble("system calls", why, "no_system_call_filter", "")
