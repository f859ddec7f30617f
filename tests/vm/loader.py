"""In the guest: loads the BPF program, then what was kept of it, and holds the map to ``/proc`` while processes live.

Prints one line of JSON: ``ok``, ``why`` when it is not, ``detail`` (the verifier's or the compiler's last words),
``compared`` (processes), ``missed`` (events that the kernel did not show the probes; the map may still be right).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from resolver.base.errors import CannotKnow
from resolver.pids.bpf_map import KernelMap, start
from tests.fakes.bpf.lives import everybody, start_time, truth

_DETAIL = 1500
_FORKS = 300


def main() -> int:
    """See the module's docstring; the exit status is 0 if all is right."""
    try:
        with tempfile.TemporaryDirectory() as directory:
            start(kept_in=directory).close()
            pidmap = start(kept_in=directory)
    except CannotKnow as error:
        detail = str(getattr(error, "detail", ""))
        print(json.dumps({"ok": False, "why": str(error), "detail": detail[-_DETAIL:]}))
        return 1
    with namespaced():
        wrong, compared = compare(pidmap)
        for _ in range(_FORKS):
            subprocess.run(["/bin/true"], check=True)
        later, _ = compare(pidmap)
    wrong += later
    if pidmap.report["bcc"] != "kept":
        wrong.append("the program that was kept is not taken by the next start")
    answer = {"ok": not wrong, "why": "; ".join(wrong[:5]), "detail": "", "compared": compared}
    print(json.dumps({**answer, "missed": pidmap.missed_events()}))
    pidmap.close()
    return 1 if wrong else 0


@contextmanager
def namespaced() -> Iterator[None]:
    """Twenty processes in PID namespaces of their own, begun after the map was."""
    inside = [
        subprocess.Popen(("unshare", "--pid", "--fork", "--kill-child", "sleep", "1000")) for _ in range(20)
    ]
    try:
        yield
    finally:
        for process in inside:
            process.kill()
            process.wait()


def compare(pidmap: KernelMap) -> tuple[list[str], int]:
    """What is wrong about processes that lived all the while, and how many those were."""
    before = truth()
    mapped = {(record.host_pid, start_time(record)): record.levels for record in everybody(pidmap).values()}
    after = truth()
    lasted = before.living.keys() & after.living.keys()
    wrong = [f"{process} lives and is not in the map" for process in sorted(lasted - mapped.keys())]
    wrong += [
        f"{process} is {mapped[process]} in the map and {before.living[process]} in /proc"
        for process in sorted(lasted & mapped.keys())
        if mapped[process] != before.living[process]
    ]
    own = [process for process in lasted if process[0] == os.getpid()]
    return wrong + ([] if own else ["this process itself was not seen"]), len(lasted)


if __name__ == "__main__":
    sys.exit(main())
