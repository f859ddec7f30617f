"""The scene of the demo: containers in which everything has gone wrong that goes wrong on real nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from tests.fakes.container import Container
from tests.fakes.gpu import LATE_S, Device
from tests.fakes.node import Node
from tests.fakes.process import Tenant

STEADY_S: Final = 0.3  # more than two ticks of a watcher
#: One driver of each kind: (version, PIDs of the process list, PIDs of the samples)
DRIVERS: Final = (
    ("560.35.03", "container", "host"),
    ("535.104.05", "host", "host"),
    ("565.57.01", "container", "host"),
    ("570.86.15", "container", "container"),
    ("580.105.08", "container", "container"),
)
#: One that refuses the only call for samples that HAMi before 2.10 makes.
REFUSING: Final = DRIVERS[-1][0]


@dataclass(slots=True)
class Case:
    """One slot and its required state. `load` is the actual load in percent, None if the layout has no field for it."""

    container: Container
    tenant: Tenant
    device: Device
    story: str
    reason: str  # of the repair, as the daemon names it; "" where none is needed
    wanted: int  # the hostpid it must have in the end
    load: int | None
    ended: bool = False  # killed: its utilization must become 0
    idles: bool = False  # on this device, and it lives

    def span(self) -> tuple[int, int]:
        """Return the lowest and highest right value: its load, or by the periods if processes take turns."""
        gpu = self.container.node.gpu
        if not (self.load and gpu.turns):
            return self.load or 0, self.load or 0
        return gpu.span(self.tenant.host_pid, gpu.devices.index(self.device), LATE_S + STEADY_S)

    def right(self, sm: int | None) -> bool:
        """Tell if a value is right; NVIDIA's library rounds up, sometimes to one more."""
        if sm is None or self.load is None:
            return sm == self.load
        low, high = self.span()
        return low <= sm <= high + (low < high)


def _case(
    tenant: Tenant, container: Container, device: Device, story: str, reason: str, *, samples: str = "host"
) -> Case:
    wanted = tenant.host_pid if samples == "host" else tenant.ns_pid
    load = None if container.layout == "v0-no-util" else tenant.load
    return Case(container, tenant, device, story, reason, wanted, load)


#: Placements with the container from the cgroup.
TOLD_BY_CGROUP: Final = ("kai", "bare")
#: Engines of the full scene's containers.
PLACED: Final = {
    "train": "dra",
    "serve": "volcano",
    "batch": "koordinator",
    "notebook": "kai",
    "etl": "hami",
    "legacy": "bare",
}


def full_scene(node: Node, placed: Mapping[str, str] = MappingProxyType({})) -> list[Case]:
    """Six containers in five layouts; the driver lists container PIDs, its samples have host PIDs.

    `placed` is the placement of each by its name, `hami` for those that are not in it.
    """
    both = first, second = node.gpu.devices

    def made(name: str, cgroup: str, devices: Sequence[Device] = both, **options: Any) -> Container:
        options |= {"placement": placed.get(name, "hami"), "devices": devices}
        return node.container(name=name, cgroup_format=cgroup, **options)

    return [
        *_training(made("train", "containerd-systemd"), first, second),
        *_restarted(
            made("serve", "crio-systemd-child", layout="v1.1-shifted", qos="guaranteed"), first, second
        ),
        *_duplicates(made("batch", "docker-cgroupfs", [first], layout="v1.1", qos="besteffort"), first),
        *_common(made("notebook", "containerd-cgroupfs", release="2.9.0", sm_limit=0), first, second),
        *_killed(made("etl", "crio-cgroupfs", layout="v0"), first, second),
        _oldest_layout(made("legacy", "kind-cgroupfs", [second], layout="v0-no-util"), second),
    ]


def _training(container: Container, first: Device, second: Device) -> list[Case]:
    guessed = container.tenant(load=34, devices=[first])
    raced = container.tenant(load=27, devices=[second], guess="none")
    return [
        _case(guessed, container, first, "guessed from the process list", "wrong_namespace"),
        _case(raced, container, second, "lost the race for its PID", "missing"),
    ]


def _restarted(container: Container, first: Device, second: Device) -> list[Case]:
    before = container.tenant(load=23, devices=[first])
    before.command(f"hostpid {before.host_pid}")
    container.restart()
    after = container.tenant(load=23, devices=[first], guess="none")
    stranger = container.tenant(load=21, devices=[second], guess="wrong")
    return [
        _case(after, container, first, "container was restarted", "stale"),
        _case(stranger, container, second, "took a stranger's PID", "stale"),
    ]


def _duplicates(container: Container, device: Device) -> list[Case]:
    right = container.tenant(load=12, guess="none")
    right.command(f"hostpid {right.host_pid}")
    twin = container.tenant(load=9, guess=right.host_pid)
    return [
        _case(right, container, device, "was right all along", ""),
        _case(twin, container, device, "has its neighbour's PID", "duplicate"),
    ]


def _common(container: Container, first: Device, second: Device) -> list[Case]:
    """Return the usual case: HAMi 2.9.0, no core limit, two GPUs, a right number, and a watcher that runs."""
    process = container.tenant(load=38, guess="none")
    process.command(f"hostpid {process.host_pid}")
    idle = _case(process, container, second, "idles on its second GPU", "")
    idle.load, idle.idles = 0, True
    return [_case(process, container, first, "no core limit set", ""), idle]


def _killed(container: Container, first: Device, second: Device) -> list[Case]:
    dead = container.tenant(load=45, devices=[second], guess="none")
    dead.command(f"hostpid {dead.host_pid}")
    heir = container.tenant(load=17, devices=[first], guess="none")
    case = _case(dead, container, second, "killed with SIGKILL", "")
    case.ended, case.load = True, 0
    return [case, _case(heir, container, first, "never knew its PID", "missing")]


def _oldest_layout(container: Container, device: Device) -> Case:
    return _case(container.tenant(load=8), container, device, "layout without utilization", "wrong_namespace")


def short_scene(node: Node, listed: str, samples: str) -> list[Case]:
    """Return the cases of two containers on any driver, with the mistakes of tenants there."""
    (device,) = node.gpu.devices[:1]
    limited = node.container(name="limited", cgroup_format="docker-systemd", devices=[device])
    missing = limited.tenant(load=41, guess="none")
    guessed = limited.tenant(load=26)
    free = node.container(
        name="free", cgroup_format="crio-systemd", layout="v1.1", watcher=False, devices=[device]
    )
    wrong = free.tenant(load=19, guess="none")
    other_number = wrong.ns_pid if samples == "host" else wrong.host_pid
    wrong.command(f"hostpid {other_number}")
    guess_reason = "" if listed == samples else "wrong_namespace"
    story = "what a broker would tell" if samples == "container" else "number of the wrong namespace"
    return [
        _case(missing, limited, device, "never knew its PID", "missing", samples=samples),
        _case(guessed, limited, device, "guessed from the process list", guess_reason, samples=samples),
        _case(wrong, free, device, story, "wrong_namespace", samples=samples),
    ]


def settle(cases: Sequence[Case]) -> None:
    """Kill and idle the processes that the cases name, once the watchers have filled the regions."""
    for case in cases:
        if case.ended:
            case.tenant.kill()
        elif case.idles:
            case.tenant.set_load(case.tenant.load, 0)
