"""Each source of PIDs, really tried: started, asked for a process that was just made, and given back.

A source that is tried here is another one than a running daemon's: probes and sockets of its own, gone with it.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from resolver.doctor.findings import Finding, failed, ok, several, unknown, warning
from resolver.errors import ResolverError

if TYPE_CHECKING:
    from resolver.doctor.node import Node

_REMEDIES = {
    "netlink": "fix what the checks pid_namespace, user_namespace or capabilities name; a kernel without "
    "CONFIG_PROC_EVENTS has none: grep CONFIG_PROC_EVENTS /boot/config-$(uname -r)",
    "scan": "fix what the checks pid_namespace and hidepid name: everything else rests on a /proc that can be read",
}
#: By the cause that the loader names (`LoadError` in bpf/obstacles.py).
_BPF_REMEDIES = {
    "place": "fix what the checks pid_namespace or user_namespace name",
    "rights": "fix what the check capabilities names",
    "seccomp": "give it a seccomp profile that allows bpf(): deploy/seccomp/resolver.json, or the default one of "
    "containerd 1.7 or Docker 23 and later, for a process with CAP_BPF",
    "module": "allow it in the security module's profile (AppArmor: capability bpf, capability perfmon; SELinux: class "
    "bpf); what was denied is said by: journalctl -k | grep -iE 'apparmor|avc'",
    "kernel": "boot Linux 5.12 or later (arm64: 5.18), or set source = netlink to save the try",
    "lockdown": "boot with lockdown=integrity on the kernel's command line (Secure Boot allows that), or set "
    "source = netlink to save the try",
    "btf": "fix what the check btf names",
    "bcc": "fix what the check bcc names",
    "verifier": "report the kernel's release and the output of: resolver doctor --verbose --only bpf; no right and no "
    "setting helps but source = netlink, which saves the try",
    "other": "the reason is said in full by: resolver doctor --verbose --only bpf; please report it",
}
_LAST_LINES = 30


def bpf(node: Node) -> Finding:
    """Whether the probes can be loaded and the kernel's map finds a new process."""
    return _try("bpf", node)


def netlink(node: Node) -> Finding:
    """Whether the kernel's process events come, by the proc connector."""
    return _try("netlink", node)


def scan(node: Node) -> Finding:
    """Whether a scan of ``/proc`` finds a new process."""
    return _try("scan", node)


def _try(name: str, node: Node) -> Finding:
    import asyncio

    from resolver.pids.ladder import LADDER, find_canary, open_source

    if name not in node.sources and name != LADDER[-1]:
        return ok(f"not tried: the settings ask for {node.sources[0]} only")
    began = time.monotonic()
    try:
        source = open_source(name, node.procfs, node.settings.map_size)
    except (ResolverError, OSError) as error:
        finding = _refused(name, node, "it cannot be started", str(error), getattr(error, "cause", "other"))
        detail = getattr(error, "detail", "").splitlines()[
            -_LAST_LINES:
        ]  # a verifier says last why it refused
        return finding._replace(detail="\n".join(detail))
    with contextlib.closing(source):
        canary = asyncio.run(find_canary(source))
        seconds, known = time.monotonic() - began, len(source)
        if canary.trouble:
            return _refused(name, node, "it does not find a new process", canary.trouble)
        if canary.unmade:
            return unknown(
                f"it runs, but no canary could be made to test it: {canary.unmade}",
                "no new process could be made to be found, so whether it would be seen is not known",
                "see why it could not, and try again: the node may be short of processes or descriptors",
            )
        shortage = source.shortage() or source.trouble()
    if shortage:
        return warning(f"it works, {several(known, 'process', 'processes')}", shortage, "set map_size higher")
    return ok(
        f"found a process that was just made, among {several(known, 'process', 'processes')}, in {seconds:.1f} s"
    )


def _refused(name: str, node: Node, found: str, why: str, cause: str = "other") -> Finding:
    fix = _BPF_REMEDIES[cause] if name == "bpf" else _REMEDIES[name]
    below = node.sources[node.sources.index(name) + 1 :] if name in node.sources else ()
    if not below:
        only = "" if len(node.sources) > 1 else ", or set source = auto"
        return failed(found, why, fix + only)
    return warning(f"{found}; the daemon falls to {below[0]}", why, fix)
