"""HAMi's cordon of single GPUs (HAMi 2.10): the node's annotation ``hami.io/device-cordon`` lists their UUIDs.

HAMi's scheduler places nothing on a listed GPU; running pods stay. The reporter enters unhealthy GPUs and takes them
out again. A second annotation remembers its entries; it never touches another program's or an operator's.
"""

import time
from collections.abc import Iterable

from resolver.base.errors import ApiServerFailed
from resolver.base.journal import Journal
from resolver.kube.apiserver import ApiServer, Backoff
from resolver.kube.device import HAMI_CORDON, Json, entries

OWN_ENTRIES = "hami-resolver/cordoned-gpus"
#: Seconds that a GPU must be unhealthy before it is entered, and healthy before it is taken out.
UNHEALTHY_SECONDS, HEALTHY_SECONDS = 30.0, 300.0
CHECK_SECONDS = 5.0


def foreign_entries(metadata: Json) -> frozenset[str]:
    """Return the UUIDs that an operator or another program has entered."""
    return frozenset(entries(metadata, HAMI_CORDON)) - frozenset(entries(metadata, OWN_ENTRIES))


def change(metadata: Json, sick: Iterable[str], well: Iterable[str]) -> Json:
    """Return the merge patch that enters ``sick`` GPUs and takes out ``well`` ones; empty without a difference.

    Only own entries are taken out. The patch is for exactly the ``resourceVersion`` of ``metadata``.
    """
    entered, own = entries(metadata, HAMI_CORDON), entries(metadata, OWN_ENTRIES)
    gone = set(well) & set(own)
    new = [uuid for uuid in sick if uuid not in entered]
    own = [uuid for uuid in (*own, *new) if uuid not in gone and (uuid in entered or uuid in new)]
    wanted = [uuid for uuid in (*entered, *new) if uuid not in gone]
    if wanted == entered and own == entries(metadata, OWN_ENTRIES):
        return {}
    annotations = {HAMI_CORDON: ",".join(wanted) or None, OWN_ENTRIES: ",".join(own) or None}
    return {"metadata": {"resourceVersion": metadata["resourceVersion"], "annotations": annotations}}


class HamiCordon:
    """Updates the node's annotation by the GPUs' health, with hysteresis. ``node``: its metadata, as last seen."""

    def __init__(self, server: ApiServer, path: str, journal: Journal) -> None:
        self._server, self._path, self._journal = server, path, journal
        self.node: Json | None = None
        self._states: dict[str, tuple[bool, float]] = {}  # healthy, and since when (monotonic)

    def note_gpus(self, gpus: Iterable[Json]) -> None:
        """Take NVML's GPUs, as in ``/v1/gpus``. A GPU that is not listed any more keeps its state."""
        now = time.monotonic()
        for gpu in gpus:
            healthy = not gpu["illnesses"]
            if gpu["uuid"] and self._states.get(gpu["uuid"], (None, 0.0))[0] is not healthy:
                self._states[gpu["uuid"]] = healthy, now

    async def run(self) -> None:
        await Backoff(self._ended, CHECK_SECONDS).repeat(self._write)

    def _ended(self, error: ApiServerFailed | None) -> None:
        why = "" if error is None or error.status == 409 else str(error)  # 409: a new version is on its way
        self._journal.trouble("hami cordon", why, "hami_cordon_failed", "hami_cordon_works")

    async def _write(self) -> None:
        ages = {uuid: (healthy, time.monotonic() - since) for uuid, (healthy, since) in self._states.items()}
        sick = [uuid for uuid, (healthy, age) in ages.items() if not healthy and age >= UNHEALTHY_SECONDS]
        well = [uuid for uuid, (healthy, age) in ages.items() if healthy and age >= HEALTHY_SECONDS]
        if self.node and (patch := change(self.node, sick, well)):
            node = await self._server.patch(self._path, patch)
            self.node = node["metadata"]
            self._journal.log.info("hami_cordon", gpus=entries(self.node, OWN_ENTRIES))
