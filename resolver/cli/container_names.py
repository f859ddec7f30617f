"""Names that people have for containers, by the daemon's list or kubelet's directory of logs."""

from __future__ import annotations

import os

from resolver import client
from resolver.base.errors import AccessDenied, Ambiguous, NotFound, ResolverError, UsageError
from resolver.base.lock_holder import UNIT_SETTINGS
from resolver.base.records import NamedTuple
from resolver.base.text import printable
from resolver.cli.ask_daemon import ask
from resolver.linux.cgroup import is_uid

TYPE_CHECKING = False  # typing would slow down a look-up
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resolver.state import Container, Process

_NAMES = "use NAMESPACE/POD, NAMESPACE/POD/NAME, POD_UID/NAME, NAME or an id"
_SHORTEST_UID = 6
#: The title of processes of the host.
HOST = "not in a container"


class Named(NamedTuple):
    """A container's names; empty ones are unknown."""

    container_id: str
    namespace: str
    pod: str
    container_name: str
    pod_uid: str

    @classmethod
    def of(cls, record: Container | Process) -> Named:
        """Return the names in a record of the daemon."""
        names = record.container_id, record.namespace, record.pod, record.container_name, record.pod_uid
        return cls(*(name or "" for name in names))

    @property
    def key(self) -> str:
        """Return its id, or ``<podUID>/<containerName>`` without one."""
        return self.container_id or f"{self.pod_uid}/{self.container_name}"

    @property
    def title(self) -> str:
        """Return a name for people: the pod's if known, else the known ids."""
        if self.pod:
            return "/".join(filter(None, (self.namespace, self.pod, self.container_name)))
        if self.container_name:
            return "/".join(filter(None, (self.pod_uid[:8], self.container_name)))
        return self.container_id[:12] or HOST

    def is_called(self, text: str) -> bool:
        """Match NAMESPACE/POD[/NAME], NAME, an id or its start, or a pod's UID or its start, with [/NAME]."""
        first, _, rest = text.partition("/")
        name, pod = self.container_name, f"{self.namespace}/{self.pod}"
        if text in (name, pod, f"{pod}/{name}"):
            return True
        if is_id(text) and self.key.startswith(text):
            return True
        of_pod = len(first) >= _SHORTEST_UID and self.pod_uid.startswith(first.replace("_", "-"))
        return of_pod and rest in ("", name)


def not_found(text: str, more: str = "") -> NotFound:
    """Build the error for a name that no container has."""
    message = f"no container here is called {text!r}: {_NAMES}; resolver containers lists them"
    return NotFound(f"{message}, or resolver slots without a daemon{more}", "container")


def ambiguous(text: str, matches: Iterable[Named], others: Iterable[str] = ()) -> Ambiguous:
    """Build the error for a name that several containers have; ``others`` are known by their ids only."""
    listing = (*sorted(f"{names.key}  {printable(names.title)}" for names in matches), *sorted(others))
    return Ambiguous(f"{text!r} fits {len(listing)} containers: ask for one by its id", listing)


def resolve(text: str, socket_path: str | None, *, is_no_id: bool = False) -> str:
    """Translate a container's name into an argument of `resolver.lookup.forward.lookup`; an unknown name stays.

    ``is_no_id``: the kernel knows no container with such an id.
    """
    text = text.strip()
    parts = text.split("/")
    in_pod = len(parts) == 2 and "" not in parts and is_uid(parts[0].replace("_", "-"))
    if in_pod or "://" in text or (is_id(text) and not is_no_id and ids_from_kernel(text)):
        return text
    if len(parts) > 3 or (len(parts) > 1 and "" in parts):
        raise UsageError(f"{text!r} is not a container name: {_NAMES}")
    matches = {
        container.key: container
        for container in _known(socket_path)
        if container.container_name and container.is_called(text)
    }
    if not matches and "/" in text:
        raise not_found(text)
    others = ids_from_kernel(text) - matches.keys() if matches and "/" not in text else set()
    if len(matches) + len(others) > 1:
        raise ambiguous(text, matches.values(), others)
    return next(iter(matches), text)


def is_id(text: str) -> bool:
    return 6 <= len(text) <= 64 and not text.strip("0123456789abcdef")


def ids_from_kernel(text: str) -> set[str]:
    """Return the ids (names if they have none) of the containers that the kernel knows by this name."""
    from resolver.containers.find import Wanted, find_container
    from resolver.linux.procfs import Procfs

    procfs = Procfs()
    try:
        return {find_container(procfs, Wanted(text), procfs.mounts("self"))[0].container_id}
    except Ambiguous as error:
        return {candidate.partition(" ")[0] for candidate in error.candidates}
    except ResolverError:
        return set()


def _known(socket_path: str | None) -> Iterator[Named]:
    if os.path.exists(where := client.socket_of(socket_path)):
        try:
            from resolver.api.shapes import Containers

            yield from map(Named.of, ask(Containers, "/v1/containers", socket_path, seconds=1.0).containers)
        except ResolverError:
            if not os.access(where, os.W_OK):  # the daemon may know the name
                raise
        else:
            return
    yield from _in_logs(socket_path)


def _in_logs(socket_path: str | None) -> Iterator[Named]:
    from resolver.containers.log_names import POD_LOGS_DIR, parse_names

    directory = os.environ.get("RESOLVER_POD_LOGS_DIR", POD_LOGS_DIR)
    if "RESOLVER_CONFIG" in os.environ or any(
        map(os.path.exists, (client.socket_of(socket_path), UNIT_SETTINGS))
    ):
        from resolver.cli.in_force import settings_in_force  # slower to import than the rest

        directory = settings_in_force(socket_path).settings.pod_logs_dir
    try:
        pods = parse_names(os.listdir(directory))
        for pod_uid, (namespace, pod) in pods.items():
            for name in os.listdir(os.path.join(directory, f"{namespace}_{pod}_{pod_uid}")) if pod else ():
                yield Named("", namespace, pod, name, pod_uid)
    except PermissionError as error:
        raise AccessDenied(
            f"{error.filename} may not be read, and has the names of pods: run as root"
        ) from None
    except OSError:
        return
