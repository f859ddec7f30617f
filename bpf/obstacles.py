"""Obstacles to loading the BPF map, found before compiling.

Small programs probe the kernel: neither a release nor a file shows a vendor's backports. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence

_SYSCALL_NUMBERS = {"x86_64": 321, "aarch64": 280}
_HOST_PIDNS = 0xEFFFFFFC  # PROC_PID_INIT_INO in include/linux/proc_ns.h
# include/uapi/linux/capability.h
_CAP_SYS_ADMIN, _NEEDED = 21, {"CAP_BPF": 39, "CAP_PERFMON": 38}
# enum bpf_cmd and bpf_prog_type in include/uapi/linux/bpf.h
_PROG_LOAD, _ITER_CREATE, _RAW_TRACEPOINT = 5, 33, 17
_PROBE_READ_KERNEL, _SEQ_WRITE = 113, 127  # enum bpf_func_id
# More than a page is refused with E2BIG before anything else is checked (kernel/bpf/syscall.c).
_TOO_LARGE = 1 << 20
_LOG_SIZE = 1 << 14

Instruction = tuple[int, int, int, int, int]  # code, destination, source, offset, immediate
_END: tuple[Instruction, ...] = ((0xB7, 0, 0, 0, 0), (0x95, 0, 0, 0, 0))  # r0 = 0; exit
#: Always refused, because only iterators may call this helper; a kernel with iterators knows its number.
_ITERATES = ((0x85, 0, 0, 0, _SEQ_WRITE), *_END)
_UNKNOWN_NUMBER = "invalid func"
#: r1 = r10 - 8; r2 = 8; r3 = 0; bpf_probe_read_kernel(r1, r2, r3)
_READ = (
    *((0xBF, 1, 10, 0, 0), (0x07, 1, 0, 0, -8), (0xB7, 2, 0, 0, 8), (0xB7, 3, 0, 0, 0)),
    *((0x85, 0, 0, 0, _PROBE_READ_KERNEL), *_END),
)


class LoadError(Exception):
    """Reason why the map can't be loaded. ``detail`` is for the debug log; `SourceFailure` has each cause's fix.

    ``cause`` is one of ``place`` (a namespace), ``rights``, ``seccomp``, ``module`` (AppArmor, SELinux and the like),
    ``kernel``, ``lockdown``, ``btf``, ``bcc``, ``verifier``, ``other``.
    """

    def __init__(self, cause: str, sentence: str, detail: str = "") -> None:
        super().__init__(sentence)
        self.cause = cause
        self.detail = detail


class Kernel:
    """Running kernel's ``bpf(2)``, and this process's state."""

    def __init__(self) -> None:
        self.release, self.machine = platform.release(), platform.machine()

    def call(self, command: int, attributes: bytes, size: int) -> int:
        """Descriptor, or a negative error number."""
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.syscall(_SYSCALL_NUMBERS[self.machine], command, attributes, ctypes.c_uint(size))
        return int(fd) if fd >= 0 else -ctypes.get_errno()

    def refusal(self, program: Sequence[Instruction]) -> tuple[int, str]:
        """Load a tracepoint's program; return error number and verifier's words."""
        code = b"".join(
            struct.pack("=BBhi", code, destination | source << 4, offset, immediate)
            for code, destination, source, offset, immediate in program
        )
        instructions = ctypes.create_string_buffer(code, len(code))
        licence = ctypes.create_string_buffer(b"GPL")
        log = ctypes.create_string_buffer(_LOG_SIZE)
        attributes = struct.pack(
            "=IIQQIIQII",
            *(_RAW_TRACEPOINT, len(program), ctypes.addressof(instructions), ctypes.addressof(licence)),
            *(1, _LOG_SIZE, ctypes.addressof(log), 0, 0),
        )
        fd = self.call(_PROG_LOAD, attributes, len(attributes))
        if fd >= 0:
            os.close(fd)
            return 0, ""
        return -fd, log.value.decode("utf-8", "replace")

    def iterate(self, link: int) -> int:
        """Descriptor that runs a link's iterator when read. Raises OSError."""
        fd = self.call(_ITER_CREATE, struct.pack("=II", link, 0), 8)
        if fd < 0:
            raise OSError(-fd, os.strerror(-fd))
        return fd

    def filtered(self) -> bool:
        return _own_status().get("Seccomp") == "2"

    def confinement(self) -> str:
        try:
            with open("/proc/self/attr/current") as file:
                label = file.read().strip("\0\n ")
        except OSError:
            return ""
        return "" if label == "unconfined" else label


def require(kernel: Kernel) -> None:
    """Raise `LoadError` for the first obstacle: place, rights, a filter, the kernel's age, lockdown."""
    if kernel.machine not in _SYSCALL_NUMBERS:
        raise LoadError("kernel", f"the BPF map runs on x86_64 and aarch64, and this is {kernel.machine}")
    if os.stat("/proc/self/ns/pid").st_ino != _HOST_PIDNS:
        why = "this process is not in the host's PID namespace, where alone the map can be seeded"
        raise LoadError("place", why)
    with open("/proc/self/uid_map") as file:
        initial = file.read().split() == ["0", "0", "4294967295"]
    if not initial:
        raise LoadError(
            "place",
            "this process is in a separate user namespace, and BPF programs need capabilities in the initial one",
        )
    held = int(_own_status().get("CapEff", "0"), 16)
    missing = [name for name, bit in _NEEDED.items() if not held >> bit & 1]
    if missing and not held >> _CAP_SYS_ADMIN & 1:
        raise LoadError("rights", f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    require_kernel(kernel)


def require_kernel(kernel: Kernel) -> None:
    """Require that the kernel loads programs with the map's instructions."""
    reached = -kernel.call(_PROG_LOAD, b"", _TOO_LARGE)
    if reached in (errno.EPERM, errno.EACCES) or (reached == errno.ENOSYS and kernel.filtered()):
        raise forbidden(kernel, reached, reached=False)
    if reached == errno.ENOSYS:
        raise LoadError("kernel", f"this kernel ({kernel.release}) was built without bpf()")
    code, log = kernel.refusal(_END)
    if code in (errno.EPERM, errno.EACCES):
        raise forbidden(kernel, code, reached=True)
    if code:
        raise LoadError(
            "kernel",
            f"this kernel ({kernel.release}) takes no BPF program for tracepoints ({os.strerror(code)}): it is older "
            "than Linux 4.17, or built without CONFIG_BPF_EVENTS",
            log,
        )
    _, log = kernel.refusal(_ITERATES)
    if _UNKNOWN_NUMBER in log:
        why = f"this kernel ({kernel.release}) lacks BPF iterators, which Linux has since 5.8"
        raise LoadError("kernel", why, log)
    code, log = kernel.refusal(_READ)
    if code:
        raise LoadError(
            "lockdown",
            "blocked by kernel lockdown: in the mode confidentiality no BPF program may read kernel memory",
            log,
        )


def forbidden(kernel: Kernel, code: int, *, reached: bool) -> LoadError:
    """Find the cause of a refusal despite the capabilities. ``reached``: the call passed any filter."""
    error_name, profile = errno.errorcode.get(code, str(code)), kernel.confinement()
    holder = f"the security module that holds this process to {profile!r}"
    if reached or not kernel.filtered():
        either = "a security module, or before Linux 5.11 by the limit on locked memory (CAP_SYS_RESOURCE raises it)"
        sentence = f"BPF programs are forbidden here ({error_name}), although the capabilities are there, by "
        return LoadError("module", sentence + (holder if profile else either))
    # Before Linux 5.19 the kernel asked the security module for the capability first.
    cause = "the seccomp filter of this process" + (f", or by {holder}" if profile else "")
    return LoadError("seccomp", f"bpf() is forbidden here ({error_name}) by {cause}")


def _own_status() -> dict[str, str]:
    with open("/proc/self/status") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
