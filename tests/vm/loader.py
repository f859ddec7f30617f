"""In the guest: load the BPF program, load it again from its cache, and compare the map with /proc during N forks.

Prints one line of JSON: ``ok``, ``why`` when it is not, ``detail`` (the verifier's or the compiler's last words),
``compared`` (processes), ``missed`` (events that the probes did not get; the map may still be right).
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from resolver.base.errors import CannotKnow
from resolver.pids.bpf_map import start
from tests.fakes.bpf.lives import Life, compare, compile_lives, reconcile

_DETAIL = 1500


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        try:
            start(kept_in=directory).close()
            pidmap = start(kept_in=directory)
        except CannotKnow as error:
            detail = str(getattr(error, "detail", ""))
            print(json.dumps({"ok": False, "why": str(error), "detail": detail[-_DETAIL:]}))
            return 1
        wrong, compared = compare(pidmap)
        with Life(compile_lives(Path(directory)), "storm", sys.argv[1], "100", "600") as storm:
            os.set_blocking(storm.ready().stdout.fileno(), False)
            output = b""
            while not output.endswith(b"\n") and storm.running():
                output += storm.stdout.read() or b""
                more, count = compare(pidmap)
                wrong, compared = wrong + more, max(compared, count)
                reconcile(pidmap)
    if not output.startswith(b"done"):
        wrong.append("the forks did not end")
    if not pidmap.by_host(os.getpid()):
        wrong.append("this process is not in the map")
    if pidmap.report["bcc"] != "kept":
        wrong.append("the second start compiled again, although a program was kept")
    answer = {"ok": not wrong, "why": "; ".join(wrong[:5]), "detail": "", "compared": compared}
    print(json.dumps({**answer, "missed": pidmap.missed_events()}))
    pidmap.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
