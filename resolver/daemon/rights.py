"""What the daemon and the children that it starts may do at each time of its life: capabilities and system calls.

In effect it has what the work takes. What it takes to start a source again, or to measure the driver, stays permitted:
a child that root starts gets that in effect, also where the daemon itself was started with ``no_new_privs``, as in a
pod. docs/security.md has the tables, and what it means for a daemon that was taken over.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from resolver.config import parse_address
from resolver.linux import capabilities, seccomp

if TYPE_CHECKING:
    from collections.abc import Collection

    from resolver.config import Settings
    from resolver.log.journal import Journal

_FIRST_FREE_PORT = 1024  # below it, listening takes CAP_NET_BIND_SERVICE


class Rights:
    """Capabilities and system calls of this process; only ever fewer. ``steps`` are the sources that may be used."""

    def __init__(self, settings: Settings, steps: Collection[str], journal: Journal) -> None:
        # Optional: tenants' files are 0666, unless one has a umask; ports below 1024.
        always = {"DAC_OVERRIDE"}
        address = parse_address(settings.metrics_addr)
        if address is not None and 0 < address[1] < _FIRST_FREE_PORT:
            always.add("NET_BIND_SERVICE")
        release = os.uname().release
        self._running = frozenset(always).union(
            *(capabilities.while_running(name, release) for name in steps)
        )
        self._to_start = frozenset[str]().union(*(capabilities.TO_START[name] for name in steps))
        self._at_first = frozenset[str]().union(*(capabilities.CHILDREN_TO_START[name] for name in steps))
        self._journal = journal
        self._calls = {"unshare"}  # of the dangerous ones: the canary's, the loader's, the opener's
        if "bpf" in steps:
            self._calls |= seccomp.OF_BPF
        if "netlink" in steps:
            self._calls.add("setns")
        self._refused: frozenset[str] = frozenset()

    def source_started(self) -> None:
        """What only the first start of a source may need goes with the next `give_up`."""
        self._at_first = frozenset()

    def give_up(self, to_measure: frozenset[str]) -> None:
        """Keep what is needed from now on. ``to_measure``: what the driver probe still needs."""
        try:
            capabilities.limit(self._running, self._to_start | self._at_first | to_measure)
        except OSError as error:
            self._journal.log.warning("capabilities_kept", why=str(error))
        self._refuse(self._calls | (seccomp.OF_NAMESPACES | seccomp.OF_MOUNTS if to_measure else set()))

    def _refuse(self, needed: set[str]) -> None:
        """All dangerous system calls but those; `capabilities.limit` has set what the kernel asks for."""
        more = seccomp.dangerous_but(*needed, *self._refused)
        if more and seccomp.forbid(more):
            self._refused |= more.keys()
