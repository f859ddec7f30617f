"""Which containers the driver probe stays out of, by real processes in real namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resolver.linux.procfs import Procfs
from resolver.workers.bystanders import dangerous, objection

DEFAULT = 0xA80425FB
PTRACE, ADMIN = 1 << 19, 1 << 21
DROPPED = ("setpriv", "--bounding-set", "-all,+chown,+kill", "--inh-caps", "-all")
#: Two threads; the first gives its rights up, so that the process's own status shows none.
HIDDEN = """
import ctypes, sys, threading
sys.path.insert(0, sys.argv[1])
threading.Thread(target=lambda: threading.Event().wait(60), daemon=True).start()
from resolver.linux.capabilities import limit
limit(frozenset(), frozenset())
print("ready", flush=True)
threading.Event().wait(60)
"""
#: A process that has the rights, in a chain of processes that live for a moment each.
RUNNING = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
print("ready", flush=True)
end = time.monotonic() + 30
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
    time.sleep(0.0002)
"""


def status(**sets: int) -> bytes:
    lines = [f"Cap{name}:\t{sets.get(name, 0):016x}\n" for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")]
    return ("Name:\tx\nUid:\t0\t0\t0\t0\n" + "".join(lines) + "NoNewPrivs:\t0\n").encode()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (status(), ""),
        (status(Prm=DEFAULT, Eff=DEFAULT, Bnd=DEFAULT), ""),
        (status(Bnd=PTRACE), "CAP_SYS_PTRACE"),  # what a program with file capabilities would get
        (status(Prm=PTRACE), "CAP_SYS_PTRACE"),  # held, though the bounding set lacks it
        (status(Inh=PTRACE), "CAP_SYS_PTRACE"),
        (status(Amb=PTRACE), "CAP_SYS_PTRACE"),
        (status(Bnd=DEFAULT | ADMIN), "CAP_SYS_ADMIN"),
        (status(Bnd=(1 << 41) - 1), "CAP_SYS_PTRACE"),
    ],
)
def test_every_set_that_a_capability_can_come_from_counts(text: bytes, name: str) -> None:
    assert dangerous(text) == name


@pytest.mark.parametrize("text", [b"", b"Name:\tx\n", b"Name:\tCapBnd:\t0\n"])
def test_a_status_without_capabilities_proves_nothing(text: bytes) -> None:
    with pytest.raises(ValueError, match="no capability lines"):
        dangerous(text)


Enter = Callable[..., int]


@pytest.fixture
def enter() -> Iterator[Enter]:
    """Starts a program in a PID namespace of its own, as its PID 1; gives the namespace's inode."""
    started: list[subprocess.Popen[str]] = []

    def enter(*command: str, unshare: tuple[str, ...] = (), ready: bool = False) -> int:
        child = subprocess.Popen(
            ["unshare", *unshare, "--pid", "--fork", "--kill-child", *command],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        assert child.stdout is not None
        if ready:
            assert child.stdout.readline() == "ready\n"
        for _ in range(2000):
            children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
            for pid in children:
                pidns = os.stat(f"/proc/{pid}/ns/pid").st_ino
                if ready or Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
                    return pidns
            time.sleep(0.005)
        raise AssertionError("it did not start")

    yield enter
    for child in started:
        child.kill()
        child.communicate()


def test_a_container_with_default_rights_is_entered(enter: Enter) -> None:
    assert objection(Procfs(), enter(*DROPPED, "sleep", "60")) == ""


def test_one_that_has_everything_is_not(enter: Enter) -> None:
    assert "has, or may get, CAP_SYS_PTRACE" in objection(Procfs(), enter("sleep", "60"))


def test_one_in_a_user_namespace_of_its_own_is_whatever_it_has(enter: Enter) -> None:
    pidns = enter("sleep", "60", unshare=("--user", "--map-root-user"))
    assert objection(Procfs(), pidns) == ""


def test_a_thread_that_kept_it_while_the_first_gave_it_up_is_found(enter: Enter) -> None:
    root = str(Path(__file__).parents[3])
    pidns = enter(sys.executable, "-c", HIDDEN, root, ready=True)
    assert "has, or may get, CAP_SYS_PTRACE" in objection(Procfs(), pidns)


def test_processes_that_come_and_go_too_fast_are_not_passed_over(enter: Enter) -> None:
    root = str(Path(__file__).parents[3])
    # The first process stays and has nothing; those that it left behind pass the rights on and on.
    script = (
        'python=$0; $python -c "$1" "$2" & wait $!; exec setpriv --bounding-set -all --inh-caps -all sleep 60'
    )
    pidns = enter("sh", "-c", script.replace("$python", sys.executable), sys.executable, RUNNING, root)
    for _ in range(5):
        assert objection(Procfs(), pidns) != ""


def test_a_namespace_without_anybody_is_not_entered() -> None:
    assert objection(Procfs(), 12345) == "it has no processes any more"
