"""Whether a daemon runs here, alone, answers and is content; without disturbing it, or one that starts just now.

No lock is taken to see whether one is held, and no port is bound to see whether it is free: both would make a daemon
that starts in that moment fail. The kernel's own lists show it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from resolver import __version__
from resolver.doctor.findings import Finding, failed, ok, several, together, unknown, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resolver.doctor.node import Node

_OLD_PICTURE = 10.0  # seconds, beside twenty intervals


def settings(node: Node) -> Finding:
    """Whether the settings can be read, and whose they are."""
    if node.settings_error:
        return failed(
            f"refused: {node.settings_error}",
            "the daemon does not start with these settings (a running one keeps the old ones); everything below was "
            "checked with the defaults",
            "correct that place; resolver config shows every setting and where it comes from",
        )
    return ok(node.settings_from)


def daemon(node: Node) -> Finding:
    """Whether a daemon runs, and what it is not content with."""
    status, running = node.status, node.daemons
    if status is not None:
        return _content(node, status)
    where = node.settings.socket_path
    if not running and node.lock_holder is None:
        return warning(
            "none runs",
            "nothing is repaired on this node; resolver lookup asks the kernel itself",
            "start it: resolver run (as root, on the host); systemctl status resolver, or: kubectl get pods -A "
            "--field-selector spec.nodeName=$(hostname) | grep resolver",
        )
    host_pid = node.lock_holder or min(running)
    other = running.get(host_pid)
    elsewhere = other.settings.socket_path if other and other.settings else where
    own = f"resolver doctor --socket {elsewhere}" if elsewhere != where else "fix what the check socket names"
    return unknown(
        f"PID {host_pid} runs, but does not answer at {where}",
        f"it listens at {elsewhere}"
        if elsewhere != where
        else "its socket is refused to this user, or it hangs",
        f"{own}; tr '\\0' ' ' < /proc/{host_pid}/cmdline shows its command line",
    )


def _content(node: Node, status: dict[str, Any]) -> Finding:
    totals, hours = status["totals"], (time.time() - status["started_at"]) / 3600
    found = (
        f"PID {status['host_pid']}, version {status['version']}, up {hours:.1f} h, "
        f"source {status['source']['name']}: {several(totals['containers'], 'container')}, "
        f"{several(totals['regions'], 'region')}, {several(totals['slots'], 'slot')}"
    )
    troubles = [finding for wrong, finding in (*_grave(node, status), *_slight(status)) if wrong]
    seen = together(found, troubles)
    return seen._replace(found=f"{found}; {seen.found}") if troubles else seen


def _grave(node: Node, status: dict[str, Any]) -> Iterator[tuple[object, Finding]]:
    """What keeps it from its work: whether it is so, and what to say then."""
    source, age = status["source"], time.time() - status["at"]
    yield (
        age > _OLD_PICTURE + 20 * node.settings.interval,
        failed(
            f"its last pass was {age:.0f} s ago",
            "the passes over the slots hang or come too late: an overloaded node, or a file system that hangs",
            f"cat /proc/{status['host_pid']}/stack; uptime; then restart it",
        ),
    )
    yield (
        source["not_ready"],
        failed(
            f"not ready: {source['not_ready']}",
            f"its source {source['name']} is not known to find every process",
            f"resolver doctor --only {source['name']}",
        ),
    )


def _slight(status: dict[str, Any]) -> Iterator[tuple[object, Finding]]:
    """What it works with all the same."""
    from resolver.counters import CounterName

    counters, unresolved, errors = (
        status["counters"],
        status["totals"]["slots_unresolved"],
        status["counters"].get(CounterName.INTERNAL_ERRORS, 0),
    )
    shortage, driver_error = str(status["source"]["incomplete"]), str(status["driver"]["error"])
    yield (
        status["source"]["incomplete"],
        warning("its map is incomplete", shortage, "set map_size higher, and restart it"),
    )
    yield (
        status["driver"]["error"],
        warning("NVML does not answer it", driver_error, "resolver doctor --only nvml"),
    )
    yield (
        status["dry_run"],
        warning("it is a dry run", "--dry-run was given, so it writes nothing", "start it without --dry-run"),
    )
    yield (
        unresolved,
        warning(
            f"{several(unresolved, 'slot')} unresolved",
            "for these it is not known which process they belong to, so they are left as they are",
            "resolver status shows the reasons, docs/troubleshooting.md what each means",
        ),
    )
    yield (
        counters.get(CounterName.OVER_BUDGET),
        warning(
            f"a container went over its budget {several(counters.get(CounterName.OVER_BUDGET, 0), 'time')}",
            "it costs more CPU than its share, by very many mappings, mounts or changes; its slots are resolved later",
            "resolver top shows whose slots are over_budget; docs/limits.md has the share",
        ),
    )
    yield (
        counters.get(CounterName.OUT_OF_DESCRIPTORS),
        warning(
            "it ran out of descriptors",
            "some regions were skipped for lack of them",
            "raise the limit, see the check descriptors, and restart it",
        ),
    )
    yield (
        errors,
        warning(
            several(errors, "internal error"),
            "a defect, or a file system that fails in a new way",
            "its log has a traceback for each, under internal_error: please report them",
        ),
    )
    yield (
        status["version"] != __version__,
        warning(
            f"this command is {__version__}",
            "daemon and command are of two versions: it was not restarted after an upgrade",
            "systemctl restart resolver, or: kubectl rollout restart its daemon set",
        ),
    )


def instances(node: Node) -> Finding:
    """Whether not more than one daemon writes on this node."""
    # Each that writes holds a lock in its own run directory; a dry run, or one that waits for its turn, holds none.
    writing = {host_pid: other for host_pid, other in node.daemons.items() if host_pid in node.locks}
    holder = node.lock_holder
    if len(writing) > 1:
        listed = "; ".join(
            f"PID {host_pid}: {' '.join(other.argv)}" for host_pid, other in sorted(writing.items())
        )
        return failed(
            f"{len(writing)} daemons write on this node: PIDs {', '.join(map(str, sorted(writing)))}",
            "the lock keeps apart only those with the same run directory; these write the same slots and count each "
            f"other's repairs. {listed}",
            f"keep one: kill -TERM {max(writing)}; and give all of them the same --run-dir",
        )
    if holder is not None:
        return ok(f"one, PID {holder}, holds {node.settings.run_dir}/lock")
    if writing:
        ((host_pid, other),) = writing.items()
        theirs = (
            f"with --run-dir {other.settings.run_dir}"
            if other.settings
            else "with settings that are not known"
        )
        return warning(
            f"PID {host_pid} writes, {theirs}",
            f"a daemon with these settings (--run-dir {node.settings.run_dir}) would start beside it, and write its "
            "slots as well",
            f"give both the same --run-dir; tr '\\0' ' ' < /proc/{host_pid}/cmdline shows its own",
        )
    return ok("none, the lock is free")
