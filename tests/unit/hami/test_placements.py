"""The table of placements, checked against the projects' real paths."""

import pytest

from resolver.hami.discovery import SharedDirectory
from resolver.hami.placements import (
    AUTO,
    KNOWN_DIRS,
    PLACEMENTS,
    is_entry,
    may_be_mounted,
    placement_of,
    searched,
)
from resolver.hami.process_reads import shared_trees
from tests.fakes.placements import PLACEMENTS as FAKES

POD, CLAIM = "0f6f2c70-8f5e-4d0c-9b1d-2f7c0d9a4e01", "7d0c6e3e-2f6d-4e0b-9b57-0d3c8f4b5a12"
UUID = "2f4c1d9e-5a3c-4e70-8d42-4f6b9b1e2f7d"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"/var/lib/hami/vgpu/containers/{POD}_main/{UUID}.cache", "hami"),
        (f"/usr/local/vgpu/containers/{POD}_main/{POD}_other.cache", "hami"),
        (f"/tmp/vgpu/containers/{POD}_main/{UUID}.cache", "volcano"),  # noqa: S108
    ],
)
def test_placement_of_a_file(path: str, name: str) -> None:
    row = placement_of(path)
    assert row is not None
    assert row.name == name


def test_every_row_is_one_of_the_miniature_nodes() -> None:
    assert {row.name for row in PLACEMENTS} == {*FAKES, "bare"}
    for row in PLACEMENTS:
        fake = FAKES.get(row.name)
        if fake is not None:
            words = {"entry": f"{POD}_main", "uuid": UUID, "claim": CLAIM}
            path = f"/{fake.root}/{fake.directory}/{fake.file}".format(**words)
            assert placement_of(path) is row


def test_placements_searched_by_auto() -> None:
    assert searched(("/a", AUTO, "/a")) == ("/a", *KNOWN_DIRS)
    assert searched(("/a", "/b")) == ("/a", "/b")
    assert KNOWN_DIRS[0] == "/usr/local/vgpu/containers"


@pytest.mark.parametrize(
    ("directory", "name", "expected"),
    [
        ("/x/containers", f"{POD}_main", True),
        ("/x/containers", POD, False),
        ("/x/containers", "_main", False),
        ("/x/claims", CLAIM, True),
        ("/x/claims", "lost+found", False),
        ("/x/claims", f"{CLAIM}_main", True),
    ],
)
def test_which_entries_may_have_files(directory: str, name: str, expected: bool) -> None:  # noqa: FBT001
    assert is_entry(directory, name) is expected
    if expected:
        assert may_be_mounted(f"{directory}/{name}".encode())


def test_a_tree_that_a_preloaded_container_has_as_a_whole() -> None:
    preload = "90 80 8:1 /usr/local/vgpu/ld.so.preload /etc/ld.so.preload ro - ext4 /dev/sda1 rw"
    whole = "91 80 8:1 /usr/local/vgpu/containers /usr/local/vgpu/containers rw - ext4 /dev/sda1 rw"
    own = f"92 80 8:1 /usr/local/vgpu/containers/{POD}_main /usr/local/vgpu rw - ext4 /dev/sda1 rw"

    def trees(*lines: str) -> list[SharedDirectory]:
        return [SharedDirectory(*each) for each in shared_trees("\n".join(lines).encode())]

    assert trees(preload, whole) == [SharedDirectory("8:1", "/usr/local/vgpu/containers")]
    assert trees(preload, own) == []  # HAMi's
    assert trees(whole) == []  # a monitor's
