"""Lane: a child for system calls that a tenant can delay; the daemon may abandon a child that hangs in one.

Questions name a function of this package and its arguments after `Procfs`. Wire format (SOCK_SEQPACKET, JSON, answers
in order)::

    ["resolver.linux.mappings:maps_file", 4711, "8:1", 1234]
    [0.00021, 0.0002, "", true]                  wall-clock and CPU seconds; no error; result
    [0.00003, 0.00003, "ProcessGone", ["..."]]   a `resolver.base.errors` error, its arguments
"""

import errno
import json
import os
import signal
import socket
import time
from collections import deque
from importlib import import_module
from typing import Any

from resolver.base.errors import AccessDenied, CannotKnow, ProcessGone, RegionRejected
from resolver.linux import seccomp
from resolver.linux.procfs import Procfs, TooLarge, run_delay
from resolver.linux.safe_open import let_go
from resolver.workers.child import LACKING

#: Files kept open until the daemon has them: those of the last answers, with at most a third of the descriptors.
_held: deque[int] = deque()
_MOST_HELD = min(64, os.sysconf("SC_OPEN_MAX") // 3)
#: Questions about mount tables, which take one lock for the machine (namespace_sem).
ALL = ""
#: Questions about leases and file locks (file_rwsem).
LEASES = "leases"
#: Bytes; a region of 1,024 slots and 16 devices takes 193,100. Channels have a larger buffer.
MAX_ANSWER = 250_000
#: CPU seconds for one question of this lane; 0 is no limit.
_most_seconds = 0.0


class TooCostly(BaseException):
    """The question took longer than this lane's limit. As a BaseException, it passes a function's error handlers."""


class OpenFile:
    """Descriptor in an answer; the daemon gets a path to open."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd


def _offer(value: Any) -> Any:
    """Keep an open file while the daemon may open it, and return its path; lists of sequences."""
    if not isinstance(value, OpenFile):
        return list(value)
    _held.append(value.fd)
    if len(_held) > _MOST_HELD:
        let_go(_held.popleft())
    return f"/proc/{os.getpid()}/fd/{value.fd}"


def awake() -> float:
    """Seconds on the clock, less those for which this process was ready and had no CPU."""
    return time.monotonic() - run_delay("self")


def main() -> int:
    """Answer until the socket closes."""
    seccomp.forbid_dangerous()
    signal.signal(signal.SIGPROF, _stop)
    channel = socket.socket(fileno=os.dup(0))
    procfs = Procfs()
    while message := channel.recv(1 << 18):
        began, used = awake(), time.thread_time()
        error, value = answer(procfs, json.loads(message))
        took = awake() - began, time.thread_time() - used
        text = json.dumps([*took, error, value], default=_offer).encode()
        if len(text) > MAX_ANSWER:
            why = f"the answer of {len(text)} bytes is longer than {MAX_ANSWER}, which is as much as is taken"
            text = json.dumps([*took, "TooLarge", [why]]).encode()
        channel.send(text)
    return 0


def _stop(*_: object) -> None:
    raise TooCostly


def load(_procfs: Procfs, seconds: float, *modules: str) -> None:
    """Import the modules of later questions, and allow each question so many CPU seconds."""
    global _most_seconds  # noqa: PLW0603 - a setting of this process
    for module in modules:
        import_module(module)
    _most_seconds = seconds


def answer(procfs: Procfs, question: list[Any]) -> tuple[str, Any]:
    """Call the function: an empty string and result, or an error's name and arguments."""
    name, *arguments = question
    module, _, function = name.partition(":")
    try:
        call = getattr(import_module(module), function)
        signal.setitimer(signal.ITIMER_PROF, _most_seconds)
        try:
            return "", call(procfs, *arguments)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except RegionRejected as why:
        cause = why.__context__
        if isinstance(cause, OSError) and cause.errno in LACKING:  # no file is to blame
            return "OSError", [cause.errno, cause.strerror]
        return "RegionRejected", [why.reason, why.detail]
    except (AccessDenied, ProcessGone, TooLarge, CannotKnow, TooCostly) as error:
        return type(error).__name__, [str(error)]
    except OSError as error:
        return "OSError", [error.errno or errno.EIO, error.strerror or str(error)]
    except Exception as error:  # noqa: BLE001 - a defect, or a tenant's doing: fails this answer only
        return "WorkerFailed", [f"{name} failed: {error!r}"]
