"""Checks of ``resolver doctor``, each with a time limit: a finding, and the cause and fix of each problem."""

from collections.abc import Callable
from typing import NamedTuple

from resolver.base.retry import started
from resolver.doctor import daemon, gpu, hami, sources, view
from resolver.doctor.findings import Finding, failed, unknown
from resolver.doctor.node import Node

_SECONDS = 15.0


class Check(NamedTuple):
    """A check; the first line of the docstring of ``look`` describes it in the documents."""

    name: str
    look: Callable[[Node], Finding]
    seconds: float = _SECONDS


#: In order: checks that others depend on come first.
CHECKS = (
    Check("settings", daemon.settings),
    Check("view", view.view),
    Check("scan", sources.scan, 20.0),
    Check("netlink", sources.netlink, 30.0),
    Check("bpf", sources.bpf, 90.0),
    Check("nvml", gpu.nvml, 45.0),
    Check("driver", gpu.driver, 45.0),
    Check("containers_dir", hami.containers_dir),
    Check("regions", hami.regions, 30.0),
    Check("writer", hami.writer),
    Check("pod_names", hami.pod_names),
    Check("daemon", daemon.daemon),
)


def bounded(check: Check, node: Node) -> Finding:
    """Run one check within its time."""
    looking = started(lambda: check.look(node), name=check.name)
    try:
        return looking.result(check.seconds)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks go on
        if looking.done():
            return failed(
                f"a defect in the check: {type(error).__name__}: {error}",
                "the check itself failed, so its result is not known",
                f"please report this line, with the output of: resolver doctor --json --only {check.name}",
            )
    return unknown(
        f"no answer within {check.seconds:g} s",
        "the checked part hangs: a driver, an unreachable file system, or an overloaded node",
        "uptime; ps axo pid,stat,wchan:32,comm | awk '$2 ~ /D/' shows the processes that wait in the kernel, and where",
    )
