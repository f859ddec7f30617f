"""Permanent filters of system calls (seccomp(2)), inherited by children.

Refused calls fail with EPERM; another architecture's end the process. Numbers: arch/x86/entry/syscalls/syscall_64.tbl,
include/uapi/asm-generic/unistd.h.
"""

import ctypes
import errno
import os
import struct

_Numbers = dict[str, tuple[int | None, int | None]]


def _numbers(table: str) -> _Numbers:
    rows = (row.split() for row in table.split(","))
    return {name: (int(x86), None if arm == "-" else int(arm)) for name, x86, arm in rows}


#: Programs that only read and report need none of these: they change the kernel, mounts, the clock or other processes.
DANGEROUS = _numbers("""
    acct 163 89, add_key 248 217, adjtimex 159 171, bpf 321 280, chroot 161 51, clock_adjtime 305 266,
    clock_settime 227 112, delete_module 176 106, fanotify_init 300 262, finit_module 313 273, fsconfig 431 431,
    fsmount 432 432, fsopen 430 430, fspick 433 433, init_module 175 105, io_uring_enter 426 426,
    io_uring_register 427 427, io_uring_setup 425 425, ioperm 173 -, iopl 172 -, kcmp 312 272,
    kexec_file_load 320 294, kexec_load 246 104, keyctl 250 219, mount 165 40, mount_setattr 442 442,
    move_mount 429 429, name_to_handle_at 303 264, open_by_handle_at 304 265, open_tree 428 428,
    perf_event_open 298 241, pidfd_getfd 438 438, pivot_root 155 41, process_vm_readv 310 270,
    process_vm_writev 311 271, ptrace 101 117, quotactl 179 60, quotactl_fd 443 443, reboot 169 142,
    request_key 249 218, setdomainname 171 162, sethostname 170 161, setns 308 268, settimeofday 164 170,
    swapoff 168 225, swapon 167 224, syslog 103 116, umount2 166 39, unshare 272 97, userfaultfd 323 282,
    vhangup 153 58
""")
#: Calls of Python and `resolver.workers.writer_child` after loading.
OF_THE_WRITER = _numbers("""
    brk 12 214, clock_gettime 228 113, close 3 57, dup 32 23, exit 60 93, exit_group 231 94, fcntl 72 25,
    fstat 5 80, futex 202 98, getdents64 217 61, getpid 39 172, getrandom 318 278, gettid 186 178, ioctl 16 29,
    lseek 8 62, lstat 6 -, madvise 28 233, mmap 9 222, mprotect 10 226, mremap 25 216, munmap 11 215,
    newfstatat 262 79, openat 257 56, poll 7 -, ppoll 271 73, pread64 17 67, pselect6 270 72, read 0 63,
    readlink 89 -, readlinkat 267 78, recvmsg 47 212, restart_syscall 219 128, rt_sigaction 13 134,
    rt_sigprocmask 14 135, rt_sigreturn 15 139, select 23 -, sendmsg 46 211, sendto 44 206, stat 4 -, statx 332 291,
    tgkill 234 131, write 1 64, writev 20 66
""")

#: By machine: the kernel's name of the architecture (AUDIT_ARCH_*), and the column in the tables.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER = 1
#: All threads of the process get the filter; and kernels before 5.16 need not slow the whole process down, against a
#: danger that only foreign code in it brings.
_FLAGS = 1 | 4  # TSYNC, SPEC_ALLOW

# include/uapi/linux/bpf_common.h and seccomp.h
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
#: Calls of x86-64's 32-bit variant (x32) have numbers from here on, and the same architecture.
_X32 = 0x40000000
_INSTRUCTION = struct.Struct("=HBBI")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def forbid_dangerous(*needed: str) -> bool:
    """Refuse `DANGEROUS` calls from now on, except the needed ones; False without kernel support.

    Takes ``no_new_privs``, or CAP_SYS_ADMIN.
    """
    refused = {name: numbers for name, numbers in DANGEROUS.items() if name not in needed}
    return _install(refused, listed=_REFUSE, others=_ALLOW)


def allow_only(calls: _Numbers) -> bool:
    """Refuse all calls but these; returns as `forbid_dangerous`."""
    return _install(calls, listed=_ALLOW, others=_REFUSE)


def program(numbers: list[int], architecture: int, *, listed: int, others: int) -> bytes:
    """Build the filter: ``listed`` for these calls, else ``others``."""
    count = len(numbers)
    if count > 250:
        raise ValueError("a jump in a filter reaches 255 instructions")
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        # Each comparison jumps over the later ones, and over the return for other calls.
        *((_JUMP_EQUAL, count - index, 0, number) for index, number in enumerate(sorted(numbers))),
        (_RETURN, 0, 0, others),
        (_RETURN, 0, 0, listed),
    ]
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in instructions)


def _install(calls: _Numbers, *, listed: int, others: int) -> bool:
    machine = os.uname().machine
    if machine not in MACHINES:
        return False
    architecture, column = MACHINES[machine]
    numbers = [number for numbers in calls.values() if (number := numbers[column]) is not None]
    text = program(numbers, architecture, listed=listed, others=others)
    given = _Program(len(text) // _INSTRUCTION.size, text)
    libc = ctypes.CDLL(None, use_errno=True)
    done: int = libc.syscall(
        _SYS_SECCOMP[machine], _SET_MODE_FILTER, ctypes.c_ulong(_FLAGS), ctypes.byref(given)
    )
    return done == 0
