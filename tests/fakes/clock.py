"""A test's own clock, and CPU time that is really used."""

import time


class Clock:
    """A clock that stands until it is set; called, or as a module's `time`."""

    def __init__(self) -> None:
        self.now, self.cpu = 1000.0, 0.0

    def __call__(self) -> float:
        return self.now

    monotonic = __call__

    def thread_time(self) -> float:
        return self.cpu


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
