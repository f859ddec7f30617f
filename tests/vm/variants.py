"""Guests that are not plain: another command line, more packages, or a script before the steps.

To add one, add it to `VARIANTS`:

- ``cmdline`` is appended to the kernel's command line;
- ``packages`` are Debian packages that its root file system has besides (a root of its own is made and kept). They are
  unpacked, and their maintainer scripts do not run: what those would do belongs into the script;
- ``script`` is a path in the checkout (``tests/vm/variants/NAME.sh``), run by ``sh -e`` as root in the guest, after the
  mounts of `tests.vm.guest` and before the steps. If it fails, the row says so and the run fails;
- ``modules`` are kernel modules that are loaded at the start, where they are not built in;
- ``steps`` are tried besides those of every variant;
- ``loads`` and ``source`` are what the guest has to come to; None is what the kernel alone comes to;
- ``why``: by source, words that the daemon has to give as the reason for not using it;
- ``told``: by check of doctor, its state, and words that have to be in what it says.

The daemon, doctor and the demo are started as /venv/bin/resolver, by which a profile can name them.

Run it by its name: ``make kernels ARGS="--variant lockdown 6.12"``. Variants are no part of a run that names none.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple


class Variant(NamedTuple):
    cmdline: str = ""
    packages: tuple[str, ...] = ()
    script: str = ""
    modules: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    loads: bool | None = None
    source: str | None = None
    why: Mapping[str, str] = {}
    told: Mapping[str, tuple[str, str]] = {}


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
