"""The watch over slots' owners where the kernel refuses it."""

import errno
import select
import subprocess
from contextlib import ExitStack
from types import SimpleNamespace

from resolver.base.counters import Shortage
from resolver.base.journal import Journal
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.containers.log_names import ContainerNames
from resolver.hami.slot_owner import OwnerFinder
from resolver.linux.procfs import Procfs
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from resolver.repair.abandoned import Abandoned
from resolver.repair.owners import Owners
from resolver.repair.slots import OwnedSlot
from resolver.workers.lanes import TenantReader
from tests.fakes.planned import Bench
from tests.patience import PATIENCE_S, until


def test_an_owner_that_epoll_does_not_take_is_polled(stack: ExitStack) -> None:
    procfs, benches = Procfs(), (Bench(stack), Bench(stack))
    pidmap, names = PidMap(ScanSource(procfs)), ContainerNames("", "")
    finder = OwnerFinder(procfs, pidmap, KnownNamespaces(procfs, pidmap))
    owners = Owners(procfs, pidmap, names, finder, Abandoned(procfs, TenantReader(procfs), Journal()))
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
