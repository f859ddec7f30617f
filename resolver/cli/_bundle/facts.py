"""Parts of a bundle that no command prints."""

import gzip
import http.client
import os
import platform
import re
import sys
import urllib.request
from collections.abc import Callable
from importlib import metadata

from resolver.base.errors import ResolverError
from resolver.base.version import VERSION

_OPTIONS = re.compile(
    r"CONFIG_(BPF\w*|DEBUG_INFO_BTF\w*|PID_NS|USER_NS|CGROUP\w*|SECCOMP\w*|SECURITY_LOCKDOWN\w*|LSM|PROC_EVENTS|CONNECTOR"
    r"|FTRACE|KPROBES|CHECKPOINT_RESTORE|PREEMPT\w*|NR_CPUS|HZ)="
)
#: Mounts of the system that the daemon depends on, by their type.
_MOUNTS = re.compile(r" - (cgroup2?|proc|sysfs|securityfs|bpf|tracefs|debugfs) ")
_NAMESPACES = ("pid", "user", "cgroup", "net", "mnt")
_FILES = (
    "/etc/os-release",
    "/proc/version",
    "/proc/meminfo",
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


def kernel() -> dict[str, object]:
    """Collect facts of the machine. Unreadable ones say why."""
    release = os.uname().release
    return {
        "uname": list(os.uname())[2:],
        "release": release,
        "btf": _known(os.path.getsize, "/sys/kernel/btf/vmlinux"),
        "config": _config(release),
        "mounts": [line for line in _text("/proc/self/mountinfo").splitlines() if _MOUNTS.search(line)],
        "cpus": os.cpu_count(),
        "namespaces": {name: _known(os.readlink, f"/proc/self/ns/{name}") for name in _NAMESPACES},
        "files": {path: _text(path) for path in _FILES},
    }


def _known(read: Callable[[str], object], path: str) -> object:
    try:
        return read(path)
    except OSError as error:
        return f"({error.strerror})"


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_MOST).strip("\0\n")


def _text(path: str) -> str:
    return str(_known(_read, path))


def _config(release: str) -> object:
    for path in ("/proc/config.gz", f"/boot/config-{release}", f"/lib/modules/{release}/config"):
        try:
            with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
                return {"from": path, "options": [line.strip() for line in file if _OPTIONS.match(line)]}
        except OSError:
            continue
    return "(neither /proc/config.gz nor a file of it in /boot)"


def versions() -> dict[str, object]:
    return {
        "resolver": VERSION,
        "python": sys.version,
        "executable": sys.executable,
        "libc": " ".join(platform.libc_ver()),
        "distributions": {
            distribution.name: distribution.version for distribution in metadata.distributions()
        },
    }


def metrics(socket_path: str) -> str:
    """Fetch the text for Prometheus, by the daemon's own certificate and token."""
    from resolver.cli.in_force import settings_in_force

    settings, origins, no_daemon = settings_in_force(socket_path)
    if origins:
        raise ResolverError(no_daemon)  # another program may have the port, and must not get the token
    if settings.metrics_addr == "off":
        raise ResolverError("metrics_addr is off")
    host, _, port = settings.metrics_addr.rpartition(":")
    context = None
    if settings.metrics_tls_cert:
        import ssl

        context = ssl.create_default_context(cafile=settings.metrics_tls_cert)
        context.check_hostname, context.verify_flags = False, ssl.VERIFY_X509_PARTIAL_CHAIN
    handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    address = f"http{'s' if context else ''}://{host or 'localhost'}:{port}/metrics"
    request = urllib.request.Request(address)  # noqa: S310 - of the setting
    if settings.metrics_token_file:
        from resolver.serve.tls import token_in

        request.add_header("Authorization", f"Bearer {token_in(settings.metrics_token_file).decode()}")
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=8) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except http.client.HTTPException as error:
        raise ResolverError(f"/metrics answers no HTTP: {error}") from None
