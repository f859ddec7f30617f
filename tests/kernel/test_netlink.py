"""The proc connector on this kernel: compared with `/proc` while processes come and go, flooded, and refused.

The reference is `/proc` as listed by `truth`, never the source's own data.
"""

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from resolver.base.errors import CannotKnow
from resolver.linux.procfs import Procfs
from resolver.pids.netlink import BUFFER_BYTES, NetlinkSource, open_source
from tests.descriptors import links
from tests.fakes.bpf.lives import Life, child_of, children_of, truth
from tests.fakes.pids import reborn
from tests.fakes.procs import changes, numbers
from tests.kernel.rights import with_nothing_but
from tests.patience import until
from tests.programs import completed

ROOT: Final = Path(__file__).parent.parent.parent


class Checked:
    def __init__(self, source: NetlinkSource) -> None:
        self.source = source

    def refresh(self) -> tuple[set[int], set[int]]:
        came, went = changes(self.source)
        return set(came), set(went)

    def agree(self) -> tuple[set[int], set[int]]:
        """Refresh, and compare with `/proc` before and after."""
        before = truth()
        came, went = self.refresh()
        after = truth()
        known = numbers(self.source)
        throughout = before.living.keys() & after.living.keys()
        assert {pid: known.get(pid) for pid, _ in throughout} == {
            each[0]: tuple(number for _, number in before.living[each]) for each in throughout
        }
        # In neither listing: it lived between them, or it has left /proc and the kernel has yet to report
        # its exit.
        present = {pid for seen in (before, after) for pid, _ in (*seen.living, *seen.ending)}
        leaving = known.keys() - present - came - {1}
        until(lambda: self.left(leaving, came, went), f"the exits of {leaving}")
        return came, went

    def left(self, leaving: set[int], came: set[int], went: set[int]) -> bool:
        if leaving <= went:
            return True
        later_came, later_went = self.refresh()
        came |= later_came
        went |= later_went
        return leaving <= went


def python(code: str, *wrapper: str) -> tuple[int, str]:
    done = completed(*wrapper, sys.executable, "-c", textwrap.dedent(code), cwd=ROOT, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


@pytest.fixture
def checked() -> Iterator[Checked]:
    checked = Checked(open_source(Procfs()))
    checked.refresh()
    yield checked
    assert checked.source.trouble() == ""
    checked.source.close()


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.long)])
def test_thousands_of_forks_and_never_a_difference_to_proc(
    checked: Checked, lives: Path, rounds: int
) -> None:
    stream = checked.source.stream
    seen = stream.events
    for _ in range(rounds):
        with Life(lives, "storm", "1000", "10", "30000") as storm:
            storm.ready()
            while not select.select([storm.stdout], [], [], 0.05)[0]:
                checked.source.tend()  # other tests cause storms, too
            assert storm.line().startswith("done")
            staying = set(children_of(child_of(storm.host_pid)))
            assert len(staying) == 10
            came, _went = checked.agree()
            assert staying <= came
            storm.end()
            _came, went = checked.agree()
            assert staying <= went
    assert stream.events - seen >= 2 * 1000 * rounds
    # Rescans follow only dropped events; the kernel drops many if this process lacks a CPU in others' storms.
    assert checked.source.rescans <= stream.gaps + stream.overruns


def test_a_zombie_is_there_until_it_is_reaped(checked: Checked) -> None:
    zombies = {os.posix_spawn("/bin/true", ["true"], {}) for _ in range(30)}
    for each in zombies:
        os.waitid(os.P_PID, each, os.WEXITED | os.WNOWAIT)
    came, _went = checked.agree()
    assert zombies <= came
    late = Checked(open_source(Procfs()))  # this source starts after the zombies' events
    late.refresh()
    for each in zombies:
        os.waitpid(each, 0)
    for source in (checked, late):
        _came, went = source.agree()
        assert zombies <= went
    late.source.close()


@pytest.mark.parametrize("kind", ["leader-first", "thread-execs"])
def test_threads_keep_a_process_after_its_leader_ended(checked: Checked, lives: Path, kind: str) -> None:
    with Life(lives, kind) as process:
        if kind == "leader-first":
            process.ready()
        checked.agree()
        assert process.host_pid in checked.source
        if kind == "thread-execs":
            process.ready()
        for _ in range(3):
            came, went = checked.agree()
            assert process.host_pid not in came | went
    _came, went = checked.agree()
    assert process.host_pid in went


def test_a_pid_that_is_used_again_at_once_is_another_process(checked: Checked) -> None:
    with subprocess.Popen(["sleep", "1000"]) as first:
        checked.agree()
        first.kill()
    for _ in range(3):
        with reborn(first.pid):
            came, went = checked.agree()
            assert (first.pid in came, first.pid in went) == (True, True)
            assert numbers(checked.source)[first.pid] == (first.pid, 1)


@contextlib.contextmanager
def listening() -> Iterator[None]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 11) as other:
        other.bind((0, 1))
        for request in (1, 2):  # start and stop listening
            other.send(struct.pack("=IHHII IIIIHHI", 40, 3, 0, 0, 0, 1, 1, 0, 0, 4, 0, request))
            if request == 1:
                yield


def test_a_source_that_never_keeps_up_says_so() -> None:
    checked = Checked(open_source(Procfs()))
    checked.source.stream.grow_buffer(4096)  # room for some ten events
    for _ in range(8):
        for _ in range(200):
            os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
        checked.agree()
    assert "refreshes in a row" in checked.source.trouble()
    checked.source.stream.grow_buffer(BUFFER_BYTES)
    checked.refresh()  # reads earlier events
    checked.refresh()
    assert checked.source.trouble() == ""
    checked.source.close()


OPEN: Final = """
    import os, subprocess, sys
    from resolver.base.errors import CannotKnow
    from resolver.linux.procfs import Procfs
    from resolver.pids.netlink import open_source
    try:
        source = open_source(Procfs())
    except CannotKnow as error:
        print(error)
        sys.exit(4)
    source.refresh()
    child = subprocess.Popen(["sleep", "1000"])
    source.refresh()
    print(child.pid in source, end=" ")
    child.kill()
    child.wait()
    source.refresh()
    print(child.pid in source, source.stream.events > 1, source.stream.grow_buffer(4096) > 0)
"""


def test_network_namespaces_are_left_and_user_ones_refused() -> None:
    for rights in ((), with_nothing_but(frozenset({"SYS_ADMIN", "SYS_PTRACE"}))):
        assert python(OPEN, "unshare", "--net", *rights) == (0, "True False True True")
    code, said = python(OPEN, "unshare", "--user", "--map-root-user")
    assert code == 4
    assert "from a user namespace, and this process is in one" in said


@pytest.mark.parametrize("others", [False, True])
def test_a_request_that_is_ignored_ends_in_time_with_a_sentence(*, others: bool) -> None:
    """The kernel ignores a request from another PID namespace (cn_proc_mcast_ctl).

    Every listener gets every acknowledgement, so one for another listener's request proves nothing.
    """
    ask = """
        import socket, sys, time
        from resolver.base.errors import CannotKnow
        from resolver.pids.proc_events import EventStream
        channel = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 11)
        channel.bind((0, 1))
        print("ready", flush=True)
        sys.stdin.readline()
        stream, began = EventStream(channel), time.monotonic()
        try:
            stream.listen(0.3)
        except CannotKnow as error:
            print(time.monotonic() - began >= 0.3, stream.events > 0, error)
    """
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", textwrap.dedent(ask)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with listening() if others else contextlib.nullcontext():
            said, _ = process.communicate("go\n", timeout=60)
    assert said.startswith("True True " if others else "True ")
    assert "the kernel did not acknowledge the request for process events within 0.3 s: " in said


def test_missing_pyroute2_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    with pytest.raises(CannotKnow, match=r"^pyroute2 cannot be loaded .*: install it"):
        open_source(Procfs())


def opened() -> set[str]:
    """Return this process's pipes and sockets by inode, because descriptor numbers are reused."""
    return {link for link in links() if link.startswith(("pipe:", "socket:"))}


@pytest.mark.parametrize("program", ["/bin/false", "/does/not/exist"])
def test_an_opener_that_does_not_run_is_a_sentence(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = opened()
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(CannotKnow, match="the netlink opener"):
        open_source(Procfs())
    until(lambda: opened() <= before, "no further descriptor")


def test_it_leaves_nothing_behind() -> None:
    before, children = opened(), set(children_of(os.getpid()))
    source = open_source(Procfs())
    assert set(children_of(os.getpid())) <= children
    until(lambda: len(opened() - before) == 1, "one further descriptor")
    source.close()
    source.close()
    until(lambda: opened() <= before, "no further descriptor")
    assert "pyroute2" not in sys.modules
