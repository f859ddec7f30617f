"""The driver probe's parts that need no container: what it leaves in sight, what it asks, how it listens."""

from __future__ import annotations

import os
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from resolver.linux.mounts import Mount
from resolver.workers.driver_probe import _read, ask, unneeded
from tests.patience import PATIENCE_S


def mounts(*points: str) -> list[Mount]:
    return [Mount(number, "0:1", "/", point, "ext4", "") for number, point in enumerate(points)]


def test_what_nvml_needs_stays_in_sight_and_nothing_else() -> None:
    table = mounts(
        "/",
        "/proc",
        "/proc/driver/nvidia",
        "/sys",
        "/sys/fs/cgroup",
        "/dev",
        "/dev/nvidia0",
        "/usr",
        "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
        "/etc",
        "/run/nvidia/driver",
        "/run/nvidia/driver/usr/lib64",
        # not the tenant's business
        "/etc/resolv.conf",
        "/var/lib/kubelet/pods/0b6e/volumes/secret",
        "/var/lib/kubelet",
        "/usr/local/vgpu",
        "/run",
        "/home",
        "/libellous",
        "/develop",
    )
    gone = unneeded(table, "/run/nvidia/driver/usr/lib64:")
    assert gone == [
        "/var/lib/kubelet/pods/0b6e/volumes/secret",
        "/etc/resolv.conf",
        "/var/lib/kubelet",
        "/usr/local/vgpu",
        "/libellous",
        "/develop",
        "/home",
    ]
    assert "/run" in unneeded(table, "")
    assert "/run/nvidia/driver" in unneeded(table, "")


class Error(Exception):
    pass


def library(*, fail: bool = False) -> Any:
    def init() -> None:
        if fail:
            raise Error("Insufficient Permissions")

    return SimpleNamespace(nvmlInit=init, NVMLError=Error)


class Nvml:
    def __init__(self, **told: Any) -> None:
        self.told = {"status": "ok", "samples": [[7, 1, 30], [9, 2, 4], [7, 3, 31]]} | told
        self.asked: list[tuple[str, int]] = []

    def samples(self, uuid: str, since: int) -> dict[str, Any]:
        self.asked.append((uuid, since))
        if "error" in self.told:
            raise Error(self.told["error"])
        return self.told


def seen_by(nvml: Nvml, **options: bool) -> dict[str, Any]:
    it: Any = nvml
    return ask(it, library(**options), ["GPU-1"], 123)


def test_it_tells_numbers_and_no_more() -> None:
    nvml = Nvml()
    assert seen_by(nvml) == {"seen": {"GPU-1": [7, 9]}}
    assert nvml.asked == [("GPU-1", 123)]


def test_what_nvml_does_not_tell_is_not_empty() -> None:
    assert seen_by(Nvml(status="unsupported", samples=[])) == {"seen": {"GPU-1": None}}


def test_an_nvml_that_does_not_start_is_told_from_one_that_fails() -> None:
    assert seen_by(Nvml(), fail=True) == {
        "failed": "NVML says there: Insufficient Permissions",
        "init": True,
    }
    assert seen_by(Nvml(error="GPU is lost")) == {"failed": "NVML says there: GPU is lost", "init": False}


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        (b'{"seen":{}}', b'{"seen":{}}'),
        (b'{"seen":', b""),  # killed in the middle
        (b"", b""),
    ],
    ids=["whole", "half", "nothing"],
)
def test_half_an_answer_is_none(written: bytes, answer: bytes) -> None:
    read_end, write_end = os.pipe()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        os.write(write_end, written)
        os.close(write_end)
        assert _read(read_end, theirs, time.monotonic() + PATIENCE_S) == answer
    os.close(read_end)


def test_who_says_nothing_is_late_and_a_daemon_that_goes_is_not_waited_for() -> None:
    read_end, write_end = os.pipe()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        assert _read(read_end, theirs, time.monotonic() + 0.05) is None
        ours.close()
        began = time.monotonic()
        assert _read(read_end, theirs, began + 1000) is None
        assert time.monotonic() - began < PATIENCE_S
    for fd in (read_end, write_end):
        os.close(fd)
