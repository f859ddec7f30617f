"""Runs ``bpf/loader.py``, a child under a Python with ``bcc``, and takes over its descriptors."""

import contextlib
import json
import os
import resource
import signal
import sys
from typing import Any, NamedTuple

from resolver.base.errors import CannotKnow
from resolver.base.source_records import SourceFailure
from resolver.workers.spawn import ask_once

#: The distribution's Python has ``bcc``.
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
#: Where the running kernel describes itself.
BTF = "/sys/kernel/btf/vmlinux"
#: An overloaded machine compiles slowly; another source works meanwhile.
TIMEOUT = 60.0


class BpfUnavailable(CannotKnow):
    """The kernel can't keep the map here; ``cause``, a `SourceFailure`, and ``detail`` as in ``bpf/loader.py``."""

    def __init__(self, why: str, detail: str = "", cause: str = "other") -> None:
        super().__init__(f"{why}: {SourceFailure(cause).for_terminal()[1]}")
        self.why, self.detail, self.cause = why, detail, cause


class Loaded(NamedTuple):
    """Descriptors of maps, programs and links by name; ``report`` is the loader's answer."""

    descriptors: dict[str, int]
    report: dict[str, Any]

    def close(self) -> None:
        """Close all; the kernel removes programs, maps and links with the last descriptor."""
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])


def bpf_directory() -> str:
    """Find the directory of ``loader.py``: inside an installed package, next to it in a checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for place in (os.path.join(package, "_bpf"), os.path.join(os.path.dirname(package), "bpf")):
        if os.path.exists(os.path.join(place, "loader.py")):
            return place
    raise BpfUnavailable(
        f"the BPF program is missing: neither {package}/_bpf nor {os.path.dirname(package)}/bpf has it"
    )


def lift_locked_memory_limit() -> None:
    """Lift the limit that Linux before 5.11 charges maps to, for this process and its children.

    Without SYS_RESOURCE only up to the hard limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    for limit in (hard, resource.RLIM_INFINITY):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))


def load(constants: dict[str, int], kept_in: str) -> Loaded:
    """Run the loader, blocking up to `TIMEOUT` seconds. Raises `BpfUnavailable`."""
    lift_locked_memory_limit()
    argv = [PYTHON, "-I", os.path.join(bpf_directory(), "loader.py")]
    request = json.dumps({"sizes": constants, "btf": BTF, "kept_in": kept_in}).encode()
    # No inherited environment: BCC reads several variables (BCC_KERNEL_SOURCE, BCC_LINUX_VERSION_CODE).
    variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    try:
        answer, descriptors, code = ask_once(argv, request, TIMEOUT, environment=variables, quiet=True)
    except TimeoutError:
        raise BpfUnavailable(
            f"the BPF loader was not done within {TIMEOUT:g} s and was stopped: the machine is overloaded, or the "
            "compiler hangs"
        ) from None
    except OSError as error:
        raise BpfUnavailable(f"the BPF loader ({PYTHON}) failed: {error.strerror}") from None
    except ValueError as error:
        raise BpfUnavailable(f"the BPF loader's answer is not JSON: {error}") from None
    if answer is None and code == -signal.SIGKILL:
        raise BpfUnavailable(
            "the BPF loader was killed, as a kernel does that is out of memory: compiling takes up to 200 MiB, "
            "of the node and of this control group's limit",
            cause="memory",
        )
    if answer is None:
        raise BpfUnavailable(f"the BPF loader ended with code {code} and gave no answer")
    if "error" in answer:
        raise BpfUnavailable(answer["error"], answer["detail"], answer["cause"])
    names = [*(kernel_map["name"] for kernel_map in answer["maps"]), *answer["programs"], *answer["links"]]
    if len(names) != len(descriptors):
        for fd in descriptors:
            os.close(fd)
        raise BpfUnavailable(
            f"the BPF loader named {len(names)} descriptors and sent {len(descriptors)}: the limit of open files "
            "(ulimit -n) may be too low"
        )
    return Loaded(dict(zip(names, descriptors, strict=True)), answer)
