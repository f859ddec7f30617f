"""The slot writer's process: carries out the orders of `slot_writer`, and corrects held words in between.

A watcher may write a wrong value at each tick, every 120 ms. After a correction, the process checks the file again
when that watcher's next tick is due. It compares all files every 30 to 60 ms, to find unexpected watchers. A seccomp
filter forbids everything else.
"""

import _socket  # the socket module would be a tenth of this process
import array
import mmap
import os
import select
import time
from heapq import heappop, heappush

from resolver.linux import seccomp
from resolver.workers import slot_writer
from resolver.workers.child import inherited
from resolver.workers.slot_writer import DONE, HEAD, HOLD, HOLDS, ORDER, REPORT, SLOTS, Words, serve

#: Least seconds between comparisons of all files (out of step with ticks), a watcher's ticks, and checks.
_ALL, _TICK, _PAUSE = 0.029, 0.12, 0.0006
_LATE = 0.05  # seconds for which an overdue tick is still expected
#: Seconds by which a watcher's period grows after a late tick, and shrinks after an early one.
_LATER, _SOONER = 0.00005, 0.0001
_SOON = 0.002  # a comparison of all files leaves out those with a check due within these seconds
_FEW = 3  # most watchers whose ticks are predicted; with more, a file is checked at each pause
#: Outcomes that end a hold; after others the write is tried again.
_FINAL = slot_writer.OWNER_GONE, slot_writer.WRONG_SIZE, slot_writer.TOO_OFTEN


def main() -> int:
    """Serve orders until the socket closes."""
    channel = _socket.socket(fileno=os.dup(0))
    room = _socket.CMSG_SPACE((slot_writer.MAX_ORDERS + 2) * array.array("i").itemsize)
    Words.load_functions()
    received = inherited()
    holds, readable = HeldWords(), [channel.fileno()]
    seccomp.allow_only(seccomp.OF_THE_WRITER)
    while True:
        while holds.files and not select.select(readable, (), (), holds.tick())[0]:
            pass
        message, ancillary, _flags, _address = channel.recvmsg(1 << 16, room)
        for level, kind, payload in ancillary:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                received += array.array("i", payload[: len(payload) // 4 * 4])
        if not message:
            return 0
        try:
            hold = HEAD.unpack_from(message)[1] & HOLDS
            channel.send(holds.replace(message, received) if hold else serve(message, received))
        finally:
            for fd in set(received):  # several orders may share an inherited descriptor
                os.close(fd)
            received.clear()


class _HeldWord:
    """A held word and its report; a value other than ``standing`` is corrected."""

    __slots__ = "at", "corrections", "foreign", "order", "outcome", "standing", "value"

    def __init__(self, order: tuple[int, ...]) -> None:
        self.order, self.at = order, order[4] // 8
        self.value = self.standing = self.foreign = order[6]
        self.outcome, self.corrections = DONE, 0


class _HeldFile(Words):
    """A file with held words."""

    def __init__(self, message: bytes, descriptors: list[int], period: float) -> None:
        file_bytes, count = HEAD.unpack_from(message)
        super().__init__(descriptors[0], file_bytes)
        _, self._allowed = HOLD.unpack_from(message, HEAD.size)
        at, count = HEAD.size + HOLD.size, count & ~HOLDS
        self.words = [_HeldWord(ORDER.unpack_from(message, at + n * ORDER.size)) for n in range(count)]
        self._slots = SLOTS.unpack_from(message, at + count * ORDER.size)
        self.watchers, self.period = len(descriptors) - 2, period  # the estimated period of their ticks
        self._second, self._changes, self.compared = 0, 0, 0.0
        self._handles: list[int] = []
        try:
            self._handles += [os.dup(handle) for handle in descriptors[2:]]
        except OSError:
            self.close()
            raise

    def set_right(self, now: float) -> bool:
        """Correct the words that differ; return True if one was corrected."""
        corrected, self.compared = False, now
        for word in self.words:
            if self.view[word.at] != word.standing and word.outcome == DONE:
                corrected = self._correct(word, now) or corrected
        return corrected

    def _correct(self, word: _HeldWord, now: float) -> bool:
        present = self.view[word.at]
        if self.view[self._slots[2] // 8]:
            return False  # a process that holds the lock may be moving slots
        word.foreign = present
        if not slot_writer.differs(present, word.value):
            word.standing = present
            return False
        if int(now) != self._second:
            self._second, self._changes = int(now), 0
        self._changes += 1
        outcome = slot_writer.TOO_OFTEN if self._changes > self._allowed else slot_writer.WRONG_SIZE
        if self._changes <= self._allowed and self.whole():
            order = (*word.order[:5], present, word.value)
            outcome, _ = slot_writer.carry_out(self, self._handles, order, self._slots)
        if outcome == DONE:
            word.corrections += 1
            word.standing = word.value
        elif (
            outcome in _FINAL
            or self.view[word.order[2] // 8] != word.order[3]
            or not self.in_use(word.order[2], self._slots)
        ):
            word.outcome = outcome
        return outcome == DONE

    def close(self) -> None:
        super().close()
        for fd in self._handles:
            os.close(fd)


class HeldWords:
    """Held words by file. The note has the key of the file in use: the daemon reads it if SIGBUS ends this process."""

    def __init__(self) -> None:
        self.files: dict[int, _HeldFile] = {}
        self._note = memoryview(bytearray(8)).cast("Q")
        self._compared = 0.0  # time of the last comparison of all files
        #: Heap of checks: time, file's key, time when the tick is due, and how many ticks in a row came early.
        self._checks: list[tuple[float, int, float, int]] = []

    def replace(self, message: bytes, descriptors: list[int]) -> bytes:
        """Hold these words of a file instead of its earlier ones; return the reports of the earlier ones."""
        key, _ = HOLD.unpack_from(message, HEAD.size)
        before = self.files.pop(key, None)
        words = before.words if before else ()
        answer = b"".join(REPORT.pack(word.outcome, word.corrections, word.foreign) for word in words)
        if before:
            before.close()
        if HEAD.unpack_from(message)[1] & ~HOLDS:
            self._note = memoryview(mmap.mmap(descriptors[1], mmap.PAGESIZE)).cast("Q")
            try:
                self.files[key] = _HeldFile(message, descriptors, before.period if before else _TICK)
            except (OSError, ValueError):
                return answer or b"\0"  # the next order for this file reports the error
            self._set_right(key, time.monotonic())
        return answer or b"\0"

    def tick(self) -> float:
        """Compare the files that are due; return the seconds until the next one is.

        After an early tick the next check comes sooner, each time by twice as much: the tick may have been another
        watcher's.
        """
        now, checks = time.monotonic(), self._checks
        if now >= self._compared + _ALL:
            before, self._compared = self._compared, now
            for key in self._differing():
                file = self.files[key]
                due = now if file.watchers > _FEW else max(before, file.compared) + _TICK
                soon = any(check[1] == key and check[0] < now + _SOON for check in checks)
                if not soon and self._set_right(key, now):
                    heappush(checks, (due, key, due, 0))
        while checks and checks[0][0] <= now:
            at, key, due, hits = heappop(checks)
            if key not in self.files:
                continue
            file = self.files[key]
            corrected = self._set_right(key, now)
            if file.watchers > _FEW and (corrected or now < due + _TICK + _LATE):
                heappush(checks, (now + _PAUSE, key, now if corrected else due, 0))
            elif corrected:
                hits = hits + 1 if at == due else 0
                file.period = max(_TICK, file.period + (-_SOONER if hits else _LATER))
                due = (due - _SOONER * 2 ** min(hits, 6) if hits else now) + file.period
                heappush(checks, (due, key, due, hits))
                if file.watchers + len(file.words) > 2:  # other watchers' ticks may follow at once
                    heappush(checks, (now + _PAUSE, key, now - _LATE + 2 * _PAUSE, 0))
            elif now < due + _LATE:
                heappush(checks, (now + max(_PAUSE, (now - due) / 8), key, due, hits))
        due = self._compared + 2 * _ALL  # an earlier check compares all files, too, once `_ALL` has passed
        return max(_PAUSE, min(due, checks[0][0] if checks else due) - now)

    def _differing(self) -> list[int]:
        """Return the keys of files with a differing word. Most of the work is here, so it calls no function."""
        keys, note = [], self._note
        for key, file in self.files.items():
            note[0], view = key, file.view
            for word in file.words:
                if view[word.at] != word.standing:
                    keys.append(key)
                    break
        note[0] = 0
        return keys

    def _set_right(self, key: int, now: float) -> bool:
        self._note[0] = key
        corrected = self.files[key].set_right(now)
        self._note[0] = 0
        return corrected
