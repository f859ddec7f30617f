"""Checks of the daemon that runs here, without disturbing it or one that starts just now: no lock is taken."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from resolver.base.lock_holder import UNIT, UNIT_SETTINGS, ailment, unit_says
from resolver.base.text import several
from resolver.doctor.findings import Finding, failed, ok, together, unknown, warning

if TYPE_CHECKING:
    from resolver.api.status import Status
    from resolver.doctor.node import Node


def settings(node: Node) -> Finding:
    """Check that the settings can be read, and name their origin."""
    if node.settings_error:
        return failed(
            f"refused: {node.settings_error}",
            "the daemon does not start with these settings (a running one keeps the old ones); everything below was "
            "checked with the defaults",
            "correct that place; resolver config shows every setting and where it comes from",
        )
    return ok(node.settings_from)


def daemon(node: Node) -> Finding:
    """Check that a daemon runs and answers, and show the problems that it reports."""
    if node.status is not None:
        return _content(node.status)
    where = node.settings.socket_path
    if node.refused:
        return failed(
            "it refuses this command", node.no_answer, "give the daemon the right that is missing; restart it"
        )
    if host_pid := node.lock_holder:
        if os.path.exists(where) and not os.access(where, os.W_OK):
            return unknown(f"PID {host_pid} runs", "its socket is refused to this user", "run this as root")
        cause, fix = ailment(host_pid, where)
        return failed(f"PID {host_pid} {cause}", node.no_answer.partition(". ")[0], fix)
    if "no such socket" not in node.no_answer and "no process listens" not in node.no_answer:
        return _foreign(where, node.no_answer)
    return _none_runs(node)


def _none_runs(node: Node) -> Finding:
    """Return a failure where slots are left unrepaired, or a daemon is expected."""
    none = f"none runs with the run directory {node.settings.run_dir}"
    if sentence := unit_says():
        return failed(
            f"{none}, though {UNIT} is installed",
            f"nothing is repaired on this node. The unit's last line: {sentence}",
            f"correct what that line names, for example in {UNIT_SETTINGS}; then: systemctl restart resolver",
        )
    count = len(node.regions.regions)
    return (failed if count or os.path.exists(f"{node.settings.run_dir}/lock") else warning)(
        f"{none}; {several(count, 'cache file')} here",
        "nothing is repaired on this node; resolver lookup asks the kernel itself",
        "start it: resolver run (as root, on the host), or see why its pod does not run: kubectl get pods -A "
        "--field-selector spec.nodeName=$(hostname) | grep resolver",
    )


def _foreign(path: str, why: str) -> Finding:
    """Return the finding about a socket of another program."""
    finding, _, fix = why.partition(". ")
    if "Permission denied" in finding:
        return unknown(finding, "root and the socket's group may ask", fix)
    return failed(
        finding,
        "a daemon replaces no other program's file, and clients trust only root's sockets (api_off)",
        f"ls -ln {path}; ss -xlp | grep {path} shows its process. If it is no daemon's: rm {path}",
    )


def _content(status: Status) -> Finding:
    from resolver.base.version import VERSION  # slow to import, and other checks don't need it

    totals = status.totals
    counts = f"{several(totals.containers, 'container')}, {several(totals.regions, 'region')}"
    summary = f"PID {status.host_pid}, version {status.version}, source {status.source.name}: {counts}, "
    summary += several(totals.slots, "slot")
    troubles = [
        (failed if trouble.grave else warning)(
            trouble.what, trouble.why, trouble.fix.replace("resolver doctor --only", "see the check")
        )
        for trouble in status.troubles
    ]
    if status.version != VERSION:
        cause = "daemon and command are of two versions: it was not restarted after an upgrade"
        fix = "systemctl restart resolver, or: kubectl rollout restart its daemon set"
        troubles.append(warning(f"this command is {VERSION}", cause, fix))
    seen = together(summary, troubles)
    return seen._replace(found=f"{summary}; {seen.found}") if troubles else seen
