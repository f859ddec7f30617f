"""``resolver lookup`` with a daemon and without, on a crowded node."""

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.bench.timing import RowValues, command, medians, progress
from tests.fakes.cgroups import Hierarchy, hierarchies, remove
from tests.fakes.daemon import BOUND, RESOLVER, Daemon
from tests.fakes.node import Node
from tests.patience import until
from tests.programs import completed


def measure(scratch: Path) -> list[RowValues]:
    """Compare the command with an empty Python, whose start is most of its time, while the crowd runs."""
    progress("resolver lookup beside python3 -c pass")
    run_dir = scratch / "lookup"
    daemon = Daemon(None, run_dir, "--dry-run", "--source", "bpf", wrapper=BOUND)
    with daemon, Node(scratch / "lookup-node", "535.183.01") as node:
        container = node.container(watcher=False)
        host_pid = container.init_host_pid
        until(daemon.socket.exists, "its socket")
        ask = [str(RESOLVER), "lookup", container.container_id, "1", "--socket"]
        steps = {"pass": command([sys.executable, "-c", "pass"])}
        for name, place in (("no daemon", "/nonexistent"), ("through the daemon", str(daemon.socket))):
            answer = completed(*ask, place, check=True).stdout
            if int(answer) != host_pid:
                raise RuntimeError(f"lookup, {name}, printed {answer.strip()} instead of {host_pid}")
            steps[name] = command([*ask, place])
        seconds_by_name = medians(steps, turns=21)
    nothing = seconds_by_name.pop("pass")
    beside = f"python3 -c pass {nothing * 1e3:.1f} ms"
    rows: list[RowValues] = []
    for (name, lookup), bound in zip(seconds_by_name.items(), (2.6, 2.2), strict=True):
        separator = ", " if name == "no daemon" else " "
        rows += [
            (f"resolver lookup{separator}{name}", lookup * 1e3, "ms", None, beside),
            ("  over python3 -c pass", lookup / nothing, "times", bound, ""),
        ]
    return rows


def measure_containers() -> Iterator[RowValues]:
    """Look up an existing and a missing container among many, without a daemon, in the mounted cgroups."""
    count = 250
    for version, has_controllers in (("v1", True), ("v2", False)):
        mounted = [mount for mount in hierarchies() if bool(mount.controllers) is has_controllers]
        if not mounted:
            continue
        progress(
            f"resolver lookup among {count} containers in {len(mounted)} hierarchies of cgroups {version}"
        )
        with _containers(mounted, count) as (container_id, host_pid):
            ask = [str(RESOLVER), "lookup", "--socket", "/nonexistent"]
            steps = {"pass": command([sys.executable, "-c", "pass"])}
            steps["found"] = command([*ask, container_id, str(host_pid)])
            for name, unknown in (("not found", "ab" * 32), ("start of an id not found", "abcdef123456")):
                steps[name] = command([*ask, unknown, "1"], code=1)
            seconds_by_name = medians(steps, turns=21)
        nothing = seconds_by_name.pop("pass")
        for name, seconds in seconds_by_name.items():
            bound = 2.6 if name == "found" else 4.0
            yield f"resolver lookup, {count} containers, {version}, {name}", seconds * 1e3, "ms", None, ""
            yield "  over python3 -c pass", seconds / nothing, "times", bound, ""


@contextlib.contextmanager
def _containers(mounted: list[Hierarchy], count: int) -> Iterator[tuple[str, int]]:
    """Make containers of one process each; yields the last one's id and PID."""
    tops = [hierarchy.mount / f"bench-{secrets.token_hex(4)}" for hierarchy in mounted]
    for top, settings in ((top, top.parent.glob("cpuset.[cm][pe][um]s")) for top in tops):
        top.mkdir()
        for setting in settings:  # a cpuset takes processes only after both are set
            (top / setting.name).write_text(setting.read_text())
            (top / "cgroup.clone_children").write_text("1")
    with contextlib.ExitStack() as stack:
        for top in tops:
            stack.callback(remove, top, kill=True)
        for _ in range(count):
            container_id, pod_uid = secrets.token_hex(32), secrets.token_hex(16)
            process = stack.enter_context(subprocess.Popen(["sleep", "infinity"]))
            for top in tops:
                directory = top / f"kubepods/burstable/pod{pod_uid}" / container_id
                directory.mkdir(parents=True)
                (directory / "cgroup.procs").write_text(str(process.pid))
            stack.callback(process.kill)
        yield container_id, process.pid
