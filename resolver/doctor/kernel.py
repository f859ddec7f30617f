"""The kernel and what it takes to load the probes: release, BTF, bcc, lockdown; and the cgroup hierarchies."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from resolver.doctor.findings import Finding, failed, listed, ok, some, unknown, warning
from resolver.errors import ResolverError
from resolver.linux.cgroup_directories import cgroup_roots

if TYPE_CHECKING:
    from resolver.doctor.node import Node

_NSPID, _NESTED, _FETCHES = (4, 1), (4, 9), (5, 12)
_BPF_MACHINES = ("x86_64", "aarch64")
_BTF_MAGIC = (b"\x9f\xeb", b"\xeb\x9f")  # of either byte order (include/uapi/linux/btf.h)
_HOST_CGROUPNS = 0xEFFFFFFB  # PROC_CGROUP_INIT_INO in include/linux/proc_ns.h
_IMPORT_SECONDS = 20.0
_NEXT = "the daemon takes the next source meanwhile, which is more expensive and remembers less"


def _bpf(node: Node, found: str, cause: str, fix: str) -> Finding:
    """Something without which ``bpf`` cannot work: grave only where nothing else is allowed."""
    if "bpf" not in node.sources:
        return ok(f"{found}; not needed by the source {node.sources[0]}")
    if len(node.sources) == 1:
        return failed(found, cause, f"{fix}, or set source = auto")
    return warning(found, f"{cause}; {_NEXT}", fix)


def kernel(node: Node) -> Finding:
    """Whether the kernel is new enough."""
    found, version = f"Linux {node.release}, {node.machine}", node.version()
    if version is None:
        return unknown(
            found, "the release does not begin with a version number", "compare with uname -r, and report it"
        )
    if version < _NSPID:
        return failed(
            found,
            "before Linux 4.1 /proc does not show a process's PIDs in its namespaces (NSpid)",
            "boot a newer kernel; 5.12 or later has all that is used",
        )
    if version < _NESTED:
        return warning(
            found,
            "before Linux 4.9 nested PID namespaces cannot be distinguished (NS_GET_PARENT): such slots stay ambiguous",
            "boot a newer kernel; 5.12 or later has all that is used",
        )
    if version < _FETCHES:
        return _bpf(
            node,
            found,
            "before Linux 5.12 the kernel has no atomics that return the old value, which its map of processes takes, "
            "unless a vendor took them over: the check bpf asks it",
            "boot Linux 5.12 or later",
        )
    if node.machine not in _BPF_MACHINES:
        return _bpf(
            node,
            found,
            f"the kernel's map of processes runs on {listed(_BPF_MACHINES)} only",
            "nothing to be done; set source = netlink to save the try",
        )
    return ok(found)


def btf(node: Node) -> Finding:
    """Whether the kernel describes itself, so that the probes find their fields."""
    path = f"{node.sys}/kernel/btf/vmlinux"
    fix = "boot a distribution's kernel, or build it with CONFIG_DEBUG_INFO_BTF=y; check: ls -l " + path
    try:
        with open(path, "rb") as file:
            magic = file.read(2)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        return _bpf(
            node,
            f"{path} cannot be read ({error.strerror})",
            "this kernel has no BTF, without which the probes do not know where its fields are",
            f"{fix} (in a container: mount /sys/kernel/btf of the host)",
        )
    if magic not in _BTF_MAGIC:
        return _bpf(node, f"{path} is not BTF", "it does not begin with the magic number 0xeb9f", fix)
    return ok(f"{path}, {size >> 10} KiB")


def bcc(node: Node) -> Finding:
    """Which Python can load the compiler of the probes."""
    import subprocess

    said: list[str] = []
    # BPF by name: an empty directory called bcc can be imported as well.
    program = "from bcc import BPF; import bcc; print(getattr(bcc, '__version__', 'of unknown version'))"
    for python in node.pythons:
        try:
            done = subprocess.run(
                [python, "-I", "-c", program],
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_IMPORT_SECONDS,
                check=False,
            )
        except OSError as error:
            said.append(f"{python}: {error.strerror}")
            continue
        except subprocess.TimeoutExpired:
            said.append(f"{python}: not imported within {_IMPORT_SECONDS:g} s")
            continue
        if done.returncode == 0:
            return ok(f"{done.stdout.strip()} under {python}")
        said.append(f"{python}: {(done.stderr.strip().splitlines() or [f'code {done.returncode}'])[-1]}")
    return _bpf(
        node,
        f"{listed(node.pythons)} cannot import it",
        "; ".join(said),
        "apt-get install python3-bpfcc (Debian, Ubuntu) or dnf install python3-bcc (Fedora)",
    )


def lockdown(node: Node) -> Finding:
    """Whether the kernel forbids probes to read its memory."""
    directory = f"{node.sys}/kernel/security"
    try:
        with open(f"{directory}/lockdown", encoding="ascii") as file:
            modes = file.read().strip()
    except FileNotFoundError:
        visible = os.path.isdir(directory) and bool(os.listdir(directory))
        why = "this kernel has none" if visible else f"nothing to be seen, {directory} is not mounted"
        return ok(f"{why}; the check bpf shows what the kernel really allows")
    except OSError as error:
        return unknown(
            f"{directory}/lockdown cannot be read ({error.strerror})",
            "the kernel may be locked down",
            f"as root: cat {directory}/lockdown; the check bpf shows what the kernel really allows",
        )
    if "[confidentiality]" in modes:
        return _bpf(
            node,
            f"lockdown: {modes}",
            "in the mode confidentiality no BPF program may read the kernel's memory",
            "boot with lockdown=integrity on the kernel's command line (Secure Boot allows that)",
        )
    return ok(f"lockdown: {modes}")


def cgroups(node: Node) -> Finding:
    """Whether containers can be identified by their cgroups."""
    proc = node.procfs.root
    try:
        roots = cgroup_roots(node.mounts)
        own = os.stat(f"{proc}/self/ns/cgroup").st_ino
        node.procfs.cgroup(1)
    except FileNotFoundError:
        own = _HOST_CGROUPNS  # before Linux 4.6 there is no other
    except (ResolverError, OSError) as error:
        return failed(
            f"{proc}/1/cgroup cannot be read",
            f"a process's container is read from that file: {error}",
            "run it as root in the host's PID namespace, on a kernel with CONFIG_CGROUPS",
        )
    kinds = {mount.fs_type for mount in node.mounts if mount.mount_point in roots}
    kind = {1: "v2" if "cgroup2" in kinds else "v1", 2: "v1 and v2"}.get(len(kinds), "")
    private = (
        ""
        if own == _HOST_CGROUPNS
        else "; a cgroup namespace of its own, where paths are matched by their end"
    )
    if roots:
        return ok(f"{kind}: {some(roots, 2)}{private}")
    return warning(
        "no hierarchy is mounted here",
        "resolver lookup walks all of /proc to find a container, which takes longer; repairs are not concerned",
        "mount -t cgroup2 none /sys/fs/cgroup",
    )
