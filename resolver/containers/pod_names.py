"""Names of pods and namespaces, from kubelet's log directories, which belong to root."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import ItemsView

_UNKNOWN = ("", "")


class PodNames:
    """``(namespace, pod)`` by pod UID; empty strings if unknown, or if two directories disagree."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._names: dict[str, tuple[str, str]] = {}
        self._mtime_ns = -1
        self.version = 0  # another one when a name may be different

    def refresh(self) -> None:
        """Read the directory again if it changed."""
        try:
            mtime_ns = os.stat(self.directory).st_mtime_ns
            if mtime_ns == self._mtime_ns:
                return
            entries = os.listdir(self.directory)
        except OSError:
            self.version += bool(self._names)
            self._names, self._mtime_ns = {}, -1
            return
        self.version += 1
        self._names, self._mtime_ns = parse_names(entries), mtime_ns

    def of(self, pod_uid: str) -> tuple[str, str]:
        """Namespace and name of the pod."""
        return self._names.get(pod_uid, _UNKNOWN)

    def items(self) -> ItemsView[str, tuple[str, str]]:
        """Return every pod: its UID, namespace and name."""
        return self._names.items()


def parse_names(entries: list[str]) -> dict[str, tuple[str, str]]:
    """``{podUID: (namespace, pod)}``; no part contains an underscore (RFC 1123 names)."""
    names: dict[str, tuple[str, str]] = {}
    for entry in entries:
        parts = entry.split("_")
        if len(parts) == 3 and all(parts):
            namespace, pod, pod_uid = parts
            named = (namespace, pod)
            names[pod_uid] = named if names.get(pod_uid, named) == named else _UNKNOWN
    return names
