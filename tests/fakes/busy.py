"""A node's picture with as many containers as a test wants, in every state that `resolver top` shows."""

import random
import uuid
from typing import Any, Final

from msgspec.structs import replace

from resolver.base.reasons import RegionReason, RepairReason, SampleReason, UnresolvedReason
from resolver.gpu.attribution import NOTHING
from resolver.gpu.inventory import Gpu, Illness, Inventory, MigInstance
from resolver.state import Container, Process, RegionReport, SlotReport, SlotReports, Snapshot
from tests.fakes.pictures import picture

GIB: Final = 1 << 30
NAMESPACES: Final = ("ml-prod", "research", "vision", "default")
APPS: Final = ("bert-trainer", "llm-serving", "diffusion", "whisper", "rag-indexer", "notebook")
REPAIRS: Final = (RepairReason.MISSING, RepairReason.WRONG_NAMESPACE, None, None, RepairReason.STALE)
EVIL: Final = "\x1b[2Jevil\x07\n"  # a hostile process name
COMMANDS: Final = ("python3", "torchrun", "tritonserver", "jupyter-lab", "vllm")


def uuid_of(seed: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, seed))


def gpu(index: int, **changes: Any) -> Gpu:
    report = Gpu(
        f"GPU-{uuid_of(f'gpu {index}')}", index, index, "NVIDIA A100-SXM4-80GB",
        80 * GIB, 41 * GIB, 87, 61, 312.4, False, (), 0, "ok", "", (),
    )  # fmt: skip
    return replace(report, **changes)


GPUS: Final = (
    gpu(0),
    gpu(1, utilization=12, memory_used=9 * GIB, temperature=44, power=96.0),
    gpu(
        2,
        name="NVIDIA A100-PCIE-40GB",
        memory_total=40 * GIB,
        memory_used=5 * GIB,
        mig=True,
        utilization=None,
        samples="unsupported",
        samples_why="MIG mode: NVML tells no utilization of processes",
        mig_instances=(
            MigInstance(f"MIG-{uuid_of('mig 1')}", 1, 0, 20 * GIB, 3 * GIB),
            MigInstance(f"MIG-{uuid_of('mig 2')}", 2, 0, 20 * GIB, None),
        ),
    ),
    gpu(
        3,
        utilization=None,
        memory_used=None,
        temperature=None,
        power=None,
        samples="failed",
        samples_why="GPU is lost",
        illnesses=(Illness("lost", "the driver says GPU is lost", 1_700_000_000.0),),
    ),
)


class Builder:
    """Collects containers, their processes and slots: call `named` or `container`, then `process` for its processes."""

    def __init__(self) -> None:
        self._random = random.Random(7)
        self.containers: list[Container] = []
        self.processes: list[Process] = []
        self.regions: list[RegionReport] = []
        self.host_pid = 40_000

    def named(self, gpu: Gpu, name: str) -> None:
        """A container ``<namespace>/<pod>/<container>`` on a GPU, without a process yet."""
        namespace, pod, container = name.split("/")
        pod_uid, container_id = uuid_of(f"pod {pod}"), uuid_of(name).replace("-", "") * 2
        path = f"/usr/local/vgpu/containers/{pod_uid}_{container}/6f1e2d3c.cache"
        pidns = 4026532000 + len(self.containers)
        self.containers.append(
            Container(
                container_id, pod_uid, container, namespace, pod, "containerd", pidns, 1, (path,), 1.7e9
            )
        )
        self.regions.append(
            RegionReport(path, pod_uid, container, "v1.2", (gpu.uuid,), container_id, slots=SlotReports(()))
        )

    def limited(self, core: int, gib: float) -> None:
        self.regions[-1] = replace(self.regions[-1], limit=(int(gib * GIB),), sm_limit=(core,))

    def process(
        self,
        comm: str,
        host_pid: int,
        ns_pid: int,
        busy: int | None,
        gib: float,
        repaired: RepairReason | None = None,
        stuck: str = "",
        device: str = "",
    ) -> None:
        self.slot(ns_pid, host_pid=host_pid, repaired=repaired, stuck=stuck, utilization=(busy,))
        container = self.containers[-1]
        uuid = device or self.regions[-1].device_uuids[0]
        self.processes.append(
            Process(
                host_pid, ns_pid, uuid, container.container_id, container.pod_uid, container.container_name,
                container.namespace, container.pod, comm, busy, int(gib * GIB), None,
            )
        )  # fmt: skip

    def unresolved(self, ns_pid: int, reason: UnresolvedReason) -> None:
        self.slot(ns_pid, unresolved=reason)

    def slot(self, ns_pid: int, **fields: Any) -> None:
        region = self.regions[-1]
        empty = SlotReport(
            ns_pid,
            len(region.slots),
            hostpid=fields.get("host_pid", 0),
            host_pid=None,
            dead=False,
            unresolved=None,
            repaired=None,
            sm_util=(0,),
            utilization=(None,),
        )
        self.regions[-1] = replace(region, slots=SlotReports((*region.slots, replace(empty, **fields))))

    def container(self, gpu: Gpu, processes: int) -> None:
        number = len(self.containers)
        namespace, app = NAMESPACES[number % len(NAMESPACES)], APPS[number % len(APPS)]
        pod = f"{app}-{self._random.getrandbits(32):08x}-{number:05d}"
        self.named(gpu, f"{namespace}/{pod}/{'main' if number % 3 else 'worker'}")
        for index in range(processes):
            self.host_pid += self._random.randint(1, 40)
            comm, busy = COMMANDS[number % len(COMMANDS)], self._random.choice((0, 3, 7, 12, 35))
            repaired = REPAIRS[(number + index) % len(REPAIRS)]
            self.process(comm, self.host_pid, 7 + index, busy, self._random.uniform(0.1, 4), repaired)

    def picture(self, gpus: tuple[Gpu, ...] = GPUS, **changes: Any) -> Snapshot:
        usual = {
            "inventory": Inventory(3, 1_700_000_000.0, "550.54.15", gpus),
            "containers": tuple(self.containers),
            "gpu_processes": tuple(self.processes),
            "regions": tuple(self.regions),
            "joined": NOTHING._replace(error=""),
            "collected_at": 1_700_000_000.0,
            "source": {"name": "bpf"},
        }
        return picture(**usual | changes)


def busy(containers: int) -> Snapshot:
    """Return a snapshot with as many containers on two GPUs, and one to three processes in each."""
    build = Builder()
    for number in range(containers):
        build.container(GPUS[number % 2], processes=1 + number % 3)
    return build.picture()


def troubled() -> Snapshot:
    """Return a snapshot with every state that `resolver top` marks."""
    build = Builder()
    build.named(GPUS[0], "ml-prod/bert-trainer-7f9c8d-x2x9k/main")
    build.process("torchrun", 40010, 7, 52, 2.6, RepairReason.MISSING)
    build.process("torchrun", 40014, 8, 61, 0.5, RepairReason.WRONG_NAMESPACE)
    build.named(GPUS[0], "research/llm-serving-0/vllm")
    build.process("vllm", 40049, 7, 35, 0.7, stuck="sm_util stays 0: the watcher does not see its process")
    build.named(GPUS[0], "vision/notebook-ana/jupyter")
    build.named(GPUS[1], "default/whisper-eval/main")
    build.process("python3", 40053, 7, 12, 3.3)
    build.unresolved(9, UnresolvedReason.AMBIGUOUS)
    build.slot(12, host_pid=47_000, utilization=(0,))  # NVML does not list it any more
    build.named(GPUS[2], "vision/diffusion-batch-19/worker")
    build.process("python3", 40056, 7, None, 2.8, RepairReason.STALE)
    build.named(GPUS[3], "default/rag-indexer/main")
    build.process("python3", 40061, 7, None, 0.6)
    device, names = GPUS[1].uuid, (None, None, None, None)
    build.processes += [
        Process(1234, 1234, device, None, *names, "Xorg", 1, GIB // 4, SampleReason.NOT_IN_CONTAINER),
        Process(1300, 31, device, "ab" * 32, *names, EVIL, None, None, SampleReason.NO_SHARED_REGION),
        Process(1301, 32, device, "ab" * 32, *names, "模型服务", 4, GIB, SampleReason.NO_SHARED_REGION),
        Process(0, None, GPUS[0].uuid, None, *names, None, 9, None, SampleReason.PID_UNKNOWN),
    ]
    rejected = {"/usr/local/vgpu/containers/x_y/\x1b[31mbad.cache": RegionReason.UNKNOWN_SIZE}
    return build.picture(rejected=rejected)
