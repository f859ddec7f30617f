"""Runs ``bpf/loader.py``, a child under a Python with ``bcc``, and takes over its descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.base.errors import CannotKnow
from resolver.linux.pidfd import fetch
from resolver.workers.spawn import spawn

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Where the running kernel describes itself.
BTF = "/sys/kernel/btf/vmlinux"
#: An overloaded machine takes its time to compile; nobody waits for it, another source does the work meanwhile.
TIMEOUT = 60.0

_MAX_MESSAGE = 1 << 18
_MAX_DESCRIPTORS = 32


class BpfUnavailable(CannotKnow):
    """The kernel can't keep the map here; ``cause`` and ``detail`` as in ``bpf/loader.py``."""

    def __init__(self, message: str, detail: str = "", cause: str = "other") -> None:
        super().__init__(message)
        self.detail = detail
        self.cause = cause


class Loaded(NamedTuple):
    """Descriptors by name; ``report`` is the loader's answer."""

    maps: dict[str, int]
    programs: dict[str, int]
    links: dict[str, int]
    report: dict[str, Any]

    def close(self) -> None:
        """Close all; the kernel removes programs, maps and links with the last descriptor."""
        for group in (self.links, self.programs, self.maps):
            for fd in group.values():
                os.close(fd)
            group.clear()


def bpf_directory() -> str:
    """Find the directory of ``loader.py``: inside an installed package, next to it in a checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for place in (os.path.join(package, "_bpf"), os.path.join(os.path.dirname(package), "bpf")):
        if os.path.exists(os.path.join(place, "loader.py")):
            return place
    raise BpfUnavailable(
        f"the BPF program is missing: neither {package}/_bpf nor {os.path.dirname(package)}/bpf has it. "
        "Install resolver again, or use --source netlink or scan"
    )


def default_pythons() -> tuple[str, ...]:
    """The distribution's Python, which has ``bcc``, then this one."""
    return tuple(dict.fromkeys(("/usr/bin/python3", sys.executable)))


def load(
    constants: dict[str, int], *, pythons: Sequence[str], btf: str, timeout: float, kept_in: str
) -> Loaded:
    """Run the loader under the first Python with bcc, blocking up to ``timeout`` seconds.

    Raises `BpfUnavailable`, the first Python's if none has bcc.
    """
    request = json.dumps({"sizes": constants, "btf": btf, "kept_in": kept_in}).encode()
    script = os.path.join(bpf_directory(), "loader.py")
    failures = []
    for python in pythons:
        try:
            return _run([python, "-I", script], request, timeout)
        except BpfUnavailable as failure:
            if failure.cause != "bcc":
                raise
            failures.append(failure)
    raise failures[0]


def _run(argv: list[str], request: bytes, timeout: float) -> Loaded:
    try:
        # No variables of ours: BCC takes several of them (BCC_KERNEL_SOURCE, BCC_LINUX_VERSION_CODE).
        process, channel = spawn(argv, environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, quiet=True)
    except OSError as error:
        why = f"the BPF loader failed: {argv[0]} could not be started: {error.strerror}"
        raise BpfUnavailable(why, cause="bcc") from None
    answer, descriptors = None, list[int]()
    try:
        channel.settimeout(timeout)
        with contextlib.suppress(BrokenPipeError):  # it ended already, maybe with an answer
            channel.send(request)
        with contextlib.suppress(ConnectionResetError):  # it ended before it took the request
            message, descriptors, _, _ = socket.recv_fds(
                channel, _MAX_MESSAGE, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            answer = json.loads(message) if message else None
            if answer and "fetch" in answer:
                descriptors = fetch(process.pid, answer["fetch"])
    except TimeoutError:
        raise BpfUnavailable(
            f"the BPF loader was not done within {timeout:g} s and was stopped: the machine is overloaded, or the "
            "compiler hangs; use --source netlink or scan meanwhile"
        ) from None
    except OSError as error:
        raise BpfUnavailable(f"the BPF loader broke off: {error.strerror}") from None
    except ValueError as error:
        raise BpfUnavailable(f"the BPF loader's answer is not JSON: {error}") from None
    finally:
        channel.close()
        process.kill()  # it has nothing more to do
        code = process.wait()
    if answer is None and code == -signal.SIGKILL:
        raise BpfUnavailable(
            "the BPF loader was killed, as a kernel does that is out of memory: compiling takes up to 200 MiB, "
            "of the node and of this control group's limit; use --source netlink or scan meanwhile",
            cause="memory",
        )
    if answer is None:
        raise BpfUnavailable(f"the BPF loader ended with code {code} and gave no answer")
    if "error" in answer:
        raise BpfUnavailable(answer["error"], answer["detail"], answer["cause"])
    return _named(answer, descriptors)


def _named(answer: dict[str, Any], descriptors: list[int]) -> Loaded:
    names = [each["name"] for each in answer["maps"]], answer["programs"], answer["links"]
    named, fds = sum(map(len, names)), iter(descriptors)
    if named != len(descriptors):
        for fd in descriptors:
            os.close(fd)
        raise BpfUnavailable(
            f"the BPF loader named {named} descriptors and sent {len(descriptors)}: the limit of open files "
            "(ulimit -n) may be too low"
        )
    maps, programs, links = ({name: next(fds) for name in some} for some in names)
    return Loaded(maps, programs, links, answer)
