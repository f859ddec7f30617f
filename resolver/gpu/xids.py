"""XID errors, the driver's numbers for errors of a GPU. Those in `BROKEN` make it unhealthy.

For them NVIDIA's catalogue requires a reset or a hardware check; programs cause most others.
"""

from __future__ import annotations

#: By number, in few words.
BROKEN = {
    48: "a memory error of two bits, which cannot be corrected",
    62: "its internal controller halted",
    64: "a broken row of memory could not be replaced",
    79: "it fell off the bus",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "a memory error that was not recovered from",
}
#: What programs do, or have done to them.
OF_PROGRAMS = {
    13: "a fault of a program in the graphics engine",
    31: "a program accessed memory that it does not have",
    43: "a program stopped because of an error",
    45: "work was removed after an earlier error, or when its program ended",
    68: "a fault of a program in the video decoder",
    94: "a contained memory error: the programs that used it ended",
    109: "a context switch took too long",
}


def meaning(xid: int) -> str:
    """Describe an XID, or say where to look it up."""
    return BROKEN.get(xid) or OF_PROGRAMS.get(xid) or "see NVIDIA's catalogue of XID errors"
