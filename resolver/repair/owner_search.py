"""Search for the owners of a region's slots, and what follows from its answer."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from resolver.base.errors import ResolverError
from resolver.base.reasons import UnresolvedReason
from resolver.hami.process_reads import hami_variables
from resolver.linux.procfs import ProcessHandle

if TYPE_CHECKING:
    from resolver.containers.log_names import ContainerNames
    from resolver.hami.owner_check import Pause
    from resolver.hami.slot_owner import OwnerFinder
    from resolver.repair.abandoned import Abandoned
    from resolver.repair.owner_watch import Owners
    from resolver.repair.plan import RegionRepairs
    from resolver.repair.slot_states import SlotState
    from resolver.workers.lanes import TenantReader

#: Seconds after which an environment that could not be read is read again.
_READ_AGAIN_SECONDS = 30.0


class OwnerSearch:
    """Search by ``finder`` for the ``owners`` of slots; without any, the file may be ``abandoned``."""

    def __init__(
        self,
        finder: OwnerFinder,
        owners: Owners,
        abandoned: Abandoned,
        names: ContainerNames,
        reader: TenantReader,
    ) -> None:
        self.finder, self.owners, self.abandoned, self.names = finder, owners, abandoned, names
        self._reader = reader

    def release(self, repairs: RegionRepairs) -> None:
        """Release a vanished region's owners, and close it."""
        for state in repairs.states.values():
            self.owners.unwatch(state)
        repairs.close()
        self.finder.forget(repairs.proof)
        self.abandoned.forget(repairs.region.path)

    async def search(self, repairs: RegionRepairs, index: int, now: float, pause: Pause) -> None:
        """Search the owner of the slot at this index."""
        state = repairs.at(index)
        slot, payer = state.slot, repairs.ownership.account
        found = await self.finder.owner(repairs.proof, repairs.shown, slot.pid, payer, slot.hostpid, pause)
        if repairs.closed:
            if isinstance(found, ProcessHandle):
                found.close()
            return
        if state.owner is not None:
            if state.keeps_owner(found):
                return
            self.owners.unwatch(state)
            state.disowned()
        state.found(found, now)
        if isinstance(found, ProcessHandle):
            self._own(repairs, state, found)
        else:
            self._not_found(repairs, state, found)
        repairs.put_back(state)

    def _not_found(self, repairs: RegionRepairs, state: SlotState, why: UnresolvedReason) -> None:
        """Decide if the slot is dead or the file may be abandoned."""
        undecided = False
        if why is UnresolvedReason.OVER_BUDGET:
            undecided = not state.dead
        elif why is UnresolvedReason.OTHER_CONTAINER and repairs.proof.open:
            state.dead = False  # one of the same pod uses a file that it can reach, too
        elif why is UnresolvedReason.NO_SUCH_PROCESS and state.looks > 1 and not state.dead:
            state.dead = self.finder.vacant(repairs.proof, state.slot.pid)
            undecided = not state.dead
        if undecided:
            self.abandoned.suspect(repairs)

    def _own(self, repairs: RegionRepairs, state: SlotState, owner: ProcessHandle) -> None:
        """Watch a slot's owner and remember its container: the directory may name an init container."""
        ownership = repairs.ownership
        self.owners.watch(state, owner, "" if ownership.claim else ownership.container)
        container = self.owners.container(owner.process.host_pid)
        self.names.refresh()
        name = self.names.of(container.container_id)
        state.names = container.pod_uid or "", name.container if name else ""

    async def read_variables(self, repairs: RegionRepairs, now: float) -> None:
        """Read what new owners' environments tell HAMi's library, once; a tenant can make that fail for a while."""
        payer = repairs.ownership.account
        for state in repairs.distinguished():
            if state.owner is None or now < state.read_again:
                continue
            owner, state.read_again = state.owner.process, now + _READ_AGAIN_SECONDS
            about = self.owners.container_id(owner.host_pid) or payer
            with contextlib.suppress(ResolverError, OSError):
                found = await self._reader.ask(payer, about, hami_variables, owner.host_pid, owner.start_time)
                if state.owner is not None and state.owner.process == owner:
                    state.variables, state.read_again = (found[0], found[1]), math.inf
