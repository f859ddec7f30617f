"""The slot writer, as the daemon runs it: a real child, real files, real mappings."""

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from resolver.base.errors import WorkerFailed
from resolver.hami import layout as layouts
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.repair.plan import slot_word
from resolver.workers import slot_writer
from resolver.workers.slot_writer import DIFFERENT, DONE, MOVED, NOT_WRITABLE, OWNER_GONE, WRONG_SIZE, Words
from resolver.workers.supervisor import WorkerProcess
from tests.fakes import cachefiles
from tests.fakes.halted import halted_when_it_maps, wait_until_halted
from tests.patience import PATIENCE_S

V1_2 = layouts.LAYOUTS["v1.2"]
Order = tuple[int, int, int, int, int, int, int]


class Bench:
    def __init__(self, path: Path, layout: layouts.Layout = V1_2) -> None:
        self.path, self.layout = path, layout
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.worker = WorkerProcess("slot writer", "resolver.workers.writer_child", timeout=60)
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self.worker.stop(PATIENCE_S)
        self._runner.close()
        os.close(self.fd)

    def ask(self, message: bytes, descriptors: list[int]) -> bytes:
        return self._runner.run(self.worker.request(message, descriptors))

    def carry_out(
        self, orders: list[Order], handles: list[ProcessHandle] | None = None, file_bytes: int | None = None
    ) -> list[tuple[int, int]]:
        message = slot_writer.HEAD.pack(file_bytes or self.layout.file_bytes, len(orders))
        message += b"".join(slot_writer.ORDER.pack(*order) for order in orders)
        fds = [self.fd, *(handle.fd for handle in handles or [])]
        return list(slot_writer.RESULT.iter_unpack(self.ask(message, fds)))

    def word(self, offset: int) -> int:
        return int.from_bytes(os.pread(self.fd, 8, offset), "little")

    def hostpid(
        self, slot: int, pid: int, before: int, after: int, handle: int = -1, pidfd: int = 1
    ) -> Order:
        at, expected = self.layout.slot_offset(slot), slot_word(pid, before)
        return handle, pidfd, at, expected, at, expected, slot_word(pid, after)

    def sm_util(
        self, slot: int, guard: int, before: int, after: int, device: int = 0, handle: int = -1
    ) -> Order:
        target = self.layout.sm_util_offset(slot, device)
        assert target is not None
        return handle, 1, self.layout.slot_offset(slot), guard, target, before, after


def filled(path: Path, layout: layouts.Layout = V1_2, slots: int = 4) -> Path:
    """Write a region whose slots hold pid 7, 8, ... with hostpid 0, and random bytes everywhere else."""
    data = bytearray(cachefiles.recorded(layout.name))
    data[layout.procs : layout.proc_num] = os.urandom(layout.proc_num - layout.procs)
    for slot in range(slots):
        struct.pack_into("<ii", data, layout.slot_offset(slot), 7 + slot, 0)
    return cachefiles.write(path, bytes(data))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(filled(tmp_path / "a.cache"))
    yield bench
    bench.close()


@contextmanager
def mapped(bench: Bench) -> Iterator[Words]:
    Words.load_functions()
    words = Words(bench.fd, bench.layout.file_bytes)
    yield words
    words.close()


@contextmanager
def sleeper(*, use_pidfd: bool = True) -> Iterator[tuple[subprocess.Popen[bytes], ProcessHandle]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with Procfs(use_pidfd=use_pidfd).open_handle(process.pid) as handle:
                yield process, handle
        finally:
            process.kill()


def changed(before: bytes, after: bytes) -> list[int]:
    """Offsets of the 8-byte words that differ."""
    assert len(before) == len(after)
    return [at for at in range(0, len(before), 8) if before[at : at + 8] != after[at : at + 8]]


@pytest.mark.parametrize("use_pidfd", [True, False], ids=["pidfd", "proc directory"])
def test_hostpid_is_changed_and_read_back(bench: Bench, *, use_pidfd: bool) -> None:
    before = bench.path.read_bytes()
    with sleeper(use_pidfd=use_pidfd) as (process, handle):
        assert handle.is_pidfd == use_pidfd
        order = bench.hostpid(1, 8, 0, process.pid, handle=0, pidfd=int(use_pidfd))
        assert bench.carry_out([order], [handle]) == [(DONE, slot_word(8, process.pid))]
        assert changed(before, bench.path.read_bytes()) == [V1_2.slot_offset(1)]
        pid, hostpid = struct.unpack_from("<ii", bench.path.read_bytes(), V1_2.slot_offset(1))
        assert (pid, hostpid) == (8, process.pid)


@pytest.mark.parametrize("use_pidfd", [True, False], ids=["pidfd", "proc directory"])
def test_change_for_an_ended_process_is_undone(bench: Bench, *, use_pidfd: bool) -> None:
    before = bench.path.read_bytes()
    with sleeper(use_pidfd=use_pidfd) as (process, handle):
        process.kill()
        process.wait()
        guard = slot_word(7, 0)
        orders = [
            bench.hostpid(0, 7, 0, process.pid, 0, int(use_pidfd)),
            (0, int(use_pidfd), *bench.sm_util(0, guard, bench.word(V1_2.slot_offset(0) + 1176), 50)[2:]),
        ]
        results = bench.carry_out(orders, [handle])
        assert [outcome for outcome, _ in results] == [OWNER_GONE, OWNER_GONE]
        assert bench.path.read_bytes() == before


@pytest.mark.parametrize("meanwhile", [False, True])
@pytest.mark.parametrize("value", [False, True])
def test_ended_process_changes_no_word_even_briefly(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, meanwhile: bool, value: bool
) -> None:
    """A new process with the PID keeps the guard's value. An owner's end after the check undoes the write."""
    before, swap = bench.path.read_bytes(), Words.swap

    def touched(words: Words, offset: int, expected: int, new: int) -> int:
        assert meanwhile, "the slot was touched"
        process.kill()
        process.wait()
        return swap(words, offset, expected, new)

    monkeypatch.setattr(Words, "swap", touched)
    with sleeper(use_pidfd=True) as (process, handle), mapped(bench) as words:
        if not meanwhile:
            process.kill()
            process.wait()
        order = bench.hostpid(0, 7, 0, process.pid, 0, 1)
        if value:
            present = bench.word(V1_2.slot_offset(0) + 1176)
            order = (0, 1, *bench.sm_util(0, slot_word(7, 0), present, 50)[2:])
        outcome, _ = slot_writer.carry_out(words, [handle.fd], order)
    assert outcome == OWNER_GONE
    assert bench.path.read_bytes() == before


def test_unexpected_value_is_not_changed(bench: Bench) -> None:
    before = bench.path.read_bytes()
    present = bench.word(V1_2.slot_offset(0) + 1176)
    results = bench.carry_out(
        [
            bench.hostpid(0, 8, 0, 4711),  # another pid: the slot moved
            bench.hostpid(0, 7, 5, 4711),  # another hostpid: another writer was faster
            bench.sm_util(0, slot_word(8, 0), present, 1),  # the guard
            bench.sm_util(0, slot_word(7, 0), present ^ 1, 1),  # the value
        ]
    )
    found = slot_word(7, 0)
    assert results == [(DIFFERENT, found), (DIFFERENT, found), (DIFFERENT, 0), (DIFFERENT, present)]
    assert bench.path.read_bytes() == before


def test_slot_moving_during_write_gets_value_back(bench: Bench) -> None:
    """A guard in the same word as the value detects the move at the moment of the write."""
    before = bench.path.read_bytes()
    target = V1_2.sm_util_offset(0, 0)
    assert target is not None
    present = bench.word(target)
    overlapping = target - 4
    order = (-1, 1, overlapping, bench.word(overlapping), target, present, present ^ 0xFF)
    assert bench.carry_out([order]) == [(MOVED, present ^ 0xFF)]
    assert bench.path.read_bytes() == before


PLACES = V1_2.procs, V1_2.slot_size, V1_2.owner_pid, V1_2.proc_num


class Zeroing:
    """A dead slot's value of 50, which an order sets to 0 while the slot changes."""

    def __init__(self, bench: Bench) -> None:
        self.target, self._guard_at, self._path = (
            V1_2.sm_util_offset(0, 0) or 0,
            V1_2.slot_offset(0),
            bench.path,
        )
        self.put(slot_word(0, 4711), 50)

    def put(self, guard: int, value: int) -> None:
        with self._path.open("r+b") as file:
            for at, word in ((self._guard_at, guard), (self.target, value), (V1_2.owner_pid, 0)):
                os.pwrite(file.fileno(), word.to_bytes(8, "little"), at)

    def carry_out(self, words: Words, slots: tuple[int, ...] | None = None) -> int:
        order = (-1, 0, self._guard_at, slot_word(0, 4711), self.target, 50, 0)
        return slot_writer.carry_out(words, [], order, slots)[0]


@pytest.mark.parametrize("moved_in", [0, 50, 7])
@pytest.mark.parametrize("fills_at_check", [0, 1, 2])
def test_slot_filled_during_zeroing_keeps_new_value(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, moved_in: int, fills_at_check: int
) -> None:
    """The slot fills before the check, before the change, or after it; with the old, new or another value."""
    zeroing, read, swapped, checks = Zeroing(bench), Words.load, Words.swap, iter(range(9))

    def checked(words: Words, offset: int) -> int:
        number = next(checks)
        if number == fills_at_check == 0:
            zeroing.put(slot_word(9, 0), moved_in)
        before = read(words, offset)
        if number == 0 and fills_at_check == 1:
            zeroing.put(slot_word(9, 0), moved_in)
        return before

    def swap(words: Words, offset: int, expected: int, new: int) -> int:
        found = swapped(words, offset, expected, new)
        if expected == 50 and fills_at_check == 2:
            zeroing.put(slot_word(9, 0), moved_in)
        return found

    monkeypatch.setattr(Words, "load", checked)
    monkeypatch.setattr(Words, "swap", swap)
    with mapped(bench) as words:
        assert zeroing.carry_out(words) in (DIFFERENT, MOVED)
    assert bench.word(zeroing.target) == moved_in


@pytest.mark.parametrize("begins_at_read", [0, 3])
def test_move_that_copies_the_pid_last_loses_no_value(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, begins_at_read: int
) -> None:
    """The move has copied the value, which equals the old one, but not yet the PID."""
    zeroing, read, reads = Zeroing(bench), Words.load, iter(range(9))

    def moving(words: Words, offset: int) -> int:
        if next(reads) == begins_at_read:
            with bench.path.open("r+b") as file:
                os.pwrite(file.fileno(), (9).to_bytes(8, "little"), V1_2.owner_pid)
        return read(words, offset)

    monkeypatch.setattr(Words, "load", moving)
    with mapped(bench) as words:
        outcome = zeroing.carry_out(words, PLACES)
    assert outcome == (MOVED if begins_at_read else DIFFERENT)
    assert bench.word(zeroing.target) == 50


@pytest.mark.parametrize(("used", "outcome", "value"), [(0, DIFFERENT, 50), (1, DONE, 0)])
def test_copy_left_by_a_move_gets_no_value(bench: Bench, used: int, outcome: int, value: int) -> None:
    """The copy also holds the guard's value, but above ``proc_num`` its value would never be corrected."""
    zeroing = Zeroing(bench)
    cachefiles.poke(bench.path, V1_2.proc_num, "i", used)
    with mapped(bench) as words:
        assert zeroing.carry_out(words, PLACES) == outcome
    assert bench.word(zeroing.target) == value


@pytest.mark.parametrize("name", cachefiles.NAMES)
def test_only_writable_words_of_layouts_are_written(tmp_path: Path, name: str) -> None:
    layout = layouts.LAYOUTS[name]
    bench = Bench(filled(tmp_path / "a.cache", layout, slots=layouts.MAX_SLOTS), layout)
    try:
        before = bench.path.read_bytes()
        expected: list[int] = []
        for slot in (0, 1, 2, 500, layouts.MAX_SLOTS - 2, layouts.MAX_SLOTS - 1):
            orders = [bench.hostpid(slot, 7 + slot, 0, 4711)]
            for device in range(layouts.MAX_DEVICES):
                target = layout.sm_util_offset(slot, device)
                if target is not None:
                    guard = slot_word(7 + slot, 4711)
                    orders.append(bench.sm_util(slot, guard, bench.word(target), 77, device))
            assert all(outcome == DONE for outcome, _ in bench.carry_out(orders))
            expected += [order[4] for order in orders]
        assert changed(before, bench.path.read_bytes()) == sorted(expected)
    finally:
        bench.close()


def test_full_message_of_orders_with_handles_is_done(bench: Bench) -> None:
    with sleeper() as (process, handle):
        orders, hostpid = [], 0
        for turn in range(slot_writer.MAX_ORDERS):
            orders.append(bench.hostpid(0, 7, hostpid, process.pid + turn, handle=turn))
            hostpid = process.pid + turn
        results = bench.carry_out(orders, [handle] * slot_writer.MAX_ORDERS)
        assert [outcome for outcome, _ in results] == [DONE] * slot_writer.MAX_ORDERS
        assert bench.word(V1_2.slot_offset(0)) == slot_word(7, hostpid)


@pytest.mark.parametrize("size", [0, 1, 1856, V1_2.size, V1_2.file_bytes + 1, 1 << 40])
def test_file_of_another_size_is_not_mapped(bench: Bench, size: int) -> None:
    os.truncate(bench.path, size)
    start = os.pread(bench.fd, 4096, 0)
    assert bench.carry_out([bench.hostpid(0, 7, 0, 4711)] * 2) == [(WRONG_SIZE, 0)] * 2
    assert bench.path.stat().st_size == size
    assert os.pread(bench.fd, 4096, 0) == start
    assert bench.worker.failures == 0


def test_deleted_file_is_harmless(bench: Bench) -> None:
    bench.path.unlink()
    assert [outcome for outcome, _ in bench.carry_out([bench.hostpid(0, 7, 0, 4711)])] == [DONE]
    assert not bench.path.exists()


def test_unwritable_file_is_refused(tmp_path: Path) -> None:
    """Even root can't write a running program's file; a read-only mount refuses the same call."""
    program = tmp_path / "program"
    shutil.copy2(shutil.which("sleep") or "sleep", program)
    before = program.read_bytes()
    bench = Bench(program)
    with subprocess.Popen([program, "60"]) as process:
        try:
            with pytest.raises(OSError, match="Text file busy"):
                os.open(program, os.O_RDWR)
            results = bench.carry_out([bench.hostpid(0, 7, 0, 4711)] * 3, file_bytes=len(before))
        finally:
            process.kill()
            bench.close()
    assert results == [(NOT_WRITABLE, errno.ETXTBSY)] * 3
    assert program.read_bytes() == before


def test_tenants_lease_is_no_shortage(bench: Bench) -> None:
    """The kernel fails with EAGAIN for a lease, and also if the process limit is reached."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    with bench.path.open("rb") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        assert bench.carry_out([bench.hostpid(0, 7, 0, 5)] * 2) == [(NOT_WRITABLE, errno.EAGAIN)] * 2
    assert bench.carry_out([bench.hostpid(0, 7, 0, 5)]) == [(DONE, slot_word(7, 5))]
    signal.signal(signal.SIGIO, before)


def test_truncation_under_the_writer_kills_the_writer_only(bench: Bench) -> None:
    assert [outcome for outcome, _ in bench.carry_out([bench.hostpid(0, 7, 0, 4711)])] == [DONE]
    writer = bench.worker.host_pid
    assert writer is not None
    with ThreadPoolExecutor() as pool, halted_when_it_maps(bench.path, writer):
        asked = pool.submit(bench.carry_out, [bench.hostpid(0, 7, 4711, 0)])
        wait_until_halted(bench.path, writer)
        os.truncate(bench.path, 0)
    with pytest.raises(WorkerFailed, match="the slot writer was killed by SIGBUS") as caught:
        asked.result()
    assert caught.value.own_fault


def test_child_keeps_no_descriptor_and_no_mapping(bench: Bench) -> None:
    with sleeper() as (process, handle):
        flip = [bench.hostpid(0, 7, 0, 5, 0), bench.hostpid(0, 7, 5, 0, 0)]
        counts = set()
        for turn in range(1000):
            assert [o for o, _ in bench.carry_out(flip, [handle, handle])] == [DONE, DONE]
            if turn % 100 == 0:
                counts.add(len(os.listdir(f"/proc/{bench.worker.host_pid}/fd")))
        assert bench.path.name not in Path(f"/proc/{bench.worker.host_pid}/maps").read_text()
        with pytest.raises(WorkerFailed):
            bench.ask(b"x", [bench.fd])
        assert bench.worker.starts == 1
        assert max(counts) <= 7  # 4 at rest, and those of the last message until they are closed
        assert process.poll() is None


def test_writer_imports_neither_typing_nor_asyncio(root: Path) -> None:
    """They would cost memory for as long as the daemon runs."""
    code = "import sys, resolver.workers.writer_child; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"asyncio", "typing", "json", "structlog", "msgspec"} & set(done.stdout.split())
