"""Compiles pidmap.c with BCC, attaches it, seeds it, hands every descriptor to the daemon, and ends.

Standard library and ``bcc`` only. One request on descriptor 0 (SOCK_SEQPACKET)::

    {"sizes": {"PROCESSES": 32768, ...}, "btf": "/sys/kernel/btf/vmlinux", "kept_in": "/run/resolver"}

One answer, with the descriptors of ``maps``, ``programs`` and ``links``, in this order::

    {"maps": [{"name", "key_size", "value_size", "max_entries", ...}], "programs": [name], "links": [hook],
     "bcc": version or "kept", "python": path, "seeded": number of processes}

If too many descriptors are in flight, ``fetch`` has their numbers here instead. A failure is
``{"error": sentence, "cause": word, "detail": for the debug log}`` (`LoadError`). ``kept_in`` is the directory of
compiled programs (`image`), or empty.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import socket
import sys
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)  # python -I leaves it out

import image  # noqa: E402
from btf import FUNCTION, TYPEDEF, Btf, BtfError  # noqa: E402
from obstacles import Kernel, LoadError, forbidden, require  # noqa: E402

TYPE_CHECKING = False  # typing takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any

MAPS = ("processes", "namespaces", "counters")
#: Program to tracepoint. The exit probe comes first: a process whose fork is seen must not miss its exit.
PROBES = {"on_exit": "sched_process_exit", "on_fork": "sched_process_fork", "on_exec": "sched_process_exec"}
ITERATOR = "bpf_iter__task"

#: -D name: structure and member, or its names from newer to older kernels.
OFFSETS = {
    "TASK_TGID": ("task_struct", "tgid"),
    "TASK_SIGNAL": ("task_struct", "signal"),
    "TASK_GROUP_LEADER": ("task_struct", "group_leader"),
    "TASK_THREAD_PID": ("task_struct", "thread_pid"),
    "TASK_START": ("task_struct", "start_boottime"),
    "TASK_STATE": ("task_struct", "__state", "state"),
    "SIGNAL_LIVE": ("signal_struct", "live"),
    "PID_LEVEL": ("pid", "level"),
    "PID_NUMBERS": ("pid", "numbers"),
    "UPID_NR": ("upid", "nr"),
    "UPID_NS": ("upid", "ns"),
    "PIDNS_INUM": ("ns_common", "inum"),
}

_MOST_WORDS = 1 << 15


def main() -> int:
    """Answer the request on descriptor 0."""
    die_with_parent()
    channel = socket.socket(fileno=0)
    complaints = os.memfd_create("complaints")
    os.dup2(complaints, 2)  # the compiler and the verifier write there
    descriptors: list[int] = []
    try:
        request = json.loads(channel.recv(1 << 16))
        answer, descriptors = load(request)
    except LoadError as error:
        answer = {"error": str(error), "cause": error.cause, "detail": error.detail}
    except Exception as error:  # noqa: BLE001 - whatever went wrong, it is reported to the daemon, which goes on without
        sentence = f"the BPF loader failed unexpectedly ({type(error).__name__}: {error})"
        answer = {"error": sentence, "cause": "other", "detail": traceback.format_exc()}
    if "error" in answer:
        start = max(0, os.fstat(2).st_size - _MOST_WORDS)
        complaint = os.pread(2, _MOST_WORDS, start).decode("utf-8", "replace")
        answer["detail"] = (answer["detail"] + complaint).strip()
    hand_over(channel, answer, descriptors)
    os._exit(0)  # not through LLVM's destructors: they take longer than the answer


def hand_over(channel: socket.socket, answer: dict[str, Any], descriptors: list[int]) -> None:
    """Answer with descriptors, or their numbers."""
    try:
        socket.send_fds(channel, [json.dumps(answer).encode()], descriptors)
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        channel.send(json.dumps({**answer, "fetch": descriptors}).encode())
        channel.recv(1)  # the daemon closes its end when it has them


def die_with_parent() -> None:
    """End with the daemon, even if killed."""
    import ctypes
    import signal

    parent = os.getppid()
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    libc.prctl(15, b"bpf loader")  # PR_SET_NAME
    if os.getppid() != parent:
        os._exit(1)


def load(request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Load a kept program, or compile one. Raises `LoadError`."""
    require(Kernel())
    offsets, hooks = read_btf(request["btf"])
    constants = {**offsets, **request["sizes"]}
    mark = image.fingerprint(HERE, constants)
    try:
        if request["kept_in"]:
            return from_image(image.find(request["kept_in"], mark))
    except image.ImageError as why:
        sys.stderr.write(f"no kept program: {why}\n")  # for the debug log, if compiling fails too
    bcc = import_bcc(os.path.join(HERE, "include"))
    made = image.image_of(compile_program(bcc, constants), MAPS, hooks, ITERATOR)
    try:
        answer, descriptors = from_image(made)
    except image.Refused as refused:
        raise not_taken(refused) from None
    answer["bcc"] = getattr(bcc, "__version__", "unknown")
    if request["kept_in"]:
        try:
            image.save(request["kept_in"], mark, made)
        except (OSError, image.ImageError) as error:
            sys.stderr.write(f"the program is not kept: {error}\n")
    return answer, descriptors


def from_image(kept: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Load, attach and seed. Raises `image.ImageError`, leaving nothing behind."""
    loaded = image.Loaded(Kernel(), kept)
    try:
        with open(Kernel().iterate(loaded.links[-1]), "rb", buffering=0) as present:
            seeded = len(present.read())
    except OSError as error:
        loaded.close()
        raise image.Refused("the iterator's run", error.errno) from None
    answer = {
        "maps": kept["maps"],
        "programs": list(loaded.programs),
        "links": [*PROBES.values(), "iterator"],
        "bcc": "kept",
        "python": sys.executable,
        "seeded": seeded,
    }
    return answer, [*loaded.maps.values(), *loaded.programs.values(), *loaded.links]


def read_btf(path: str) -> tuple[dict[str, int], dict[str, int]]:
    """Read field offsets, and each program's hook: a BTF id, which tells the verifier argument types."""
    try:
        with open(path, "rb") as file:
            blob = file.read()
    except OSError as error:
        raise LoadError("btf", f"this kernel has no BTF: {path} cannot be read ({error.strerror})") from None
    try:
        btf = Btf(blob)
        offsets = {name: btf.offset(*names) for name, names in OFFSETS.items()}
        offsets["PIDNS_INUM"] += btf.offset("pid_namespace", "ns")
        offsets |= {"UPID_SIZE": btf.size("upid"), "PID_SIZE": btf.size("pid")}
        traced = {name: btf.type_id(TYPEDEF, f"btf_trace_{hook}") for name, hook in PROBES.items()}
        traced[ITERATOR] = btf.type_id(FUNCTION, f"bpf_iter_{ITERATOR.removeprefix('bpf_iter__')}")
    except BtfError as error:
        raise LoadError("other", f"this kernel's BTF is not understood: {error}") from None
    return offsets, traced


def import_bcc(headers: str) -> Any:
    """Import ``bcc`` with stub headers for the kernel's."""
    # BCC looks for DIRECTORY/include; it reads the variable when it compiles.
    os.environ["BCC_KERNEL_SOURCE"] = os.path.dirname(headers)
    try:
        import bcc
        from bcc import BPF  # noqa: F401 - an empty directory called bcc can be imported, too
    except (ImportError, OSError) as error:
        raise LoadError("bcc", "bcc is not installed", f"{sys.executable}: {error}\n") from None
    return bcc


def compile_program(bcc: Any, constants: dict[str, int]) -> Any:
    """Compile, and make the maps. BCC prints reasons of failure."""
    flags = [f"-D{name}={value}" for name, value in constants.items()]
    flags += [f"-I{HERE}", "-Wno-macro-redefined"]
    try:
        return bcc.BPF(src_file=os.path.join(HERE, "pidmap.c"), cflags=flags)
    except Exception as error:  # noqa: BLE001 - BCC raises no other
        if "super-user" in str(error) or "not permitted" in str(error):
            raise forbidden(Kernel(), errno.EPERM, reached=True) from None
        raise LoadError(
            "other",
            f"the BPF program could not be compiled, or its maps not be made ({error})",
            f"{error}\n",
        ) from None


def not_taken(refused: image.Refused) -> LoadError:
    """Build the error for a refused program; those of `obstacles` were accepted."""
    call, reason = refused.what, os.strerror(refused.code)
    if re.search(r"^processed \d+ insns", refused.log, re.MULTILINE):
        return LoadError(
            "verifier",
            f"the kernel's verifier refused the BPF program ({call}: {reason}): to Linux {platform.release()} it "
            "does not look safe. Rights do not change that",
            refused.log[-_MOST_WORDS:],
        )
    if refused.code == errno.EPERM:
        return forbidden(Kernel(), errno.EPERM, reached=True)
    return LoadError(
        "other",
        f"the kernel did not take the BPF program ({call}: {reason})",
        refused.log[-_MOST_WORDS:],
    )


if __name__ == "__main__":
    sys.exit(main())
