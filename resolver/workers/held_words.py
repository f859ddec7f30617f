"""Words that the slot writer holds: where they differ from their value, they are set right at once.

A watcher sets its container's words wrong at each tick, and sleeps 120 ms between two. So a word is compared each
millisecond from the first moment at which the next tick can come, and every 10 ms besides; with several watchers, which
shows, each millisecond.
"""

from __future__ import annotations

import math
import mmap
import os
import time

from resolver.workers.slot_writer import (
    DONE,
    HEAD,
    HOLD,
    HOLDS,
    ORDER,
    OWNER_GONE,
    REPORT,
    SLOTS,
    TOO_OFTEN,
    WRONG_SIZE,
    Words,
    carry_out,
    differs,
)

#: Seconds: between two comparisons of all words; between two ticks of a watcher; for which a word has several watchers
#: after two corrections in less; after which nothing is fought over.
_ALL, _TICK, _SEVERAL, _QUIET = 0.01, 0.12, 5.0, 1.0
#: A hold ends with these; others are tried again.
_FINAL = OWNER_GONE, WRONG_SIZE, TOO_OFTEN


class _HeldFile(Words):
    """A file with held words."""

    def __init__(self, message: bytes, descriptors: list[int], before: dict[int, _HeldWord]) -> None:
        file_bytes, count = HEAD.unpack_from(message)
        super().__init__(descriptors[0], file_bytes)
        self.key, self.allowed = HOLD.unpack_from(message, HEAD.size)
        at, count = HEAD.size + HOLD.size, count & ~HOLDS
        orders = [ORDER.unpack_from(message, at + n * ORDER.size) for n in range(count)]
        self.slots = SLOTS.unpack_from(message, at + count * ORDER.size)
        self.held = [_HeldWord(self, order, before.get(order[4] // 8)) for order in orders]
        self.second, self.changes = 0, 0
        self.handles: list[int] = []
        try:
            self.handles += [os.dup(handle) for handle in descriptors[2:]]
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Release everything."""
        super().close()
        for fd in self.handles:
            os.close(fd)


class _HeldWord:
    """A held word, and its report. ``last``: when it was corrected, ``due``: when a watcher may set it wrong."""

    __slots__ = (
        *("at", "corrections", "due", "file", "first", "foreign", "last", "order"),
        *("outcome", "standing", "until", "value", "view"),
    )

    def __init__(self, file: _HeldFile, order: tuple[int, ...], before: _HeldWord | None) -> None:
        self.file, self.view, self.order, self.at = file, file.view, order, order[4] // 8
        self.value = self.standing = self.foreign = order[6]
        self.outcome, self.corrections, self.first = DONE, 0, before.value if before else self.view[self.at]
        self.last: float = before.last if before else 0.0
        self.due: float = before.due if before else 0.0
        self.until: float = before.until if before else 0.0  # it has several watchers

    def differed(self, since: float, now: float) -> None:
        """Note that a watcher has set it wrong between these times."""
        if now - self.last < _TICK - _ALL:
            self.until = now + _SEVERAL
        self.last, self.due = now, now if now < self.until else since + _TICK


class HeldWords:
    """Held words, by file. ``note`` names the file that is touched, for the daemon if SIGBUS ends this process."""

    def __init__(self) -> None:
        self.files: dict[int, _HeldFile] = {}
        self._note: memoryview | None = None
        self._all_at = self._ticked = 0.0
        self._due: list[_HeldWord] = []

    def replace(self, message: bytes, descriptors: list[int]) -> bytes:
        """Hold these words of a file and no others; returns reports of those before."""
        key, _ = HOLD.unpack_from(message, HEAD.size)
        file = self.files.pop(key, None)
        before = {word.at: word for word in file.held} if file else {}
        answer = b"".join(
            REPORT.pack(word.outcome, word.corrections, word.foreign) for word in before.values()
        )
        if file:
            file.close()
        self._due, self._all_at = [], 0.0
        if HEAD.unpack_from(message)[1] & ~HOLDS:
            if self._note is None:
                self._note = memoryview(mmap.mmap(descriptors[1], mmap.PAGESIZE)).cast("Q")
            try:
                self.files[key] = _HeldFile(message, descriptors, before)
            except (OSError, ValueError):
                return answer or b"\0"  # the next order in this file has the reason
        return answer or b"\0"

    def tick(self) -> int:
        """Compare the words that are due, and correct those that differ; returns milliseconds until the next tick."""
        now, note, words, since = time.monotonic(), self._note, self._due, self._ticked
        if note is None:
            return -1
        self._ticked = now
        if every := now >= self._all_at:
            since, self._all_at = self._all_at - _ALL, now + _ALL
            words = [word for file in self.files.values() for word in file.held if word.outcome == DONE]
        for word in words:
            note[0] = word.file.key
            if word.view[word.at] != word.standing:
                self._correct(word, since, now)
        note[0] = 0
        if every:
            soon = self._all_at
            self._due = [word for word in words if word.due < soon and now - word.last < _QUIET]
        due = min([word.due for word in self._due], default=self._all_at)
        return max(1, math.ceil(1000 * (min(due, self._all_at) - now)))

    def _correct(self, word: _HeldWord, since: float, now: float) -> None:
        file, present = word.file, word.view[word.at]
        if file.view[file.slots[2] // 8]:
            return  # a process that holds the lock may be moving slots
        word.foreign = present
        if not differs(present, word.value):
            word.standing = present
            return
        if word.corrections or present != word.first:  # else it differed before it was held at this value
            word.differed(since, now)
        if int(now) != file.second:
            file.second, file.changes = int(now), 0
        file.changes += 1
        outcome = TOO_OFTEN
        if file.changes <= file.allowed:
            order = (*word.order[:5], present, word.value)
            outcome = carry_out(file, file.handles, order, file.slots)[0] if file.whole() else WRONG_SIZE
        if outcome == DONE:
            word.corrections += 1
            word.standing = word.value
        elif outcome in _FINAL or file.view[word.order[2] // 8] != word.order[3]:
            word.outcome = outcome
            self._due, self._all_at = [], 0.0
