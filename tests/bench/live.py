"""Look-ups by the running daemon with the kernel's map: within it, and through its socket, on a crowded node."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from resolver.linux.procfs import Procfs
from resolver.lookup.cached import LiveLookup
from resolver.pids.ladder import open_source
from resolver.pids.pidmap import PidMap
from tests.bench.crowd import inits
from tests.bench.scan import in_container
from tests.bench.timing import Progress, RowValues, command, medians
from tests.fakes.cgroups import CgroupTree

_RUNS, _EACH = 9, 100
_MAP_SIZE = 65_536


def measure(scratch: Path, starter: int, progress: Progress) -> list[RowValues]:
    """To be called while the crowd of ``starter`` is there. Its namespaces become containers."""
    with _containers(inits(starter)), in_container() as (container_id, host_pid):
        progress("look-ups as within the daemon")
        rows = _within(container_id, host_pid)
        progress("resolver lookup through the daemon beside python3 -c pass")
        with _daemon(scratch / "live") as socket_path:
            return rows + _through_the_socket(socket_path, container_id, host_pid)


@contextlib.contextmanager
def _containers(host_pids: list[int]) -> Iterator[None]:
    """Each of these processes in the cgroup of a container of its own."""
    tree = CgroupTree()
    if tree.root is None:
        raise RuntimeError(f"no cgroup can be made: {tree.why_not}")
    try:
        for host_pid in host_pids:
            cgroup = tree.make("containerd-systemd", "burstable", str(uuid.uuid4()), secrets.token_hex(32))
            if cgroup is not None:
                (cgroup / "cgroup.procs").write_text(str(host_pid))
        yield
    finally:
        for host_pid in host_pids:  # a cgroup with processes stays
            (tree.root.parent / "cgroup.procs").write_text(str(host_pid))
        tree.close()


def _within(container_id: str, host_pid: int) -> list[RowValues]:
    procfs = Procfs()
    pidmap = PidMap(open_source("bpf", procfs, _MAP_SIZE))
    try:
        live = LiveLookup(procfs, pidmap)
        asyncio.run(live.look_around())

        def held() -> None:
            with procfs.open_handle(host_pid):
                pass

        def find() -> None:
            pidmap.refresh()
            found = live.find(container_id, 1)
            if found is None or found.host_pid != host_pid:
                raise RuntimeError(f"the daemon's look-up says {found}, the truth is {host_pid}")

        asyncio.run(live.look_for((container_id,)))
        find()
        source = pidmap.source
        everyone = len(source.candidates(1))
        return [
            (f"every process with a PID, {everyone} in the map", _each(lambda: source.candidates(1)), "us", None, ""),
            ("  taking hold of one, start time and NSpid", _each(held), "us", None, ""),
            ("container and PID to the verified process, with all that is said of it", _each(find), "us", None, ""),
        ]  # fmt: skip
    finally:
        pidmap.source.close()


def _each(step: Callable[[], object]) -> float:
    """Microseconds for one, as the median of nine runs."""
    found = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        for _ in range(_EACH):
            step()
        found.append((time.perf_counter() - began) / _EACH * 1e6)
    return statistics.median(found)


@contextlib.contextmanager
def _daemon(run_dir: Path) -> Iterator[str]:
    """A daemon that only looks; the path of its socket."""
    socket_path = run_dir / "resolver.sock"
    argv = [sys.executable, "-m", "resolver", "run", "--dry-run", "--source", "bpf", "--log-level", "error"]
    daemon = subprocess.Popen([*argv, "--run-dir", str(run_dir)], stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not socket_path.exists():
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the daemon with --source bpf did not start: its message is above")
            time.sleep(0.01)
        yield str(socket_path)
    finally:
        daemon.terminate()
        daemon.wait()


def _through_the_socket(socket_path: str, container_id: str, host_pid: int) -> list[RowValues]:
    python = sys.executable
    ask = [str(Path(python).with_name("resolver")), "lookup", "--socket", socket_path, container_id, "1"]
    answer = subprocess.run([*ask, "--json"], capture_output=True, text=True, check=True).stdout
    if f'"host_pid": {host_pid},' not in answer or '"source": "bpf"' not in answer:
        raise RuntimeError(f"the daemon did not answer, or not right; the truth is {host_pid}: {answer}")
    resolver, where = ask[0], ("--socket", socket_path)
    others = {"reverse": [resolver, "reverse", *where, str(host_pid)]} | {
        name: [resolver, name, *where] for name in ("containers", "events")
    }
    steps = {"pass": command([python, "-c", "pass"]), "lookup": command(ask)}
    found = medians(steps | {name: command(words) for name, words in others.items()}, turns=21)
    lookup, nothing = found["lookup"], found["pass"]
    return [
        ("resolver lookup through the daemon", lookup * 1e3, "ms", None, f"python3 -c pass {nothing * 1e3:.1f} ms"),
        ("  over python3 -c pass", lookup / nothing, "times", 2.2, ""),
        *((f"resolver {name}", found[name] * 1e3, "ms", None, "") for name in others),
    ]  # fmt: skip
