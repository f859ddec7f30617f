"""Whether a daemon runs here, alone, answers and is content; without disturbing it, or one that starts just now.

No lock is taken to see whether one is held, and no port is bound to see whether it is free: both would make a daemon
that starts in that moment fail. The kernel's own lists tell it.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from typing import TYPE_CHECKING, Any

from resolver import __version__
from resolver.doctor.findings import Finding, failed, ok, several, together, unknown, warning

if TYPE_CHECKING:
    from resolver.doctor.node import Node

_CONNECT_SECONDS = 1.0
_OLD_PICTURE = 10.0  # seconds, beside twenty intervals


def settings(node: Node) -> Finding:
    """Whether the settings can be read, and whose they are."""
    if node.settings_error:
        return failed(
            f"refused: {node.settings_error}",
            "the daemon does not start with these settings (a running one keeps the old ones); everything below was "
            "looked at with the defaults",
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
    own = (
        f"resolver doctor --socket {elsewhere}" if elsewhere != where else "mend what the check socket names"
    )
    return unknown(
        f"PID {host_pid} runs, but does not answer at {where}",
        f"it listens at {elsewhere}"
        if elsewhere != where
        else "its socket is refused to this user, or it hangs",
        f"{own}; tr '\\0' ' ' < /proc/{host_pid}/cmdline shows its command line",
    )


def _content(node: Node, status: dict[str, Any]) -> Finding:
    source, driver, totals, counters = (status[name] for name in ("source", "driver", "totals", "counters"))
    hours = (time.time() - status["started_at"]) / 3600
    found = (
        f"PID {status['host_pid']}, version {status['version']}, up {hours:.1f} h, "
        f"source {source['name']}: {several(totals['containers'], 'container')}, "
        f"{several(totals['regions'], 'region')}, {several(totals['slots'], 'slot')}"
    )
    troubles = []

    def complain(wrong: object, what: str, cause: str, remedy: str, *, grave: bool = False) -> None:
        if wrong:
            troubles.append((failed if grave else warning)(what, cause, remedy))

    age = time.time() - status["at"]
    complain(
        age > _OLD_PICTURE + 20 * node.settings.interval,
        f"its last pass was {age:.0f} s ago",
        "the passes over the slots hang or come too late: an overloaded node, or a file system that does not answer",
        f"cat /proc/{status['host_pid']}/stack; uptime; then restart it",
        grave=True,
    )
    complain(
        source["not_ready"],
        f"not ready: {source['not_ready']}",
        f"its source {source['name']} is not known to find every process",
        f"resolver doctor --only {source['name']}",
        grave=True,
    )
    complain(
        source["incomplete"],
        "its map is incomplete",
        str(source["incomplete"]),
        "set map_size higher, and restart it",
    )
    complain(driver["error"], "NVML does not answer it", str(driver["error"]), "resolver doctor --only nvml")
    complain(
        status["dry_run"],
        "it is a dry run",
        "it writes nothing, as it was told",
        "start it without --dry-run",
    )
    complain(
        totals["slots_unresolved"],
        f"{several(totals['slots_unresolved'], 'slot')} unresolved",
        "for these it is not known which process they belong to, so they are left as they are",
        "resolver status shows the reasons, docs/troubleshooting.md what each means",
    )
    complain(
        counters.get("out_of_descriptors"),
        "it ran out of descriptors",
        "some regions were left alone for lack of them",
        "raise the limit, see the check descriptors, and restart it",
    )
    complain(
        counters.get("internal_errors"),
        several(counters.get("internal_errors", 0), "internal error"),
        "a defect, or a file system that fails in a new way",
        "its log has a traceback for each, under internal_error: please report them",
    )
    complain(
        status["version"] != __version__,
        f"this command is {__version__}",
        "daemon and command are of two versions: it was not restarted after an upgrade",
        "systemctl restart resolver, or: kubectl rollout restart its daemon set",
    )
    if not troubles:
        return ok(found)
    seen = together(found, troubles)
    return seen._replace(found=f"{found}; {seen.found}")


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


def api_socket(node: Node) -> Finding:
    """Whether the API's socket is what it should be."""
    path = node.settings.socket_path
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        if node.lock_holder is None:
            return ok(f"{path} is not there, and no daemon that would make it")
        return failed(
            f"{path} is not there, though PID {node.lock_holder} runs",
            "it could not make its socket (api_off in its log), or somebody removed it",
            f"look for api_off in its log; ls -ld {os.path.dirname(path)}; then restart it",
        )
    except OSError as error:
        return unknown(
            f"{path} cannot be seen ({error.strerror})",
            "a directory above it is closed to this user",
            "run this as root, or give the daemon's --socket",
        )
    if not stat.S_ISSOCK(info.st_mode):
        return failed(
            f"{path} is no socket",
            "another file has its name, and a daemon does not replace what is not its own (api_off)",
            f"look at it, then: rm {path}",
        )
    if info.st_uid not in (0, os.geteuid()):
        return failed(
            f"{path} belongs to user {info.st_uid}",
            "neither root's nor this user's: no command believes what answers there",
            f"ls -ln {path}; rm {path}, restart the daemon, and keep others out of {os.path.dirname(path)}",
        )
    return _connect(node, path, info)


def _connect(node: Node, path: str, info: os.stat_result) -> Finding:
    began = time.monotonic()
    try:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(_CONNECT_SECONDS)
            channel.connect(path)
            listener = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError as error:
        return _refused(node, path, info, error)
    uid = int.from_bytes(listener[4:8], sys.byteorder)
    if uid not in (0, os.geteuid()):
        return failed(
            f"user {uid} listens at {path}",
            "neither root nor this user: no command believes what answers there",
            f"ss -xlp | grep {path} shows who; stop it, rm {path}, restart the daemon",
        )
    if node.status is None:
        return _silent(path)
    mode = f"mode {stat.S_IMODE(info.st_mode):04o}, group {info.st_gid}"
    return ok(f"{path}, {mode}, connected in {(time.monotonic() - began) * 1e3:.0f} ms")


def _refused(node: Node, path: str, info: os.stat_result, error: OSError) -> Finding:
    """Why there was no connection."""
    if isinstance(error, ConnectionRefusedError):
        return _stale(node, path)
    if isinstance(error, PermissionError):
        return unknown(
            f"{path} is refused to user {os.geteuid()}",
            f"its mode is {stat.S_IMODE(info.st_mode):04o}, its group {info.st_gid}: root and that group may ask",
            "run this as root, or start the daemon with --socket-group and a group of this user",
        )
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return _silent(path)
    return unknown(f"{path}: {error.strerror}", "the kernel refuses the connection", f"ls -l {path}")


def _silent(path: str) -> Finding:
    return failed(
        f"{path} does not answer",
        "who listens there accepts no connection, or does not say how it is: it hangs, or is no resolver",
        f"ss -xlp | grep {path} shows who listens; restart it",
    )


def _stale(node: Node, path: str) -> Finding:
    if node.lock_holder is not None:
        return failed(
            f"nobody listens at {path}, though PID {node.lock_holder} runs",
            "another daemon's socket was there when it started, and is left over now (api_off in its log)",
            "restart the daemon: it replaces a socket that nobody listens on",
        )
    return warning(
        f"nobody listens at {path}",
        "a daemon was killed and left its socket",
        "nothing: the next start replaces it (resolver run)",
    )


def broker(node: Node) -> Finding:
    """Whether HAMi's clients would believe the broker's socket."""
    path = node.settings.broker
    if not path:
        return ok("off")
    directory = os.path.dirname(path) or "."
    try:
        place = os.stat(directory)
    except OSError as error:
        return warning(
            f"{directory}: {error.strerror}",
            "the broker's directory is made by the daemon when it starts, if it can be",
            f"start the daemon; or: install -d -m 0711 -o root -g root {directory}",
        )
    if place.st_uid != 0 or place.st_mode & 0o022:
        return failed(
            f"{directory} is user {place.st_uid}'s, mode {stat.S_IMODE(place.st_mode):04o}",
            "HAMi's clients believe a broker only in a directory of root's that nobody else can write to",
            f"chown root:root {directory} && chmod 0711 {directory}",
        )
    if not os.path.exists(path):
        judge = failed if node.status else warning
        return judge(
            f"{path} is not there",
            "no daemon runs that would make it, or it could not (broker_off in its log)",
            f"start the daemon with --broker {path}, and read its log",
        )
    return ok(f"{path} in a directory of root's")
