"""Exactly the documented capabilities are enough for each source, and no more is kept while it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from resolver.linux.capabilities import NUMBERS, TO_START, while_running
from tests.fakes.node import Node
from tests.kernel.conftest import (
    EVERY_SOURCE,
    NVML,
    ROOT,
    WRITER,
    Daemon,
    Start,
    hostpid_of,
    never,
    slot_of,
    until,
)

FAST = ("--interval", "50ms", "--nvml-interval", "200ms")
RELEASE = os.uname().release
#: Listening to the proc connector takes CAP_NET_ADMIN before this release.
OLD = tuple(map(int, RELEASE.split(".")[:2])) < (6, 6)


class Rights(NamedTuple):
    """What a process may do, and what its children could get."""

    effective: frozenset[str]
    permitted: frozenset[str]
    bounding: frozenset[str]
    inheritable: frozenset[str]
    ambient: frozenset[str]
    no_new_privs: bool
    filtered: bool  # by seccomp


def rights(host_pid: int) -> Rights:
    """By the kernel's word. A capability that the table does not know goes by its number."""
    fields = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{host_pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    known = {number: name for name, number in NUMBERS.items()}

    def names(field: str) -> frozenset[str]:
        mask = int(fields[field], 16)
        return frozenset(known.get(bit, str(bit)) for bit in range(64) if mask >> bit & 1)

    effective, permitted, bounding, inheritable, ambient = map(
        names, ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")
    )
    promised, filtered = fields["NoNewPrivs"] == "1", fields["Seccomp"] == "2"
    return Rights(effective, permitted, bounding, inheritable, ambient, promised, filtered)


def with_nothing_but(names: frozenset[str]) -> tuple[str, ...]:
    """Runs a program as root with exactly these."""
    kept = ",".join(["-all", *(f"+{name.lower()}" for name in sorted(names))])
    return ("setpriv", "--inh-caps", "-all", "--bounding-set", kept)


def documented(source: str) -> frozenset[str]:
    """What it takes to start with this source on this kernel."""
    return TO_START[source] if OLD else TO_START[source] - {"NET_ADMIN"}


def works(node: Node, daemon: Daemon, source: str) -> None:
    """The whole of the main job: repairs in every kind of PID namespace, a load, a dead slot's end."""
    daemon.wait_for("source", source=source)  # on a busy machine it may climb to it
    container, free = node.container(), node.container(name="free", watcher=False)
    nesting, host = node.container(name="nesting"), node.container(name="host", pid_namespace="host")
    tenants = {
        container.tenant(load=5, guess="wrong"): container,
        nesting.tenant(guess="none", nested=True): nesting,
        free.tenant(load=40, guess="none"): free,
        host.tenant(guess="none"): host,
    }
    for tenant, where in tenants.items():
        until(lambda t=tenant, c=where: hostpid_of(c, t) == t.host_pid, "a repair")  # type: ignore[misc]
    (lone,) = [tenant for tenant, where in tenants.items() if where is free]
    until(lambda: slot_of(free, lone.ns_pid).sm_util == (40,), "a load")
    lone.kill()
    until(lambda: slot_of(free, lone.ns_pid).sm_util == (0,), "the end of a dead one's load")
    assert daemon.said("write_failed") == []


@EVERY_SOURCE
def test_the_documented_capabilities_are_enough(node: Node, start: Start, source: str) -> None:
    needed = documented(source)
    daemon = start(node, *FAST, wrapper=with_nothing_but(needed))
    works(node, daemon, source)
    own = rights(daemon.process.pid)
    assert own.effective == while_running(source, RELEASE)
    assert own.permitted == own.bounding == needed  # to start it again
    assert own.inheritable == own.ambient == frozenset()
    assert own.no_new_privs
    for name in (WRITER, NVML):
        child = rights(daemon.child(name))
        assert child.effective == child.permitted == frozenset()
        assert child.no_new_privs
        assert child.filtered
    assert daemon.said("capabilities_kept") == []
    assert daemon.said("source_unavailable") == []


@EVERY_SOURCE
def test_one_that_has_everything_gives_it_up(node: Node, start: Start, source: str) -> None:
    daemon = start(node, *FAST, "--hostpid-namespace", "host")  # nothing to measure: see test_driver_truth
    works(node, daemon, source)
    own = rights(daemon.process.pid)
    optional = frozenset({"DAC_OVERRIDE"})
    assert own.effective == while_running(source, RELEASE) | optional
    assert own.permitted == TO_START[source] | optional
    assert own.inheritable == own.ambient == frozenset()
    assert own.no_new_privs
    for name, kept in ((WRITER, optional), (NVML, frozenset[str]())):
        child = rights(daemon.child(name))
        assert child.effective == child.permitted == kept
        assert child.inheritable == child.ambient == frozenset()
        assert child.bounding <= own.bounding
        assert child.no_new_privs
        assert child.filtered


def test_auto_keeps_what_any_source_may_need_later(node: Node, start: Start) -> None:
    daemon = start(node, *FAST, "--source", "auto", "--hostpid-namespace", "host")
    daemon.wait_for("source")
    own = rights(daemon.process.pid)
    optional = frozenset({"DAC_OVERRIDE"})
    needed = frozenset().union(*TO_START.values(), optional)
    until(lambda: rights(daemon.process.pid).permitted == needed, "the drop")
    assert own.effective == while_running("bpf", RELEASE) | optional


#: The loader takes its time, as a compiler on a busy node does: until there is a file, its first argument.
HELD = """
import os, sys, time
from resolver.pids import bpf_load
ask, go = bpf_load._ask, sys.argv.pop(1)
def slowly(*arguments):
    while not os.path.exists(go):
        time.sleep(0.02)
    return ask(*arguments)
bpf_load._ask = slowly
from resolver.cli import main
sys.argv = ["resolver", *sys.argv[4:]]
sys.exit(main())
"""


@pytest.mark.parametrize("namespace", ["host", "auto"], ids=["nothing to measure", "a driver to measure"])
def test_what_no_source_needs_is_given_up_before_anybody_is_answered(
    node: Node, start: Start, namespace: str, tmp_path: Path
) -> None:
    """With ``auto`` the first source may take seconds; tenants and scrapers are served from the beginning."""
    tenants = tmp_path / "tenants" / "resolver.sock"
    options = ("--source", "auto", "--hostpid-namespace", namespace, "--tenant-socket", str(tenants))
    go = tmp_path / "go"
    held = (sys.executable, "-c", HELD, str(go))
    daemon = start(node, *FAST, *options, "--metrics-addr", "127.0.0.1:0", wrapper=held, anew=False)
    daemon.wait_for("metrics_on")
    until(tenants.exists, "the tenants' socket")
    own = rights(daemon.process.pid)
    assert daemon.said("source") == []  # none is up yet
    needed = frozenset().union(*TO_START.values(), {"DAC_OVERRIDE"})
    assert own.effective == while_running("bpf", RELEASE) | {"DAC_OVERRIDE"}
    # The opener may have to enter the host's network namespace; the driver's probe a container.
    others = {"SYS_ADMIN"} | ({"SETUID", "SETGID"} if namespace == "auto" else set())
    assert own.permitted == own.bounding == needed | others
    assert own.no_new_privs  # no program that it starts gets more
    go.touch()
    daemon.wait_for("source", source="bpf")
    left = needed if namespace == "host" else needed | others
    until(lambda: rights(daemon.process.pid).permitted == left, "the drop")


@pytest.mark.parametrize("missing", ["BPF", "PERFMON"])
def test_each_capability_of_the_map_is_needed(node: Node, start: Start, missing: str) -> None:
    wrapper = with_nothing_but(TO_START["bpf"] - {missing})
    daemon = start(node, *FAST, "--source", "bpf", wrapper=wrapper)
    assert daemon.wait() == 4
    (sentence,) = daemon.other_output
    assert sentence.startswith(f"resolver run: --source bpf does not work here: CAP_{missing} is missing")


def test_without_the_one_that_every_source_needs_it_is_said_and_nothing_guessed(
    node: Node, start: Start
) -> None:
    """Other processes' mount tables are not shown: the slot stays as it is, and it has a reason."""
    container = node.container()
    container.tenant(guess="none")
    before = container.cache.read_bytes()
    once = start(node, "--once", "--source", "scan", wrapper=with_nothing_but(frozenset()))
    assert once.wait() == 1
    assert container.cache.read_bytes() == before


BLIND = """
import asyncio
from resolver.linux.procfs import Procfs
from resolver.pids.ladder import find_canary
from resolver.pids.listing import Listing
from resolver.pids.scan import ScanSource
class Blind(Listing):
    def refresh(self):
        pass
print(asyncio.run(find_canary(Blind(ScanSource(Procfs())))).trouble)
"""


def test_with_what_is_left_a_canary_can_be_made() -> None:
    """Seen by one that sees nothing."""
    wrapper = with_nothing_but(frozenset({"SYS_PTRACE"}))
    said = subprocess.check_output([*wrapper, sys.executable, "-c", BLIND], cwd=ROOT, text=True)
    assert said.startswith("it did not see process ")


#: As under a container runtime's seccomp profile: nobody may make a namespace.
CONFINED = (
    *("unshare", "--user", "--map-root-user"),
    *("sh", "-c", 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"', "sh"),
    *("setpriv", "--inh-caps", "-all", "--bounding-set", "-sys_admin"),
)
NARROW = """
import asyncio, sys
from resolver.linux.procfs import Procfs
from resolver.pids.ladder import find_canary
from resolver.pids.listing import Listing
from resolver.pids.scan import ScanSource
class Narrow(Listing):
    def candidates(self, ns_pid, pidns=None):
        found = super().candidates(ns_pid, pidns)
        if sys.argv[1] == "blind":
            return []
        return [each for each in found if each == ns_pid or sys.argv[1] == "sound"]
print(*asyncio.run(find_canary(Narrow(ScanSource(Procfs())))))
"""


@pytest.mark.parametrize(
    ("eyes", "said"),
    [("sound", ""), ("blind", "it did not see process"), ("host only", "in its PID namespace")],
)
def test_where_no_namespace_can_be_made_two_others_stand_in_for_the_canary(
    node: Node, eyes: str, said: str
) -> None:
    node.container()
    command = [*CONFINED, sys.executable, "-c", NARROW, eyes]
    trouble = subprocess.check_output(command, cwd=ROOT, text=True).strip()
    assert said in trouble
    assert bool(said) == bool(trouble)


IMPATIENT = """
import sys
from resolver.pids import ladder
ladder._CHECK_EVERY = 0.2
from resolver.cli import main
sys.argv = ["resolver", *sys.argv[4:]]
sys.exit(main())
"""


@EVERY_SOURCE
def test_with_what_is_left_its_health_is_checked(node: Node, start: Start, source: str) -> None:
    """A canary is made again and again, without the right to make PID namespaces, and found."""
    daemon = start(node, *FAST, wrapper=(sys.executable, "-c", IMPATIENT), anew=False)
    daemon.wait_for("source", source=source)
    never(lambda: daemon.said("source_failed") or daemon.other_output, "a trouble", 1.5)


#: On SIGUSR1 every descriptor of a map becomes one of something else, as if the kernel had taken the map away.
FRAGILE = """
import gc, os, signal, sys
from resolver.pids import ladder
ladder._FIRST_CLIMB = 0.2
def break_down(*_):
    nothing = os.open("/dev/null", os.O_RDONLY)
    for each in gc.get_objects():
        if type(each).__name__ == "BpfPidMap":
            for fd in each._loaded.maps.values():
                os.dup2(nothing, fd)
    os.close(nothing)
signal.signal(signal.SIGUSR1, break_down)
from resolver.cli import main
sys.argv = ["resolver", *sys.argv[4:]]
sys.exit(main())
"""


def test_with_what_is_left_it_can_fall_and_climb(node: Node, start: Start) -> None:
    """The loader and the opener are root's children: they get what stayed permitted."""
    container = node.container()
    fragile = (sys.executable, "-c", FRAGILE)
    daemon = start(node, *FAST, "--source", "auto", wrapper=fragile, anew=False)
    daemon.wait_for("source", source="bpf")
    for count in (1, 2):
        daemon.signal(signal.SIGUSR1)
        failed = daemon.wait_for("source_failed", count=count)
        assert failed["why"].startswith("the map cannot be read")
        daemon.wait_for("source", source="netlink", count=count)
        daemon.wait_for("source", source="bpf", count=count + 1)
        tenant = container.tenant(guess="none")
        until(lambda t=tenant: hostpid_of(container, t) == t.host_pid, "a repair")  # type: ignore[misc]
