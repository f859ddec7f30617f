"""`make gpu-check`: a real GPU driver's answers inside and outside of a PID namespace, and the whole repair on it.

A tenant in its own container (namespaces, cgroup, HAMi's cache file) keeps the GPU busy through CUDA's driver API.
NVML is asked from the node and from inside the tenant's PID namespace; then the daemon repairs the tenant's slot, and
the tenant's own watcher has to see its load. The daemon decides by the driver's version; for an unknown version it is
told the observed behaviour. No CUDA toolkit is needed; the driver brings all of it.

Exit status: 0 if the repair is right, 1 if it is not, 2 if this machine cannot run it, 4 if it has no GPU.
"""

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from resolver.client import get_json
from resolver.config import HostpidNamespace
from resolver.hami.hostpid_policy import decide
from tests.fakes.build import BuildError
from tests.fakes.daemon import BOUND, Daemon, DaemonError
from tests.fakes.gpu import DEFAULT_DEVICES, Device
from tests.fakes.node import Node
from tests.fakes.nvml_probe import NvmlCallError, Probe, device
from tests.fakes.process import NodeError, Tenant
from tests.gpu.node import RealNode, StandinNode

AUTO: Final = HostpidNamespace.AUTO
LIBRARY: Final = "libcuda.so.1"
LOAD: Final = 60
MEMORY: Final = 64 << 20
_OPTIONS: Final[tuple[str, ...]] = ("--source", "auto", "--interval", "100ms", "--nvml-interval", "500ms")
_SAMPLE_SECONDS: Final = 20.0
_REPAIR_SECONDS: Final = 30.0
_OWN_SAMPLES: Final = 1  # NVML_GPU_UTILIZATION_SAMPLES
DUTIES: Final = ((0.2, 1.0), (1.0, 4.0))  # seconds busy of each so many
_SETTLED_SECONDS: Final = 20.0
_NAME: Final = "gpu-check"
CALLS: Final = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetProcessUtilization")
_SECOND_CALL: Final = "nvmlDeviceGetProcessesUtilizationInfo"
_MODES: Final = ("none", "passthrough", "vgpu", "host_vgpu", "host_vsga")


class NoGpu(Exception):
    """No GPU is usable here; the message names the reason."""


class Seen(NamedTuple):
    """What one call showed of the tenant: which of its numbers, and all numbers that were there.

    ``answered``: the call that answered, where the driver refuses the older one.
    """

    call: str
    where: str
    which: str
    numbers: tuple[int, ...]
    answered: str = ""


class Duty(NamedTuple):
    """Processes that are ``busy`` seconds of each ``every``: GPU-seconds measured here, and shown by resolver.

    ``unknown`` seconds are those that NVML didn't tell resolver, as it says itself: they are in no sum.
    """

    busy: float
    every: float
    processes: int
    measured: float
    shown: float
    unknown: float

    @property
    def error(self) -> float:
        """Return the error in percent of the measured use."""
        return 100 * (self.shown / self.measured - 1)


class Findings(NamedTuple):
    """One run. ``hostpid`` is which of the tenant's numbers was written, ``watched`` its own watcher's per cent.

    ``period_ms`` is the length of the driver's own samples.
    """

    driver: str
    gpu: str
    host_pid: int
    ns_pid: int
    seen: tuple[Seen, ...]
    hostpid: str
    origin: str
    watched: int
    seconds: float
    wrong: tuple[str, ...]
    period_ms: float
    duties: tuple[Duty, ...]
    real: bool = True
    virtualization: str = "unknown"

    @property
    def call(self) -> str:
        """The call for samples that answered."""
        return next(each.answered or each.call for each in self.seen if each.call == CALLS[1])

    @property
    def agree(self) -> bool:
        """Whether list and samples have the same number of the tenant inside, so that HAMi's guess is right."""
        return len({each.which for each in self.seen if each.where == "inside"}) == 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; see the module's docstring for the exit status."""
    parser = argparse.ArgumentParser(prog="make gpu-check", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", metavar="UUID", help="the GPU to use (the first)")
    parser.add_argument(
        "--seconds", type=float, default=20, help="how long each duty cycle lasts (default 20, 0: none)"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.add_argument(
        "--standin", metavar="DRIVER", help="without a GPU: stand-ins as that driver's libraries"
    )
    options = parser.parse_args(arguments)
    try:
        if os.geteuid() != 0:
            raise NodeError("it makes containers, and that takes root: sudo make gpu-check")
        with tempfile.TemporaryDirectory(prefix="resolver-gpu-") as root, ExitStack() as stack:
            Path(root).chmod(0o755)
            findings = examine(*_node(Path(root), options, stack), options.seconds)
            findings = findings._replace(real=not options.standin)
    except NoGpu as why:
        print(f"no GPU: {why}", file=sys.stderr)
        return 4
    except (BuildError, NodeError, DaemonError) as error:
        print(f"gpu-check cannot run here: {error}", file=sys.stderr)
        return 2
    facts = findings._asdict() | {"call": findings.call, "agree": findings.agree}
    print(json.dumps(facts) if options.json else report(findings))
    return 1 if findings.wrong else 0


def _node(root: Path, options: argparse.Namespace, stack: ExitStack) -> tuple[Node, Device, str]:
    """The node to work on, its GPU, and its driver's version."""
    if options.standin:
        node: Node = stack.enter_context(StandinNode(root, options.standin))
        return node, DEFAULT_DEVICES[0], options.standin
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        raise NoGpu(
            f"{LIBRARY} not found. The driver brings it: install it, or run this where there is one"
        ) from None
    version, gpu = _first_gpu(options.device)
    return stack.enter_context(RealNode(root, version, gpu)), gpu, version


def _first_gpu(wanted: str | None) -> tuple[str, Device]:
    try:
        with Probe(dict(os.environ)) as nvml:
            nvml("nvmlInit")
            version = nvml("nvmlSystemGetDriverVersion")
            for index in range(nvml("nvmlDeviceGetCount")):
                uuid = nvml("nvmlDeviceGetUUID", device(index))
                if wanted in (None, uuid):
                    return version, Device(uuid, nvml("nvmlDeviceGetName", device(index)))
    except (NvmlCallError, TimeoutError) as error:
        raise NoGpu(f"NVML does not answer: {error}") from None
    raise NoGpu(f"NVML shows no {wanted or 'device'}")


def examine(node: Node, gpu: Device, version: str, seconds_each: float) -> Findings:
    """Start a tenant, call NVML inside and outside of its container, await its repair, and measure its use."""
    container = node.container(name=_NAME, sm_limit=90, devices=[gpu])
    tenant = container.tenant(load=LOAD, guess="none", memory=MEMORY)
    inside = ("nsenter", "--target", str(container.init_host_pid), "--pid")
    environment = node.environment()
    seen = [
        *_look(environment, (), "outside", gpu, tenant),
        *_look(environment, inside, "inside", gpu, tenant),
    ]
    with Probe(environment) as nvml:
        nvml("nvmlInit")
        virtualization = _virtualization(nvml, gpu)
    wanted = samples_inside(seen)
    number = {"host": tenant.host_pid, "container": tenant.ns_pid}.get(wanted)
    options = _OPTIONS
    if number is not None and decide(AUTO, version, vgpu=virtualization == "vgpu").namespace is None:
        options += ("--hostpid-namespace", wanted)
    began = time.monotonic()
    with Daemon(node, node.root / "run", *options, wrapper=BOUND) as daemon:
        slot = tenant.slot()
        while time.monotonic() < began + _REPAIR_SECONDS:
            slot = tenant.slot()
            if slot["hostpid"] == number and slot["sm_util"][0] > 0:
                break
            if not daemon.alive:
                raise DaemonError(f"the daemon ended: {daemon.tail()}")
            time.sleep(0.05)
        seconds = time.monotonic() - began
        daemon.wait_for("policy")  # its line may come after the repair
        origin = daemon.said("policy")[-1]["origin"]
        watched = int(slot["sm_util"][0])
        period = _period(environment, gpu)
        tenants = [tenant]
        duties = []
        for _ in range(2 if seconds_each else 0):
            duties += [_duty(daemon, tenants, busy, every, seconds_each) for busy, every in DUTIES]
            tenants.append(container.tenant(guess="none", devices=[gpu], memory=MEMORY))
    written = which([slot["hostpid"]], tenant.host_pid, tenant.ns_pid)
    return Findings(
        version,
        gpu.name,
        tenant.host_pid,
        tenant.ns_pid,
        tuple(seen),
        written,
        origin,
        watched,
        seconds,
        tuple(_wrong(seen, wanted, written, watched)),
        period,
        tuple(duties),
        virtualization=virtualization,
    )


def _period(environment: dict[str, str], gpu: Device) -> float:
    """Milliseconds between the driver's own samples; 0 if it has none."""
    with Probe(environment) as nvml:
        nvml("nvmlInit")
        uuids = {nvml("nvmlDeviceGetUUID", device(i)): i for i in range(nvml("nvmlDeviceGetCount"))}
        try:
            _, samples = nvml("nvmlDeviceGetSamples", device(uuids[gpu.uuid]), _OWN_SAMPLES, 0)
        except NvmlCallError:
            return 0.0
    stamps = sorted(sample["timeStamp"] for sample in samples)
    return median(after - before for before, after in pairwise(stamps)) / 1e3 if len(stamps) > 1 else 0.0


def _duty(daemon: Daemon, tenants: Sequence[Tenant], busy: float, every: float, seconds: float) -> Duty:
    """Keep the GPU busy in turns, one process after the other, and compare use with the time of their kernels."""

    def settled() -> tuple[float, float]:
        """Return the sums once the account has seen more idle time than lies between two bursts: it may lag."""
        deadline = time.monotonic() + _SETTLED_SECONDS
        while True:
            answer = get_json("/v1/usage", str(daemon.socket))["containers"]
            uses = [use for use in answer if use["container_name"] == _NAME]
            idle = min((time.time() - (use["idle_since"] or time.time()) for use in uses), default=0.0)
            if idle > every or time.monotonic() > deadline:
                return sum(use["gpu_seconds"] for use in uses), sum(use["unknown_seconds"] for use in uses)
            time.sleep(0.1)

    def measured() -> float:
        return sum(float(tenant.command("busy")["busy_us"]) for tenant in tenants) / 1e6

    for tenant in tenants:
        tenant.set_load(0)
    before, began = settled(), time.monotonic()
    measured_before = measured()
    for turn in count():
        start = began + turn * every / len(tenants)
        if start + busy > began + seconds:
            break
        time.sleep(max(0.0, start - time.monotonic()))
        tenants[turn % len(tenants)].set_load(100)
        time.sleep(busy)
        tenants[turn % len(tenants)].set_load(0)
    shown, unknown = (after - start for after, start in zip(settled(), before, strict=True))
    return Duty(busy, every, len(tenants), measured() - measured_before, shown, unknown)


def _virtualization(nvml: Probe, gpu: Device) -> str:
    try:
        count = nvml("nvmlDeviceGetCount")
        index = next(i for i in range(count) if nvml("nvmlDeviceGetUUID", device(i)) == gpu.uuid)
        return _MODES[nvml("nvmlDeviceGetVirtualizationMode", device(index))]
    except (NvmlCallError, LookupError):
        return "unknown"


def samples_inside(seen: Iterable[Seen]) -> str:
    """Return which of the tenant's PIDs its samples carry inside; the slot needs that one."""
    return next(each.which for each in seen if (each.call, each.where) == (CALLS[1], "inside"))


def _look(
    environment: dict[str, str], prefix: Sequence[str], where: str, gpu: Device, tenant: Tenant
) -> list[Seen]:
    """Make both calls inside or outside. Some drivers have samples late: wait for them."""
    with Probe(environment, prefix) as nvml:
        nvml("nvmlInit")
        uuids = {nvml("nvmlDeviceGetUUID", device(i)): i for i in range(nvml("nvmlDeviceGetCount"))}
        handle = device(uuids[gpu.uuid])
        found = []
        for call, arguments in ((CALLS[0], ()), (CALLS[1], (0,))):
            deadline = time.monotonic() + _SAMPLE_SECONDS
            numbers: tuple[int, ...] = ()
            answered = call
            while time.monotonic() < deadline:
                try:
                    numbers = tuple(entry["pid"] for entry in nvml(answered, handle, *arguments))
                except NvmlCallError as error:
                    if "NotSupported" in str(error) and answered == CALLS[1]:
                        answered = _SECOND_CALL
                        continue
                    if "NotFound" not in str(error):
                        raise NodeError(f"{call}, {where}: {error}") from None
                if which(numbers, tenant.host_pid, tenant.ns_pid) != "neither":
                    break
                time.sleep(0.2)
            shown = which(numbers, tenant.host_pid, tenant.ns_pid)
            found.append(Seen(call, where, shown, numbers, answered if answered != call else ""))
    return found


def which(numbers: Iterable[int], host_pid: int, ns_pid: int) -> str:
    """Return which of a process's two PIDs is among the numbers: ``host``, ``container``, ``both`` or ``neither``.

    The number of one of its threads counts as its own.
    """
    owners = {_process_of(number) for number in numbers} | set(numbers)
    there = (host_pid in owners, ns_pid in owners)
    return {(True, True): "both", (True, False): "host", (False, True): "container"}.get(there, "neither")


def _process_of(number: int) -> int:
    """The process of a thread's number; the number itself where there is none."""
    try:
        for line in Path(f"/proc/{number}/status").read_text().splitlines():
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    except OSError:
        pass
    return number


def _wrong(seen: Sequence[Seen], wanted: str, written: str, watched: int) -> Iterable[str]:
    for each in seen:
        if each.where == "outside" and each.which != "host":
            yield f"{each.call} outside shows {each.which}, not the host PID"
    if wanted not in ("host", "container"):
        yield f"the samples inside show {wanted} of its numbers: which one a slot needs cannot be told"
    elif written != wanted:
        yield f"its slot has {written}, and its samples carry {wanted}"
    if not watched:
        yield "its own watcher sees no load"


def report(findings: Findings) -> str:
    """Print the findings, and the line for docs/compatibility.md."""
    lines = [f"driver {findings.driver}, {findings.gpu}"]
    lines += [f"the tenant is {findings.ns_pid} in its container, {findings.host_pid} on the node", ""]
    lines += [f"  {'call':40}{'asked':10}{'shows':12}numbers"]
    for each in findings.seen:
        numbers = " ".join(map(str, each.numbers[:8])) or "-"
        lines.append(f"  {each.call:40}{each.where:10}{each.which:12}{numbers}")
    lines += ["", f"samples by {findings.call}; virtualization: {findings.virtualization}"]
    lines += [f"list and samples {'agree' if findings.agree else 'differ'} inside"]
    result = f"hostpid written: {findings.hostpid} ({findings.origin}); "
    result += f"the tenant's watcher sees {findings.watched} % after {findings.seconds:.1f} s"
    lines += ["", result, *(f"WRONG: {what}" for what in findings.wrong)]
    lines += ["", f"the driver's own samples: one each {findings.period_ms:.1f} ms"]
    for duty in findings.duties:
        what = (
            f"{duty.busy:g} s of each {duty.every:g} s, {duty.processes} process{'es' * (duty.processes > 1)}"
        )
        lines.append(
            f"  {what:40}measured {duty.measured:.2f} s, shown {duty.shown:.2f} s, {duty.error:+.1f} %"
            f"{f', {duty.unknown:.2f} s unknown' * (duty.unknown > 0)}"
        )
    wanted, expected = (
        samples_inside(findings.seen),
        decide(AUTO, findings.driver, vgpu=findings.virtualization == "vgpu").namespace,
    )
    if wanted in ("host", "container") and wanted != expected:
        lines += [f"set this on nodes with that driver: --hostpid-namespace {wanted}"]
    lines += (
        ["", "for docs/compatibility.md:", row(findings)]
        if findings.real
        else ["", "stand-ins: nothing of a GPU's"]
    )
    return "\n".join(lines)


def row(findings: Findings) -> str:
    inside = {each.call: each.which for each in findings.seen if each.where == "inside"}
    result = "wrong" if findings.wrong else "right"
    source = f"`make gpu-check` on {findings.gpu}: {result}"
    return f"| {findings.driver} | {inside[CALLS[0]]} | {inside[CALLS[1]]} | {source} |"


if __name__ == "__main__":
    sys.exit(main())
