"""What one look proves, and what the file of an earlier daemon may say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resolver.config import HostpidNamespace
from resolver.hami.driver_memory import DriverMemory, Subject, judge

HOST, CONTAINER = HostpidNamespace.HOST, HostpidNamespace.CONTAINER
GPU, OTHER = "GPU-1", "GPU-2"
FIRST, SECOND = Subject(4711, 7, GPU), Subject(4712, 8, GPU)
BOOT = "6f3c2f0e-4ad1-4f61-9a8e-6f6f0a3f2b11"


@pytest.mark.parametrize(
    ("subjects", "seen", "namespace", "why"),
    [
        ([FIRST], {GPU: {4711}}, HOST, ""),
        ([FIRST], {GPU: {7}}, CONTAINER, ""),
        ([FIRST, SECOND], {GPU: {4711, 4712, 999}}, HOST, ""),
        ([FIRST, SECOND], {GPU: {4711}}, HOST, ""),  # of the other nothing is learnt
        ([FIRST], {GPU: set()}, None, "neither number of 1 busy"),
        ([FIRST, SECOND], {GPU: {1, 2}}, None, "neither number of 2 busy"),
        ([FIRST], {GPU: {7, 4711}}, None, "both numbers of process 4711 (7 inside)"),
        ([FIRST, SECOND], {GPU: {4711, 8}}, None, "of others their own"),
        ([FIRST], {OTHER: {4711}}, None, "neither"),  # another device's samples prove nothing
        ([FIRST], {}, None, "neither"),
        ([], {GPU: {4711}}, None, "neither"),
    ],
)
def test_what_a_look_proves(
    subjects: list[Subject], seen: dict[str, set[int]], namespace: HostpidNamespace | None, why: str
) -> None:
    verdict = judge(subjects, seen)
    assert verdict.namespace is namespace
    assert why in verdict.why
    assert bool(verdict.why) == (namespace is None)


@given(
    st.lists(st.tuples(st.integers(1000, 1010), st.integers(1, 10)), min_size=1, max_size=4),
    st.sets(st.one_of(st.integers(1, 12), st.integers(1000, 1012))),
)
def test_no_verdict_is_against_what_was_seen(pairs: list[tuple[int, int]], seen: set[int]) -> None:
    verdict = judge([Subject(host_pid, ns_pid, GPU) for host_pid, ns_pid in pairs], {GPU: seen})
    if verdict.namespace is not None:
        right, wrong = (0, 1) if verdict.namespace is HOST else (1, 0)
        assert any(pair[right] in seen for pair in pairs)
        assert not any(pair[wrong] in seen for pair in pairs)


def test_what_was_measured_is_known_after_a_restart(tmp_path: Path) -> None:
    DriverMemory(str(tmp_path), BOOT).put("535.183.01", HOST)
    again = DriverMemory(str(tmp_path), BOOT)
    assert again.get("535.183.01") is HOST
    assert again.get("570.86.15") is None
    again.put("570.86.15", CONTAINER)
    assert again.get("535.183.01") is HOST  # as long as this daemon runs
    assert DriverMemory(str(tmp_path), BOOT).get("535.183.01") is None
    assert DriverMemory(str(tmp_path), BOOT).get("570.86.15") is CONTAINER
    assert Path(again.path).stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["driver-truth.json"]


def test_another_boot_knows_nothing(tmp_path: Path) -> None:
    DriverMemory(str(tmp_path), BOOT).put("535.183.01", HOST)
    assert DriverMemory(str(tmp_path), BOOT.replace("6", "7")).get("535.183.01") is None
    assert DriverMemory(str(tmp_path)).get("535.183.01") is None
    DriverMemory(str(tmp_path)).put("weird", CONTAINER)  # this boot is the kernel's
    assert DriverMemory(str(tmp_path)).get("weird") is CONTAINER


def content(**changes: object) -> dict[str, object]:
    return {
        "format": 1,
        "boot_id": BOOT,
        "driver_version": "535.183.01",
        "hostpid_namespace": "host",
    } | changes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\0" * 100,
        "[" * 4000,
        json.dumps(content(hostpid_namespace="auto")),
        json.dumps(content(hostpid_namespace=None)),
        json.dumps(content(hostpid_namespace=["host"])),
        json.dumps(content(driver_version=535)),
        json.dumps(content(format=2)),
        json.dumps(content(format="1")),
        json.dumps(content(boot_id="")),
        json.dumps(content(boot_id=None)),
        json.dumps(content(more=1)),
        json.dumps({"driver_version": "535.183.01", "hostpid_namespace": "host"}),
        json.dumps(content()) + " " * 5000,
    ],
)
def test_a_file_that_is_not_just_so_was_never_there(tmp_path: Path, text: str) -> None:
    path = tmp_path / "driver-truth.json"
    path.write_text(text)
    path.chmod(0o600)
    memory = DriverMemory(str(tmp_path), BOOT)
    assert memory.get("535.183.01") is None
    memory.put("535.183.01", CONTAINER)
    assert DriverMemory(str(tmp_path), BOOT).get("535.183.01") is CONTAINER


def test_a_file_that_others_can_write_or_put_there_is_not_believed(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "driver-truth.json", tmp_path / "elsewhere"

    def believed() -> bool:
        return DriverMemory(str(tmp_path), BOOT).get("535.183.01") is not None

    path.write_text(json.dumps(content()))
    path.chmod(0o600)
    assert believed()
    for mode in (0o644, 0o620, 0o602, 0o666):
        path.chmod(mode)
        assert not believed()
    path.chmod(0o600)
    os.chown(path, 65534, 0)
    assert not believed()
    os.chown(path, 0, 0)
    os.link(path, elsewhere)
    assert not believed()
    path.unlink()
    path.symlink_to(elsewhere)
    assert not believed()
    path.unlink()
    os.mkfifo(path, 0o600)
    assert not believed()
    path.unlink()
    path.mkdir()
    assert not believed()


def test_what_cannot_be_written_down_is_known_all_the_same(tmp_path: Path) -> None:
    memory = DriverMemory(str(tmp_path / "missing"), BOOT)
    with pytest.raises(FileNotFoundError):
        memory.put("535.183.01", HOST)
    assert memory.get("535.183.01") is HOST


def test_a_name_that_somebody_took_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "driver-truth.json.new").symlink_to(victim)
    DriverMemory(str(tmp_path), BOOT).put("535.183.01", HOST)
    assert victim.read_text() == "precious"
    assert DriverMemory(str(tmp_path), BOOT).get("535.183.01") is HOST
