"""The checks of ``resolver doctor``: what each found, and the cause and fix of each problem.

Works without a daemon, and beside one without disturbing it. Each check has a time limit, so that a driver or a file
system that hangs costs one answer and not all of them; a defect in a check is reported as such, and the others go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from resolver.doctor import daemon, gpu, hami, kernel, limits, permissions, ports, sockets, sources
from resolver.doctor.findings import Finding, State, failed, unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from resolver.doctor.node import Node

_SECONDS = 15.0


class Check(NamedTuple):
    """``look`` may take ``seconds``; the first line of its docstring says what it checks."""

    name: str
    look: Callable[[Node], Finding]
    seconds: float = _SECONDS

    @property
    def about(self) -> str:
        """One sentence, for the list of checks."""
        return (self.look.__doc__ or "").splitlines()[0]


class Result(NamedTuple):
    """A finding with the name of its check: one object of ``resolver doctor --json``."""

    check: str
    state: State
    found: str
    cause: str
    fix: str
    detail: str


#: In the order in which they are run: what others rest on comes first.
CHECKS = (
    Check("settings", daemon.settings),
    Check("root", permissions.root),
    Check("capabilities", permissions.capabilities),
    Check("pid_namespace", permissions.pid_namespace),
    Check("user_namespace", permissions.user_namespace),
    Check("hidepid", permissions.hidepid),
    Check("kernel", kernel.kernel),
    Check("btf", kernel.btf),
    Check("bcc", kernel.bcc, 45.0),
    Check("lockdown", kernel.lockdown),
    Check("cgroups", kernel.cgroups),
    Check("scan", sources.scan, 20.0),
    Check("netlink", sources.netlink, 30.0),
    Check("bpf", sources.bpf, 60.0),
    Check("nvml", gpu.nvml, 45.0),
    Check("gpus", gpu.gpus, 45.0),
    Check("driver", gpu.driver, 45.0),
    Check("containers_dir", hami.containers_dir),
    Check("regions", hami.regions, 30.0),
    Check("writer", hami.writer),
    Check("pod_names", hami.pod_names),
    Check("descriptors", limits.descriptors),
    Check("watches", limits.watches),
    Check("memory", limits.memory),
    Check("clock", limits.clock),
    Check("sample_clock", gpu.sample_clock, 60.0),
    Check("daemon", daemon.daemon),
    Check("instances", daemon.instances),
    Check("system_calls", permissions.system_calls),
    Check("socket", sockets.api),
    Check("tenant_socket", sockets.tenants),
    Check("metrics", ports.metrics),
    Check("broker", sockets.broker),
)


def bounded(check: Check, node: Node) -> Finding:
    """One check, within its time. One that does not return is left behind in its thread."""
    import threading

    answers: list[Finding] = []

    def look() -> None:
        try:
            answers.append(check.look(node))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other checks go on
            answers.append(
                failed(
                    f"a defect in the check: {type(error).__name__}: {error}",
                    "the check itself failed, so its result is not known",
                    f"please report this line, with the output of: resolver doctor --json --only {check.name}",
                )
            )

    thread = threading.Thread(target=look, name=check.name, daemon=True)
    thread.start()
    thread.join(check.seconds)
    if answers:
        return answers[0]
    return unknown(
        f"no answer within {check.seconds:g} s",
        "what it checks hangs: a driver, a file system that is away, or an overloaded node",
        "uptime; ps axo pid,stat,wchan:32,comm | awk '$2 ~ /D/' shows what waits in the kernel, and where",
    )
