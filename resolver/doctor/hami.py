"""Checks of HAMi's cache files, as the daemon would find them, of the slot writer, and of pod names."""

import contextlib
import os
from collections import Counter

from resolver.base.errors import WorkerFailed
from resolver.base.reasons import RegionReason
from resolver.base.text import several, some
from resolver.doctor.findings import Finding, State, failed, ok, together, unknown, warning
from resolver.doctor.node import Node
from resolver.hami.placements import AUTO, KNOWN_DIRS

_LIBATOMIC = "libatomic.so.1"


def containers_dir(node: Node) -> Finding:
    """Check that the schedulers' directories exist, and can be listed and written to."""
    given = node.settings.containers_dir
    dirs = [path for path in given if path != AUTO]
    if AUTO in given:
        dirs += [path for path in KNOWN_DIRS if path not in dirs and os.path.isdir(path)]
    troubles = [] if dirs else [_missing(f"none of {', '.join(KNOWN_DIRS)} exists")]
    root = f"/proc/{node.lock_holder}/root" if node.lock_holder else ""
    troubles += [finding for path in dirs if (finding := _directory(path, root)).state != State.OK]
    return together(some(dirs or [AUTO]), troubles)


def _missing(summary: str) -> Finding:
    existing = [path for path in KNOWN_DIRS if os.path.isdir(path)]
    return failed(
        summary,
        "HAMi's device plugin, or another scheduler's, has not made it: it is not installed on this node, no container "
        "used a GPU yet, or it keeps its files elsewhere",
        f"there is {some(existing)}: --containers-dir auto finds it"
        if existing
        else "kubectl -n kube-system get ds -o yaml | grep -n -A1 -e vgpu -e HOOK_PATH, and give that directory with "
        "--containers-dir; in a container: mount the host's directory (/usr/local/vgpu) at the same path",
    )


def _directory(path: str, daemon_root: str) -> Finding:
    """Check one directory, as this process and the daemon see it: a unit or a pod has other mounts."""
    try:
        with os.scandir(path) as listing:
            next(listing, None)
    except FileNotFoundError:
        return _missing(f"{path} does not exist")
    except OSError as error:
        return failed(
            f"{path} cannot be listed ({error.strerror})",
            "it is no directory, it or one above it is closed to this user, or its file system fails",
            f"run as root; namei -l {path} shows each directory above it; dmesg | tail",
        )
    for place, suffix in ((path, ""), (f"{daemon_root}{path}", " for the daemon")):
        with contextlib.suppress(OSError):
            if os.statvfs(place).f_flag & os.ST_RDONLY:
                return failed(
                    f"{path} is mounted read-only{suffix}",
                    "no slot there is repaired (not_writable): made after the daemon's start, or mounted read-only",
                    f"restart the daemon; if that doesn't help: mount -o remount,rw {path}, ReadWritePaths in its "
                    "unit, or readOnly: false in its volumeMounts",
                )
    return ok(path)


def regions(node: Node) -> Finding:
    """Check every cache file: its layout, or the reason why it is skipped."""
    from resolver.hami.layout import LAYOUTS

    seen = node.regions
    layouts = Counter(layout for _path, layout in seen.regions)
    kinds = ", ".join(f"{number} of layout {layout}" for layout, number in sorted(layouts.items()))
    summary = ": ".join(filter(None, (several(len(seen.regions), "region"), kinds)))
    by_reason: dict[str, list[str]] = {}
    for path, reason in seen.rejected.items():
        by_reason.setdefault(reason, []).append(path)
    troubles = []
    for reason, paths in by_reason.items():
        why = RegionReason(reason)
        cause, fix = why.for_terminal(paths[0])
        if reason in (RegionReason.UNKNOWN_SIZE, RegionReason.UNKNOWN_VERSION):
            cause += f" (known: {', '.join(LAYOUTS)})"
        detail = f"{several(len(paths), 'file')} skipped, {reason}: {some(map(_container, paths))}"
        troubles.append((failed if why.grave else warning)(detail, f"{reason}: {cause}", fix))
    if closed := seen.not_writable:
        detail = f"{several(len(closed), 'region')} not writable: {some(map(_container, closed))}"
        cause = "they can be read but not repaired: mounted read-only, or a tenant's umask closed them to this user"
        fix = f"run as root with CAP_DAC_OVERRIDE; ls -ln {closed[0]}; findmnt --target it"
        troubles.append(failed(detail, cause, fix))
    if troubles:
        worst = together(summary, troubles)
        return worst._replace(found=f"{summary}; {worst.found}") if seen.regions else worst
    if seen.regions:
        return ok(summary)
    if len(seen.missing_dirs) == len(set(node.settings.containers_dir)):
        return unknown(
            "there is no directory to read",
            "where HAMi keeps its files on this node is not known",
            "fix the problem that the check containers_dir names, then: resolver doctor --only regions",
        )
    return ok("none yet: no container of HAMi's runs here, or none of them has started CUDA")


def _container(path: str) -> str:
    """Shorten a path to ``<podUID>_<containerName>/<file>``."""
    return "/".join(path.rsplit("/", 2)[1:])


def writer(node: Node) -> Finding:  # noqa: ARG001
    """Check that the slot writer starts and changes a word, in a file of our own."""
    import asyncio
    import ctypes

    from resolver.workers import slot_writer as orders
    from resolver.workers.supervisor import WorkerProcess

    try:
        ctypes.CDLL(_LIBATOMIC)
    except OSError as error:
        return failed(
            "it cannot write, for lack of a library",
            f"it compares and swaps words with {_LIBATOMIC}, which cannot be loaded: {error}",
            "apt-get install libatomic1 (Debian, Ubuntu) or dnf install libatomic (Fedora)",
        )
    rights = frozenset({"DAC_OVERRIDE"})
    worker = WorkerProcess("slot writer", "resolver.workers.writer_child", timeout=5.0, rights=rights)
    fd = os.memfd_create("slot", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 4096)
        message = orders.HEAD.pack(4096, 1) + orders.ORDER.pack(-1, 0, 8, 0, 8, 0, 1 << 32 | 1)
        outcome, outcome_detail = orders.RESULT.unpack(asyncio.run(worker.request(message, [fd])))
        if outcome == orders.DONE and os.pread(fd, 8, 8) == (1 << 32 | 1).to_bytes(8, "little"):
            return ok("changed a word of a test file by compare-and-swap")
        why = f"outcome {outcome}, found {outcome_detail}"
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
    """Check that names of pods can be read from kubelet's directory of logs."""
    directory = node.settings.pod_logs_dir
    fix = f"in a container: mount the host's {directory} read-only; elsewhere kept logs: --pod-logs-dir"
    cause = "names of pods and namespaces stay empty in metrics, top and the API; all else works"
    try:
        entries = os.listdir(directory)
    except FileNotFoundError:
        return warning(f"{directory} does not exist", f"no kubelet here, or it is not mounted: {cause}", fix)
    except OSError as error:
        return warning(f"{directory} cannot be read ({error.strerror})", cause, f"run as root; {fix}")
    from resolver.containers.log_names import parse_names

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
