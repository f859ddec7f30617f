"""Variants of the guests: another kernel command line, more packages, or a script before the steps.

To add one, add it to `VARIANTS`, and run it by its name: ``make kernels ARGS="--variant lockdown 6.12"``. A profile can
name the daemon, doctor and the demo by /venv/bin/resolver.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple


class Variant(NamedTuple):
    cmdline: str = ""  # appended to the kernel's command line
    packages: tuple[str, ...] = ()  # in a separate root; their maintainer scripts do not run
    script: str = ""  # path in the checkout, run by `sh -e` as root before the steps; it must not fail
    modules: tuple[str, ...] = ()  # loaded at the start, where they are not built in
    steps: tuple[str, ...] = ()  # in addition to those of every variant
    loads: bool | None = None  # None: as without a variant
    source: str | None = None  # as `loads`
    why: Mapping[str, str] = {}  # words in the daemon's reason for not using a source, by source
    told: Mapping[str, tuple[str, str]] = {}  # state and words of doctor's checks, by check


_LOCKED: Final = "blocked by kernel lockdown"
_DOMAIN: Final = "by the security module that holds this process to 'system_u:system_r:resolver_t:s0'"
_FORBIDDEN: Final = "by the security module that holds this process to 'resolver (enforce)'"
#: Systemd runs the guest's program as a unit, and switches the machine off when that ends. ``first`` is what the
#: initial RAM disk starts as PID 1.
_SYSTEMD: Final = (
    "first=/usr/lib/systemd/systemd systemd.firstboot=no systemd.machine_id=6f0f1b6c1d0e4c6f9b8f2f6f0c7a1d11 "
    'systemd.run="/usr/bin/python3 /resolver/tests/vm/guest.py"'
)

VARIANTS: Final[dict[str, Variant]] = {
    "": Variant(),
    "lockdown": Variant(
        cmdline="lockdown=confidentiality",
        loads=False,
        source="netlink",
        why={"bpf": _LOCKED},
        told={"bpf": ("warning", _LOCKED), "netlink": ("ok", "")},
    ),
    "apparmor": Variant(
        cmdline="apparmor=1 security=apparmor",
        packages=("apparmor",),
        script="tests/vm/variants/apparmor.sh",
        source="netlink",
        why={"bpf": _FORBIDDEN},
        told={"bpf": ("warning", _FORBIDDEN), "netlink": ("ok", ""), "view": ("ok", "")},
    ),
    "selinux": Variant(
        cmdline="selinux=1 security=selinux",
        packages=("selinux-policy-default", "secilc"),
        script="tests/vm/variants/selinux.sh",
        source="netlink",
        why={"bpf": _DOMAIN},
        told={"bpf": ("warning", _DOMAIN), "netlink": ("ok", ""), "view": ("ok", "")},
    ),
    "cgroup-v1": Variant(script="tests/vm/variants/cgroup-v1.sh", told={"view": ("ok", "cgroups v1")}),
    "cgroup-hybrid": Variant(
        script="tests/vm/variants/cgroup-hybrid.sh", told={"view": ("ok", "cgroups v1 and v2")}
    ),
    "systemd": Variant(
        cmdline=_SYSTEMD,
        packages=("systemd", "dbus", "crun", "runc", "podman", "busybox-static"),
        script="tests/vm/variants/systemd.sh",
        steps=("containers",),
        told={"view": ("ok", "cgroups v2")},
    ),
    "hidepid": Variant(script="tests/vm/variants/hidepid.sh", told={"view": ("ok", "")}),
}
