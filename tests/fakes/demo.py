"""`make demo`: a miniature GPU node where every value is wrong, and the real `resolver run` that repairs it.

Options go to `resolver run`: `make demo ARGS=--dry-run` repairs nothing. `--library 550.163.01` uses NVIDIA's own NVML
of that release with a simulated driver, as `make nvml` does.

Exit status: 0 if every value is right in the end, 1 if one is wrong, 2 if this machine cannot run it; the message names
the missing part.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from resolver import client
from tests.fakes import demo_view as view
from tests.fakes.build import BuildError
from tests.fakes.daemon import BOUND, RESOLVER, Daemon, DaemonError
from tests.fakes.demo_view import percent, spread
from tests.fakes.measure import Row, before, until_true, verdict
from tests.fakes.node import Node
from tests.fakes.preflight import in_chroot, missing
from tests.fakes.process import NodeError
from tests.fakes.rm.fetch import USABLE, library
from tests.fakes.scene import DRIVERS, PLACED, REFUSING, TOLD_BY_CGROUP, Case, full_scene, settle, short_scene
from tests.fakes.state import Fault
from tests.programs import completed

#: Loads of containers without HAMi.
PLAIN = {"busy": 9, "quiet": 0}


class CannotRun(Exception):
    """The demo can't run here; the message names what is missing, and the fix."""


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--library", choices=USABLE)
    chosen, options = parser.parse_known_args()
    if chosen.help:
        print(__doc__)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the node and its processes are removed
    try:
        if os.geteuid() != 0:
            raise CannotRun("it makes namespaces and containers: run it as root: sudo make demo")
        if absent := missing():
            raise CannotRun("".join(f"\n  - {requirement}" for requirement in absent))
        with tempfile.TemporaryDirectory(prefix="resolver-demo-") as root:
            Path(root).chmod(0o755)
            return 0 if _show_nodes(Path(root), options, chosen.library) else 1
    except (CannotRun, BuildError, NodeError) as error:
        view.result(f"The demo cannot run here: {error}", ok=False)
        return 2
    except DaemonError as error:
        view.result(f"\nNot every value is right: {error}", ok=False)
        return 1
    except KeyboardInterrupt:
        return 130


def _show_nodes(root: Path, options: list[str], release: str | None) -> bool:
    begin = time.monotonic()
    view.heading("A GPU node in miniature")
    results = []
    # The chosen release behaves like the first driver.
    drivers = ((release, *DRIVERS[0][1:]),) if release else DRIVERS
    for number, (version, listed, samples) in enumerate(drivers):
        with Node(root / f"node-{number}", version, library=library(release) if release else None) as node:
            about = f"Driver {version}: its process list has {listed} PIDs, its samples {samples} PIDs"
            if version == REFUSING:
                node.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED)
                about += ", which HAMi before 2.10 can't read"
            if number == 0:
                results.append(_show_first_node(node, about, options))
            else:
                view.heading(f"{about}, so hostpid must be the {samples} PID")
                results.append(_run(node, short_scene(node, listed, samples), options))
        if not results[-1]:
            break
    ok = all(results)
    words = "Every value is right" if ok else "Not every value is right"
    view.result(f"\n{words} ({time.monotonic() - begin:.1f} s).", ok=ok)
    return ok


def _show_first_node(node: Node, about: str, options: list[str]) -> bool:
    placed = PLACED
    if in_chroot():
        placed = {name: scheduler for name, scheduler in PLACED.items() if scheduler not in TOLD_BY_CGROUP}
        view.say(
            "  Below a chroot, the placements of KAI and without a scheduler can't be proven: "
            "HAMi's replaces both."
        )
    view.progress(f"starting six containers with real namespaces, of {len({*placed.values()})} placements")
    cases = full_scene(node, placed)
    plain = {}
    for name, load in PLAIN.items():
        container = node.container(name=name)
        container.tenant(load=load, guess="none")
        container.cache.unlink()
        plain[container.container_id] = name
    view.say(f"  {about}.")
    time.sleep(1.3)  # watchers find samples of an ended process for one more second
    return _run(node, cases, options, plain)


def _run(node: Node, cases: list[Case], more: list[str], plain: Mapping[str, str] | None = None) -> bool:
    """Show a node's values before and after a daemon ran; with ``plain`` (names by id), run the whole demo."""
    whole = plain is not None
    settle(cases)
    rows = before(cases, view.progress)
    options = [*node.placement_options(), "--mapped-regions"] if whole else []
    tenants = node.root / "tenants" / "resolver.sock"
    options += ["--tenant-socket", str(tenants)] if whole else []
    options += ["--source", "scan", *more]
    with Daemon(node, node.root / "run", *options, wrapper=BOUND) as daemon, _kept(daemon) as problems:
        until_true(rows, daemon.started_at, daemon)
        if whole and all(row.true_ms is not None for row in rows):
            rows += _latecomer(cases[0], daemon)
        verdict(rows, daemon)
        if not daemon.alive:
            raise DaemonError(f"the daemon has ended by itself: {daemon.tail()}")
        view.table(rows)
        ok = all(row.ok for row in rows)
        if whole:
            view.say("  ms: since the start of the daemon; of the late one, since its own.")
            view.heading("What HAMi's monitor reports, summed over each container")
            view.picture(rows)
            ok = _lookup(cases[2]) and ok
            ok = _own_views(cases, tenants) and ok
            ok = _without_hami(node, daemon, plain or {}) and ok
        printed_at = time.monotonic()
        if status := daemon.stop():
            raise DaemonError(f"the daemon ended with {status}: {daemon.tail()}")
        view.progress(f"the daemon ended {(time.monotonic() - printed_at) * 1000:.0f} ms after SIGTERM")
        if not ok:
            problems.append("values")
        if daemon.other_output:
            view.say("  WRONG: the daemon printed: " + "\n".join(daemon.other_output))
            problems.append("output")
    return not problems


@contextmanager
def _kept(daemon: Daemon) -> Iterator[list[str]]:
    """Keep the daemon's log in a file if the block raises or adds a problem to the list."""
    problems: list[str] = []
    try:
        yield problems
    except Exception:
        problems.append("raised")
        raise
    finally:
        if problems:
            handle, path = tempfile.mkstemp(prefix="resolver-demo-", suffix=".log")
            with open(handle, "w", encoding="utf-8") as log:
                log.writelines(f"{line}\n" for line in (*map(json.dumps, daemon.lines), *daemon.other_output))
            view.say(f"  The daemon's log is in {path}.")


def _latecomer(like: Case, daemon: Daemon) -> list[Row]:
    """Start a process while the daemon runs, and show the delay of its repair, as users meet it."""
    view.progress("one more process starts while the daemon runs")
    begin = time.monotonic()
    tenant = like.container.tenant(load=5, devices=[like.device])
    late = Case(
        like.container, tenant, like.device, "started late", "wrong_namespace", tenant.host_pid, tenant.load
    )
    rows = [Row(late, hostpid_before=tenant.ns_pid, sm_before=0)]
    until_true(rows, begin, daemon)
    return rows


def _lookup(case: Case) -> bool:
    short_id = case.container.container_id[:12]
    done = completed(str(RESOLVER), "lookup", short_id, str(case.tenant.ns_pid))
    view.heading(f"$ resolver lookup {short_id} {case.tenant.ns_pid}")
    view.say("  " + (done.stdout + done.stderr).strip())
    right = done.returncode == 0 and done.stdout == f"{case.tenant.host_pid}\n"
    if not right:
        view.say(
            f"  WRONG: it must print {case.tenant.host_pid} and exit with 0, and exited with {done.returncode}"
        )
    return right


def _own_views(cases: list[Case], socket: Path) -> bool:
    """Show the view from inside two containers: their own processes, by the containers' PIDs."""
    right = True
    for name in ("batch", "notebook"):
        own_cases = [case for case in cases if case.container.name == name and not case.ended]
        container, wanted = own_cases[0].container, {case.tenant.ns_pid for case in own_cases}
        program = [sys.executable, "-m", "resolver.cli.own_view", "--socket", str(socket)]
        deadline, shown = time.monotonic() + 5, ""
        while time.monotonic() < deadline and pids_shown(shown) != wanted:  # until its next collection
            process = container.spawn(["/bin/sh", "-c", f"{shlex.join(program)} 2>&1; echo end; read -r _"])
            shown = "\n".join(iter(process.read_line, "end"))
        view.heading(f"$ python3 resolver-view.pyz, in the container {name}")
        view.say("  " + shown.replace("\n", "\n  "))
        if pids_shown(shown) != wanted:
            view.say(f"  WRONG: it must show the PIDs {sorted(wanted)} and no other")
            right = False
    return right


def _without_hami(node: Node, daemon: Daemon, plain: Mapping[str, str]) -> bool:
    """Show the use of containers on plain time slicing, which have no cache file."""

    def values() -> dict[str, tuple[int | None, tuple[int, int]]]:
        """Return the containers' values, with the lowest and highest right ones; above 0 for a busy one."""
        result = {}
        for process in client.processes(str(daemon.socket))["processes"]:
            if (name := plain.get(process["container_id"])) is not None:
                load = PLAIN[name]
                low, high = node.gpu.span(process["host_pid"], 0) if load and node.gpu.turns else (load, load)
                result[name] = process["sm_util"], (max(low, min(load, 1)), high)
        return result

    def right(seen: Mapping[str, tuple[int | None, tuple[int, int]]]) -> bool:
        fits = [value is not None and low <= value <= high for value, (low, high) in seen.values()]
        return seen.keys() == PLAIN.keys() and all(fits)

    deadline = time.monotonic() + (20 if node.gpu.turns else 5)  # turns on a GPU can be seconds apart
    while not right(seen := values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    view.heading("Without HAMi: two containers share a GPU by time slicing")
    for name, (value, truth) in seen.items():
        view.say(f"  {name:6} {percent(value):>3} %  (true {spread(*truth)})")
    if not right(seen):
        view.say(f"  WRONG: it must be {PLAIN}")
    return right(seen)


def pids_shown(text: str) -> set[int]:
    table = text.partition("\nPID ")[2].splitlines()[1:]
    return {int(line.split()[0]) for line in table if line.split()[0].isdigit()}


if __name__ == "__main__":
    sys.exit(main())
