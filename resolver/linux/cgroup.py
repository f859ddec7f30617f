"""Container ids and pod UIDs in cgroup paths of containerd, CRI-O, Docker and Podman, under both cgroup drivers.

Names without 64 hexadecimal digits (``ctr``, ``runc``) must be known (`names_in`). Without ``re``: it takes a third of
a look-up's imports.
"""

from collections.abc import Iterator
from functools import lru_cache

from resolver.base.records import NamedTuple

_HEX = frozenset("0123456789abcdef")
_WORD = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_ID_DIGITS = 64
#: Beginnings and ends of names without 64 digits, by engine; see `names_in`.
_NAMED = ("lxc.payload.", ""), ("systemd-nspawn@", ".service"), ("system.slice:docker:", "")
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
    pods = _pods(path)
    for at in (pods[0][1], 0) if pods else (0,):
        for start, id_start, container_id in _ids(path):
            if id_start >= at and _is_container(path[start:id_start]):
                pod_uid = next((uid for uid, end in reversed(pods) if end <= id_start), None)
                prefix = path[start:id_start]
                runtime = "docker" if path[:start].endswith("/docker/") else None
                if prefix:
                    runtime = _RUNTIMES.get(prefix[:-1].rpartition(":")[2])
                return ContainerCgroup(container_id, pod_uid, runtime)
    return None


# A line: '0::/kubepods.slice/kubepods-pod23c50244_5588_46da_b958_f3cfca0c0cef.slice/cri-containerd-<64 digits>.scope'
@lru_cache(maxsize=128)  # all processes of a container have the same text
def parse_cgroup(text: str) -> ContainerCgroup | None:
    """Parse ``/proc/<pid>/cgroup``: the first line with a container counts."""
    if len(text) < _ID_DIGITS:
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
        pods = _pods(path)
        if not pods:
            continue
        ids = [container_id for _, start, container_id in _ids(path) if start >= pods[0][1]]
        container = parse_cgroup_path(path)
        if len(pods) != 1 or len(ids) != 1 or container is None:
            return None
        if key is not None and key[:2] != container[:2]:
            return None
        key = container
    return key


def pod_uid_of(text: str) -> str | None:
    """Innermost pod UID in a path or ``/proc/<pid>/cgroup``."""
    for path in cgroup_paths(text):
        if pods := _pods(path):
            return pods[-1][0]
    return None


# A line: '4:memory:/docker/<64 digits>'
def cgroup_paths(text: str) -> Iterator[str]:
    """Yield the path of each line of ``/proc/<pid>/cgroup`` (cgroups(7)), or a line that is a path."""
    for line in text.split("\n"):
        if line.startswith("/"):
            yield line
        elif ":/" in line:
            yield line[line.index(":/") + 1 :]


def container_id_of(name: str) -> str | None:
    """Container id in a name."""
    for start, id_start, container_id in _ids(name):
        return container_id if _is_container(name[start:id_start]) else None
    return None


def names_in(name: str) -> tuple[str, ...]:
    """Names of a container without an id of 64 digits: the one to print first, its cgroup's name last.

    Samples: ``lxc.payload.web``, ``systemd-nspawn@web.service``, ``system.slice:docker:q3v...`` (BuildKit) and
    ``<allocation's UUID>.<task>.scope`` (Nomad).
    """
    for before, after in _NAMED:
        if name.startswith(before) and name.endswith(after) and len(name) > len(before) + len(after):
            return name.removeprefix(before).removesuffix(after), name
    task, _, suffix = name.rpartition(".")
    allocation = task.partition(".")[0]
    return (
        (task, allocation, name)
        if suffix == "scope" and task != allocation and is_uid(allocation)
        else (name,)
    )


def names_in_pod(pod: str, container_id: str) -> tuple[str, ...]:
    """Names of a container's cgroup in its pod's, by runtime; empty unless ``pod`` may be a pod's."""
    if len(pod.rpartition("pod")[2]) < 32:
        return ()
    if pod.endswith(".slice"):
        return tuple(f"{runtime}-{container_id}.scope" for runtime in ("cri-containerd", "crio", "docker"))
    return container_id, f"crio-{container_id}"


def strip_scheme(text: str) -> str:
    """Remove a scheme such as ``containerd://``."""
    scheme, separator, rest = text.partition("://")
    return rest if separator and "/" not in scheme else text


def _is_container(prefix: str) -> bool:
    """Check the text before the 64 digits: empty, ``<runtime>-`` or ``<slice>:<runtime>:``.

    Conmon monitors CRI-O's and Podman's containers from outside.
    """
    return not prefix or (prefix[-1] in "-:" and not prefix.endswith("conmon-"))


def is_uid(text: str) -> bool:
    """Check for an API server's UID, or the hash that kubelet gives a static pod."""
    parts = text.split("-")
    return [len(part) for part in parts] in ([8, 4, 4, 4, 12], [32]) and _HEX.issuperset("".join(parts))


def _pods(path: str) -> list[tuple[str, int]]:
    """UIDs of the pods in a path, each with its end; systemd slices have '_' for '-'."""
    pods, at = [], -1
    while (at := path.find("pod", at + 1)) >= 0:
        text = path[at + 3 : at + 39].replace("_", "-")
        uid = next((uid for uid in (text, text[:32]) if is_uid(uid)), "")
        end = at + 3 + len(uid)
        if uid and path[at - 1 : at] not in _WORD and path[end : end + 1] not in {*_WORD, "-"}:
            pods.append((uid, end))
    return pods


def _ids(path: str) -> Iterator[tuple[int, int, str]]:
    """Yield ids, components' last 64 digits but for the unit's suffix: the component's start, the id's start, the id.

    The kernel appends " (deleted)" to the path of a removed cgroup that still holds a zombie (proc_cgroup_show in
    kernel/cgroup/cgroup.c).
    """
    start = 0
    for part in path.split("/"):
        name = part.removesuffix(" (deleted)").removesuffix(".scope")
        at = len(name) - _ID_DIGITS
        if at >= 0 and name[at - 1 : at] not in _HEX and _HEX.issuperset(name[at:]):
            yield start, start + at, name[at:]
        start += len(part) + 1
