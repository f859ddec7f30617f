"""The parts of a bundle that no command prints: run as a child, ``python -m resolver.cli._bundle.facts WHAT``."""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import socket
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

from resolver import __version__, client
from resolver.errors import ResolverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_OPTIONS = re.compile(
    r"CONFIG_(BPF\w*|DEBUG_INFO_BTF\w*|PID_NS|USER_NS|CGROUP\w*|SECCOMP\w*|SECURITY_LOCKDOWN\w*|LSM|PROC_EVENTS|CONNECTOR"
    r"|FTRACE|KPROBES|CHECKPOINT_RESTORE|PREEMPT\w*|NR_CPUS|HZ)="
)
_FILES = (
    "/proc/version",
    "/proc/loadavg",
    "/proc/sys/kernel/pid_max",
    "/proc/sys/kernel/unprivileged_bpf_disabled",
    "/proc/sys/kernel/perf_event_paranoid",
    "/proc/sys/kernel/yama/ptrace_scope",
    "/proc/sys/user/max_pid_namespaces",
    "/proc/sys/fs/inotify/max_user_watches",
    "/proc/sys/fs/inotify/max_user_instances",
    "/sys/kernel/security/lsm",
    "/sys/kernel/security/lockdown",
    "/proc/self/attr/current",
    "/proc/self/status",
    "/proc/self/limits",
    "/proc/driver/nvidia/version",
)
_MOST = 64 << 10


def kernel() -> Any:
    """Of the machine. What cannot be read says why."""
    release = os.uname().release
    return {
        "uname": list(os.uname())[2:],
        "release": release,
        "os_release": _text("/etc/os-release"),
        "btf": _size("/sys/kernel/btf/vmlinux"),
        "config": _config(release),
        "mounts": [line for line in _text("/proc/self/mountinfo").splitlines() if _is_system(line)],
        "memory": _text("/proc/meminfo").splitlines()[:3],
        "cpus": os.cpu_count(),
        "namespaces": {
            name: _link(f"/proc/self/ns/{name}") for name in ("pid", "user", "cgroup", "net", "mnt")
        },
        "files": {path: _text(path) for path in _FILES},
    }


def _is_system(mount: str) -> bool:
    """Of those that the daemon rests on; a tenant's are nobody's business."""
    after = mount.partition(" - ")[2].split(" ")
    return after[0] in ("cgroup", "cgroup2", "proc", "sysfs", "securityfs", "bpf", "tracefs", "debugfs")


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST).strip("\0\n")
    except OSError as error:
        return f"({error.strerror})"


def _size(path: str) -> Any:
    try:
        return os.stat(path).st_size
    except OSError as error:
        return f"({error.strerror})"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError as error:
        return f"({error.strerror})"


def _config(release: str) -> Any:
    """The options that matter here."""
    for path in ("/proc/config.gz", f"/boot/config-{release}", f"/lib/modules/{release}/config"):
        try:
            with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
                return {"from": path, "options": [line.strip() for line in file if _OPTIONS.match(line)]}
        except OSError:
            continue
    return "(neither /proc/config.gz nor a file of it in /boot)"


def versions() -> Any:
    """Of all that is of ours, and of what it takes."""
    return {
        "resolver": __version__,
        "python": sys.version,
        "executable": sys.executable,
        "libc": " ".join(platform.libc_ver()),
        "distributions": {each.name: each.version for each in _required()},
        "nvidia": _text("/proc/driver/nvidia/version"),
    }


def _required() -> Iterable[metadata.Distribution]:
    wanted = metadata.requires("hami-resolver") or () if _installed() else ()
    for requirement in wanted:
        name = re.match(r"[\w.-]+", requirement)
        try:
            if name and "extra ==" not in requirement:
                yield metadata.distribution(name[0])
        except metadata.PackageNotFoundError:
            continue


def _installed() -> bool:
    try:
        metadata.distribution("hami-resolver")
    except metadata.PackageNotFoundError:
        return False
    return True


def route(name: str, socket_path: str) -> Any:
    """One of the daemon's lists."""
    return client.get_json(f"/v1/{name}", socket_path)


def metrics(socket_path: str) -> str:
    """What Prometheus would be given now."""
    from resolver.cli.in_force import settings_in_force

    address = settings_in_force(socket_path).settings.metrics_addr
    if address == "off":
        raise ResolverError("metrics_addr is off")
    host, _, port = address.rpartition(":")
    question = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain\r\nConnection: close\r\n\r\n"
    with socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout=8) as channel:
        channel.sendall(question)
        answer = b""
        while more := channel.recv(1 << 16):
            answer += more
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise ResolverError(f"/metrics answers: {head[:100]!r}")
    return body.decode("utf-8", "replace")


def main() -> int:
    """Print one; 1 with a sentence on standard error if it is not to be had."""
    known: dict[str, Callable[..., Any]] = {
        "kernel": kernel,
        "versions": versions,
        "route": route,
        "metrics": metrics,
    }
    try:
        said = known[sys.argv[1]](*sys.argv[2:])
    except (ResolverError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(said if isinstance(said, str) else json.dumps(said, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
