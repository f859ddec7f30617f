"""Container ids and pod UIDs in cgroup paths of containerd, CRI-O, Docker and Podman, under both cgroup drivers.

Names without 64 hexadecimal digits (``ctr``, ``runc``) must be known (`parts_of`).
"""

from __future__ import annotations

import re
from functools import lru_cache

from resolver.base.records import NamedTuple

TYPE_CHECKING = False  # as typing's, which a look-up does without
if TYPE_CHECKING:
    from collections.abc import Iterator

# 64 digits that end a path component, or end it but for the unit's suffix. The kernel appends " (deleted)"
# to the path of a removed cgroup that still holds a zombie (proc_cgroup_show in kernel/cgroup/cgroup.c).
_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?=(?:\.scope)?(?: \(deleted\))?(?:/|\n|\Z))")
# An API server's UID, or the hash that kubelet gives a static pod. Systemd slices have '_' for '-'.
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_POD = re.compile(
    r"(?<![0-9A-Za-z_])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![0-9A-Za-z_-])"
)
#: Names without 64 digits, by engine; see `names_in`.
_NAMED = re.compile(
    r"lxc\.payload\.(.+)|systemd-nspawn@(.+)\.service|system\.slice:docker:([a-z0-9]{25})"
    rf"|(({_UUID})\..+)\.scope"
)
_RUNTIMES = {
    "cri-containerd": "containerd",
    "crio": "cri-o",
    "docker": "docker",
    "libpod": "podman",
    "libpod-payload": "podman",
    "nerdctl": "containerd",
}


class ContainerCgroup(NamedTuple):
    """Container named by a cgroup path.

    ``container_id`` is empty in `NO_CONTAINER` only. ``pod_uid`` may be a static pod's 32-digit hash. ``runtime`` is
    None if not shown.
    """

    container_id: str
    pod_uid: str | None
    runtime: str | None


#: Key of a process without a container in its cgroup.
NO_CONTAINER = ContainerCgroup("", None, None)


def parse_cgroup_path(path: str) -> ContainerCgroup | None:
    """First container in a pod, else the outermost one.

    An id before the pod is a node in a container (kind, k3d). Tenants may choose names below their container's cgroup.
    """
    if len(path) < 64:
        return None
    pod = _POD.search(path)
    for at in (pod.end(), 0) if pod else (0,):
        for match in _ID.finditer(path, at):
            start = path.rfind("/", 0, match.start()) + 1
            prefix = path[start : match.start()]
            if _is_container(prefix):
                return ContainerCgroup(
                    match[0], _last_pod(path[: match.start()]), _runtime(path[:start], prefix)
                )
    return None


@lru_cache(maxsize=128)  # all processes of a container have the same text
def parse_cgroup(text: str) -> ContainerCgroup | None:
    """Parse ``/proc/<pid>/cgroup``: the first line with a container counts."""
    if _ID.search(text) is None:
        return None
    for path in cgroup_paths(text):
        if (key := parse_cgroup_path(path)) is not None:
            return key
    return None


def only_container(text: str) -> ContainerCgroup | None:
    """Return the container if ``/proc/<pid>/cgroup`` names one pod, with one container below.

    Tenants can name cgroups after other containers or pods. Outer containers without a pod are nodes.
    """
    key: ContainerCgroup | None = None
    for path in cgroup_paths(text):
        pods = list(_POD.finditer(path))
        if not pods:
            continue
        below = path[pods[0].end() :]
        ids = list(_ID.finditer(below))
        container = parse_cgroup_path(path)
        if len(pods) != 1 or len(ids) != 1 or container is None:
            return None
        if key is not None and (key.container_id, key.pod_uid) != (
            container.container_id,
            container.pod_uid,
        ):
            return None
        key = container
    return key


def pod_uid_of(text: str) -> str | None:
    """Innermost pod UID in a path or ``/proc/<pid>/cgroup``."""
    for path in cgroup_paths(text):
        if (pod_uid := _last_pod(path)) is not None:
            return pod_uid
    return None


def cgroup_paths(text: str) -> Iterator[str]:
    """Yield the path of each line of ``/proc/<pid>/cgroup`` (cgroups(7)), or a line that is a path."""
    for line in text.split("\n"):
        if line.startswith("/"):
            yield line
        elif ":/" in line:
            yield line[line.index(":/") + 1 :]


def container_id_of(name: str) -> str | None:
    """Container id in a name."""
    match = _ID.search(name)
    return match[0] if match is not None and _is_container(name[: match.start()]) else None


def names_in(name: str) -> tuple[str, ...]:
    """Names by which people know a container without 64 digits, the one to print first; its cgroup's name is the last.

    Samples: ``lxc.payload.web``, ``systemd-nspawn@web.service``, ``system.slice:docker:q3v...`` (BuildKit) and
    ``<allocation's UUID>.<task>.scope`` (Nomad).
    """
    match = _NAMED.fullmatch(name)
    names = tuple(text for text in match.groups() if text) if match is not None else ()
    return (*names, name)


def is_monitor(path: str) -> bool:
    """Check if a cgroup is one of LXC's own processes, which watch a container from outside."""
    return "/lxc.monitor/" in path


def parts_of(path: str) -> list[str]:
    """Split a path, outermost component first."""
    return path.removesuffix(" (deleted)").split("/")


def strip_scheme(text: str) -> str:
    """Remove a scheme such as ``containerd://``."""
    scheme, separator, rest = text.partition("://")
    return rest if separator and "/" not in scheme else text


def _is_container(prefix: str) -> bool:
    """Check the text before the 64 digits: empty, ``<runtime>-`` or ``<slice>:<runtime>:``.

    Conmon monitors CRI-O's and Podman's containers from outside.
    """
    return not prefix or (prefix[-1] in "-:" and not prefix.endswith("conmon-"))


def _last_pod(path: str) -> str | None:
    pods = _POD.findall(path)
    return pods[-1].replace("_", "-") if pods else None


def _runtime(parent: str, prefix: str) -> str | None:
    if prefix:
        return _RUNTIMES.get(prefix[:-1].rpartition(":")[2])
    return "docker" if parent.endswith("/docker/") else None
