"""The proc connector on this kernel: held against `/proc` while processes come and go, flooded, refused.

What it is compared with is never the source's own word: `/proc` is read here by a parser of this file, events are
counted by a second socket of this file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from resolver.base.errors import CannotKnow
from resolver.linux.procfs import Procfs
from resolver.pids.netlink import BUFFER_BYTES, NetlinkSource, open_source
from tests.fakes.procs import changes, numbers
from tests.patience import until

ROOT: Final = Path(__file__).parent.parent.parent
#: Makes processes as told by lines on standard input; answers each with a line.
CHURN: Final = r"""
#define _GNU_SOURCE
#include <linux/sched.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static pid_t kept[100000];
static int count;

static void *run_on(void *exec) {
    usleep(50000);
    if (exec) execl("/bin/sleep", "sleep", "1000", NULL);
    pause();
    return NULL;
}

static void with_thread(void *exec, int leader_leaves) {
    pthread_t thread;
    pthread_create(&thread, NULL, run_on, exec);
    if (leader_leaves) pthread_exit(NULL);
    pause();
}

static pid_t fork_as(int ns_pid, int host_pid) {
    pid_t wanted[] = {ns_pid, host_pid};
    struct clone_args arguments = {.exit_signal = SIGCHLD, .set_tid = (unsigned long)wanted, .set_tid_size = 2};
    return syscall(SYS_clone3, &arguments, sizeof arguments);
}

int main(void) {
    char line[64];
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    while (fgets(line, sizeof line, stdin)) {
        char what = 0;
        int first = 0, second = 0;
        pid_t child = 0;
        sscanf(line, "%c %d %d", &what, &first, &second);
        switch (what) {
        case 'f':  /* fork so many, keep so many of them, evenly spread */
            for (int i = 0; i < first; i++) {
                if ((child = fork()) == 0) {
                    if (i % (first / second)) _exit(0);
                    for (;;) pause();
                }
                if (i % (first / second) == 0) kept[count++] = child;
                else waitpid(child, NULL, 0);
            }
            break;
        case 'z':  /* leave so many unreaped */
            for (int i = 0; i < first; i++) {
                if ((child = fork()) == 0) _exit(0);
                siginfo_t info;
                waitid(P_PID, child, &info, WEXITED | WNOWAIT);
                kept[count++] = child;
            }
            break;
        case 'l':  /* the leader leaves, a thread stays */
            if ((child = fork()) == 0) with_thread(NULL, 1);
            kept[count++] = child;
            break;
        case 'x':  /* a thread execs; the leader leaves before, or not */
            if ((child = fork()) == 0) with_thread("", first);
            kept[count++] = child;
            break;
        case 'p':  /* a child with these numbers, inside and outside */
            if ((child = fork_as(first, second)) == 0) for (;;) pause();
            kept[count++] = child;
            break;
        case 'e':  /* end and reap all */
            while (count) {
                kill(kept[--count], SIGKILL);
                waitpid(kept[count], NULL, 0);
            }
            break;
        }
        printf("%d\n", child);
    }
    return 0;
}
"""


class Known(NamedTuple):
    """A process as `/proc` has it."""

    start_time: str
    ns_pids: tuple[int, ...]


class Churn:
    """The program above, alone in a PID namespace; host PIDs of its children by number inside."""

    def __init__(self, program: Path, *wrapper: str) -> None:
        command = [*wrapper, "unshare", "--pid", "--fork", "--kill-child", str(program)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()
        (self.host_pid,) = children(self.process.pid)

    def __call__(self, what: str) -> int:
        """Have it done; returns the PID, inside, of the last child that was made."""
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return int(self._line())

    def child(self, ns_pid: int) -> int:
        """The host's number of one of its children."""
        (found,) = [pid for pid in children(self.host_pid) if read(pid).ns_pids[-1] == ns_pid]
        return found

    def _line(self) -> str:
        assert self.process.stdout is not None
        line: str = self.process.stdout.readline()
        assert line, "the churn program has ended"
        return line

    def close(self) -> None:
        with self.process:
            self.process.kill()


def children(host_pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{host_pid}/task/{host_pid}/children").read_text().split()))


def read(host_pid: int) -> Known:
    stat = Path(f"/proc/{host_pid}/stat").read_text()
    status = Path(f"/proc/{host_pid}/status").read_text()
    (numbers,) = [line for line in status.splitlines() if line.startswith("NSpid:")]
    return Known(stat.rsplit(")", 1)[1].split()[19], tuple(map(int, numbers.split()[1:])))


def processes() -> dict[int, Known]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[int(name)] = read(int(name))
    return found


class Checked:
    """A source, and its changes."""

    def __init__(self, source: NetlinkSource) -> None:
        self.source = source

    def refresh(self) -> tuple[set[int], set[int]]:
        came, went = changes(self.source)
        return set(came), set(went)

    def agree(self) -> tuple[set[int], set[int]]:
        """Refresh, and compare with `/proc` before and after."""
        before = processes()
        came, went = self.refresh()
        after = processes()
        known = numbers(self.source)
        throughout = {pid: seen for pid, seen in before.items() if after.get(pid) == seen}
        assert {pid: known.get(pid) for pid in throughout} == {p: s.ns_pids for p, s in throughout.items()}
        # What was in neither listing can only have been seen in between, by this very refresh.
        assert known.keys() - before.keys() - after.keys() <= came
        return came, went


def python(code: str, *wrapper: str) -> tuple[int, str]:
    """Exit code and output of a Python that runs in other circumstances."""
    command = [*wrapper, sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("churn")
    (directory / "churn.c").write_text(CHURN)
    flags = ("-O2", "-Wall", "-Wextra", "-Werror", "-pthread")
    subprocess.run(["gcc", *flags, "-o", "churn", "churn.c"], cwd=directory, check=True)
    return directory / "churn"


@pytest.fixture
def churn(program: Path) -> Iterator[Churn]:
    churn = Churn(program)
    yield churn
    churn.close()


@pytest.fixture
def checked() -> Iterator[Checked]:
    checked = Checked(open_source(Procfs()))
    checked.refresh()
    yield checked
    assert checked.source.trouble() == ""
    assert checked.source.drift == 0
    checked.source.close()


# ---- right, whatever happens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.long)])
def test_thousands_of_forks_and_never_a_difference_to_proc(
    checked: Checked, churn: Churn, rounds: int
) -> None:
    seen = checked.source.stream.events
    for _ in range(rounds):
        came, _went = checked.agree()
        churn("f 1000 10")
    came, _went = checked.agree()
    assert len(came & set(children(churn.host_pid))) == 10
    staying = set(children(churn.host_pid))
    assert len(staying) == 10 * rounds
    assert staying <= checked.source.known.keys()
    churn("e")
    _came, went = checked.agree()
    assert staying <= went
    assert checked.source.stream.events - seen >= 2 * 1000 * rounds
    assert (checked.source.stream.overruns, checked.source.stream.lost, checked.source.rescans) == (0, {}, 0)


def test_a_zombie_is_there_until_it_is_reaped(checked: Checked, churn: Churn) -> None:
    churn("z 30")
    zombies = set(children(churn.host_pid))
    came, _went = checked.agree()
    assert len(zombies) == 30
    assert zombies <= came
    late = Checked(open_source(Procfs()))  # their events were over before it began
    late.refresh()
    churn("e")
    for one in (checked, late):
        _came, went = one.agree()
        assert zombies <= went
    late.source.close()


def test_a_leader_that_left_is_there_as_long_as_a_thread_is(checked: Checked, churn: Churn) -> None:
    host_pid = churn.child(churn("l"))
    until(lambda: "State:\tZ" in Path(f"/proc/{host_pid}/status").read_text(), "the leader's end")
    came, _went = checked.agree()
    assert host_pid in came
    for _ in range(3):
        came, went = checked.agree()
        assert host_pid not in came | went
    churn("e")
    _came, went = checked.agree()
    assert host_pid in went


@pytest.mark.parametrize("leader_leaves", [0, 1])
def test_a_thread_that_execs_keeps_the_process(checked: Checked, churn: Churn, leader_leaves: int) -> None:
    host_pid = churn.child(churn(f"x {leader_leaves}"))
    checked.agree()
    assert host_pid in checked.source
    until(lambda: Path(f"/proc/{host_pid}/comm").read_text() == "sleep\n", "the exec of the thread")
    came, went = checked.agree()
    assert host_pid not in came | went
    churn("e")
    _came, went = checked.agree()
    assert host_pid in went


def test_a_pid_that_is_used_again_at_once_is_another_process(checked: Checked, churn: Churn) -> None:
    ns_pid = churn("f 1 1")
    host_pid = churn.child(ns_pid)
    checked.agree()
    for other in (7777, 7778, 7779):
        churn("e")
        assert churn(f"p {other} {host_pid}") == other, "clone3 with set_tid needs CAP_SYS_ADMIN, Linux 5.5"
        came, went = checked.agree()
        assert (host_pid in came, host_pid in went) == (True, True)
        assert numbers(checked.source)[host_pid] == (host_pid, other)


# ---- losses -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """A second listener: its acknowledgement goes to every one."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 11) as other:
        other.bind((0, 1))
        for request in (1, 2):  # to listen, and to listen no more
            other.send(struct.pack("=IHHII IIIIHHI", 40, 3, 0, 0, 0, 1, 1, 0, 0, 4, 0, request))
            if request == 1:
                yield


def narrow() -> NetlinkSource:
    """A source with room for some ten events."""
    source = open_source(Procfs())
    source.stream.grow_buffer(4096)
    return source


def test_a_source_that_never_keeps_up_says_so(program: Path) -> None:
    checked = Checked(narrow())
    churn = Churn(program)
    try:
        for _ in range(8):
            churn("f 200 1")
            checked.agree()
        assert "refreshes in a row" in checked.source.trouble()
        checked.source.stream.grow_buffer(BUFFER_BYTES)
        checked.refresh()  # takes in what came before
        checked.refresh()
        assert checked.source.trouble() == ""
    finally:
        churn.close()
        checked.source.close()


# ---- where it cannot work, and says so ----------------------------------------------------------------------------

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


def without(*capabilities: str) -> tuple[str, ...]:
    kept = ",".join(["-all", *(f"+{name}" for name in capabilities)])
    return ("setpriv", "--inh-caps", "-all", "--bounding-set", kept)


def test_from_another_network_namespace_it_reaches_the_hosts() -> None:
    assert python(OPEN, "unshare", "--net") == (0, "True False True True")
    assert python(OPEN, "unshare", "--net", *without("sys_admin", "sys_ptrace")) == (
        0,
        "True False True True",
    )


@pytest.mark.parametrize("capabilities", [(), ("sys_ptrace",), ("net_admin",)])
def test_without_a_way_to_the_hosts_network_namespace(capabilities: tuple[str, ...]) -> None:
    code, said = python(OPEN, "unshare", "--net", *without(*capabilities))
    assert code == 4
    assert "only in the host's network namespace, and this process is in another" in said
    assert "hostNetwork: true" in said


def test_in_a_user_namespace() -> None:
    code, said = python(OPEN, "unshare", "--user", "--map-root-user")
    assert code == 4
    assert "from a user namespace, and this process is in one" in said


def test_without_any_capability_it_works_or_says_which_it_needs() -> None:
    """Listening needs CAP_NET_ADMIN before Linux 6.6, and none since."""
    release = tuple(map(int, os.uname().release.split(".")[:2]))
    code, said = python(OPEN, *without())
    if release >= (6, 6):
        assert (code, said) == (0, "True False True True")
    else:
        assert code == 4
        assert "needs CAP_NET_ADMIN" in said
    assert python(OPEN, *without("net_admin")) == (0, "True False True True")


def test_a_request_that_is_ignored_ends_in_time_with_a_sentence() -> None:
    """The kernel says nothing at all to a request from another PID namespace (cn_proc_mcast_ctl)."""
    ask = """
        import socket, time
        from resolver.base.errors import CannotKnow
        from resolver.pids.proc_events import EventStream
        channel = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 11)
        channel.bind((0, 1))
        began = time.monotonic()
        try:
            EventStream(channel).listen(0.3)
        except CannotKnow as error:
            print(time.monotonic() - began >= 0.3, error)
    """
    code, said = python(ask, "unshare", "--pid", "--fork")
    assert code == 0
    assert said.startswith(
        "True the kernel did not acknowledge the request for process events within 0.3 s: "
    )


def test_the_acknowledgement_of_another_listener_is_not_taken_for_ours() -> None:
    """Every listener gets every acknowledgement; one that comes while we are ignored proves nothing."""
    ask = """
        import socket, struct, sys
        from resolver.base.errors import CannotKnow
        from resolver.pids.proc_events import EventStream
        channel = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 11)
        channel.bind((0, 1))
        print("ready", flush=True)
        sys.stdin.readline()
        stream = EventStream(channel)
        try:
            stream.listen(0.3)
        except CannotKnow as error:
            print(stream.events > 0, error)
    """
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", textwrap.dedent(ask)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        with listening():
            said, _ = process.communicate("go\n", timeout=60)
    assert said.startswith("True the kernel did not acknowledge")


def test_without_pyroute2_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    with pytest.raises(CannotKnow, match=r"^pyroute2 cannot be loaded .*: install it"):
        open_source(Procfs())


@pytest.mark.parametrize("program", ["/bin/false", "/does/not/exist"])
def test_an_opener_that_does_not_run_is_a_sentence(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = os.listdir("/proc/self/fd")
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(CannotKnow, match="the netlink opener"):
        open_source(Procfs())
    assert set(os.listdir("/proc/self/fd")) <= set(descriptors)


def test_it_leaves_nothing_behind() -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    before = set(children(os.getpid()))
    source = open_source(Procfs())
    assert set(children(os.getpid())) <= before
    assert len(set(os.listdir("/proc/self/fd")) - descriptors) == 1
    source.close()
    source.close()
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert "pyroute2" not in sys.modules
