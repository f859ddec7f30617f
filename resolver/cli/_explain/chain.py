"""Chain from a container's processes to the reported number, link by link; after a break no link is judged."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from resolver.api.shapes import Slot
from resolver.base.reasons import STARTING, DriverError, RepairReason, SampleReason, UnresolvedReason
from resolver.base.text import several
from resolver.cli._explain.container_view import ContainerView, Reported, percent
from resolver.cli.documents import Documents
from resolver.hami.hostpid_policy import classify
from resolver.hami.layout import DROPPED_FIX, DROPPED_WHY
from resolver.hami.placements import searched
from resolver.state import Container
from resolver.workers.slot_writer import differs


class LinkState(StrEnum):
    """``soon`` gets right by itself; ``after`` is not judged, since the chain breaks before it."""

    OK = "ok"
    SOON = "soon"
    AFTER = "after"
    UNKNOWN = "unknown"
    BREAKS = "breaks"


class Link(NamedTuple):
    """``reason`` is the fixed word, where there is one; ``cause`` and ``fix`` are empty while it holds."""

    state: LinkState
    name: str
    found: str
    cause: str = ""
    fix: str = ""
    reason: str = ""


_ok = partial(Link, LinkState.OK)
_soon = partial(Link, LinkState.SOON)
_after = partial(Link, LinkState.AFTER)
_unknown = partial(Link, LinkState.UNKNOWN)
_breaks = partial(Link, LinkState.BREAKS)


class SlotOwner(NamedTuple):
    """A slot, a process on a GPU, or both, with its part of the chain."""

    ns_pid: int | None
    host_pid: int | None
    comm: str | None
    slot: int | None
    links: tuple[Link, ...]


class Explained(NamedTuple):
    """The chain of one container."""

    view: ContainerView
    links: tuple[Link, ...]
    owners: tuple[SlotOwner, ...]
    end: Link
    reported: tuple[Reported, ...]

    def every_link(self) -> Iterator[tuple[SlotOwner | None, Link]]:
        yield from ((None, link) for link in self.links)
        yield from ((owner, link) for owner in self.owners for link in owner.links)
        yield None, self.end

    def first(self, state: str) -> tuple[SlotOwner | None, Link] | None:
        return next(((owner, link) for owner, link in self.every_link() if link.state == state), None)


def explain(documents: Documents, container: Container) -> Explained:
    view = ContainerView(documents, container)
    links = (_processes(view), _namespace(view), _map(view), _cache_file(view), _driver(view))
    broken = any(link.state is LinkState.BREAKS for link in links)
    owners = tuple(_of_owners(view, broken=broken))
    reported = tuple(view.reported())
    whole = not broken and all(link.state is LinkState.OK for owner in owners for link in owner.links)
    return Explained(view, links, owners, _end(view, reported, whole=whole), reported)


# ---- of the container ---------------------------------------------------------------------------------------------


def _processes(view: ContainerView) -> Link:
    summary = f"{len(view.processes)} on a GPU, {several(len(view.slots), 'slot')} in use"
    if not view.container.container_id:
        cause = "none of its processes is known: they have ended, or no slot has an owner yet"
        fix = "kubectl get pod shows whether it runs; the slots below say what is known of each"
        return _unknown("processes", summary, cause, fix)
    return _ok("processes", summary)


def _namespace(view: ContainerView) -> Link:
    pidns, init = view.container.pidns, view.container.init_host_pid
    if not view.container.container_id:
        return _after("namespace", "not known")
    shared = "shared with another container, or with the host"
    return _ok("namespace", f"{pidns}; its first process is {init} on the host" if pidns else shared)


def _map(view: ContainerView) -> Link:
    source = view.documents.status.source
    if view.documents.no_daemon:
        return _ok("map", f"a scan of /proc, made now: {source.processes} processes")
    summary = f"{source.name}, {source.processes} processes"
    read_only = any(slot.unresolved == UnresolvedReason.NOT_WRITABLE for slot in view.documents.slots)
    if source.not_ready and not read_only:  # a read-only file breaks the chain at the slot
        fix = f"resolver doctor --only {source.name}"
        return _breaks("map", summary, source.not_ready, fix, "not_ready")
    if source.incomplete:
        return _unknown("map", summary, source.incomplete, "set map_size higher", "incomplete")
    return _ok("map", summary)


def _cache_file(view: ContainerView) -> Link:
    uid, name = view.container.pod_uid, view.container.container_name
    rejected = [file for file in view.documents.rejected if uid and f"/{uid}_{name}/" in f"{file.path}/"]
    if view.regions:
        region = view.regions[0]
        summary = f"{region.path.rsplit('/', 1)[-1]}, layout {region.layout}"
        summary += f", and {len(view.regions) - 1} more" if len(view.regions) > 1 else ""
        if any(region.quarantined for region in view.regions):
            return _reason("cache file", summary, UnresolvedReason.QUARANTINED)
        return _ok("cache file", summary)
    if rejected:
        path, why = rejected[0].path, rejected[0].reason
        return _breaks("cache file", f"{path.rsplit('/', 1)[-1]} is ignored", *why.for_terminal(path), why)
    if view.documents.missing_dirs:
        summary = f"there is no {', '.join(searched(tuple(view.documents.missing_dirs)))}"
        fix = "resolver doctor --only containers_dir"
        return _breaks("cache file", summary, "HAMi keeps its cache files there", fix)
    if view.processes:
        reasons = {process.no_slot for on_gpu in view.processes.values() for process in on_gpu}
        yet = SampleReason.NOT_FOUND_YET
        return _none("cache file", yet if yet in reasons else SampleReason.NO_SHARED_REGION)
    return _ok("cache file", "none: no process of it has used a GPU yet")


def _driver(view: ContainerView) -> Link:
    driver, policy = view.documents.status.driver, view.documents.status.policy
    if view.namespace not in ("host", "container"):
        if driver.error == STARTING:
            return _unknown("driver", STARTING, "it opens every GPU first", "ask again in half a minute")
        if driver.error:
            error = DriverError.named_in(driver.error)
            return _breaks("driver", driver.error, *error.for_terminal(), UnresolvedReason.DRIVER_UNKNOWN)
        return _reason("driver", policy.why, UnresolvedReason.DRIVER_UNKNOWN)
    version = driver.version or "of an unknown version"
    summary = f"{version}: hostpid must be the {view.namespace} PID ({policy.origin})"
    if driver.error:
        cause = f"NVML does not answer: {driver.error}"
        return _unknown("driver", summary, cause, "resolver doctor --only nvml")
    return _ok("driver", summary)


def _reason(name: str, summary: str, reason: UnresolvedReason) -> Link:
    return (_soon if reason.passing else _breaks)(name, summary, *reason.for_terminal(), reason)


def _none(name: str, reason: SampleReason) -> Link:
    link = _unknown if reason is SampleReason.NOT_FOUND_YET else _breaks
    return link(name, "it has none", *reason.for_terminal(), reason)


# ---- of each slot, and each process on a GPU ------------------------------------------------------------------------


def _of_owners(view: ContainerView, *, broken: bool) -> Iterator[SlotOwner]:
    for slot in view.slots:
        links = _of_slot(view, slot)
        on_gpu = view.processes.get(slot.host_pid or 0)
        comm = on_gpu[0].comm if on_gpu else None
        blamed = tuple(map(_not_blamed, links) if broken else links)
        yield SlotOwner(slot.pid, slot.host_pid, comm, slot.slot, blamed)
    owning = {slot.host_pid for slot in view.slots}
    for host_pid in sorted(view.processes.keys() - owning):
        first, *_ = on_gpu = view.processes[host_pid]
        link = _none("slot", first.no_slot or SampleReason.NO_SLOT)
        sample = _sample(view, [(process.device_uuid, process.sm_util) for process in on_gpu])
        pair = _not_blamed(link) if broken else link, _not_blamed(sample)
        yield SlotOwner(first.ns_pid, host_pid, first.comm, None, pair)


def _not_blamed(link: Link) -> Link:
    return link._replace(state=LinkState.AFTER) if link.state is not LinkState.OK else link


def _of_slot(view: ContainerView, slot: Slot) -> Iterator[Link]:
    place = f"number {slot.slot}"
    values = [(device.device_uuid, device.sm_util) for device in slot.device_util]
    samples = [(device.device_uuid, device.utilization) for device in slot.device_util]
    reason = slot.unresolved
    if slot.dead:
        yield _ok("slot", f"{place}; its process has ended")
        summary = _per_gpu(view, values)
        if not any(value for _, value in values):
            yield _ok("value", summary)
            return
        cause = "HAMi's monitor still adds up its process's last value"
        yield _left(view, "value", summary, "", cause)
        return
    if reason and not reason.of_writing and reason is not UnresolvedReason.DRIVER_UNKNOWN:
        yield _reason("slot", place, reason)
        yield _after("hostpid", f"{slot.hostpid}; the right value is unknown")
        yield _after("value", _per_gpu(view, values))
        return
    yield _ok("slot", place)
    hostpid = _hostpid(view, slot, reason)
    yield hostpid
    sample = _sample(view, samples)
    yield sample
    value = _value(view, slot, values)
    holds = hostpid.state is LinkState.OK and sample.state is LinkState.OK
    yield value if holds or value.state is LinkState.OK else _not_blamed(value)


def _hostpid(view: ContainerView, slot: Slot, reason: UnresolvedReason | None) -> Link:
    hostpid, wanted = slot.hostpid, view.wanted(slot)
    if wanted is None:
        return _after("hostpid", f"{hostpid}; the right value is unknown")
    if reason is not None:
        return _reason("hostpid", f"{hostpid}, but must be {wanted}", reason)
    if hostpid == wanted:
        before = f"; it was {slot.repaired}, and is repaired" if slot.repaired else ""
        return _ok("hostpid", f"{hostpid}, the {view.namespace} PID{before}")
    number = slot.pid if view.namespace == "host" else slot.host_pid or 0
    shared = any(other is not slot and other.hostpid == hostpid for other in view.slots)
    why = classify(hostpid, wanted, number, shared=shared) or RepairReason.STALE
    return _left(view, "hostpid", f"{hostpid}, but must be {wanted}", why, why.meaning)


def _left(view: ContainerView, name: str, summary: str, reason: str, cause: str) -> Link:
    """Build a link that the daemon will fix; without a daemon, it breaks."""
    if view.documents.writes:
        return _soon(name, summary, cause, "nothing: the daemon writes it at its next pass", reason)
    fix = "the daemon is a dry run, and writes nothing: start it without --dry-run"
    if view.documents.no_daemon:
        fix = "start the daemon, which repairs it"
    return _breaks(name, summary, cause, fix, reason)


def _sample(view: ContainerView, samples: Sequence[tuple[str, int | None]]) -> Link:
    unknown = [uuid for uuid, value in samples if value is None]
    summary = _per_gpu(view, samples)
    if not unknown:
        return _ok("sample", f"NVML: {summary}")
    gpu, error = view.gpus.get(unknown[0]), view.documents.status.driver.error
    if error:
        age = f" (its last answer is {view.documents.age} old)" if view.documents.age else ""
        cause, fix = f"NVML does not answer: {error}{age}", "resolver doctor --only nvml"
    elif gpu is not None and gpu.samples != "ok":
        why = gpu.samples_why or gpu.samples
        cause = f"the driver has no samples of processes there: {why}"
        fix = "docs/compatibility.md#gpus lists the available values; nvidia-smi shows the whole GPU's"
    else:
        cause, fix = "NVML has not reported this process yet", "ask again in a few seconds"
    return _unknown("sample", f"NVML: {summary}", cause, fix)


def _value(view: ContainerView, slot: Slot, values: Sequence[tuple[str, int | None]]) -> Link:
    if values and all(value is None for _, value in values):
        cause = "its layout, of January 2024, has no place for utilization"
        return _breaks("value", "sm_util: none", cause, "a newer release of HAMi's library there")
    summary = f"sm_util: {_per_gpu(view, values)}"
    if slot.stuck:
        fix = "docs/troubleshooting.md#a-slot-is-stuck has a fix for each cause"
        return _breaks("value", summary, slot.stuck, fix, "stuck")
    pairs = [(device.sm_util, device.utilization) for device in slot.device_util]
    if not any(value is not None and nvml is not None and differs(value, nvml) for value, nvml in pairs):
        return _ok("value", summary)
    cause = "it differs from NVML's value now; HAMi's watcher writes a new one at its next tick"
    if view.documents.writes:
        return _soon("value", summary, cause, "nothing: the daemon corrects a value that stays wrong")
    fix = "run explain again: if the value stays wrong, start a daemon that writes"
    return _unknown("value", summary, cause, fix)


def _per_gpu(view: ContainerView, values: Sequence[tuple[str, int | None]]) -> str:
    shown = (f"{percent(value)} on {view.gpu(uuid)}" for uuid, value in values)
    return ", ".join(shown) or "on no GPU"


def _end(view: ContainerView, reported: Sequence[Reported], *, whole: bool) -> Link:
    """Return the last link: the number that HAMi's monitor reports."""
    summary = "; ".join(gpu.in_words() for gpu in reported)
    if not whole or not summary:
        return (_ok if whole else _after)("monitor", summary or "nothing, for no GPU")
    if view.dropped:
        return _breaks("monitor", summary, f"this is a file of HAMi 2.8.1: {DROPPED_WHY}", DROPPED_FIX)
    if any(gpu.monitor != gpu.monitor_2_6 for gpu in reported):
        cause = "monitors up to HAMi 2.9 also add up values left in slots of ended processes or copies of moved ones"
        return _left(view, "monitor", summary, "", cause)
    if any(gpu.nvml is None for gpu in reported):
        cause = "NVML gives no value for one of the container's processes"
        return _unknown("monitor", summary, cause, "resolver doctor --only nvml")
    return _ok("monitor", summary)
