"""The chain from a container's processes to the number that is reported, link by link; pure.

A link is judged only where those before it hold: after a break the rest is shown, and not blamed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from resolver.cli._explain import words
from resolver.hami.hostpid_policy import classify
from resolver.reasons import RegionReason, RepairReason, SampleReason, UnresolvedReason
from resolver.repair.reported_values import differs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from resolver.cli._explain.known import Known

Json = dict[str, Any]


class LinkState(StrEnum):
    """``soon`` gets right by itself; ``after`` is not judged, since the chain breaks before it."""

    OK = "ok"
    SOON = "soon"
    AFTER = "after"
    UNKNOWN = "unknown"
    BREAKS = "breaks"


class Link(NamedTuple):
    """``reason`` is the fixed word, where there is one; ``cause`` and ``fix`` are empty while it holds."""

    name: str
    state: LinkState
    found: str
    reason: str = ""
    cause: str = ""
    fix: str = ""


class SlotOwner(NamedTuple):
    """A slot, a process on a GPU, or both, with its part of the chain."""

    ns_pid: int | None
    host_pid: int | None
    comm: str | None
    slot: int | None
    links: tuple[Link, ...]


class Reported(NamedTuple):
    """What HAMi's monitor makes of the slots, and NVML's sum; None where that is not known. Per cent."""

    device_uuid: str
    gpu: str
    monitor: int | None
    nvml: int | None


class Explained(NamedTuple):
    """One container. ``container_id`` is None where no process of it is known."""

    namespace: str | None
    pod: str | None
    pod_uid: str | None
    container_name: str | None
    container_id: str | None
    runtime: str | None
    links: tuple[Link, ...]
    owners: tuple[SlotOwner, ...]
    end: Link
    reported: tuple[Reported, ...]

    def every_link(self) -> Iterator[tuple[SlotOwner | None, Link]]:
        """In the chain's order."""
        yield from ((None, link) for link in self.links)
        yield from ((owner, link) for owner in self.owners for link in owner.links)
        yield None, self.end

    def worst(self, state: LinkState) -> tuple[SlotOwner | None, Link] | None:
        """The first link of that state."""
        return next((each for each in self.every_link() if each[1].state is state), None)


class _Of:
    """What is known of one container."""

    def __init__(self, known: Known, container: Json, count: int | None) -> None:
        self.known, self.container, self.count = known, container, count
        self.slots = [each for each in known.slots if self._mine(each)]
        # The file of a claim may be several containers', and then has no container's name.
        paths = {slot["path"] for slot in self.slots} | set(container.get("regions", ()))
        self.regions = [each for each in known.regions if each["path"] in paths or self._mine(each)]
        self.processes = [each for each in known.processes if self._mine(each)]
        self.gpus = {gpu["uuid"]: gpu for gpu in known.gpus}
        self.namespace: str = known.status["policy"]["namespace"]

    def _mine(self, each: Json) -> bool:
        mine = self.container
        if each["container_id"] and mine["container_id"]:
            return bool(each["container_id"] == mine["container_id"])
        return bool(mine["pod_uid"]) and all(
            each[name] == mine[name] for name in ("pod_uid", "container_name")
        )

    def wanted(self, slot: Json) -> int | None:
        return {"host": slot["host_pid"], "container": slot["pid"]}.get(self.namespace)

    def gpu(self, uuid: str) -> str:
        """What people call it."""
        gpu = self.gpus.get(uuid)
        return f"GPU {gpu['device_index']}" if gpu else uuid[:12]


def explain(known: Known, container: Json, count: int | None) -> Explained:
    """The chain of one container; ``count`` is how many processes it has, None if that is not known."""
    of = _Of(known, container, count)
    links = tuple(_of_container(of))
    broken = any(link.state is LinkState.BREAKS for link in links)
    owners = tuple(_of_owners(of, broken=broken))
    reported = tuple(_reported(of))
    whole = not broken and all(link.state is LinkState.OK for owner in owners for link in owner.links)
    return Explained(
        namespace=container["namespace"],
        pod=container["pod"],
        pod_uid=container["pod_uid"],
        container_name=container["container_name"],
        container_id=container["container_id"],
        runtime=container["runtime"],
        links=links,
        owners=owners,
        end=_end(of, reported, whole=whole),
        reported=reported,
    )


# ---- of the container ---------------------------------------------------------------------------------------------


def _of_container(of: _Of) -> Iterator[Link]:
    yield _processes(of)
    yield _namespace(of)
    yield _map(of)
    yield _cache_file(of)
    yield _driver(of)


def _processes(of: _Of) -> Link:
    using = len({each["host_pid"] for each in of.processes})
    found = f"{using} on a GPU, {_count(len(of.slots), 'slot')} in use"
    if of.container["container_id"] is None:
        return Link(
            "processes",
            LinkState.UNKNOWN,
            found,
            cause="no process of it is known: it has ended, or none of its slots has an owner yet",
            fix="kubectl get pod shows whether it runs; the slots below say what is known of each",
        )
    return Link(
        "processes", LinkState.OK, found if of.count is None else f"{of.count} in the container, {found}"
    )


def _namespace(of: _Of) -> Link:
    pidns, init = of.container["pidns"], of.container["init_host_pid"]
    if of.container["container_id"] is None:
        return Link("namespace", LinkState.AFTER, "not known")
    if pidns is None:
        return Link(
            "namespace", LinkState.OK, "none of its own: it shares another container's, or the host's"
        )
    return Link("namespace", LinkState.OK, f"{pidns}; its first process is {init} on the host")


def _map(of: _Of) -> Link:
    source = of.known.status["source"]
    if of.known.no_daemon:
        return Link("map", LinkState.OK, f"a scan of /proc, made now: {source['processes']} processes")
    found = f"{source['name']}, {source['processes']} processes"
    if source["not_ready"]:
        fix = f"resolver doctor --only {source['name']}"
        return Link(
            name="map",
            state=LinkState.BREAKS,
            found=found,
            reason="not_ready",
            cause=source["not_ready"],
            fix=fix,
        )
    if source["incomplete"]:
        return Link(
            name="map",
            state=LinkState.UNKNOWN,
            found=found,
            reason="incomplete",
            cause=source["incomplete"],
            fix="set map_size higher",
        )
    return Link("map", LinkState.OK, found)


def _cache_file(of: _Of) -> Link:
    uid, name = of.container["pod_uid"], of.container["container_name"]
    place = f"/{uid}_{name}"
    refused = [each for each in of.known.rejected if uid and f"{each['path']}/".find(f"{place}/") >= 0]
    if of.regions:
        region = of.regions[0]
        found = f"{region['path'].rsplit('/', 1)[-1]}, layout {region['layout']}"
        found += f", and {len(of.regions) - 1} more" if len(of.regions) > 1 else ""
        if any(region["quarantined"] for region in of.regions):
            return _reason("cache file", found, UnresolvedReason.QUARANTINED)
        return Link("cache file", LinkState.OK, found)
    if refused:
        from resolver.doctor.hami import REFUSALS

        path, reason = refused[0]["path"], refused[0]["reason"]
        _, cause, fix = REFUSALS[RegionReason(reason)]
        return Link(
            name="cache file",
            state=LinkState.BREAKS,
            found=f"{path.rsplit('/', 1)[-1]} is ignored",
            reason=reason,
            cause=cause,
            fix=fix.format(path),
        )
    if of.known.missing_dirs:
        found = f"there is no {', '.join(of.known.missing_dirs)}"
        cause, fix = "HAMi keeps its cache files there", "resolver doctor --only containers_dir"
        return Link(name="cache file", state=LinkState.BREAKS, found=found, reason="", cause=cause, fix=fix)
    if of.processes:
        reason = SampleReason.NO_SHARED_REGION
        return Link(
            "cache file", LinkState.BREAKS, "it has none", reason, *map(words.plain, words.SAMPLE[reason])
        )
    return Link("cache file", LinkState.OK, "none: no process of it has used a GPU yet")


def _driver(of: _Of) -> Link:
    driver, policy = of.known.status["driver"], of.known.status["policy"]
    version = driver["version"] or "of an unknown version"
    if of.namespace not in ("host", "container"):
        return _reason("driver", policy["why"], UnresolvedReason.DRIVER_UNKNOWN)
    found = f"{version}: hostpid must be the {of.namespace} PID ({policy['origin']})"
    if driver["error"]:
        cause = f"NVML does not answer: {driver['error']}"
        return Link(
            name="driver",
            state=LinkState.UNKNOWN,
            found=found,
            reason="",
            cause=cause,
            fix="resolver doctor --only nvml",
        )
    return Link("driver", LinkState.OK, found)


def _reason(name: str, found: str, reason: UnresolvedReason) -> Link:
    state = LinkState.SOON if reason in words.PASSING else LinkState.BREAKS
    return Link(name, state, found, reason, *map(words.plain, words.UNRESOLVED[reason]))


# ---- of each slot, and each process on a GPU ------------------------------------------------------------------------


def _of_owners(of: _Of, *, broken: bool) -> Iterator[SlotOwner]:
    comms = {each["host_pid"]: each["comm"] for each in of.processes}
    for slot in of.slots:
        links = tuple(_of_slot(of, slot))
        if broken:
            links = tuple(_not_blamed(link) for link in links)
        yield SlotOwner(
            ns_pid=slot["pid"],
            host_pid=slot["host_pid"],
            comm=comms.get(slot["host_pid"]),
            slot=slot["slot"],
            links=links,
        )
    owning = {slot["host_pid"] for slot in of.slots}
    for host_pid in sorted({each["host_pid"] for each in of.processes} - owning):
        mine = [each for each in of.processes if each["host_pid"] == host_pid]
        reason = SampleReason(mine[0]["no_slot"] or SampleReason.NO_SLOT)
        state = LinkState.AFTER if broken else LinkState.BREAKS
        slot_link = Link("slot", state, "it has none", reason, *map(words.plain, words.SAMPLE[reason]))
        said = [(each["device_uuid"], each["sm_util"]) for each in mine]
        links = (slot_link, _not_blamed(_sample(of, said)))
        yield SlotOwner(
            ns_pid=mine[0]["ns_pid"], host_pid=host_pid, comm=mine[0]["comm"], slot=None, links=links
        )


def _not_blamed(link: Link) -> Link:
    return link._replace(state=LinkState.AFTER) if link.state is not LinkState.OK else link


def _of_slot(of: _Of, slot: Json) -> Iterator[Link]:
    place = f"number {slot['slot']}"
    values = [(each["device_uuid"], each["sm_util"]) for each in slot["device_util"]]
    samples = [(each["device_uuid"], each["utilization"]) for each in slot["device_util"]]
    reason = UnresolvedReason(slot["unresolved"]) if slot["unresolved"] else None
    if slot["dead"]:
        yield Link("slot", LinkState.OK, f"{place}; its process has ended")
        yield _of_the_dead(of, values)
        return
    if reason and reason not in words.OF_WRITING and reason is not UnresolvedReason.DRIVER_UNKNOWN:
        yield _reason("slot", place, reason)
        yield Link("hostpid", LinkState.AFTER, f"{slot['hostpid']}; what it must be is not known")
        yield Link("value", LinkState.AFTER, _per_gpu(of, values))
        return
    yield Link("slot", LinkState.OK, place)
    hostpid = _hostpid(of, slot, reason)
    yield hostpid
    sample = _sample(of, samples)
    yield sample
    value = _value(of, slot, values, dict(samples))
    holds = hostpid.state is LinkState.OK and sample.state is LinkState.OK
    yield value if holds or value.state is LinkState.OK else _not_blamed(value)


def _of_the_dead(of: _Of, values: Sequence[tuple[str, int | None]]) -> Link:
    if not any(value for _, value in values):
        return Link("value", LinkState.OK, _per_gpu(of, values))
    cause = "HAMi's monitor still adds up what its process said last"
    return _left(of, "value", _per_gpu(of, values), "", cause)


def _hostpid(of: _Of, slot: Json, reason: UnresolvedReason | None) -> Link:
    hostpid, wanted = slot["hostpid"], of.wanted(slot)
    if wanted is None:
        return Link("hostpid", LinkState.AFTER, f"{hostpid}; what it must be is not known")
    if reason is not None:
        return _reason("hostpid", f"{hostpid}, and must be {wanted}", reason)
    if hostpid == wanted:
        before = f"; it was {slot['repaired']}, and is repaired" if slot["repaired"] else ""
        return Link("hostpid", LinkState.OK, f"{hostpid}, the {of.namespace} PID{before}")
    other = slot["pid"] if of.namespace == "host" else slot["host_pid"]
    shared = any(each is not slot and each["hostpid"] == hostpid for each in of.slots)
    why = classify(hostpid, wanted, other, shared=shared) or RepairReason.STALE
    return _left(of, "hostpid", f"{hostpid}, and must be {wanted}", why, words.REPAIR[why])


def _left(of: _Of, name: str, found: str, reason: str, cause: str) -> Link:
    """What the daemon puts right; with nobody there who does, it breaks."""
    if of.known.writes:
        return Link(
            name=name,
            state=LinkState.SOON,
            found=found,
            reason=reason,
            cause=cause,
            fix="nothing: the daemon writes it at its next pass",
        )
    if of.known.no_daemon:
        return Link(
            name=name,
            state=LinkState.BREAKS,
            found=found,
            reason=reason,
            cause=cause,
            fix="a daemon repairs it; none answers here",
        )
    fix = "the daemon is a dry run, and writes nothing: start it without --dry-run"
    return Link(name=name, state=LinkState.BREAKS, found=found, reason=reason, cause=cause, fix=fix)


def _sample(of: _Of, samples: Sequence[tuple[str, int | None]]) -> Link:
    unknown = [uuid for uuid, value in samples if value is None]
    found = _per_gpu(of, samples)
    if not unknown:
        return Link("sample", LinkState.OK, f"NVML: {found}")
    gpu, error = of.gpus.get(unknown[0], {}), of.known.status["driver"]["error"]
    if error:
        cause, fix = f"NVML does not answer: {error}", "resolver doctor --only nvml"
    elif gpu.get("samples") not in (None, "ok"):
        why = gpu["samples_why"] or gpu["samples"]
        cause = f"the driver has no samples of processes there: {why}"
        fix = "docs/limits.md#gpus says what can be had; nvidia-smi shows the GPU as a whole"
    else:
        cause, fix = "NVML has not said anything of this process yet", "ask again in a few seconds"
    return Link(
        name="sample", state=LinkState.UNKNOWN, found=f"NVML: {found}", reason="", cause=cause, fix=fix
    )


def _value(
    of: _Of, slot: Json, values: Sequence[tuple[str, int | None]], samples: dict[str, int | None]
) -> Link:
    found = _per_gpu(of, values)
    if values and all(value is None for _, value in values):
        cause = (
            "this layout of HAMi's cache file has no place for utilization: its library is of January 2024"
        )
        return Link(
            name="value",
            state=LinkState.BREAKS,
            found="sm_util: none",
            reason="",
            cause=cause,
            fix="a newer release of HAMi's library there",
        )
    found = f"sm_util: {found}"
    if slot["stuck"]:
        fix = "docs/troubleshooting.md#a-slot-is-stuck has what to do for each cause"
        return Link(
            name="value", state=LinkState.BREAKS, found=found, reason="stuck", cause=slot["stuck"], fix=fix
        )
    off = any(
        value is not None and (nvml := samples.get(uuid)) is not None and differs(value, nvml)
        for uuid, value in values
    )
    if off:
        cause = "it differs from NVML's at this moment; HAMi's watcher takes it in at its next tick"
        if of.known.writes:
            fix = "nothing: what stays wrong is put right by the daemon"
            return Link(name="value", state=LinkState.SOON, found=found, reason="", cause=cause, fix=fix)
        fix = "explain it again: a value that stays wrong needs a daemon that writes"
        return Link(name="value", state=LinkState.UNKNOWN, found=found, reason="", cause=cause, fix=fix)
    return Link("value", LinkState.OK, found)


def _per_gpu(of: _Of, values: Sequence[tuple[str, int | None]]) -> str:
    shown = (f"{_percent(value)} on {of.gpu(uuid)}" for uuid, value in values)
    return ", ".join(shown) or "on no GPU"


# ---- what comes out -----------------------------------------------------------------------------------------------


def _reported(of: _Of) -> Iterator[Reported]:
    devices = [uuid for region in of.regions for uuid in region["device_uuids"]]
    devices += [each["device_uuid"] for each in of.processes]
    for uuid in dict.fromkeys(devices):
        listed = [
            (slot["host_pid"], each)
            for slot in of.slots
            for each in slot["device_util"]
            if each["device_uuid"] == uuid
        ]
        monitor = [each["sm_util"] for _, each in listed]
        used = {each["host_pid"]: each["sm_util"] for each in of.processes if each["device_uuid"] == uuid}
        for host_pid, each in listed:  # one that NVML does not list there is idle, or not known
            if host_pid is not None:
                used.setdefault(host_pid, each["utilization"])
        legible = bool(of.regions) and not _read_wrongly(of)
        yield Reported(
            device_uuid=uuid,
            gpu=of.gpu(uuid),
            monitor=_sum(monitor) if legible else None,
            nvml=_sum(used.values()),
        )


def _sum(values: Collection[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _read_wrongly(of: _Of) -> bool:
    return any(region["layout"] == "v1.1-shifted" for region in of.regions)


def _end(of: _Of, reported: Sequence[Reported], *, whole: bool) -> Link:
    """What HAMi's monitor says at last."""
    found = "; ".join(
        f"{each.gpu}: HAMi's monitor {_percent(each.monitor)}, NVML {_percent(each.nvml)}"
        for each in reported
    )
    if not found:
        return Link("monitor", LinkState.OK if whole else LinkState.AFTER, "nothing, for no GPU")
    if not whole:
        return Link("monitor", LinkState.AFTER, found)
    if _read_wrongly(of):
        cause = (
            "HAMi's own monitor reads files of 2.8.1 wrongly: their fields are not where their version says"
        )
        fix = "another release of HAMi's library in that container; resolver top and resolver's own metrics are right"
        return Link(name="monitor", state=LinkState.BREAKS, found=found, reason="", cause=cause, fix=fix)
    return Link("monitor", LinkState.OK, found)


def _percent(value: int | None) -> str:
    return "?" if value is None else f"{value} %"


def _count(number: int, one: str) -> str:
    return f"{number} {one if number == 1 else one + 's'}"
