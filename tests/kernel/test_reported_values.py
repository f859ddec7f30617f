"""The closed loop: the values that HAMi's monitor would report become NVML's, for every release of the tenants.

If a tenant's watcher overwrites the values at each tick, the daemon corrects them each time, and reports the slot.
"""

import itertools
import time
from pathlib import Path

import pytest

from tests.bench.values import GPUS, IDLE, Case
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.releases import BEHAVIOURS
from tests.fakes.state import Fault
from tests.kernel.conftest import DRIVER, Start, command
from tests.kernel.rights import patched
from tests.kernel.serving import answer
from tests.patience import never, until

UUIDS = tuple(device.uuid for device in GPUS)
FAST = ("--interval", "50ms", "--nvml-interval", "200ms", "--source", "scan")


@pytest.mark.parametrize("gpus", [1, 4])
def test_monitor_reports_nvml_values_in_every_release(tmp_path: Path, start: Start, gpus: int) -> None:
    """Busy, changed, idle except on the first device, idle: values within 3 points, and 0 if idle."""
    with Node(tmp_path, DRIVER, GPUS) as node:
        cases = []
        for release in BEHAVIOURS:
            name = release.name.replace(".", "-")
            container = node.container(name=name, release=release.name, sm_limit=0, devices=GPUS[:gpus])
            cases.append(Case(container))
        # On one GPU only the first release's watcher undoes repairs.
        words = ("HAMi 2.4.1", "HAMi 2.5 and 2.6")[: 1 + (gpus > 1)]
        undone = {case.container.directory.name: word for case, word in zip(cases, words, strict=False)}
        daemon = start(node)
        for phase, loads in (
            ("busy", (30, 25, 20, 15)),
            ("alone", (60, 0, 0, 0)),
            ("others", (0, 50, 50, 50)),
            ("idle", IDLE),
        ):
            for case in cases:
                case.change(phase, loads, None)
            waiting = list(cases)

            def all_right(waiting: list[Case] = waiting) -> bool:
                waiting[:] = [case for case in waiting if not case.right()]
                return not waiting

            until(all_right, f"the right values when {phase}")
            for name, word in undone.items() if phase == "busy" else ():
                line = daemon.wait_for("slot_stuck", container=name)
                assert line["level"] == "warning"
                assert word in line["why"]
        # No other watcher overwrites values, except one without a CPU.
        until(lambda: stuck(daemon).keys() <= undone.keys(), "right values left to their watchers")


def stuck(daemon: Daemon) -> dict[str, str]:
    """Return the reason of each container whose slot is stuck now."""
    slots = answer(daemon, "slots")["slots"]
    return {Path(slot["path"]).parent.name: slot["stuck"] for slot in slots if slot["stuck"]}


@pytest.mark.parametrize("order", ["1", "1,0", "2,3", "3,2,1,0"])
def test_reordered_gpus_have_right_values_and_a_named_cause(tmp_path: Path, start: Start, order: str) -> None:
    """With CUDA_VISIBLE_DEVICES, watchers from before and after PR 330 mix up GPUs, each in a different way."""
    gpus = 4 if "2" in order else 2
    places = [int(place) for place in order.split(",")]
    with Node(tmp_path, DRIVER, GPUS[:gpus]) as node:
        tenants = {}
        for row in BEHAVIOURS[-3:]:
            name = row.name.lower().replace(" ", "-").replace(".", "-")
            container = node.container(name=name, release=row.name, sm_limit=0, devices=GPUS[:gpus])
            tenants[container] = container.tenant(visible=order)
            tenants[container].set_load(*(20 + 15 * place for place in places))
        node.container(name="neighbour", devices=GPUS[:gpus]).tenant(load=10)  # no GPU is idle
        truth = {uuid: 20 + 15 * place if place in places else 0 for place, uuid in enumerate(UUIDS[:gpus])}
        daemon = start(node)
        for container in tenants:
            until(lambda c=container: c.monitor_view() == truth, "the right GPUs' loads")  # type: ignore[misc]
        name = container.directory.name  # after PR 330 every order but NVML's is wrong at each tick
        line = daemon.wait_for("slot_stuck", container=name)
        assert line["why"].startswith("its CUDA_VISIBLE_DEVICES gives its GPUs another order")
        until(lambda: container.monitor_view() == truth, "the right values again")
        mixed = {container.directory.name for container in tenants}
        lines = [line for line in daemon.said("slot_stuck") if line["container"] in mixed]
        assert all("CUDA_VISIBLE_DEVICES" in line["why"] for line in lines)


def test_forced_wrong_namespace_is_reported(node: Node, start: Start) -> None:
    """The watcher never finds the number and sets 0, which is reported once, for that container only."""
    container, idle = node.container(), node.container(name="idle")
    free = node.container(name="free", watcher=False)
    tenant = container.tenant(load=40, guess="none")
    idle.tenant(load=0, guess="none")
    free.tenant(load=20, guess="none")
    daemon = start(node, "--hostpid-namespace", "container", *FAST)
    until(lambda: tenant.hostpid == tenant.ns_pid, "the number that was asked for")
    line = daemon.wait_for("slot_stuck", container=container.directory.name)
    assert line["level"] == "warning"
    assert (line["ns_pid"], line["host_pid"]) == (tenant.ns_pid, tenant.host_pid)
    if "is not written to" not in line["why"]:  # a slow machine may see only this in three seconds
        assert line["why"].startswith("a watcher sets sm_util to 0 at every tick and fills nothing in")
        assert line["why"].endswith("--hostpid-namespace container is wrong for this driver: try auto")
    name = container.directory.name
    never(lambda: len(daemon.said("slot_stuck", container=name)) > 1, "a second report", 1.0)
    assert tenant.hostpid == tenant.ns_pid  # the number stays as forced
    until(lambda: stuck(daemon).keys() == {name}, "no report of another")
    daemon.stop()
    assert daemon.counters()["slots_stuck"] == len(daemon.said("slot_stuck"))


#: A daemon that waits only one second, not half a minute, for a watcher to confirm the policy.
IMPATIENT = patched("from resolver.daemon import hostpid_decision; hostpid_decision.DOUBTED_SECONDS = 1.0")


def watchers(daemon: Daemon) -> dict[str, int]:
    return dict(answer(daemon, "status")["policy"]["watchers"])


@pytest.mark.parametrize(("release", "shown"), [("2.8.0", "doubts"), ("2.9.0", "contradicts")])
def test_watchers_expose_a_lying_driver(node: Node, start: Start, release: str, shown: str) -> None:
    """The driver's version gives the wrong policy. 2.8.0 shows only doubts: its file may be HAMi 2.4.1's."""
    environment = {**node.environment(), "NVML_STANDIN_SAYS": "570.86.15"}

    def tenants(*names: str) -> list[Tenant]:
        containers = [node.container(name=name, release=release) for name in names]
        return [container.tenant(load=40, guess="none") for container in containers]

    first = tenants("one", "two")
    daemon = start(node, *FAST, wrapper=IMPATIENT, environment=environment)
    line = daemon.wait_for("driver_contradicts_version")
    assert line["level"] == "warning"
    assert "do not carry container PIDs as its version says" in line["why"]
    assert "set --hostpid-namespace host" in line["why"]
    if shown == "doubts":
        until(lambda: watchers(daemon)[shown] == 2, "both containers' doubts")
        assert [line["hostpid_namespace"] for line in daemon.said("policy")] == ["container"]
        assert [tenant.hostpid for tenant in first] == [tenant.ns_pid for tenant in first]
    else:
        daemon.wait_for("policy", hostpid_namespace="unknown")
        others = tenants("three", "four")
        for tenant in others:
            never(lambda t=tenant: t.hostpid, "a write", 0.5)  # type: ignore[misc]
            tenant.command(f"hostpid {tenant.host_pid}")
        loads = itertools.cycle((40, 55, 70))

        def decided() -> bool:
            for tenant in others:
                tenant.set_load(next(loads))
            time.sleep(0.7)
            return bool(daemon.said("policy")[2:])

        until(decided, "watchers that find samples by the other number")
        assert daemon.said("policy")[2]["origin"] == "by watchers"
        for tenant in first:
            tenant.until_repaired()


def test_working_watcher_confirms_hostpid_and_is_not_stuck(node: Node, start: Start) -> None:
    container, idle, host = (
        node.container(),
        node.container(name="idle"),
        node.container(name="host", pid_namespace="host"),
    )
    tenants = [container.tenant(load=load, guess=guess) for load, guess in ((40, "none"), (30, "self"))]
    idle.tenant(load=0, guess="none")
    host.tenant(load=20, guess="none")  # this process has only one PID
    daemon = start(node, *FAST)
    daemon.wait_for("repair")
    loads = itertools.cycle((40, 55, 70))

    def confirmed() -> bool:
        """A value that never changes may as well be the daemon's."""
        tenants[0].set_load(next(loads))
        time.sleep(1.0)
        return watchers(daemon) == {"confirms": 1, "contradicts": 0, "doubts": 0, "unable": 0}

    until(confirmed, "a watcher that finds its samples")
    for tenant in tenants:
        tenant.until_load(tenant.load)

    def calm() -> bool:
        """Check that no slot was reported stuck for four seconds; a starved watcher's slot is."""
        said, end = len(daemon.said("slot_stuck")), time.monotonic() + 4.0
        while (
            same := len(daemon.said("slot_stuck")) == said and not stuck(daemon)
        ) and time.monotonic() < end:
            time.sleep(0.05)
        return same

    until(calm, "watchers that are left alone")


REFUSED = "can't read this driver's samples: update"
#: By driver, its fault, and HAMi's release: words that each command must print.
TRUTHS: dict[tuple[str, Fault, str], dict[str, str]] = {
    ("580.105.08", Fault.PROCESS_UTILIZATION_UNSUPPORTED, "2.8.2"): {
        "status": f"HAMi in 1 container {REFUSED} it to 2.10",
        "explain": f"HAMi-core in this container {REFUSED} to HAMi 2.10 and restart the pod",
        "usage": "no_effect",
        "doctor": "the driver refuses nvmlDeviceGetProcessUtilization, the only call that HAMi before 2.10 makes",
    },
    ("580.105.08", Fault.PROCESS_UTILIZATION_UNSUPPORTED, "2.10"): {
        "status": "confirmed      by watchers in 1 container, doubted in 0",
        "explain": "The chain holds",
        "usage": "in_force",
        "doctor": "the pods that resolver usage shows with no_effect",
    },
    ("570.86.15", Fault.VGPU, "2.8.2"): {
        "status": "hostpid is     host (by machine: a vGPU guest: the hypervisor's samples carry host PIDs",
        "explain": "ok       driver      570.86.15: hostpid must be the host PID (by machine)",
        "usage": "in_force",
        "doctor": "hostpid = host PID, by machine",
    },
}


@pytest.mark.parametrize("case", TRUTHS, ids=lambda case: f"{case[0]} {case[1].name} {case[2]}")
def test_commands_name_the_drivers_fault(tmp_path: Path, start: Start, case: tuple[str, Fault, str]) -> None:
    version, fault, release = case
    with Node(tmp_path, version, GPUS[:1]) as node:
        node.gpu.set_faults(fault)
        container = node.container(name="main", release=release, sm_limit=30, devices=GPUS[:1])
        tenant = container.tenant(load=20)
        daemon = start(node)
        loads = itertools.cycle((20, 28, 24))

        def waiting() -> list[str]:
            """A value that never changes may as well be the daemon's."""
            tenant.set_load(next(loads))
            time.sleep(1.0)
            return [
                name
                for name, words in TRUTHS[case].items()
                if words not in command(node, daemon.run_dir, tmp_path, name, *about.get(name, ())).stdout
            ]

        about = {"explain": (container.container_id[:12],), "doctor": ("--only", "nvml", "--only", "driver")}
        until(lambda: not waiting(), "true words in all commands")
        status = answer(daemon, "status")
        unable = release == "2.8.2" and fault is not Fault.VGPU
        assert (status["policy"]["watchers"]["unable"], status["policy"]["watchers"]["doubts"]) == (unable, 0)
        assert status["core_limits"] == {"no_effect" if unable else "in_force": 1}
        assert not daemon.said("driver_contradicts_version")
