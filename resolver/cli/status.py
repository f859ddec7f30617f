"""Show the daemon's state: readiness, source, driver, GPUs, slots, unresolved items and cost.

Exit code 1 if the daemon is not ready or leaves work undone, as its red problems say.
"""

import argparse
from collections.abc import Iterator, Mapping

from msgspec.structs import asdict

from resolver.api.shapes import Unresolved, UnresolvedCounts
from resolver.api.status import Status
from resolver.base.counters import CounterByReason, CounterName
from resolver.base.reasons import RepairReason
from resolver.base.text import several
from resolver.cli.ask_daemon import add_socket, ask
from resolver.cli.process_summary import facts_of
from resolver.cli.show import duration, print_json, print_pairs
from resolver.hami.placements import BY_NAME
from resolver.state import LimitState

Line = tuple[str, str] | tuple[str, str, str]


EXIT_NOT_READY = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_socket(parser, "print one JSON object")
    parser.add_argument("--brief", action="store_true", help="print only readiness and problems")


def run(args: argparse.Namespace) -> int:
    status = ask(Status, "/v1/status", args.socket)
    unresolved = ask(Unresolved, "/v1/unresolved", args.socket).by_reason
    if args.json:
        print_json(asdict(status) | {"unresolved": unresolved})
    else:
        print_pairs(lines(status, unresolved, brief=args.brief))
    grave = status.source.not_ready or any(trouble.grave for trouble in status.troubles)
    return EXIT_NOT_READY if grave else 0


def lines(status: Status, unresolved: UnresolvedCounts, *, brief: bool = False) -> list[Line]:
    least = list(_daemon(status))
    more = [*_driver(status), *_work(status, unresolved), *_cost(status)]
    return least if brief else least + more


def _daemon(status: Status) -> Iterator[Line]:
    up = duration(status.at - status.started_at)
    yield "resolver", f"{status.version}, up {up}, PID {status.host_pid}"
    source = status.source
    yield ("ready", "no", "red") if source.not_ready else ("ready", "yes", "green")
    size = f", the map has room for {source.map_size}" if source.name == "bpf" else ""
    yield "source", f"{source.name}, {several(source.processes, 'process', 'processes')}{size}"
    for name, why in source.not_used.items():
        yield f"not {name}", why, "yellow"
    for trouble in status.troubles:
        yield "trouble", trouble.with_fix(), "red" if trouble.grave else "yellow"


def _driver(status: Status) -> Iterator[Line]:
    policy, driver = status.policy, status.driver
    if policy.namespace == "unknown":
        yield "hostpid is", f"unknown: {policy.why}", "yellow"
    else:
        yield "hostpid is", f"{policy.namespace} ({policy.origin}: {policy.why})"
    watchers = policy.watchers
    if unable := watchers.get("unable"):
        text = f"HAMi in {several(unable, 'container')} can't read this driver's samples: update it to 2.10"
        yield "no effect", text, "yellow"
    confirms = watchers.get("confirms", 0)
    doubts = watchers.get("doubts", 0) + watchers.get("contradicts", 0)
    if confirms or doubts:
        text = f"by watchers in {several(confirms, 'container')}, doubted in {doubts}"
        yield "confirmed", text, "" if confirms else "yellow"
    asked = driver.collected_at
    age = f"answered {duration(status.at - asked)} ago" if asked else "has not answered yet"
    version = f"driver {driver.version}" if driver.version else "driver unknown"
    yield "nvml", f"{version}, {age}"
    ill, gpus = driver.gpus_unhealthy, driver.gpus
    if asked:  # before, 0 is no number of GPUs
        yield "gpus", f"{gpus}, {ill} unhealthy" if ill else str(gpus), "red" if ill else ""
        yield "processes", f"{status.totals.processes} on GPUs"
    else:
        yield "gpus", ""


def _work(status: Status, unresolved: UnresolvedCounts) -> Iterator[Line]:
    totals, counters = status.totals, status.counters
    yield "containers", str(totals.containers)
    left = totals.regions_rejected
    yield "regions", f"{totals.regions}" + (f", {several(left, 'file')} skipped" if left else "")
    for place in status.found:
        where = place.directory or "containers' own file systems"
        row = BY_NAME.get(place.placement)  # a newer daemon's, or a path like none of them
        project = row.project if row else place.placement or "no known placement"
        yield "found", f"{place.regions} in {where} ({project})"
    yield "slots", f"{totals.slots} in use, {totals.slots_dead} dead, {totals.slots_repaired} repaired"
    yield _reasons("unresolved", unresolved.slots, "yellow")
    yield _reasons("no slot", unresolved.samples, "yellow")
    yield _reasons("repairs", CounterByReason.REPAIRS.counts(counters, RepairReason))
    if any((would := CounterByReason.WOULD_REPAIR.counts(counters, RepairReason)).values()):
        yield _reasons("would repair", would)
    contested = {
        name.value: counters.get(name, 0) for name in (CounterName.CONFLICTS, CounterName.QUARANTINES)
    }
    if any(contested.values()):
        yield "contested", _list(contested), "yellow"
    states, without = status.core_limits, status.without_slot
    text = _list({state.replace("_", " "): n for state, n in states.items()})
    futile = states.keys() & {LimitState.EXCEEDED, LimitState.NO_EFFECT}
    yield "core limits", text or "none", "yellow" if futile else ""
    if (since := status.idle_since) is not None:
        yield "longest idle", duration(status.at - since)
    if without:
        yield _reasons("without slot", without, "yellow")


def _cost(status: Status) -> Iterator[Line]:
    passes = status.pass_seconds
    mean = passes.total / max(passes.observations, 1) * 1000
    yield "passes", f"{status.passes}, {mean:.{2 if mean < 10 else 0}f} ms each"
    for worker in status.workers:
        failed = worker.failures
        text = f"{several(worker.starts, 'start')}, {several(failed, 'failure')}"
        last = f", the last: {worker.last_failure}" if worker.last_failure else ""
        yield worker.name, text + last, "yellow" if failed else ""
    facts, cost = facts_of(status.host_pid), ""
    if facts.cpu_seconds is not None and facts.memory is not None:
        share = facts.cpu_seconds / max(status.at - status.started_at, 1.0)
        cost = f"{facts.memory / 2**20:.1f} MiB, {share:.1%} of a CPU since its start"
    yield "cost", cost


def _reasons(name: str, counts: Mapping[str, int], style: str = "") -> Line:
    total = sum(counts.values())
    return (name, f"{total}: {_list(counts)}", style) if total else (name, "0")


def _list(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{n} {name}" for name, n in ordered if n)
