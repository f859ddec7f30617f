"""Compiles pidmap.c with BCC, attaches it, seeds it, hands every descriptor to the daemon, and ends.

Standard library and ``bcc`` only, because it may run under another Python than the daemon: the distribution's own,
where ``bcc`` is installed. LLVM lives and dies here. On descriptor 0 is a SOCK_SEQPACKET socket. One request comes::

    {"sizes": {"PROCESSES": 32768, ...}, "btf": "/sys/kernel/btf/vmlinux", "lockdown": "/sys/kernel/security/lockdown"}

and one answer goes, with the descriptors in the order of ``maps``, then ``programs``, then ``links``::

    {"maps": [{"name", "key_size", "value_size", "max_entries"}], "programs": [name], "links": [what is attached],
     "kernel": release, "bcc": version, "milliseconds": {step: number}, "seeded": number of processes}

or ``{"error": a whole sentence, "no_bcc": whether another Python may do better, "detail": for the debug log}``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import socket
import sys
import time
import traceback

TYPE_CHECKING = False  # typing takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any

    from btf import Btf

MAPS = ("processes", "tgids", "namespaces", "tombstones", "graves", "counters")
#: Program to tracepoint. The end first: a process that is known from its beginning must not miss its end.
PROBES = {"on_exit": "sched_process_exit", "on_fork": "sched_process_fork", "on_exec": "sched_process_exec"}
ITERATOR = "bpf_iter__task"

#: -D name: structure and members, the first that the kernel has.
OFFSETS = {
    "TASK_PID": (("task_struct", "pid"),),
    "TASK_TGID": (("task_struct", "tgid"),),
    "TASK_SIGNAL": (("task_struct", "signal"),),
    "TASK_GROUP_LEADER": (("task_struct", "group_leader"),),
    "TASK_THREAD_PID": (("task_struct", "thread_pid"),),
    "TASK_START": (("task_struct", "start_boottime"), ("task_struct", "real_start_time")),  # renamed in 5.5
    "SIGNAL_LIVE": (("signal_struct", "live"),),
    "PID_LEVEL": (("pid", "level"),),
    "PID_NUMBERS": (("pid", "numbers"),),
    "UPID_NR": (("upid", "nr"),),
    "UPID_NS": (("upid", "ns"),),
    "PIDNS_INUM": (("pid_namespace", "ns", "inum"),),
}

_HOST_PIDNS = 0xEFFFFFFC  # PROC_PID_INIT_INO in include/linux/proc_ns.h
_CAP_SYS_ADMIN, _CAP_PERFMON, _CAP_BPF = 21, 38, 39  # include/uapi/linux/capability.h
_RAW_TRACEPOINT, _TRACING = 17, 26  # enum bpf_prog_type
_TRACE_ITER = 28  # enum bpf_attach_type
_PRESENT = 16  # sizeof(struct present)


class LoadError(Exception):
    """Why the map cannot be had here: a whole sentence, and what else is for the debug log."""

    def __init__(self, sentence: str, detail: str = "", *, no_bcc: bool = False) -> None:
        super().__init__(sentence)
        self.detail = detail
        self.no_bcc = no_bcc


class Clock:
    """How long each step took, in milliseconds."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}
        self._began = time.monotonic()

    def step(self, name: str) -> None:
        """What was done since the last step was this."""
        now = time.monotonic()
        self.steps[name] = round((now - self._began) * 1e3, 1)
        self._began = now


def main() -> int:
    """Serve the one request on descriptor 0; always answers, and ends with 0 if it did."""
    die_with_parent()
    channel = socket.socket(fileno=0)
    complaints = os.memfd_create("complaints")
    os.dup2(complaints, 2)  # the compiler and the verifier write there
    descriptors: list[int] = []
    try:
        request = json.loads(channel.recv(1 << 16))
        answer, descriptors = load(request)
    except LoadError as error:
        answer = {"error": str(error), "no_bcc": error.no_bcc, "detail": error.detail}
    except Exception as error:  # noqa: BLE001 - whatever went wrong, the daemon is told, and goes on without
        sentence = f"the BPF loader failed unexpectedly ({type(error).__name__}: {error}); please report it"
        answer = {"error": sentence, "no_bcc": False, "detail": traceback.format_exc()}
    if "error" in answer:
        said = os.pread(complaints, 1 << 15, 0).decode("utf-8", "replace")
        answer["detail"] = (answer["detail"] + said).strip()
    socket.send_fds(channel, [json.dumps(answer).encode()], descriptors)
    os._exit(0)  # not through LLVM's destructors: they take longer than the answer


def die_with_parent() -> None:
    """The daemon may be killed while this works: nothing must stay behind."""
    import ctypes
    import signal

    parent = os.getppid()
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    libc.prctl(15, b"bpf loader")  # PR_SET_NAME
    if os.getppid() != parent:
        os._exit(1)


def load(request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Everything; raises `LoadError`."""
    clock = Clock()
    require_privileges(request["lockdown"])
    offsets = read_offsets(request["btf"])
    clock.step("offsets")
    here = os.path.dirname(os.path.abspath(__file__))
    bcc = import_bcc(os.path.join(here, "include"))
    clock.step("import bcc")
    program = compile_program(bcc, here, {**offsets, **request["sizes"]})
    clock.step("compile")
    functions = load_functions(program)
    clock.step("verify")
    links = attach(bcc, program, functions)
    clock.step("attach")
    seeded = seed(bcc, links[-1])
    clock.step("seed")
    maps = [(name, program[name.encode()]) for name in MAPS]
    answer = {
        "maps": [
            {
                "name": name,
                "key_size": bcc.lib.bpf_table_key_size(program.module, name.encode()),
                "value_size": bcc.lib.bpf_table_leaf_size(program.module, name.encode()),
                "max_entries": bcc.lib.bpf_table_max_entries(program.module, name.encode()),
            }
            for name, _ in maps
        ],
        "programs": list(functions),
        "links": [*PROBES.values(), "iterator"],
        "kernel": platform.release(),
        "bcc": getattr(bcc, "__version__", "unknown"),
        "python": sys.executable,
        "milliseconds": clock.steps,
        "seeded": seeded,
    }
    return answer, [table.map_fd for _, table in maps] + list(functions.values()) + links


def require_privileges(lockdown: str) -> None:
    """Say in time what the kernel would only say as EPERM."""
    if os.stat("/proc/self/ns/pid").st_ino != _HOST_PIDNS:
        raise LoadError(
            "this process is not in the host's PID namespace, where alone the map can be seeded: run it on the host, "
            "or with hostPID: true (Kubernetes) or --pid=host (Docker)"
        )
    with open("/proc/self/uid_map") as file:
        initial = file.read().split() == ["0", "0", "4294967295"]
    if not initial:
        raise LoadError(
            "this process is in a user namespace of its own, and BPF programs need capabilities in the initial one: "
            "run it without a user namespace (Kubernetes: hostUsers: true)"
        )
    held = effective_capabilities()
    if not held >> _CAP_SYS_ADMIN & 1:
        wanted = {"CAP_BPF": _CAP_BPF, "CAP_PERFMON": _CAP_PERFMON}
        missing = [name for name, bit in wanted.items() if not held >> bit & 1]
        if missing:
            raise LoadError(
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: run as root, or give both "
                "(Kubernetes: securityContext.capabilities.add: [BPF, PERFMON])"
            )
    if refusal := refusal_of_bpf():
        raise LoadError(
            f"bpf() is forbidden here ({errno.errorcode[refusal]}), by a seccomp profile or a security module. That of "
            "containerd before 1.7 and Docker before 23 forbids it to everybody but CAP_SYS_ADMIN: take "
            "deploy/seccomp/resolver.json in its place, or use --source netlink or scan"
        )
    try:
        with open(lockdown) as file:
            mode = file.read()
    except OSError:
        return  # no lockdown in this kernel, or securityfs is not mounted: the kernel will say
    if "[confidentiality]" in mode:
        raise LoadError(
            "blocked by kernel lockdown: in the mode confidentiality no BPF program may read kernel memory. Boot with "
            "lockdown=integrity, or use --source netlink or scan"
        )


def refusal_of_bpf() -> int:
    """The error number of a call that the kernel itself answers with EINVAL; 0 if that was the answer."""
    number = {"x86_64": 321, "aarch64": 280}.get(platform.machine())
    if number is None:
        return 0  # what is said later is about the machine
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(number, 0x7FFFFFFF, None, 0)
    return ctypes.get_errno() if ctypes.get_errno() in (errno.EPERM, errno.EACCES, errno.ENOSYS) else 0


def effective_capabilities() -> int:
    """The CapEff mask of this process."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def read_offsets(path: str) -> dict[str, int]:
    """The kernel's own word on where its fields are."""
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        raise LoadError(
            f"the BPF map runs on x86_64 and aarch64, and this is {machine}: use --source netlink or scan"
        )
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from btf import Btf, BtfError

    try:
        with open(path, "rb") as file:
            blob = file.read()
    except OSError as error:
        raise LoadError(
            f"this kernel has no BTF: {path} cannot be read ({error.strerror}). It takes Linux 5.12 or later built "
            "with CONFIG_DEBUG_INFO_BTF=y; use --source netlink or scan until then"
        ) from None
    try:
        btf = Btf(blob)
        found = {name: first_offset(btf, choices) for name, choices in OFFSETS.items()}
        found["UPID_SIZE"] = btf.size("upid")
    except BtfError as error:
        raise LoadError(
            f"this kernel's BTF in {path} is not understood: {error}. Use --source netlink or scan, and report the "
            "kernel"
        ) from None
    return found


def first_offset(btf: Btf, choices: tuple[tuple[str, ...], ...]) -> int:
    """The offset by the first of several names that this kernel knows."""
    from btf import BtfError

    for names in choices[:-1]:
        try:
            return btf.offset(*names)
        except BtfError:
            continue
    return btf.offset(*choices[-1])


def import_bcc(headers: str) -> Any:
    """The module ``bcc``, which is to take the stub headers for the kernel's."""
    # BCC looks for DIRECTORY/include; it reads the variable when it compiles.
    os.environ["BCC_KERNEL_SOURCE"] = os.path.dirname(headers)
    try:
        import bcc
    except (ImportError, OSError) as error:
        raise LoadError(
            "bcc is not installed: apt-get install python3-bpfcc (Debian, Ubuntu) or dnf install python3-bcc (Fedora)",
            f"{sys.executable}: {error}\n",
            no_bcc=True,
        ) from None
    return bcc


def compile_program(bcc: Any, here: str, constants: dict[str, int]) -> Any:
    """C to BPF, and the maps made."""
    flags = [f"-D{name}={value}" for name, value in constants.items()]
    flags += [f"-I{here}", "-Wno-macro-redefined"]
    try:
        return bcc.BPF(src_file=os.path.join(here, "pidmap.c"), cflags=flags)
    except Exception as error:  # noqa: BLE001 - BCC raises no other
        raise refused("the BPF program could not be compiled, or its maps not be made", error) from None


def load_functions(program: Any) -> dict[str, int]:
    """Past the verifier: ``{name: descriptor}``."""
    try:
        found = {name: program.load_func(name.encode(), _RAW_TRACEPOINT).fd for name in PROBES}
        found[ITERATOR] = program.load_func(ITERATOR.encode(), _TRACING, attach_type=_TRACE_ITER).fd
    except Exception as error:  # noqa: BLE001 - BCC raises no other
        raise refused("the kernel did not take the BPF program", error) from None
    return found


def attach(bcc: Any, program: Any, functions: dict[str, int]) -> list[int]:
    """The links, in the order of `PROBES`, and the iterator's last."""
    try:
        for name, tracepoint in PROBES.items():
            program.attach_raw_tracepoint(tracepoint.encode(), name.encode())
    except Exception as error:  # noqa: BLE001 - BCC raises no other
        raise refused("the BPF program could not be attached", error) from None
    links = [program.raw_tracepoint_fds[tracepoint.encode()] for tracepoint in PROBES.values()]
    iterator = bcc.lib.bcc_iter_attach(functions[ITERATOR], None, 0)
    if iterator < 0:
        raise LoadError(
            "the task iterator could not be attached: it takes Linux 5.12 or later, see the debug log"
        )
    return [*links, iterator]


def seed(bcc: Any, iterator: int) -> int:
    """Run over every process there is; returns how many there are."""
    fd = bcc.lib.bcc_iter_create(iterator)
    if fd < 0:
        raise LoadError("the task iterator could not be started, see the debug log")
    size = 0
    try:
        while chunk := os.read(fd, 1 << 16):
            size += len(chunk)
    finally:
        os.close(fd)
    return size // _PRESENT


def refused(what: str, error: Exception) -> LoadError:
    """BCC tells no reason, only that it failed; what it printed goes to the debug log."""
    text = str(error)
    if "super-user" in text or "not permitted" in text:
        what += (
            " (Operation not permitted) although CAP_BPF and CAP_PERFMON are there: a seccomp profile or a security "
            "module forbids the bpf call, or before Linux 5.11 RLIMIT_MEMLOCK is too low"
        )
    else:
        what += f" ({text})"
    return LoadError(
        f"{what}. The debug log has all that was said; use --source netlink or scan", f"{text}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
