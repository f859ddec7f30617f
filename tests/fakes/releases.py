"""What each release of HAMi-core does with the shared region, as far as its releases differ: the one table.

The tenant (`tenant/tenant.c`) plays any row of it; `Node.container(release=...)` chooses.
"""

from typing import Final, Literal, NamedTuple


class Release(NamedTuple):
    """One release. At each tick its watcher zeroes utilization, then fills in that of NVML's samples."""

    name: str
    layout: str
    zeroes: Literal["first", "all"] = "first"  # the devices that it zeroes
    zeroes_memory: bool = True  # `monitorused` with `sm_util`
    fills: Literal["set", "add", "nothing"] = "set"  # nothing: the count of samples is not initialised
    caches_slot: bool = False  # writes `used` where its slot was when it took it, even after a move
    removes_itself: bool = (
        False  # at its exit, under the lock; else sets pid and status to 0, and leaves the rest
    )
    clears_moved: bool = False  # the place that a move left; else its copy stays there
    second_call: bool = False  # where the driver refuses the first one (HAMi-core PR 218)
    asks_cuda_number: bool = True  # NVML for the device with CUDA's number, until HAMi-core PR 330

    def arguments(self) -> list[str]:
        words = ["--layout", self.layout, "--zeroes", self.zeroes, "--fills", self.fills]
        words += [] if self.zeroes_memory else ["--keep-monitorused"]
        words += ["--removes-itself"] if self.removes_itself else []
        words += ["--asks-cuda-number"] if self.asks_cuda_number else []
        words += ["--clears-moved"] if self.clears_moved else []
        words += ["--second-call"] if self.second_call else []
        return words + (["--cached-slot"] if self.caches_slot else [])


#: Releases with different behaviour, the oldest first.
BEHAVIOURS: Final = (
    Release("2.4.1", "v1.1", zeroes_memory=False, fills="nothing", removes_itself=True),
    Release("2.5.0", "v1.1", fills="add", removes_itself=True),  # and 2.6.0
    Release("2.8.0", "v1.1", removes_itself=True),
    Release("2.8.1", "v1.1-shifted"),
    Release("2.8.2", "v1.2"),
    Release("2.9.0", "v1.2"),  # same behaviour as 2.8.2
    Release("main", "v1.2", zeroes="all", caches_slot=True, clears_moved=True),  # to mid-2026
    Release("2.10", "v1.2", zeroes="all", caches_slot=True, clears_moved=True, second_call=True),
    Release(
        "PR 330",
        "v1.2",
        zeroes="all",
        caches_slot=True,
        clears_moved=True,
        second_call=True,
        asks_cuda_number=False,
    ),
)
#: Before there were versions in the file.
OLDER: Final = (
    Release("January 2024", "v0-no-util", removes_itself=True),
    Release("April 2024", "v0", removes_itself=True),
)
RELEASES: Final = {release.name: release for release in (*OLDER, *BEHAVIOURS)}
#: The last release with a layout stands for it, where a test asks for a layout alone.
BY_LAYOUT: Final = {
    release.layout: release for name, release in RELEASES.items() if name not in ("main", "2.10", "PR 330")
}
