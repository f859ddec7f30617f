"""Which guests there are: kernels by name, the machines and userspaces that each runs with."""

import argparse
import platform
from typing import Final, NamedTuple

#: A kernel's name here: the release of Debian that has it. Of each, the newest that apt would install.
KERNELS: Final = {
    "5.10": "bullseye",
    "6.1": "bookworm",
    "6.12": "trixie",
    "backports": "trixie-backports",
    "sid": "sid",
    "16k": "trixie",
}
#: Kernels of a single architecture, and the suffix of their package names.
FLAVOURS: Final = {"16k": ("aarch64", "-16k")}
USERSPACES: Final = {"bookworm": "Debian 12", "trixie": "Debian 13"}
#: arm64 is emulated, so each kernel runs with the userspace of its release only.
_ARM64: Final = (("6.1", "bookworm"), ("6.12", "trixie"), ("16k", "trixie"))


class Guest(NamedTuple):
    """One machine to boot: a kernel (by name, or a package's path), the machine's kind, the userspace, the variant."""

    pick: str
    arch: str
    userspace: str
    variant: str = ""

    def __str__(self) -> str:
        variant = f" {self.variant}" if self.variant else ""
        return f"{self.pick} {self.arch} {USERSPACES[self.userspace]}{variant}"


def plan(options: argparse.Namespace) -> list[Guest]:
    picks = [*options.kernels, *map(",".join, options.package)] or list(KERNELS)
    arches = [options.arch] if options.arch else ["x86_64", "aarch64"]
    if options.kernels or options.package:
        arches = [options.arch or platform.machine()]
    guests = []
    for arch in arches:
        for pick in picks:
            if FLAVOURS.get(pick, (arch, ""))[0] != arch and not options.kernels:
                continue
            own = KERNELS.get(pick) if KERNELS.get(pick) in USERSPACES else None
            spaces = [own or "trixie"] if options.loader or options.variant else list(USERSPACES)
            if arch == "aarch64" and not (options.kernels or options.package):
                spaces = [space for space in spaces if (pick, space) in _ARM64]
            guests += [Guest(pick, arch, space, options.variant) for space in spaces]
    return guests
