"""Facts about the node: from the daemon, or, if none answers, read here without writing anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resolver.base.errors import CannotKnow, NoDaemon
from resolver.cli.documents import Documents, documents_from, from_daemon

if TYPE_CHECKING:
    from resolver.state import Snapshot


def read(socket_path: str | None) -> Documents:
    """Ask the daemon, else look. Raises ResolverError if neither can be."""
    try:
        return from_daemon(socket_path)
    except NoDaemon as error:
        return _by_ourselves(str(error), socket_path)


def _by_ourselves(no_daemon: str, socket_path: str | None) -> Documents:
    """Make the daemon's own pass as a dry run. No event, no lock, no socket; it takes a second."""
    import os

    from resolver.base.lean import lean

    with lean():
        import asyncio
    import msgspec

    from resolver.base.journal import setup_logging
    from resolver.base.source_records import SourceName
    from resolver.cli.in_force import settings_in_force
    from resolver.daemon.once import once
    from resolver.linux.host_view import require_host_view
    from resolver.linux.procfs import Procfs

    if os.geteuid() != 0:
        raise CannotKnow(f"{no_daemon}. To look without a daemon takes root (sudo)")
    require_host_view(Procfs())
    in_force = settings_in_force(socket_path)
    settings = msgspec.structs.replace(in_force.settings, dry_run=True, source=SourceName.SCAN)
    setup_logging(settings.log_format, "error")
    snapshot = asyncio.run(once(settings))
    names = ("containers_dir", "pod_logs_dir")
    by = ", ".join(f"{name} by {in_force.origins.get(name, in_force.whose)}" for name in names)
    return documents_from(lambda name: msgspec.to_builtins(answer(snapshot, name)), no_daemon, by)


def answer(snapshot: Snapshot, name: str) -> Any:
    """Return the API's answer about a snapshot."""
    from resolver.api import shapes
    from resolver.api.status import state_of

    if name == "status":
        return state_of(snapshot, {})
    return shapes.whole(getattr(shapes, name)(snapshot))
