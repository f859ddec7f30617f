"""Names of pods from kubelet's directory of logs."""

import os
import time
from pathlib import Path

import pytest

from resolver.containers.log_names import ContainerNames, Listing, LogName, parse_links, parse_names

UID = "0f0e5a3c-1111-2222-3333-444455556666"
STATIC = "0123456789abcdef0123456789abcdef"
A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ([f"ml_train-0_{UID}"], {UID: ("ml", "train-0")}),
        ([f"kube-system_etcd-node1_{STATIC}"], {STATIC: ("kube-system", "etcd-node1")}),
        ([f"ml_web.example_{UID}"], {UID: ("ml", "web.example")}),
        ([], {}),
        (["lost+found", "a_b", f"a_b_c_{UID}", f"_pod_{UID}", f"ns__{UID}", "a_b_"], {}),
        # The same UID with two names: neither is used.
        ([f"ml_train-0_{UID}", f"ml_train-1_{UID}"], {UID: ("", "")}),
        ([f"ml_train-0_{UID}", f"ml_train-1_{UID}", f"ml_train-0_{UID}"], {UID: ("", "")}),
    ],
)
def test_log_directory_names_are_parsed(entries: list[str], names: dict[str, tuple[str, str]]) -> None:
    assert parse_names(entries) == names


def test_directory_from_the_future_is_read_once(tmp_path: Path) -> None:
    pods = tmp_path / "pods"
    pods.mkdir()
    os.utime(pods, (time.time() + 3600,) * 2)
    listing = Listing(str(pods))
    assert listing.changed() == []
    assert listing.changed() is None


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


def cut(pod: str, container: str, container_id: str) -> str:
    """Return kubelet's link for a container, cut as its ``logSymlink`` cuts it."""
    return f"{pod}_research_{container}-{container_id}"[:251] + ".log"


def test_cut_link_names_its_container(tmp_path: Path) -> None:
    pod, other = "p" * 150, "q" * 150
    (tmp_path / cut(pod, "c" * 52, A)).symlink_to("/nowhere")
    names = ContainerNames(str(tmp_path), str(tmp_path / "none"))
    names.refresh()
    assert names.of(A) == LogName("research", pod, "c" * 52)
    assert names.of("a" * 30 + "b" * 34) is None
    (tmp_path / cut(other, "c" * 52, A)).symlink_to("/nowhere")
    names.refresh()
    assert names.of(A) is None  # the cut id fits two containers
    assert parse_links([f"x_y_z-{A[:38]}.log"]) == {}  # so short that kubelet would not cut it
    assert parse_links([cut(pod, "c" * 79, A)]) == {}  # too little of the id is left


def test_kubelets_containers(tmp_path: Path) -> None:
    links, pods = tmp_path / "containers", tmp_path / "pods"
    names = ContainerNames(str(links), str(pods))
    names.refresh()
    assert "cannot be read" in names.trouble
    assert names.pods.of(UID) == ("", "")
    links.mkdir()
    (pods / f"research_train-0_{UID}").mkdir(parents=True)
    (links / f"train-0_research_main-{A}.log").symlink_to("/nowhere")
    names.refresh()
    assert names.trouble == ""
    assert names.of(A) == LogName("research", "train-0", "main")
    assert names.of(B) is None
    assert (names.has(UID, "main"), names.has(UID, "side"), names.has(STATIC, "main")) == (True, False, False)
    (links / f"train-0_research_side-{B}.log").symlink_to("/nowhere")
    names.refresh()
    assert sorted(names.pairs()) == [(UID, "main"), (UID, "side")]
    links.rename(tmp_path / "gone")
    names.refresh()
    assert names.trouble
    assert not names.has(UID, "main")
    (pods / f"research_train-0_{UID}").rename(pods / f"research_train-1_{UID}")
    names.refresh()
    assert names.pods.of(UID) == ("research", "train-1")
    pods.rename(tmp_path / "away")
    names.refresh()
    assert names.pods.of(UID) == ("", "")
