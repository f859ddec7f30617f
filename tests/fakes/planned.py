"""One region's repairs, planned with a test's own clock and loads."""

import os
from collections.abc import Collection
from contextlib import ExitStack
from math import inf
from typing import Any

from resolver.base.budget import Budgets
from resolver.base.reasons import UnresolvedReason
from resolver.config import HostpidNamespace, WriteUtilization
from resolver.gpu.attribution import Joined
from resolver.hami.discovery import Location, Ownership, PodFile, Proof, SharedDirectory
from resolver.hami.hostpid_policy import HostpidPolicy
from resolver.hami.layout import LAYOUTS
from resolver.hami.packed_slots import SlotRecord
from resolver.hami.region import RegionView, SharedRegion
from resolver.linux.mappings import SuperblockPath
from resolver.linux.procfs import ProcessHandle, ProcessIdentity
from resolver.repair.plan import Inputs, Order
from resolver.repair.region import RegionRepairs
from resolver.repair.slots import OwnedSlot, Unowned
from tests.fakes.slots import packed

HOST, CONTAINER = (
    HostpidPolicy(namespace, "") for namespace in (HostpidNamespace.HOST, HostpidNamespace.CONTAINER)
)


UNKNOWN = HostpidPolicy(None, "")


AUTO, ALWAYS, NEVER = WriteUtilization.AUTO, WriteUtilization.ALWAYS, WriteUtilization.NEVER


UUIDS = ("GPU-a", "GPU-b")


SlotValues = tuple[Any, ...]


def view(*slots: SlotValues, proc_num: int | None = None) -> RegionView:
    """Slots as ``(pid, hostpid[, status[, sm_util]])``, in the order of their indexes."""
    rest = (1, (0, 0))
    made = tuple(SlotRecord(index, *values, *rest[len(values) - 2 :]) for index, values in enumerate(slots))
    count = len(made) if proc_num is None else proc_num
    return RegionView(2, UUIDS, (100, 100), (), count, 1, packed(made, count))


class Bench:
    def __init__(self, stack: ExitStack, layout: str = "v1.2", *, shared: bool = False) -> None:
        self.stack = stack
        self.layout = LAYOUTS[layout]
        region = SharedRegion(-1, os.stat("/"), self.layout, "/containers/uid_main/a.cache")
        ownership = Ownership(account="uid_main", container="uid_main", pod_uid="uid", container_name="main")
        proof: Proof = SharedDirectory("8:1", "/containers/uid_main")
        if shared:
            tree, file = (
                SuperblockPath("8:1", path) for path in ("/containers", "/containers/uid_main/a.cache")
            )
            proof = PodFile(file, ("8:1", region.identity[1]), region.identity[1], tree, "uid", "main")
        location = Location(proof, ("8:1", region.identity[1]))
        self.repairs = RegionRepairs(region, ownership, location, Budgets().of(ownership.account))
        self.now = 100.0
        self.answered = 0.0  # time of NVML's answer about `load`
        self.idle: Collection[str] = UUIDS  # devices without load by their own samples
        self.load: dict[tuple[int, str], int] = {}
        self.known = True
        self.conflicts: list[tuple[int, float]] = []

    def see(self, *slots: SlotValues, proc_num: int | None = None) -> list[OwnedSlot]:
        return self.repairs.observe(view(*slots, proc_num=proc_num))

    def index(self, ns_pid: int) -> int:
        (index,) = (index for index, pid in self.repairs.view.slots.in_use() if pid == ns_pid)
        return index

    def odd(self) -> dict[int, UnresolvedReason | None]:
        """Return the slots that can't have an owner, by index."""
        odd = enumerate(self.repairs.slots.unowned)
        return {at: state.why for at, state in odd if state and state.due == inf}

    def state(self, ns_pid: int) -> OwnedSlot:
        return self.repairs.slots.owned[ns_pid]

    def hold(self, ns_pid: int, host_pid: int) -> ProcessHandle:
        process = ProcessIdentity(host_pid, 1, (host_pid, ns_pid))
        handle = ProcessHandle(process, os.open(os.devnull, os.O_RDONLY), is_pidfd=True)
        self.stack.callback(handle.close)
        return handle

    def own(self, ns_pid: int, host_pid: int) -> ProcessHandle:
        handle = self.hold(ns_pid, host_pid)
        self.repairs.slots.own(self.index(ns_pid), handle)
        return handle

    def miss(self, ns_pid: int, why: UnresolvedReason = UnresolvedReason.NO_SUCH_PROCESS) -> None:
        self.repairs.slots.not_found(self.index(ns_pid), why, self.now)

    def end(self, *ns_pids: int) -> None:
        """Let the slots' owners end after their look-up."""
        for ns_pid in ns_pids:
            if ns_pid not in self.repairs.slots.owned:
                self.own(ns_pid, 4704 + ns_pid)
            state = self.state(ns_pid)
            state.owner.close()
            self.repairs.ended(state)

    def call_dead(self, ns_pid: int) -> None:
        self.repairs.slots.call_dead(self.index(ns_pid), dead=True)

    def next_look(self, ns_pid: int) -> float:
        return self.unowned(ns_pid).due

    def unowned(self, ns_pid: int) -> Unowned:
        state = self.repairs.slots.unowned[self.index(ns_pid)]
        assert state is not None
        return state

    def joined(self) -> Joined:
        asked, idle = frozenset(UUIDS if self.known else ()), frozenset(self.idle)
        return Joined(1.0, "", dict(self.load), asked, (), idle=idle, answered=self.answered)

    def plan(self, policy: HostpidPolicy = HOST, writes: WriteUtilization = AUTO) -> list[Order]:
        self.repairs.unsettle()
        plan = self.repairs.plan(Inputs(self.now, policy, self.joined(), writes))
        orders = [order for planned in plan for order in planned]
        self.conflicts += [(state.slot.pid, state.backoff()) for state in self.repairs.conflicts]
        return orders

    def done(self, order: Order) -> None:
        """Note an order that the writer carried out, as the daemon does."""
        assert order.state is not None
        order.state.written, order.state.reason = order.new >> 32, None

    def reason(self, ns_pid: int) -> UnresolvedReason | None:
        state = self.repairs.slots.owned.get(ns_pid)
        return state.reason if state else self.unowned(ns_pid).why
