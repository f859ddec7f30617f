"""The daemon's capabilities, reduced before it listens.

Those for starting a source stay permitted, for its children.
"""

import ctypes
import os
import struct

from resolver.base.errors import CannotKnow

#: From include/uapi/linux/capability.h.
NUMBERS = {
    "DAC_OVERRIDE": 1,
    "SETPCAP": 8,
    "NET_ADMIN": 12,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SYS_RESOURCE": 24,
    "PERFMON": 38,
    "BPF": 39,
}

_VERSION_3 = 0x20080522
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38


def held() -> frozenset[str]:
    """Return the effective `NUMBERS`."""
    mask = sets()["CapEff"]
    return frozenset(name for name, number in NUMBERS.items() if mask >> number & 1)


# A line: 'CapEff:\t000001ffffffffff'
def sets() -> dict[str, int]:
    """Capability sets of this process.

    Under AppArmor, capget(2) hides denied ones; setting its answer would drop them for good.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return {line[:6]: int(line.split()[1], 16) for line in status if line.startswith("Cap")}
    except OSError as error:
        raise CannotKnow(
            f"/proc/self/status cannot be read ({error.strerror}): mount -t proc proc /proc"
        ) from None


def limit(running: frozenset[str], to_start: frozenset[str] = frozenset()) -> None:
    """Keep ``running`` effective, ``to_start`` permitted for children; set `no_new_privs`.

    Capabilities that aren't held are ignored. Raises OSError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    has = sets()
    keep = {NUMBERS[name] for name in running | to_start}
    for number in range(64):
        # Refused without CAP_SETPCAP (EPERM): without new privileges the bounding set gives nothing. EINVAL: the end.
        if number not in keep and libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0):
            break
    permitted = has["CapPrm"] & sum(1 << number for number in keep)
    effective = permitted & sum(1 << NUMBERS[name] for name in running)
    inheritable = permitted & has["CapInh"]  # a right that is not inheritable can't be ambient
    words = [right >> half & 0xFFFFFFFF for half in (0, 32) for right in (effective, permitted, inheritable)]
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.capset(struct.pack("=Ii", _VERSION_3, 0), struct.pack("=6I", *words)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
