"""Questions for a lane: functions that answer, wait or fail."""

import time

from resolver.base.errors import ProcessGone, RegionRejected
from resolver.base.reasons import RegionReason
from resolver.linux.procfs import Procfs


def echo(_procfs: Procfs, said: str) -> str:
    return said


def wait(_procfs: Procfs, seconds: float) -> str:
    """Answer late, as when a tenant holds a lock."""
    time.sleep(seconds)
    return "waited"


def burn(_procfs: Procfs, seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def fail(_procfs: Procfs, how: str) -> None:
    raise {
        "gone": ProcessGone("it ended"),
        "rejected": RegionRejected(RegionReason.GONE, "it went"),
        "kernel": PermissionError(13, "Permission denied"),
        "defect": ZeroDivisionError(),
        "long": RuntimeError("x" * 400_000),
    }[how]
