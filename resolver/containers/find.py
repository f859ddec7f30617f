"""Finds containers by names that people give."""

import os
from collections.abc import Iterable, Sequence

from resolver.base.errors import Ambiguous, CannotKnow, NotFound, ProcessGone, ResolverError, UsageError
from resolver.base.records import NamedTuple
from resolver.containers.namespaces import Member, members_of
from resolver.linux.cgroup import cgroup_paths, container_id_of, names_in, pod_uid_of, strip_scheme
from resolver.linux.cgroup_directories import cgroup_roots, find_directories, processes_in
from resolver.linux.mounts import Mount
from resolver.linux.procfs import Procfs

#: Least characters of the start of an id, and characters of a complete id.
SHORTEST_PREFIX, FULL_ID = 6, 64
_HEX = frozenset("0123456789abcdef")
#: Inode of the initial cgroup namespace (PROC_CGROUP_INIT_INO in include/linux/proc_ns.h).
_HOST_CGROUPNS = "cgroup:[4026531835]"


class FoundContainer(NamedTuple):
    """Container with processes. ``keys`` holds its id, or cgroup paths if its name is no id."""

    keys: frozenset[str]
    directories: tuple[str, ...]
    host_pids: dict[int, None]

    @property
    def container_id(self) -> str:
        return names_in(min(self.keys, key=len).rsplit("/", 1)[-1])[0]


class Wanted:
    """Requested container: an id or its start, a name, or a name in a pod."""

    def __init__(self, text: str) -> None:
        self.text = strip_scheme(text.strip())
        self.pod_uid, _, self.container_name = self.text.partition("/")
        self.in_pod = "/" in self.text
        if self.in_pod and (not self.container_name or pod_uid_of(f"/pod{self.pod_uid}") is None):
            raise UsageError(
                f"{text!r} is not a <podUID>/<containerName>: "
                "kubectl get pod NAME -o jsonpath={.metadata.uid} prints the UID"
            )
        self.is_id = len(self.text) >= SHORTEST_PREFIX and _HEX.issuperset(self.text)
        if not self.text:
            raise UsageError("the container's id is empty: give it, 6 or more characters of it, or its name")
        self.pod_uid = self.pod_uid.replace("_", "-")
        #: `match` has seen a container's directory: its hierarchy has those of all containers with ids.
        self.sees_ids = False
        self._needles = (self.pod_uid, self.pod_uid.replace("-", "_")) if self.in_pod else (self.text,)

    def match(self, path: str, name: str, in_pod: bool) -> tuple[str | None, bool]:  # noqa: FBT001 - of Match
        """Return the wanted container's key for a cgroup; see `find_directories`."""
        if len(name) >= FULL_ID:
            self.sees_ids = True
        if self.in_pod:
            in_pod = in_pod or (
                any(needle in name for needle in self._needles) and pod_uid_of("/" + name) == self.pod_uid
            )
            return (container_id_of(name) if in_pod else None), in_pod
        if self.text in name:
            container_id = container_id_of(name) or ""
            if len(self.text) >= SHORTEST_PREFIX and container_id.startswith(self.text):
                return container_id, False
            # LXC watches a container from outside, by processes in /lxc.monitor/<name>.
            named = self.text in names_in(name) and "/lxc.monitor/" not in path
            if named and not name.endswith(".slice"):  # a slice contains containers but is no container
                return path, False
        return None, False

    def is_exact(self, key: str) -> bool:
        name = key.rsplit("/", 1)[-1]
        return self.text in names_in(name)

    def keys_in(self, cgroup_text: str) -> set[str]:
        keys: set[str] = set()
        if any(needle in cgroup_text for needle in self._needles):
            for path in cgroup_paths(cgroup_text):
                in_pod, so_far = False, ""
                for part in path.removesuffix(" (deleted)").split("/")[1:]:
                    so_far += "/" + part
                    key, in_pod = self.match(so_far, part, in_pod)
                    if key is not None:
                        keys.add(key)
        return keys


def find_container(procfs: Procfs, wanted: Wanted, mounts: Iterable[Mount]) -> tuple[FoundContainer, str]:
    """Return the only wanted container, and where it was found: ``"cgroup"`` or ``"scan"``.

    Raises NotFound, Ambiguous, CannotKnow and UsageError.
    """
    source = "cgroup"
    containers = by_directories(wanted, cgroup_roots(mounts))
    if not containers:
        containers, source = _by_scan(procfs, wanted), "scan"
    if any(wanted.is_exact(key) for container in containers for key in container.keys):
        containers = [container for container in containers if any(map(wanted.is_exact, container.keys))]
    if wanted.in_pod and containers:
        containers = _named(procfs, wanted, containers)
    if len(containers) > 1:
        raise Ambiguous(
            f"{wanted.text!r} fits {len(containers)} containers: ask for one by its id",
            tuple(
                sorted(
                    "  ".join((container.container_id, *container.directories[:1]))
                    for container in containers
                )
            ),
        )
    if not containers:
        raise _not_found(procfs, wanted)
    return containers[0], source


def container_name(mounts: Iterable[Mount], pod_uid: str | None) -> str | None:
    """Return a container's name in its pod, from its main process's mount table.

    In order: ``<kubelet>/pods/<podUID>/containers/<containerName>/<hash>``, and HAMi's
    ``<hook>/containers/<podUID>_<containerName>``, which may be an init container's. If ``containers`` is a separate
    mount, the root is ``/<podUID>_<containerName>``.
    """
    if pod_uid is None:
        return None
    in_kubelet, in_hami, own_mount = f"/pods/{pod_uid}/", f"/containers/{pod_uid}_", f"/{pod_uid}_"
    of_hami: str | None = None
    for mount in mounts:
        before, separator, name = mount.root.partition(in_hami)
        if not separator and mount.root.startswith(own_mount):
            separator, name = own_mount, mount.root[len(own_mount) :]
        if separator and name and "/" not in name and in_kubelet not in before:
            of_hami = of_hami or name
        # A tenant's own volumes are deeper below this pod's directory.
        _, separator, below = mount.root.partition(in_kubelet)
        if separator:
            kind, _, rest = below.partition("/")
            name, _, file = rest.partition("/")
            if kind == "containers" and name and file and "/" not in file:
                return name
    return of_hami


def name_by_mounts(procfs: Procfs, host_pid: int, pod_uid: str | None) -> str:
    """Return the container's name by its main process's mounts, empty if unknown. Lanes call it."""
    return container_name(procfs.first_mounts(host_pid), pod_uid) or ""


def name_of(procfs: Procfs, members: list[Member], pod_uid: str | None) -> str | None:
    """Return a container's name from its main process (outermost, lowest number)."""
    if pod_uid is None:
        return None
    for member in sorted(members, key=lambda member: (len(member.ns_pids), member.ns_pids[-1])):
        try:
            name = container_name(procfs.mounts(member.host_pid), pod_uid)
            if procfs.ns_pids(member.host_pid) == member.ns_pids:  # its PID was not reused
                return name
        except ProcessGone:
            continue
    return None


def by_directories(wanted: Wanted, roots: Sequence[str]) -> list[FoundContainer]:
    """Find containers with processes in the hierarchies' directories; an id in the first that has all ids."""
    by_key: dict[str, list[str]] = {}
    container_id = wanted.text if wanted.is_id and len(wanted.text) == FULL_ID else ""
    for root in roots:
        for key, directories in find_directories(root, wanted.match, container_id=container_id).items():
            by_key.setdefault(key, []).extend(directories)
        # Where v1 is mounted, too, v2 may have only some containers.
        alone = bool(container_id and by_key) or not os.path.exists(f"{root}/cgroup.controllers")
        if wanted.is_id and wanted.sees_ids and alone:
            break
    return _merged((key, paths, _processes(roots, key, paths)) for key, paths in by_key.items())


def _processes(roots: Sequence[str], key: str, directories: Iterable[str]) -> dict[int, None]:
    """Return the processes of a container, without systemd-nspawn's own, which watches it from outside."""
    own = processes_in(f"{root}{key}/supervisor" for root in roots if key.endswith(".service"))
    return {pid: None for pid in processes_in(directories) if pid not in own}


def _merged(parts: Iterable[tuple[str, list[str], dict[int, None]]]) -> list[FoundContainer]:
    """Merge containers with a different path in each hierarchy if they share processes."""
    containers: list[FoundContainer] = []
    for key, directories, host_pids in parts:
        if not host_pids:
            continue  # left behind by an ended container
        keys, merged_directories, merged_pids = frozenset((key,)), tuple(directories), host_pids
        for other in list(containers):
            named = key.startswith("/") and all(name.startswith("/") for name in other.keys)
            if named and not other.host_pids.keys().isdisjoint(merged_pids):
                containers.remove(other)
                keys |= other.keys
                merged_directories = other.directories + merged_directories
                merged_pids = other.host_pids | merged_pids
        containers.append(FoundContainer(keys, merged_directories, merged_pids))
    return containers


def _by_scan(procfs: Procfs, wanted: Wanted) -> list[FoundContainer]:
    by_key: dict[str, dict[int, None]] = {}
    for host_pid in procfs.entries():
        try:
            keys = wanted.keys_in(procfs.cgroup(host_pid))
        except ProcessGone:
            continue
        for key in keys:
            by_key.setdefault(key, {})[host_pid] = None
    return _merged((key, [], host_pids) for key, host_pids in by_key.items())


def _named(procfs: Procfs, wanted: Wanted, containers: list[FoundContainer]) -> list[FoundContainer]:
    """Return a pod's containers of that name. Raises NotFound."""
    names: dict[str, list[FoundContainer]] = {}
    for container in containers:
        if name := name_of(procfs, members_of(procfs, container.host_pids), wanted.pod_uid):
            names.setdefault(name, []).append(container)
    if wanted.container_name not in names:
        names_text = ", ".join(sorted(names)) or "none with a known name"
        why = f"pod {wanted.pod_uid} has no running container {wanted.container_name!r}; it has: {names_text}"
        raise NotFound(why, "container")
    return names[wanted.container_name]


def _not_found(procfs: Procfs, wanted: Wanted) -> ResolverError:
    if not wanted.in_pod and len(wanted.text) < SHORTEST_PREFIX:
        return UsageError(
            f"{wanted.text!r} is no container's complete name, and too short for the start of an id: "
            f"give {SHORTEST_PREFIX} or more characters"
        )
    subject = f"pod {wanted.pod_uid}" if wanted.in_pod else f"container {wanted.text!r}"
    require_host_cgroupns(procfs, f"no process of {subject} can be seen")
    return NotFound(f"no process on this node is in {subject}: is it running, and on this node?", "container")


def require_host_cgroupns(procfs: Procfs, seen: str) -> None:
    """Raise CannotKnow if a private cgroup namespace hides this process's container; ``seen`` names those found."""
    try:
        hidden = os.readlink(f"{procfs.root}/self/ns/cgroup") != _HOST_CGROUPNS
    except FileNotFoundError:
        hidden = False  # before Linux 4.6
    if hidden:
        raise CannotKnow(
            f"{seen}, but this process runs in a private cgroup namespace, where its own container's id is hidden, "
            "and that might be the one: run it on the host, or with --cgroupns=host (Docker)"
        )
