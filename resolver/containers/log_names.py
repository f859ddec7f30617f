"""Names of pods and containers, from kubelet's log directories, which belong to root."""

import os
import time
from collections.abc import Iterable

from resolver.base.records import NamedTuple

#: Kubelet's link to a container's log; no part holds an underscore (RFC 1123 names).
_LINK = r"([^_]+)_([^_]+)_([^_]+)-([0-9a-f]{12,64})\.log"
#: Kubelet's directory of pods' logs, by default.
POD_LOGS_DIR = "/var/log/pods"
#: Kubelet cuts a link's name at so many bytes (``logSymlink`` in pkg/kubelet/kuberuntime/legacy.go), and so its id.
_ID_DIGITS, _LONGEST_LINK = 64, 255
#: A directory's change within this time before a listing may carry the same time stamp as later ones (kernel ticks).
_TICK_NS = 50_000_000
_UNKNOWN = ("", "")


class Listing:
    """Entries of a directory, read again only after a change."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.trouble = "it was not read yet"
        self._mtime_ns = -1

    def changed(self) -> list[str] | None:
        """Return the directory's entries if they may have changed, no entries if it can't be read."""
        try:
            mtime_ns = os.stat(self.directory).st_mtime_ns
            if mtime_ns == self._mtime_ns:
                return None
            entries = os.listdir(self.directory)
        except OSError as error:
            self.trouble, self._mtime_ns = f"{self.directory} cannot be read ({error.strerror})", -1
            return []
        self.trouble, self._mtime_ns = "", mtime_ns if abs(time.time_ns() - mtime_ns) > _TICK_NS else -1
        return entries


class PodNames:
    """``names`` are ``(namespace, pod)`` by pod UID; empty if two directories disagree."""

    def __init__(self, directory: str) -> None:
        self._listing = Listing(directory)
        self.names: dict[str, tuple[str, str]] = {}

    def refresh(self) -> None:
        entries = self._listing.changed()
        if entries is not None:
            self.names = parse_names(entries)

    def of(self, pod_uid: str) -> tuple[str, str]:
        return self.names.get(pod_uid, _UNKNOWN)


class LogName(NamedTuple):
    """Kubelet's name of a container."""

    namespace: str
    pod: str
    container: str


class ContainerNames:
    """Kubelet's containers of this node, as of ``refresh``."""

    def __init__(self, containers_dir: str, pods_dir: str) -> None:
        self.pods = PodNames(pods_dir)
        self._listing = Listing(containers_dir)
        self._by_id: dict[str, LogName] = {}
        self._by_pod: dict[tuple[str, str], set[str]] = {}
        self._cut: list[int] = []  # lengths of ids that kubelet has cut

    @property
    def trouble(self) -> str:
        return self._listing.trouble

    def refresh(self) -> None:
        self.pods.refresh()
        entries = self._listing.changed()
        if entries is not None:
            self._by_id, self._by_pod = parse_links(entries), {}
            self._cut = sorted({len(text) for text in self._by_id if len(text) < _ID_DIGITS}, reverse=True)
            for name in self._by_id.values():
                self._by_pod.setdefault((name.namespace, name.pod), set()).add(name.container)

    def of(self, container_id: str) -> LogName | None:
        """Return the names in the container's log; None without a log."""
        starts = (container_id[:digits] for digits in self._cut)
        return next((self._by_id[text] for text in (container_id, *starts) if text in self._by_id), None)

    def has(self, pod_uid: str, container: str) -> bool:
        """Check if this node has, or recently had, the container."""
        return container in self._by_pod.get(self.pods.of(pod_uid), ())

    def pairs(self) -> Iterable[tuple[str, str]]:
        for pod_uid, name in self.pods.names.items():
            for container in self._by_pod.get(name, ()):
                yield pod_uid, container


def parse_names(entries: list[str]) -> dict[str, tuple[str, str]]:
    """``{podUID: (namespace, pod)}``; parts contain no underscore (RFC 1123 names)."""
    names: dict[str, tuple[str, str]] = {}
    for entry in entries:
        parts = entry.split("_")
        if len(parts) == 3 and all(parts):
            namespace, pod, pod_uid = parts
            named = (namespace, pod)
            names[pod_uid] = named if names.get(pod_uid, named) == named else _UNKNOWN
    return names


def parse_links(entries: list[str]) -> dict[str, LogName]:
    """Return the names by container id, or by its start where kubelet has cut it; none if it fits two containers."""
    import re  # slow to load, and a look-up reads no links

    names: dict[str, LogName] = {}
    shared: set[str] = set()
    for entry in entries:
        link = re.fullmatch(_LINK, entry)
        if link is not None and (len(link[4]) == _ID_DIGITS or len(entry) == _LONGEST_LINK):
            name = LogName(link[2], link[1], link[3])
            if names.setdefault(link[4], name) != name:
                shared.add(link[4])
    return {container_id: name for container_id, name in names.items() if container_id not in shared}
