"""HAMi's cache files, as the daemon would find them; who may write them; and where the names of pods come from."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from resolver.doctor.findings import Finding, State, failed, ok, several, some, together, unknown, warning
from resolver.errors import AccessDenied, ProcessGone, WorkerFailed
from resolver.hami.placements import AUTO, KNOWN_DIRS, VOLCANO_HOOK, VOLCANO_PLUGIN_DIR, searched
from resolver.reasons import RegionReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resolver.doctor.node import Node
    from resolver.linux.procfs import Procfs

_VOLCANO_MONITOR = "volcano-vgpu-monitor"
_LIBATOMIC = "libatomic.so.1"
_HOSTILE = "no HAMi makes such a file: a tenant did, by mistake or on purpose; it is never opened"
_LOOK_INSIDE = "check what runs in that container: ls -lan {}"
#: By reason: how bad, the cause, the fix with a place for the path.
REFUSALS = {
    RegionReason.NOT_REGULAR: (State.WARNING, f"it is no plain file; {_HOSTILE}", _LOOK_INSIDE),
    RegionReason.SYMLINK: (State.WARNING, f"it is a symbolic link; {_HOSTILE}", _LOOK_INSIDE),
    RegionReason.HARD_LINK: (State.WARNING, f"it has more than one name; {_HOSTILE}", _LOOK_INSIDE),
    RegionReason.OTHER_DEVICE: (
        State.WARNING,
        "something else is mounted there, so it may not be the tenant's file",
        "see what, and unmount it: findmnt --target {}",
    ),
    RegionReason.UNPROVEN: (
        State.WARNING,
        (
            "nothing proves that the file at its process's path is the one that the process maps; or, of a directory "
            "that every container can reach (KAI), which containers kubelet has here"
        ),
        (
            "restart the container of {}: its process left the mount namespace in which it opened the file. For KAI, "
            "kubelet's links must be readable: ls /var/log/containers (in a pod: mount it; elsewhere: "
            "--container-logs-dir)"
        ),
    ),
    RegionReason.NOT_ON_NODE: (
        State.WARNING,
        "it names a container that this node does not have: of a pod that is gone, or made by another pod's process",
        "if kubelet has such a container: ls /var/log/containers, and mount it (--container-logs-dir); else remove {}",
    ),
    RegionReason.UNKNOWN_SIZE: (
        State.FAILED,
        "no released layout of HAMi has this size: a newer HAMi, or no file of HAMi's; it is neither read nor written",
        (
            "compare the image's HAMi with the layouts that are known (resolver slots --json {} shows file_bytes), and "
            "report the version"
        ),
    ),
    RegionReason.UNKNOWN_VERSION: (
        State.FAILED,
        "the size is known, the version in its header is not: a newer HAMi; it is neither read nor written",
        "resolver slots --json {} shows what can be read; report HAMi's version",
    ),
    RegionReason.NOT_INITIALIZED: (
        State.WARNING,
        "HAMi has not written its magic number: it starts just now, or never got further",
        "look again in a minute: resolver slots {}; if it stays, restart the container",
    ),
    RegionReason.BAD_HEADER: (
        State.WARNING,
        "its counts are out of range, or its UUIDs are no text: damaged, or hostile",
        "restart the container, which makes the file anew; before that: cp --sparse=always {} /var/tmp, for a report",
    ),
    RegionReason.TRUNCATED: (
        State.WARNING,
        "it is shorter than its layout: damaged, or a tenant truncates it",
        _LOOK_INSIDE,
    ),
    RegionReason.TOO_MANY_ENTRIES: (
        State.WARNING,
        "the directory has more entries than are read, and HAMi's own monitor refuses it, too",
        "find out who makes them, and remove what is not HAMi's: ls -lan {} | head",
    ),
    RegionReason.ACCESS_DENIED: (
        State.FAILED,
        "the kernel refused to open it",
        "run as root; if this is root, a security module or a network file system refuses: ls -lanZ {}",
    ),
    RegionReason.GONE: (State.WARNING, "it went away between list and open", "nothing; look again: ls {}"),
    RegionReason.IO_ERROR: (
        State.FAILED,
        "the file system, or the limit of descriptors, kept it from being read",
        "dmesg | tail; ulimit -n; cat {} > /dev/null",
    ),
}


def containers_dir(node: Node) -> Finding:
    """Whether the schedulers' directories are there, can be listed and be written to, and whose files are in which."""
    given = node.settings.containers_dir
    dirs = list(searched(tuple(path for path in given if path != AUTO)))
    troubles = []
    if AUTO in given:
        there = [path for path in KNOWN_DIRS if path not in dirs and os.path.isdir(path)]
        if not there and not dirs:
            troubles.append(_no_files())
        dirs += there
    troubles += [finding for path in dirs if (finding := _directory(path)).state != State.OK]
    if (mismatch := volcano_mismatch(dirs, node.procfs)) is not None:
        troubles.append(mismatch)
    return together(some([_with_files(path, node) for path in dirs] or [AUTO]), troubles)


def _with_files(path: str, node: Node) -> str:
    """The directory, and how many files of which scheduler are in it."""
    counts = {name: count for (where, name), count in node.regions.found.items() if where == path.rstrip("/")}
    return (
        f"{path} ({', '.join(f'{count} of {name}' for name, count in sorted(counts.items()))})"
        if counts
        else path
    )


def _no_files() -> Finding:
    return failed(
        f"none of {', '.join(KNOWN_DIRS)} exists",
        "no scheduler's device plugin has made its directory: none is installed on this node, no container used a GPU "
        "yet, or it keeps its files elsewhere",
        "its HOOK_PATH says where: kubectl -n kube-system get ds -o yaml | grep -n -A1 HOOK_PATH, and give that "
        "directory with --containers-dir; in a container: mount the host's directory at the same path",
    )


def volcano_mismatch(dirs: Iterable[str], procfs: Procfs) -> Finding | None:
    """Whether Volcano's monitor on this node reads another directory than the one that its plugin fills."""
    if VOLCANO_PLUGIN_DIR not in dirs:
        return None
    for host_pid in procfs.entries():
        with suppress(ProcessGone, AccessDenied, OSError):
            if procfs.comm(host_pid) != _VOLCANO_MONITOR[:15]:
                continue
            with open(f"{procfs.root}/{host_pid}/environ", "rb") as file:
                words = file.read(1 << 20).split(b"\0")
            hook = next((os.fsdecode(word[10:]) for word in words if word.startswith(b"HOOK_PATH=")), "")
            if hook not in ("", VOLCANO_HOOK, f"{VOLCANO_HOOK}/vgpu"):
                return warning(
                    f"{_VOLCANO_MONITOR} (PID {host_pid}) reads {hook}/containers, Volcano's plugin fills "
                    f"{VOLCANO_PLUGIN_DIR}",
                    "its manifests before September 2026 give plugin and monitor different HOOK_PATHs: this monitor "
                    "finds no container, whatever their files say",
                    f"a newer volcano-vgpu-device-plugin, with its manifest, or HOOK_PATH={VOLCANO_HOOK}/vgpu for this "
                    "monitor; or read the same values from resolver: --hami-metrics",
                )
    return None


def _directory(path: str) -> Finding:
    try:
        with os.scandir(path) as listing:
            next(listing, None)
        read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except FileNotFoundError:
        return failed(
            f"{path} does not exist",
            "HAMi's device plugin has not made it: HAMi is not installed on this node, no container used a GPU yet, "
            "or it keeps its files elsewhere",
            "kubectl -n kube-system get ds hami-device-plugin -o yaml | grep -n vgpu, and give that directory with "
            "--containers-dir; in a container: mount the host's /usr/local/vgpu at the same path",
        )
    except NotADirectoryError:
        return failed(
            f"{path} is no directory",
            "something else has its name",
            f"ls -ld {path}; give HAMi's with --containers-dir",
        )
    except PermissionError as error:
        return failed(
            f"{path} may not be listed ({error.strerror})",
            "it, or a directory above it, is closed to this user",
            f"run as root; namei -l {path} shows which one",
        )
    except OSError as error:
        return failed(
            f"{path} cannot be read ({error.strerror})", "the file system fails", f"dmesg | tail; ls {path}"
        )
    if read_only:
        return failed(
            f"{path} is mounted read-only",
            "slots can be read but not repaired (write_failed)",
            f"mount it writable: mount -o remount,rw {path} (Kubernetes: readOnly: false in volumeMounts)",
        )
    return ok(path)


def regions(node: Node) -> Finding:
    """Which cache files there are, of which layouts, and which are skipped and why."""
    from resolver.hami.layout import LAYOUTS

    seen = node.regions
    layouts: dict[str, int] = {}
    for _path, layout in seen.regions:
        layouts[layout] = layouts.get(layout, 0) + 1
    kinds = ", ".join(f"{number} of layout {layout}" for layout, number in sorted(layouts.items()))
    found = f"{several(len(seen.regions), 'region')}{': ' if kinds else ''}{kinds}"
    by_reason: dict[str, list[str]] = {}
    for path, reason in seen.rejected.items():
        by_reason.setdefault(reason, []).append(path)
    troubles = []
    for reason, paths in by_reason.items():
        state, cause, fix = REFUSALS[RegionReason(reason)]
        if reason in (RegionReason.UNKNOWN_SIZE, RegionReason.UNKNOWN_VERSION):
            cause += f" (known: {', '.join(LAYOUTS)})"
        what = f"{several(len(paths), 'file')} skipped, {reason}: {some(map(_container, paths))}"
        troubles.append(
            Finding(state=state, found=what, cause=f"{reason}: {cause}", fix=fix.format(paths[0]))
        )
    if seen.not_writable:
        troubles.append(
            failed(
                f"{several(len(seen.not_writable), 'region')} not writable: {some(map(_container, seen.not_writable))}",
                "they can be read but not repaired: mounted read-only, or a tenant's umask closed them to this user",
                f"run as root with CAP_DAC_OVERRIDE; ls -ln {seen.not_writable[0]}; findmnt --target it",
            )
        )
    if troubles and seen.regions:
        worst = together(found, troubles)
        return worst._replace(found=f"{found}; {worst.found}")
    if not troubles and not seen.regions:
        if len(seen.missing_dirs) == len(set(node.settings.containers_dir)):
            return unknown(
                "there is no directory to read",
                "where HAMi keeps its files on this node is not known",
                "fix what the check containers_dir names, then: resolver doctor --only regions",
            )
        return ok("none yet: no container of HAMi's runs here, or none of them has started CUDA")
    return together(found, troubles)


def _container(path: str) -> str:
    """``<podUID>_<containerName>/<file>``: its path without what all have in common."""
    return "/".join(path.rsplit("/", 2)[1:])


def writer(node: Node) -> Finding:  # noqa: ARG001
    """Whether the slot writer starts and changes a word, of a file of our own."""
    import asyncio
    import ctypes

    from resolver.workers import slot_writer as orders
    from resolver.workers.supervisor import WorkerProcess

    try:
        ctypes.CDLL(_LIBATOMIC)
    except OSError as error:
        return failed(
            "it cannot write, for lack of a library",
            f"{_LIBATOMIC} is what it compares and swaps with, and it cannot be loaded: {error}",
            "apt-get install libatomic1 (Debian, Ubuntu) or dnf install libatomic (Fedora)",
        )
    worker = WorkerProcess(
        "slot writer", "resolver.workers.slot_writer", timeout=5.0, rights=frozenset({"DAC_OVERRIDE"})
    )
    fd = os.memfd_create("slot", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 4096)
        message = orders.HEAD.pack(4096, 1) + orders.ORDER.pack(-1, 0, 8, 0, 8, 0, 1 << 32 | 1)
        outcome, found = orders.RESULT.unpack(asyncio.run(worker.request(message, [fd])))
        if outcome == orders.DONE and os.pread(fd, 8, 8) == (1 << 32 | 1).to_bytes(8, "little"):
            return ok("changed a word of a test file by compare-and-swap")
        why = f"outcome {outcome}, found {found}"
    except (WorkerFailed, OSError, ValueError) as error:
        why = str(error)
    finally:
        worker.stop()
        os.close(fd)
    return failed(
        "it cannot write",
        f"{why}: the system does not let a child start, or not map a file for writing",
        "check its standard error: resolver doctor --only writer; dmesg | tail; and the seccomp or "
        "AppArmor profile of this container",
    )


def pod_names(node: Node) -> Finding:
    """Whether names of pods can be read from kubelet's directory of logs."""
    directory = node.settings.pod_logs_dir
    fix = f"in a container: mount the host's {directory} read-only; elsewhere kept logs: --pod-logs-dir"
    cause = (
        "names of pods and namespaces stay empty in metrics, top and the API; nothing else depends on them"
    )
    try:
        entries = os.listdir(directory)
    except FileNotFoundError:
        return warning(f"{directory} does not exist", f"no kubelet here, or it is not mounted: {cause}", fix)
    except OSError as error:
        return warning(f"{directory} cannot be read ({error.strerror})", cause, f"run as root; {fix}")
    from resolver.containers.pod_names import parse_names

    named = parse_names(entries)
    pods = {os.path.basename(os.path.dirname(path)).partition("_")[0] for path, _ in node.regions.regions}
    nameless = sorted(pods - named.keys())
    if nameless and len(nameless) == len(pods):
        return warning(
            f"{several(len(named), 'pod')}, none of those with regions ({some(nameless)})",
            f"the directory is another node's, another kubelet's, or the containers are not Kubernetes': {cause}",
            fix,
        )
    return ok(f"{several(len(named), 'pod')} named in {directory}")
