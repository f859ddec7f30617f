"""A picture as the daemon's API tells it: its documents, and a listener that serves them on a Unix socket."""

from __future__ import annotations

import contextlib
import socketserver
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from resolver.api import shapes
from resolver.cli._top.tree import Documents, Tree, build
from resolver.snapshot import Snapshot

ANSWERS: Final[dict[str, Callable[[Snapshot], Any]]] = {
    "/v1/status": lambda picture: shapes.status(picture, {}),
    "/v1/gpus": lambda picture: shapes.Gpus.of(picture.inventory),
    "/v1/containers": lambda picture: shapes.Containers(
        picture.at, [shapes.Container.of(each) for each in picture.containers]
    ),
    "/v1/processes": lambda picture: shapes.Processes(
        picture.at,
        picture.collected_at or None,
        picture.joined.error or None,
        [shapes.Process.of(each) for each in picture.gpu_processes],
    ),
    "/v1/regions": lambda picture: shapes.Regions(
        at=picture.at,
        regions=[shapes.Region.of(each) for each in picture.regions],
        rejected=[shapes.RejectedFile(path, reason) for path, reason in picture.rejected.items()],
        missing_dirs=list(picture.missing_dirs),
    ),
    "/v1/slots": lambda picture: shapes.Slots(
        picture.at, [shapes.Slot.of(region, slot) for region in picture.regions for slot in region.slots]
    ),
}


def document(picture: Snapshot, path: str) -> Any:
    """What a client makes of the answer to ``GET path``."""
    return msgspec.json.decode(msgspec.json.encode(ANSWERS[path](picture)))


def tree_of(picture: Snapshot) -> Tree:
    """What `resolver top` makes of all of it."""
    lists = {name: document(picture, f"/v1/{name}") for name in ("gpus", "containers", "processes", "slots")}
    regions = document(picture, "/v1/regions")
    return build(
        Documents(
            status=document(picture, "/v1/status"),
            **{name: answer[name] for name, answer in lists.items()},
            regions=regions["regions"],
            rejected=regions["rejected"],
        )
    )


class Served:
    """Serves a picture at ``path`` until it is left; `show` replaces it, `stop` and `start` are a daemon's restart.

    ``hangs``: it takes connections and says nothing. The picture is always of now, as a living daemon's is.
    """

    def __init__(self, path: Path, picture: Snapshot) -> None:
        self.path = path
        self.picture = picture
        self.hangs = False
        self.asked = 0
        self._server: socketserver.UnixStreamServer | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def show(self, picture: Snapshot) -> None:
        """From the next answer on."""
        self.picture = picture

    def start(self) -> None:
        """Listen."""
        served = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):  # who asked may have gone
                    served.answer(self)

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self.path.unlink(missing_ok=True)
        self._server = Server(str(self.path), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, and take the socket away, as the daemon does."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None
            self.path.unlink(missing_ok=True)

    def answer(self, request: socketserver.StreamRequestHandler) -> None:
        """One request; another than those of the API is a mistake that has to be seen."""
        words = request.rfile.readline().split()
        while request.rfile.readline().strip():
            pass
        if self.hangs:
            request.rfile.read()
            return
        self.asked += 1
        picture = self.picture._replace(at=time.time())
        body = msgspec.json.encode(ANSWERS[words[1].decode()](picture))
        request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
