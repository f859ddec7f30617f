"""The slot writer's process: serves `slot_writer`'s messages, and between them sets held words right at once.

A watcher sets its container's words wrong at each tick, and sleeps 120 ms between two. After a tick, its file is
compared again from the moment when the same watcher's next tick can come. All files are compared every 30 to 60 ms,
which finds unexpected watchers. A seccomp filter allows this process nothing more.
"""

import _socket  # without the module around it, which is a tenth of this process
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

#: Seconds: between two comparisons of all files, in no step with ticks; least time between two of a watcher's ticks;
#: between two looks; for which a late tick is waited for.
_ALL, _TICK, _PAUSE, _LATE = 0.029, 0.12, 0.0006, 0.05
#: Seconds: by which a watcher is expected later after a look in vain, or sooner without; before a look, a file is not
#: compared besides.
_LATER, _SOONER, _SOON = 0.00005, 0.0001, 0.002
_FEW = 3  # watchers that are told apart by their ticks
#: A hold ends with these; others are tried again.
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
            for fd in set(received):  # inherited ones may be the same for several orders
                os.close(fd)
            received.clear()


class _HeldWord:
    """A held word, and its report. ``standing``: the value that is taken for right."""

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
        self.watchers, self.period = len(descriptors) - 2, period  # of their ticks, as far as known
        self._second, self._changes, self.compared = 0, 0, 0.0
        self._handles: list[int] = []
        try:
            self._handles += [os.dup(handle) for handle in descriptors[2:]]
        except OSError:
            self.close()
            raise

    def set_right(self, now: float) -> bool:
        """Correct the words that differ; True if there was one."""
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
        elif outcome in _FINAL or self.view[word.order[2] // 8] != word.order[3]:
            word.outcome = outcome
        return outcome == DONE

    def close(self) -> None:
        super().close()
        for fd in self._handles:
            os.close(fd)


class HeldWords:
    """Held words, by file. The note names the file that is touched, for the daemon if SIGBUS ends this process."""

    def __init__(self) -> None:
        self.files: dict[int, _HeldFile] = {}
        self._note = memoryview(bytearray(8)).cast("Q")
        self._compared = 0.0  # when all were
        #: A heap: when, at which file, since when a tick is expected, how often in a row it was earlier.
        self._looks: list[tuple[float, int, float, int]] = []

    def replace(self, message: bytes, descriptors: list[int]) -> bytes:
        """Hold these words of a file and no others; returns reports of those before."""
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
                return answer or b"\0"  # the next order in this file has the reason
            self._set_right(key, time.monotonic())
        return answer or b"\0"

    def tick(self) -> float:
        """Compare the files that are due; returns seconds until the next ones.

        After a look that came too late, the next one is sooner, each time twice as much: the wrong value may have been
        another watcher's.
        """
        now, looks = time.monotonic(), self._looks
        if now >= self._compared + _ALL:
            before, self._compared = self._compared, now
            for key in self._differing():
                file = self.files[key]
                due = now if file.watchers > _FEW else max(before, file.compared) + _TICK
                soon = any(look[1] == key and look[0] < now + _SOON for look in looks)
                if not soon and self._set_right(key, now):
                    heappush(looks, (due, key, due, 0))
        while looks and looks[0][0] <= now:
            at, key, due, hits = heappop(looks)
            if key not in self.files:
                continue
            file = self.files[key]
            corrected = self._set_right(key, now)
            if file.watchers > _FEW:
                heappush(looks, (now + _PAUSE, key, now, 0))
            elif corrected:
                hits = hits + 1 if at == due else 0
                file.period = max(_TICK, file.period + (-_SOONER if hits else _LATER))
                due = (due - _SOONER * 2 ** min(hits, 6) if hits else now) + file.period
                heappush(looks, (due, key, due, hits))
                if file.watchers + len(file.words) > 2:  # others may follow at once
                    heappush(looks, (now + _PAUSE, key, now - _LATE + 2 * _PAUSE, 0))
            elif now < due + _LATE:
                heappush(looks, (now + max(_PAUSE, (now - due) / 8), key, due, hits))
        due = self._compared + 2 * _ALL  # sooner with another file's look
        return max(_PAUSE, min(due, looks[0][0] if looks else due) - now)

    def _differing(self) -> list[int]:
        """Return the files with a word that differs; in one go, since it is most of the work."""
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
