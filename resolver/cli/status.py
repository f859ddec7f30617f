"""Show how the daemon is: ready or why not, its source, the driver, GPUs, slots and what is unresolved, its cost.

Exit code 1 if the daemon is not ready: what it finds is not known to be everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resolver.cli.ask_daemon import add_socket, ask, duration, understood
from resolver.cli.process_summary import facts_of
from resolver.cli.show import print_json, print_pairs
from resolver.counters import CounterByReason, CounterName
from resolver.hami.placements import BY_NAME
from resolver.reasons import RepairReason

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    Line = tuple[str, str] | tuple[str, str, str]

HELP = "show how the daemon is"
EXIT_NOT_READY = 1
_TROUBLE = (CounterName.CONFLICTS, CounterName.QUARANTINES, CounterName.INTERNAL_ERRORS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_socket(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    status, unresolved = ask("/v1/status", args.socket), ask("/v1/unresolved", args.socket)
    with understood():
        status["unresolved"] = unresolved["by_reason"]
        ready = not status["source"]["not_ready"]
        lines = [*_daemon(status), *_driver(status), *_work(status), *_cost(status)]
    if args.json:
        print_json(status)
    else:
        print_pairs(lines)
    return 0 if ready else EXIT_NOT_READY


def _daemon(status: Mapping[str, Any]) -> Iterator[Line]:
    up = duration(status["at"] - status["started_at"])
    only = ", dry run: it writes nothing" if status["dry_run"] else ""
    yield "resolver", f"{status['version']}, up {up}, PID {status['host_pid']}{only}"
    source = status["source"]
    yield (
        ("ready", f"no: {source['not_ready']}", "red") if source["not_ready"] else ("ready", "yes", "green")
    )
    size = f", the map has room for {source['map_size']}" if source["name"] == "bpf" else ""
    yield "source", f"{source['name']}, {_count(source['processes'], 'process', 'processes')}{size}"
    if source["incomplete"]:
        yield "incomplete", source["incomplete"], "yellow"
    for name, why in source["not_used"].items():
        yield f"not {name}", why, "yellow"


def _driver(status: Mapping[str, Any]) -> Iterator[Line]:
    policy, driver = status["policy"], status["driver"]
    unknown = "yellow" if policy["namespace"] == "unknown" else ""
    yield "hostpid is", f"{policy['namespace']} ({policy['origin']}: {policy['why']})", unknown
    if policy["not_measured"]:
        yield "not measured", policy["not_measured"]
    asked = driver["collected_at"]
    age = f"answered {duration(status['at'] - asked)} ago" if asked else "has not answered yet"
    version = f"driver {driver['version']}" if driver["version"] else "driver unknown"
    if driver["error"]:
        yield "nvml", f"{version}, {age}: {driver['error']}", "red"
    else:
        yield "nvml", f"{version}, {age}"
    ill, gpus = driver["gpus_unhealthy"], driver["gpus"]
    if asked:  # before, 0 is no number of GPUs
        yield "gpus", f"{gpus}, {ill} unhealthy" if ill else str(gpus), "red" if ill else ""
        yield "processes", f"{status['totals']['processes']} on GPUs"
    else:
        yield "gpus", ""


def _work(status: Mapping[str, Any]) -> Iterator[Line]:
    totals, counters, unresolved = status["totals"], status["counters"], status["unresolved"]
    yield "containers", str(totals["containers"])
    left = totals["regions_rejected"]
    yield "regions", f"{totals['regions']}" + (f", {_count(left, 'file')} skipped" if left else "")
    for each in status["found"]:
        where = each["directory"] or "containers' own file systems"
        row = BY_NAME.get(each["placement"])  # a newer daemon's, or a path like none of them
        project = row.project if row else each["placement"] or "no known placement"
        yield "found", f"{each['regions']} in {where} ({project})"
    yield (
        "slots",
        f"{totals['slots']} in use, {totals['slots_dead']} dead, {totals['slots_repaired']} repaired",
    )
    yield _reasons("unresolved", unresolved["slots"])
    yield _reasons("no slot", unresolved["samples"])
    for name, counted in (
        ("repairs", CounterByReason.REPAIRS),
        ("would repair", CounterByReason.WOULD_REPAIR),
    ):
        done = {reason: n for reason, n in counted.counts(counters, RepairReason).items() if n}
        if done or name == "repairs":
            yield name, f"{sum(done.values())}" + (f": {_list(done)}" if done else "")
    wrong = {what.value: n for what in _TROUBLE if (n := counters.get(what, 0))}
    if wrong:
        yield "trouble", _list(wrong), "yellow"


def _cost(status: Mapping[str, Any]) -> Iterator[Line]:
    passes = status["pass_seconds"]
    mean = (
        f", {passes['total'] / passes['observations'] * 1000:.2g} ms each" if passes["observations"] else ""
    )
    yield "passes", f"{status['passes']}{mean}"
    for worker in status["workers"]:
        failed = worker["failures"]
        text = f"{_count(worker['starts'], 'start')}, {_count(failed, 'failure')}"
        last = f", the last: {worker['last_failure']}" if worker["last_failure"] else ""
        yield worker["name"], text + last, "yellow" if failed else ""
    facts = facts_of(status["host_pid"])
    if facts.cpu_seconds is None or facts.memory is None:
        yield "cost", ""
        return
    share = facts.cpu_seconds / max(status["at"] - status["started_at"], 1.0)
    yield "cost", f"{facts.memory / 2**20:.1f} MiB, {share:.1%} of a CPU since its start"


def _reasons(name: str, counts: Mapping[str, int]) -> Line:
    total = sum(counts.values())
    return (name, f"{total}: {_list(counts)}", "yellow") if total else (name, "0")


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{n} {name}" for name, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
