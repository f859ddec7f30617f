"""Where each scheduler puts a container's cache file on the miniature node, and how the container has it.

Written from the projects' facts and not from `resolver.hami.placements`, which is held against this.
"""

from typing import Final, NamedTuple


class FakePlacement(NamedTuple):
    """``root`` is below the node's directory; ``bind`` what of it is mounted ``at`` a path of the container.

    In all of them ``{entry}`` is ``<podUID>_<container>``, ``{uuid}`` a random UUID and ``{claim}`` the claim's UID.
    """

    root: str
    directory: str  # of the file, below the root
    file: str
    bind: str  # below the root; empty: all of it
    at: str
    made_inside: bool = False  # by HAMi-core, in the container
    mode: int = 0o755  # of the root
    alone: bool = False  # the file is in the container's own /tmp, and no directory of the host has it


PLACEMENTS: Final = {
    "hami": FakePlacement("vgpu/containers", "{entry}", "{uuid}.cache", "{entry}", "/usr/local/vgpu"),
    "koordinator": FakePlacement("vgpu/containers", "{entry}", "{entry}.cache", "{entry}", "/usr/local/vgpu"),
    "volcano": FakePlacement(
        "volcano/vgpu/vgpu/containers",
        "{entry}",
        "{uuid}.cache",
        "{entry}",
        "/tmp/vgpu",  # noqa: S108 - the container's own
    ),
    "kai": FakePlacement(
        "kai/vgpu/containers",
        "{entry}",
        "usage.cache",
        "",
        "/usr/local/vgpu/containers",
        made_inside=True,
        mode=0o1777,
    ),
    "dra": FakePlacement(
        "vgpu/claims", "{claim}", "{uuid}.cache", "{claim}", "/usr/local/vgpu/claims/{claim}"
    ),
}
#: HAMi-core's default path, found through the processes that map it.
BARE: Final = FakePlacement("bare", "{entry}", "cudevshr.cache", "{entry}", "/tmp/nothing", alone=True)  # noqa: S108
EVERY: Final = PLACEMENTS | {"bare": BARE}
