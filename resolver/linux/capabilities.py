"""What the daemon may do, cut down to what it needs.

A root daemon starts with everything. Before it listens anywhere it gives up what no source needs; after its source
runs it keeps CAP_SYS_PTRACE, to read other processes' mount tables and maps, and nothing else. Its children can get no
more than the bounding set, which is cut down too.
Numbers are those of include/uapi/linux/capability.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re

NUMBERS = {
    "DAC_OVERRIDE": 1,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "NET_ADMIN": 12,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "PERFMON": 38,
    "BPF": 39,
}

#: What each source needs of the daemon while it runs, and of the children that it starts (again).
WHILE_RUNNING = {
    "scan": frozenset({"SYS_PTRACE"}),
    "netlink": frozenset({"SYS_PTRACE"}),
    "bpf": frozenset({"SYS_PTRACE"}),
}
#: Before this release a look-up in a BPF map takes CAP_BPF, where ``kernel.unprivileged_bpf_disabled`` is set.
_FREE_LOOKUPS = (5, 19)
TO_START = {
    "scan": frozenset({"SYS_PTRACE"}),
    "netlink": frozenset({"SYS_PTRACE", "NET_ADMIN"}),
    "bpf": frozenset({"SYS_PTRACE", "BPF", "PERFMON"}),
}
#: What a child may need besides to start a source: to enter the host's network namespace, from another one.
CHILDREN_TO_START = {"scan": frozenset[str](), "netlink": frozenset({"SYS_ADMIN"}), "bpf": frozenset[str]()}

_SETPCAP = 1 << NUMBERS["SETPCAP"]
_VERSION_3 = 0x20080522
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Half(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def while_running(source: str, release: str) -> frozenset[str]:
    """What the daemon keeps for a source on a kernel of that release (``uname -r``), beside nothing else."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    old = numbers is None or (int(numbers[1]), int(numbers[2])) < _FREE_LOOKUPS
    return WHILE_RUNNING[source] | ({"BPF"} if source == "bpf" and old else set())


def held() -> frozenset[str]:
    """Those of `NUMBERS` that this process has in effect."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        mask = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    return frozenset(name for name, number in NUMBERS.items() if mask >> number & 1)


def limit(
    running: frozenset[str],
    children: frozenset[str],
    *,
    again: bool = False,
    inherited: frozenset[str] = frozenset(),
) -> None:
    """Keep ``running`` for this process, and let its children have at most ``children``.

    What is not held is not asked for. ``again``: this will be called once more, with fewer for the children, so keep
    what that takes, though not in effect. ``inherited``: those that children go on inheriting if they did before, as
    with another user than root, who has ambient ones or none. Raises OSError if the kernel refuses to give up what
    is held.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header, halves = _Header(_VERSION_3, 0), (_Half * 2)()
    if libc.capget(ctypes.byref(header), halves):
        raise OSError(ctypes.get_errno(), "capget")
    halves[0].effective |= halves[0].permitted & _SETPCAP
    libc.capset(ctypes.byref(header), halves)
    if not inherited:
        libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    keep = {NUMBERS[name] for name in children}
    for number in range(_last_capability() + 1):
        # Refused without CAP_SETPCAP: then whoever started us has already cut the set down, or may not be helped.
        if (
            number not in keep
            and libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
            and ctypes.get_errno() == errno.EPERM
        ):
            break
    mask = sum(1 << NUMBERS[name] for name in running)
    passed_on = sum(1 << NUMBERS[name] for name in inherited)
    for index, half in enumerate(halves):
        kept = half.permitted & (mask >> 32 * index) & 0xFFFFFFFF
        later = half.permitted & _SETPCAP if again and index == 0 else 0
        inheritable = half.inheritable & kept & (passed_on >> 32 * index)  # what is not is not ambient either
        half.effective, half.permitted, half.inheritable = kept, kept | later, inheritable
    if libc.capset(ctypes.byref(header), halves):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def no_new_privileges() -> None:
    """From now on no program that this process starts has more rights than it has."""
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _last_capability() -> int:
    try:
        with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 40
