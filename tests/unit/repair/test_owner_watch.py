"""The watch over slots' owners where the kernel refuses it."""

from __future__ import annotations

import errno
import select
import subprocess
from types import SimpleNamespace

from resolver.base.counters import Shortage
from resolver.hami.packed_slots import SlotRecord
from resolver.linux.procfs import Procfs
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from resolver.repair.owner_watch import Owners
from resolver.repair.slot_states import SlotState
from tests.patience import PATIENCE_S, until


def test_an_owner_that_epoll_does_not_take_is_polled() -> None:
    procfs = Procfs()
    owners = Owners(procfs, PidMap(ScanSource(procfs)))
    exits = owners._exits

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def watched(process: subprocess.Popen[bytes]) -> SlotState:
        state = SlotState(SlotRecord(0, 7, 0, 1, (0,)))
        state.found(handle := procfs.open_handle(process.pid), 0.0)
        owners.watch(state, handle, "")
        return state

    owners._exits = SimpleNamespace(register=refused, unregister=exits.unregister, poll=exits.poll)  # type: ignore[assignment]
    first, second = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    with first, second:
        forgotten, polled = watched(first), watched(second)
        assert owners.means.counts == {Shortage.WATCHES: 2}
        assert (bool(owners.means.short()), owners.polled, owners.ended()) == (True, True, [])
        owners.unwatch(forgotten)
        assert first.pid not in owners
        second.kill()
        until(lambda: owners.ended() == [polled], "the owner's end")
        assert not owners.polled
        owners._exits = exits
        registered = watched(first)
        assert (owners.means.short(), owners.polled) == ("", False)
        first.kill()
        assert select.select([owners.fd], [], [], PATIENCE_S)[0]
        assert owners.ended() == [registered]
    owners.close()
