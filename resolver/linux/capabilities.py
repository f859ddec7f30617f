"""What the daemon may do, cut down to what it needs.

A root daemon starts with everything. Before it listens anywhere it gives up what nothing needs. In effect it keeps
CAP_SYS_PTRACE, to read other processes' mount tables and maps; what it takes to start a source (again) stays permitted
for the children that do it, and nothing that it starts gets more.
Numbers are those of include/uapi/linux/capability.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
from itertools import takewhile

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

#: What each source needs of the daemon itself, and, in `TO_START`, of the children by which it is started (again).
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

_VERSION_3 = 0x20080522
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38


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
    major, _, rest = release.partition(".")
    minor = "".join(takewhile(str.isdecimal, rest))
    old = not (major.isdecimal() and minor) or (int(major), int(minor)) < _FREE_LOOKUPS
    return WHILE_RUNNING[source] | ({"BPF"} if source == "bpf" and old else set())


def held() -> frozenset[str]:
    """Those of `NUMBERS` that this process has in effect."""
    mask = _sets()["CapEff"]
    return frozenset(name for name, number in NUMBERS.items() if mask >> number & 1)


def _sets() -> dict[str, int]:
    """The sets of this process, by their names in ``/proc/self/status``.

    Not from capget(2): AppArmor takes out of its answer what the profile denies, and who sets what that answered has
    given up what he still had, so that nobody can say any more who forbids it.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return {line[:6]: int(line.split()[1], 16) for line in status if line.startswith("Cap")}


def limit(running: frozenset[str], to_start: frozenset[str] = frozenset()) -> None:
    """Keep ``running`` in effect, and beside them ``to_start`` for the programs that this process starts.

    From now on (``no_new_privs``) no program that it starts has more than is permitted here, so what is not kept can
    not come back, and a program that root starts has all that is permitted in effect, also where the starter of this
    process set ``no_new_privs``. With another user than root, programs get those that were ambient before. What is
    not held is not asked for. Raises OSError if the kernel refuses to give up what is held.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header, halves = _Header(_VERSION_3, 0), (_Half * 2)()
    has = _sets()
    keep = {NUMBERS[name] for name in running | to_start}
    for number in range(_last_capability() + 1):
        # Refused without CAP_SETPCAP. No harm: without new privileges the bounding set gives nothing to anybody.
        if (
            number not in keep
            and libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
            and ctypes.get_errno() == errno.EPERM
        ):
            break
    permitted = has["CapPrm"] & sum(1 << number for number in keep)
    effective = permitted & sum(1 << NUMBERS[name] for name in running)
    inheritable = permitted & has["CapInh"]  # what is not is not ambient either
    for index, half in enumerate(halves):
        half.permitted, half.effective, half.inheritable = (
            mask >> 32 * index & 0xFFFFFFFF for mask in (permitted, effective, inheritable)
        )
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.capset(ctypes.byref(header), halves):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _last_capability() -> int:
    try:
        with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 40
