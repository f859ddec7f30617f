"""What each release of HAMi-core does with the shared region, as far as its releases differ: the one table.

The tenant (`tenant/tenant.c`) plays any row of it; `Node.container(release=...)` chooses.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple


class Release(NamedTuple):
    """One release. Each tick of its watcher first zeroes, then fills in what NVML's samples say."""

    name: str
    layout: str
    zeroes: Literal["first", "all"] = "first"  # of which devices
    zeroes_memory: bool = True  # `monitorused` with `sm_util`
    fills: Literal["set", "add", "nothing"] = "set"  # nothing: the count of samples is not initialised
    caches_slot: bool = False  # writes `used` where its slot was when it took it, even after a move

    def arguments(self) -> list[str]:
        """The release for the tenant's command line."""
        words = ["--layout", self.layout, "--zeroes", self.zeroes, "--fills", self.fills]
        words += [] if self.zeroes_memory else ["--keep-monitorused"]
        return words + (["--cached-slot"] if self.caches_slot else [])


#: The releases that differ in what they do, the oldest first.
BEHAVIOURS: Final = (
    Release("2.4.1", "v1.1", zeroes_memory=False, fills="nothing"),
    Release("2.5.0", "v1.1", fills="add"),  # and 2.6.0
    Release("2.8.0", "v1.1"),
    Release("2.8.1", "v1.1-shifted"),
    Release("2.8.2", "v1.2"),
    Release("2.9.0", "v1.2"),  # does what 2.8.2 does
    Release("main", "v1.2", zeroes="all", caches_slot=True),  # to mid-2026
)
#: Before there were versions in the file.
OLDER: Final = (
    Release("January 2024", "v0-no-util"),
    Release("April 2024", "v0"),
)
RELEASES: Final = {release.name: release for release in (*OLDER, *BEHAVIOURS)}
#: The last release with a layout stands for it, where a test asks for a layout alone.
BY_LAYOUT: Final = {release.layout: release for name, release in RELEASES.items() if name != "main"}
