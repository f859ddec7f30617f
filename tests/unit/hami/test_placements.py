"""The table of placements, against where the projects really have their files; and kubelet's names."""

from __future__ import annotations

from pathlib import Path

import pytest

from resolver.containers.log_names import ContainerNames, LogName, parse_links
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
from resolver.linux.cgroup import only_container
from tests.fakes.placements import PLACEMENTS as FAKES

POD, CLAIM = "0f6f2c70-8f5e-4d0c-9b1d-2f7c0d9a4e01", "7d0c6e3e-2f6d-4e0b-9b57-0d3c8f4b5a12"
OTHER_POD = "1a2b3c4d-8f5e-4d0c-9b1d-2f7c0d9a4e01"
UUID = "2f4c1d9e-5a3c-4e70-8d42-4f6b9b1e2f7d"
A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("path", "mounted", "name"),
    [
        (f"/usr/local/vgpu/containers/{POD}_main/{UUID}.cache", False, "hami"),
        (f"/var/lib/hami/vgpu/containers/{POD}_main/{UUID}.cache", False, "hami"),
        (f"/usr/local/vgpu/containers/{POD}_main/{POD}_main.cache", False, "koordinator"),
        (f"/usr/local/vgpu/containers/{POD}_main/{POD}_other.cache", False, "hami"),
        (f"/usr/local/vgpu/vgpu/containers/{POD}_main/{UUID}.cache", False, "volcano"),
        (f"/tmp/vgpu/containers/{POD}_main/{UUID}.cache", False, "volcano"),  # noqa: S108
        (f"/usr/local/vgpu/claims/{CLAIM}/{UUID}.cache", False, "dra"),
        (f"/usr/local/vgpu/containers/{POD}_main/usage.cache", False, "kai"),
        (f"/usr/local/vgpu/containers/{POD}_main/usage.cache", True, "hami"),  # HAMi discusses that name
    ],
)
def test_whose_placement_a_file_is(path: str, mounted: bool, name: str) -> None:  # noqa: FBT001
    row = placement_of(path, mounted=mounted)
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


def test_what_auto_searches() -> None:
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


# ---- kubelet's names ----------------------------------------------------------------------------------------------


def test_names_in_links() -> None:
    entries = [
        f"train-0_research_main-{A}.log",
        f"a-b-c_ns-x_side-car-{B}.log",
        f"a_b_c_d-{A}.log",
        "lost+found",
        f"x_y_z-{A[:-1]}.log",
        f"x_y_z-{B}.txt",
    ]
    assert parse_links(entries) == {
        A: LogName("research", "train-0", "main"),
        B: LogName("ns-x", "a-b-c", "side-car"),
    }


def test_kubelets_containers(tmp_path: Path) -> None:
    links, pods = tmp_path / "containers", tmp_path / "pods"
    names = ContainerNames(str(links), str(pods))
    names.refresh()
    assert "cannot be read" in names.trouble
    links.mkdir()
    (pods / f"research_train-0_{POD}").mkdir(parents=True)
    (links / f"train-0_research_main-{A}.log").symlink_to("/nowhere")
    names.refresh()
    assert names.trouble == ""
    assert names.of(A) == LogName("research", "train-0", "main")
    assert names.of(B) is None
    assert (names.has(POD, "main"), names.has(POD, "side"), names.has(OTHER_POD, "main")) == (
        True,
        False,
        False,
    )
    (links / f"train-0_research_side-{B}.log").symlink_to("/nowhere")
    names.refresh()
    assert sorted(names.pairs()) == [(POD, "main"), (POD, "side")]
    links.rename(tmp_path / "gone")
    names.refresh()
    assert names.trouble
    assert not names.has(POD, "main")


# ---- what only the kernel and the runtime say ---------------------------------------------------------------------


def slice_of(pod: str, container: str) -> str:
    return f"/kubepods.slice/kubepods-pod{pod.replace('-', '_')}.slice/cri-containerd-{container}.scope"


@pytest.mark.parametrize(
    ("text", "pod", "container"),
    [
        (f"0::{slice_of(POD, A)}\n", POD, A),
        (f"0::{slice_of(POD, A)}/init.scope\n", POD, A),
        (f"0::/docker/{B}/kubelet{slice_of(POD, A)}\n", POD, A),  # a node in a container
        (f"3:memory:{slice_of(POD, A)}\n2:cpu:/\n0::/\n", POD, A),
        (f"0::{slice_of(POD, A)}/pod{OTHER_POD}/{B}\n", None, None),  # made by who is in there
        (f"0::{slice_of(POD, A)}/{B}\n", None, None),
        (f"3:memory:{slice_of(POD, A)}\n2:cpu:{slice_of(OTHER_POD, B)}\n", None, None),
        (f"0::/system.slice/docker-{A}.scope\n", None, None),
        ("0::/\n", None, None),
    ],
)
def test_the_only_container_in_a_cgroup(text: str, pod: str | None, container: str | None) -> None:
    found = only_container(text)
    assert (found and found.pod_uid, found and found.container_id) == (pod, container)


def test_a_tree_that_a_preloaded_container_has_as_a_whole() -> None:
    preload = "90 80 8:1 /usr/local/vgpu/ld.so.preload /etc/ld.so.preload ro - ext4 /dev/sda1 rw"
    whole = "91 80 8:1 /usr/local/vgpu/containers /usr/local/vgpu/containers rw - ext4 /dev/sda1 rw"
    own = f"92 80 8:1 /usr/local/vgpu/containers/{POD}_main /usr/local/vgpu rw - ext4 /dev/sda1 rw"

    def trees(*lines: str) -> list[SharedDirectory]:
        return [SharedDirectory(*each) for each in shared_trees("\n".join(lines).encode())]

    assert trees(preload, whole) == [SharedDirectory("8:1", "/usr/local/vgpu/containers")]
    assert trees(preload, own) == []  # HAMi's
    assert trees(whole) == []  # a monitor's
