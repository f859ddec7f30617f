"""Watches on slots' owners, and polling if the kernel refuses a watch."""

import errno
import select
import subprocess
from contextlib import ExitStack
from types import SimpleNamespace

from resolver.base.budget import Slices
from resolver.base.counters import Shortage
from resolver.base.journal import Journal
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.containers.log_names import ContainerNames
from resolver.hami.slot_owner import OwnerFinder
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from resolver.repair.abandoned import Abandoned
from resolver.repair.owners import Owners
from resolver.repair.slots import OwnedSlot
from resolver.workers.lanes import TenantReader
from tests.fakes.planned import Bench
from tests.patience import PATIENCE_S, until


def owners_by(finder: OwnerFinder) -> Owners:
    procfs = Procfs()
    abandoned = Abandoned(procfs, TenantReader(procfs), Journal())
    return Owners(procfs, PidMap(ScanSource(procfs)), ContainerNames("", ""), finder, abandoned)


async def test_search_in_a_region_that_goes_leaves_no_handle(bench: Bench) -> None:
    """The slot's owner is in doubt, and the region is closed during the search for another."""
    bench.see((7, 4711))
    bench.own(7, 4711)
    handle = bench.hold(7, 4722)

    async def owner(*_: object) -> ProcessHandle:
        bench.repairs.close()
        return handle

    owners = owners_by(SimpleNamespace(owner=owner))  # type: ignore[arg-type]
    await owners.search(bench.repairs, 0, bench.now, Slices().yield_if_due)
    assert handle.fd == -1
    owners.close()


def test_an_owner_that_epoll_does_not_take_is_polled(stack: ExitStack) -> None:
    procfs, benches = Procfs(), (Bench(stack), Bench(stack))
    pidmap = PidMap(ScanSource(procfs))
    owners = owners_by(OwnerFinder(procfs, pidmap, KnownNamespaces(procfs, pidmap)))
    exits = owners.exits

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def watched(bench: Bench, process: subprocess.Popen[bytes]) -> OwnedSlot:
        bench.see((7, 0))
        state = bench.repairs.slots.own(0, procfs.open_handle(process.pid))
        owners.watch(bench.repairs, state)
        return state

    def has_ended() -> bool:
        owners.note_ends()
        return not benches[1].repairs.slots.owned

    owners.exits = SimpleNamespace(register=refused, unregister=exits.unregister, poll=exits.poll)  # type: ignore[assignment]
    first, second = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    with first, second:
        forgotten, _ = map(watched, benches, (first, second))
        assert owners.means.counts == {Shortage.WATCHES: 2}
        assert (bool(owners.means.short()), owners.polled, has_ended()) == (True, True, False)
        owners.unwatch(forgotten)
        assert first.pid not in owners
        second.kill()
        until(has_ended, "the owner's end")
        assert not owners.polled
        owners.exits = exits
        watched(benches[1], first)
        assert (owners.means.short(), owners.polled) == ("", False)
        first.kill()
        assert select.select([owners.fd], [], [], PATIENCE_S)[0]
        assert has_ended()
    owners.close()
