"""Limits of the API's two sockets: root's clients enter as they come, tenants take turns by container."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resolver.api.access import MOST_TENANTS
from resolver.serve import http

if TYPE_CHECKING:
    import socket

    from resolver.api.access import ApiGatekeeper

ROOT_LIMITS = http.Limits(
    connections=1024,  # one beyond `MOST_CONNECTIONS` gets an answer that says so
    head_bytes=16 << 10,
    seconds=10.0,
    idle_seconds=30,
    share=0.5,
)
TENANT_LIMITS = ROOT_LIMITS._replace(
    connections=MOST_TENANTS,
    share=0.1,
    waiting=MOST_TENANTS,
    apart=0.004,
    busy="too many connections of this container are waiting; come back in a second",
)


async def serve(application: Any, gatekeeper: ApiGatekeeper, listener: socket.socket) -> None:
    """Answer until cancelled."""
    await http.serve(application, gatekeeper, listener, TENANT_LIMITS if gatekeeper.tenants else ROOT_LIMITS)
