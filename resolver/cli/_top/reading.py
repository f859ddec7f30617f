"""Asks the daemon for everything that a frame shows."""

from __future__ import annotations

import time
from typing import NamedTuple

from resolver.base.errors import ResolverError
from resolver.cli._top.tree import Tree, build, title
from resolver.cli.ask_daemon import understood
from resolver.cli.container_names import Named
from resolver.cli.documents import from_daemon


def read(socket_path: str | None, name: str = "") -> Tree:
    """Return one reading of everything, or of the containers with this name and their GPUs.

    Raises as `resolver.client.get_json`, and CannotKnow for an odd answer.
    """
    with understood():
        tree = build(from_daemon(socket_path))
    return part_of(tree, name) if name else tree


def part_of(tree: Tree, name: str) -> Tree:
    """Return the tree with the containers of this name only."""
    gpus = []
    for gpu in tree.gpus:
        named = tuple(each for each in gpu.containers if Named.of(each._asdict()).is_called(name))
        if named:
            gpus.append(gpu._replace(containers=named))
    titles = {title(each._asdict()) for gpu in gpus for each in gpu.containers}
    unresolved = tuple(each for each in tree.unresolved if each.container in titles)
    return tree._replace(gpus=tuple(gpus), unresolved=unresolved)


class Reading(NamedTuple):
    """The last reading that succeeded, and the error of those after it, since when (Unix time)."""

    tree: Tree
    read_at: float
    error: str = ""
    since: float = 0.0

    def next(self, socket_path: str | None, name: str, interval: float) -> Reading:
        """Return the reading after a pause: this one with an error if the daemon does not answer."""
        time.sleep(interval)
        now = time.time()
        try:
            return Reading(read(socket_path, name), now)
        except ResolverError as error:
            return self._replace(error=str(error), since=self.since or now)
