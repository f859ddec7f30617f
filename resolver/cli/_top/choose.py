"""Selects a part of the tree: some GPUs, one pod or container."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from resolver.base.errors import NotFound
from resolver.cli._top.tree import ContainerNode, GpuNode, Tree, UnresolvedNode, title
from resolver.cli.container_names import Named

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHORTEST_ID = 6


class ScreenPart(NamedTuple):
    """Part to show: GPUs by index, UUID or the start of one, and containers by a name; empty is everything."""

    gpus: tuple[str, ...] = ()
    name: str = ""

    def of(self, tree: Tree) -> Tree:
        """Return the tree reduced to this part; the same object if it is everything."""
        if not self.gpus and not self.name:
            return tree
        gpus = [gpu for gpu in tree.gpus if not self.gpus or any(_is_called(gpu, each) for each in self.gpus)]
        if self.name:
            inside = [gpu._replace(containers=tuple(filter(self._wants, gpu.containers))) for gpu in gpus]
            gpus = [gpu for gpu in inside if gpu.containers]
        return tree._replace(gpus=tuple(gpus), unresolved=tuple(self._unresolved(tree.unresolved, gpus)))

    def require(self, tree: Tree) -> None:
        """Raise `NotFound` if a requested part is not in the whole tree."""
        for each in self.gpus:
            if not any(_is_called(gpu, each) for gpu in tree.gpus):
                raise NotFound(f"no GPU of this node is {each!r}: resolver devices lists them", "device")
        if self.name and not any(self._wants(each) for gpu in tree.gpus for each in gpu.containers):
            raise NotFound(
                f"no container called {self.name!r} has a GPU here: use NAMESPACE/POD, NAMESPACE/POD/NAME, "
                "POD_UID/NAME, NAME or an id; resolver containers lists them",
                "container",
            )

    def _wants(self, container: ContainerNode) -> bool:
        key = container.container_id
        named = Named.of(container._asdict()).is_called(self.name)
        return named or (len(self.name) >= _SHORTEST_ID and key.startswith(self.name))

    def _unresolved(self, found: Iterable[UnresolvedNode], gpus: list[GpuNode]) -> Iterable[UnresolvedNode]:
        """Yield the unresolved items of shown containers and GPUs."""
        keys = {gpu.key for gpu in gpus}
        names = {title(each._asdict()) for gpu in gpus for each in gpu.containers}
        for each in found:
            if each.container in names if each.kind == "slot" else not self.name and each.device_uuid in keys:
                yield each


def _is_called(gpu: GpuNode, text: str) -> bool:
    if text.isdecimal():
        return gpu.report.get("device_index") == int(text)
    return len(text) >= _SHORTEST_ID and gpu.key.startswith(text)
