"""Has ``bpf/loader.py`` load the BPF program, and takes over what it made.

The loader is a child under whichever Python has ``bcc``; when it is done nothing of BCC and LLVM is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.errors import CannotKnow
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
    """The map cannot be kept by the kernel here; ``str()`` says why. ``detail`` is for the debug log.

    ``cause`` is a word of ``LoadError`` in ``bpf/obstacles.py``.
    """

    def __init__(self, message: str, detail: str = "", cause: str = "other") -> None:
        super().__init__(message)
        self.detail = detail
        self.cause = cause


class Loaded(NamedTuple):
    """What the loader handed over. Descriptors by name; ``report`` is its answer, see ``bpf/loader.py``."""

    maps: dict[str, int]
    programs: dict[str, int]
    links: dict[str, int]
    report: dict[str, Any]

    def close(self) -> None:
        """Give every descriptor back; the kernel takes programs, maps and links apart with the last one."""
        for group in (self.links, self.programs, self.maps):
            for fd in group.values():
                os.close(fd)
            group.clear()


def bpf_directory() -> str:
    """The directory with ``loader.py`` and ``pidmap.c``: inside an installed package, or beside it in a checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for place in (os.path.join(package, "_bpf"), os.path.join(os.path.dirname(package), "bpf")):
        if os.path.exists(os.path.join(place, "loader.py")):
            return place
    raise BpfUnavailable(
        f"the BPF program is missing: neither {package}/_bpf nor {os.path.dirname(package)}/bpf has it. "
        "Install resolver again, or use --source netlink or scan"
    )


def default_pythons() -> tuple[str, ...]:
    """The distribution's Python, where its ``bcc`` is, then our own."""
    return tuple(dict.fromkeys(("/usr/bin/python3", sys.executable)))


def load(
    constants: dict[str, int], *, pythons: Sequence[str], btf: str, timeout: float, kept_in: str
) -> Loaded:
    """Run the loader under the first Python that has bcc; blocks up to ``timeout`` seconds.

    ``kept_in`` is a directory of ours for the compiled program, so that the next start needs no compiler.
    Raises `BpfUnavailable`, with what the first Python said if none has bcc.
    """
    request = json.dumps({"sizes": constants, "btf": btf, "kept_in": kept_in}).encode()
    script = os.path.join(bpf_directory(), "loader.py")
    first: BpfUnavailable | None = None
    for python in pythons:
        answer, descriptors = _ask([python, "-I", script], request, timeout)
        if "error" not in answer:
            return _take(answer, descriptors)
        failure = BpfUnavailable(answer["error"], answer["detail"], answer["cause"])
        if failure.cause != "bcc":
            raise failure
        first = first or failure
    raise first or BpfUnavailable("no Python was given to run the BPF loader")


def _ask(argv: list[str], request: bytes, timeout: float) -> tuple[dict[str, Any], list[int]]:
    try:
        # No variables of ours: BCC takes several of them (BCC_KERNEL_SOURCE, BCC_LINUX_VERSION_CODE).
        process, channel = spawn(argv, environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, quiet=True)
    except OSError as error:
        reason = f"{argv[0]} could not be started: {error.strerror}"
        return {"error": f"the BPF loader failed: {reason}", "cause": "bcc", "detail": ""}, []
    try:
        channel.settimeout(timeout)
        with contextlib.suppress(BrokenPipeError):  # it ended already, maybe with an answer
            channel.send(request)
        message, descriptors, _, _ = socket.recv_fds(
            channel, _MAX_MESSAGE, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except TimeoutError:
        raise BpfUnavailable(
            f"the BPF loader was not done within {timeout:g} s and was stopped: the machine is overloaded, or the "
            "compiler hangs; use --source netlink or scan meanwhile"
        ) from None
    except ConnectionResetError:
        message, descriptors = b"", []  # it ended before it took the request
    except OSError as error:
        raise BpfUnavailable(f"the BPF loader broke off: {error.strerror}") from None
    finally:
        channel.close()
        process.kill()  # it has nothing more to do
        code = process.wait()
    if not message:
        raise BpfUnavailable(f"the BPF loader ended with code {code} and gave no answer")
    try:
        return json.loads(message), list(descriptors)
    except ValueError as error:
        for fd in descriptors:
            os.close(fd)
        raise BpfUnavailable(f"the BPF loader gave an answer that is no JSON: {error}") from None


def _take(answer: dict[str, Any], descriptors: list[int]) -> Loaded:
    maps = [each["name"] for each in answer["maps"]]
    names = [*maps, *answer["programs"], *answer["links"]]
    if len(names) != len(descriptors):
        for fd in descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)
        raise BpfUnavailable(
            f"the BPF loader named {len(names)} descriptors and sent {len(descriptors)}: the limit of open files "
            "(ulimit -n) may be too low"
        )
    fds = iter(descriptors)
    return Loaded(
        maps=dict(zip(maps, fds, strict=False)),
        programs=dict(zip(answer["programs"], fds, strict=False)),
        links=dict(zip(answer["links"], fds, strict=False)),
        report=answer,
    )
