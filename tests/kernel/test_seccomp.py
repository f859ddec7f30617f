"""What the kernel refuses to the running daemon, with every source, and that it works all the same."""

import errno
import json
import signal
from pathlib import Path

from resolver.base.source_records import SOURCE_RECORDS
from resolver.linux.seccomp import DANGEROUS
from tests.fakes.node import Node
from tests.kernel.conftest import EVERY_SOURCE, FAST, Start
from tests.kernel.rights import patched, rights, works
from tests.patience import until

#: On SIGUSR1 it makes calls that fail by their arguments if the filter lets them through.
ASKED = """
import ctypes, json, os, signal, sys
from resolver.linux.seccomp import DANGEROUS
libc = ctypes.CDLL(None, use_errno=True)
column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
answers = sys.argv[1]
def ask(*_):
    found = {}
    for name in ("process_vm_readv", "open_by_handle_at", "keyctl", "setns", "unshare", "bpf"):
        first = {"keyctl": 99, "setns": -1, "bpf": 0}.get(name, 0)
        failed = libc.syscall(DANGEROUS[name][column], first, 0, 0, 0, 0, 0) < 0
        found[name] = ctypes.get_errno() if failed else 0
    with open(answers + ".new", "w") as file:
        json.dump(found, file)
    os.rename(answers + ".new", answers)
signal.signal(signal.SIGUSR1, ask)
"""


@EVERY_SOURCE
def test_unneeded_system_calls_are_refused(node: Node, start: Start, source: str, tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    daemon = start(node, *FAST, wrapper=patched(ASKED, str(answers)), anew=False)
    daemon.wait_for("source", source=source)
    until(lambda: rights(daemon.process.pid).filtered, "a filter")

    def ask() -> set[str]:
        answers.unlink(missing_ok=True)
        daemon.signal(signal.SIGUSR1)
        until(answers.exists, "its answers")
        found = json.loads(answers.read_text())
        return {name for name, error in found.items() if error == errno.EPERM}

    works(node, daemon, source)
    refused = ask()
    assert ("setns" in refused) == (source != "netlink")
    assert refused >= {"process_vm_readv", "open_by_handle_at", "keyctl"}
    assert "unshare" not in refused  # the canary's
    assert ("bpf" in refused) == (source != "bpf")
    assert daemon.said("source_failed") == daemon.said("source_unavailable") == []


def test_calls_for_children_are_among_the_dangerous() -> None:
    calls = {"unshare", "pidfd_getfd"}.union(*(each.calls for each in SOURCE_RECORDS.values()))
    assert DANGEROUS.keys() >= calls
