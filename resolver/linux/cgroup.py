"""Container ids and pod UIDs in cgroup paths: pure functions over text.

No specification says how container runtimes name cgroups; the forms below are those of
containerd, CRI-O, Docker and Podman with the systemd and with the cgroupfs driver. A 64-digit hexadecimal
id is what they share. Names that carry none (``ctr``, plain ``runc``) cannot be matched by a pattern: they
give None here, and are found only by somebody who knows the name (`parts_of`).
"""

from __future__ import annotations

import re

from resolver.records import NamedTuple

TYPE_CHECKING = False  # as typing's, which a look-up does without
if TYPE_CHECKING:
    from collections.abc import Iterator

# 64 digits that end a path component, or end it but for the unit's suffix. The kernel appends " (deleted)"
# to the path of a removed cgroup that still holds a zombie (proc_cgroup_show in kernel/cgroup/cgroup.c).
_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?=(?:\.scope)?(?: \(deleted\))?(?:/|\n|\Z))")
# An API server's UID, or the hash that kubelet gives a static pod. Systemd slices have '_' for '-'.
_POD = re.compile(
    r"(?<![0-9A-Za-z_])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![0-9A-Za-z_-])"
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
    """What a cgroup path says about its container.

    ``container_id`` has 64 hexadecimal digits; it is empty in `NO_CONTAINER` only. ``pod_uid`` has dashes, or is the
    32-digit hash of a static pod. ``runtime`` is None where the path does not show it.
    """

    container_id: str
    pod_uid: str | None
    runtime: str | None


#: Of a process whose cgroup names no container.
NO_CONTAINER = ContainerCgroup("", None, None)


def parse_cgroup_path(path: str) -> ContainerCgroup | None:
    """The innermost container of one cgroup path; an outer id is that of its node (kind, k3d)."""
    if len(path) < 64:
        return None
    for match in reversed(list(_ID.finditer(path))):
        start = path.rfind("/", 0, match.start()) + 1
        prefix = path[start : match.start()]
        if not _is_container(prefix):
            continue
        return ContainerCgroup(match[0], _last_pod(path[: match.start()]), _runtime(path[:start], prefix))
    return None


def parse_cgroup(text: str) -> ContainerCgroup | None:
    """The container in a whole ``/proc/<pid>/cgroup``: of the first line that has one.

    v1 has a line per hierarchy, v2 a single ``0::`` line, hybrids have both, and a process need not be in
    its container's cgroup in each of them.
    """
    if _ID.search(text) is None:
        return None
    for path in cgroup_paths(text):
        if (found := parse_cgroup_path(path)) is not None:
            return found
    return None


def only_container(text: str) -> ContainerCgroup | None:
    """The container in a whole ``/proc/<pid>/cgroup`` if nothing in there could be another's; it is in a pod.

    Who may make cgroups can give one the name of another's container or pod, below its own. So there must be one pod
    in all of the text, and below it one container. Outer containers without a pod are nodes (kind, k3d).
    """
    found: ContainerCgroup | None = None
    for path in cgroup_paths(text):
        pods = list(_POD.finditer(path))
        if not pods:
            continue
        below = path[pods[0].end() :]
        ids = list(_ID.finditer(below))
        container = parse_cgroup_path(path)
        if len(pods) != 1 or len(ids) != 1 or container is None:
            return None
        if found is not None and (found.container_id, found.pod_uid) != (
            container.container_id,
            container.pod_uid,
        ):
            return None
        found = container
    return found


def pod_uid_of(text: str) -> str | None:
    """The innermost pod UID in a path or in a whole ``/proc/<pid>/cgroup``, with or without a container."""
    for path in cgroup_paths(text):
        if (pod_uid := _last_pod(path)) is not None:
            return pod_uid
    return None


def cgroup_paths(text: str) -> Iterator[str]:
    """The path of every line of ``/proc/<pid>/cgroup`` (``hierarchy:controllers:path``, cgroups(7)).

    A line that is a path already comes back as it is.
    """
    for line in text.split("\n"):
        if line.startswith("/"):
            yield line
        elif ":/" in line:
            yield line[line.index(":/") + 1 :]


def container_id_of(name: str) -> str | None:
    """The container id in one component of a path, that is, in the name of a cgroup directory."""
    match = _ID.search(name)
    return match[0] if match is not None and _is_container(name[: match.start()]) else None


def name_in(name: str) -> str:
    """What its runtime calls the container with that cgroup, where it has no id: LXC puts a word before it."""
    return name.removeprefix("lxc.payload.")


def parts_of(path: str) -> list[str]:
    """The components of a path, outermost first, for finding a name that has no pattern."""
    return path.removesuffix(" (deleted)").split("/")


def strip_scheme(text: str) -> str:
    """An id as people paste it, without ``containerd://``, ``docker://``, ``cri-o://`` or any other."""
    scheme, separator, rest = text.partition("://")
    return rest if separator and "/" not in scheme else text


def _is_container(prefix: str) -> bool:
    """Whether what stands before the 64 digits in their component names a container.

    It is nothing, ``<runtime>-``, or, where both cgroup drivers got mixed up, ``<slice>:<runtime>:``.
    Conmon is the monitor that CRI-O and Podman start beside a container, outside of it.
    """
    return not prefix or (prefix[-1] in "-:" and not prefix.endswith("conmon-"))


def _last_pod(path: str) -> str | None:
    pods = _POD.findall(path)
    return pods[-1].replace("_", "-") if pods else None


def _runtime(parent: str, prefix: str) -> str | None:
    if prefix:
        return _RUNTIMES.get(prefix[:-1].rpartition(":")[2])
    return "docker" if parent.endswith("/docker/") else None
