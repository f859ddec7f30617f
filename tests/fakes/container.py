"""A container in miniature: namespaces, a cgroup, the bind mount, and processes."""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from tests.fakes.cgroups import remove
from tests.fakes.gpu import Device
from tests.fakes.placements import EVERY
from tests.fakes.process import NodeError, Process, Tenant, readable
from tests.fakes.regions import SLOTS, Region, monitor_view, monitor_views, read_file
from tests.fakes.releases import BY_LAYOUT, RELEASES
from tests.patience import PATIENCE_S, until

if TYPE_CHECKING:
    from tests.fakes.node import Node

_CREDENTIALS: Final = struct.Struct("3i")
NO_WATCHER: Final = 200  # a core limit with which no watcher runs
#: A runtime's default: chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, net_raw,
#: sys_chroot, mknod, audit_write, setfcap.
DEFAULT_RIGHTS: Final = 0xA80425FB


class Container:
    """A container: namespaces, a cgroup, and the bind mount; made by `Node.container`."""

    def __init__(
        self,
        node: Node,
        pod_uid: str | None = None,
        name: str = "main",
        *,
        cgroup_format: str = "containerd-systemd",
        layout: str = "v1.2",
        release: str | None = None,
        sm_limit: int = 50,
        watcher: bool = True,
        qos: str = "burstable",
        pid_namespace: Literal["own", "host"] | Container = "own",
        devices: Sequence[Device] | None = None,
        priority: int = 0,
        rights: int | None = None,
        broker_dir: Path | None = None,
        placement: str = "hami",
        claim: str | None = None,
    ) -> None:
        """Start it. `pid_namespace` may be another's.

        Its processes behave as that `release` of HAMi (`releases.RELEASES`), by default a common one with the `layout`.
        `sm_limit` 0: no core limit, which is stored as 100. Without a `watcher` the limit is above 100, and nobody but
        us writes `sm_util`.

        `rights` is the mask of the capabilities that its processes can have, such as `DEFAULT_RIGHTS`; by default all
        of them, and only then can a tenant be nested. `broker_dir` is mounted read-only, and the tenants ask the
        broker in it. `placement` is a scheduler's (`placements.PLACEMENTS`); with `dra` several containers can have
        the same `claim`.
        """
        self.node = node
        self.pod_uid, self.name = pod_uid or str(uuid.uuid4()), name
        self.release = RELEASES[release] if release else BY_LAYOUT[layout]
        self.layout = self.release.layout
        self.cgroup_format, self.qos = cgroup_format, qos
        self.sm_limit = sm_limit if watcher else NO_WATCHER
        self.pid_namespace, self.priority = pid_namespace, priority
        self.rights, self.broker_dir = rights, broker_dir
        self.devices = tuple(node.gpu.devices[:1] if devices is None else devices)
        self.placed = placement
        self.placement, self.claim = EVERY[placement], claim or str(uuid.uuid4())
        words = {"entry": f"{self.pod_uid}_{name}", "uuid": str(uuid.uuid4()), "claim": self.claim}
        root = node.placement_dir(placement)
        self.directory = root / self.placement.directory.format(**words)
        if not self.placement.made_inside:
            self.directory.mkdir(exist_ok=True)
            self.directory.chmod(0o777)
        self.cache_name = self.placement.file.format(**words)
        self._bind = root / self.placement.bind.format(**words)
        self._at = self.placement.at.format(**words)
        #: Where the container itself has its file.
        self.inside = f"{self._at}/{self.directory.relative_to(self._bind) / self.cache_name}"
        if self.placement.alone:
            self.inside = f"/tmp/{self.cache_name}"  # noqa: S108 - the container's own
        self.processes: list[Process] = []
        self._running = False
        self._start()

    def _start(self) -> None:
        self.container_id = secrets.token_hex(32)
        self.cgroup = self.node.cgroups.make(self.cgroup_format, self.qos, self.pod_uid, self.container_id)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        arguments = [
            str(self.node.built / "container-init"),
            *("--control", str(theirs.fileno())),
            *("--parent", str(os.getpid())),
            *("--bind", str(self._bind)),
            *("--at", self._at),
            *("--pidns", self._pidns_argument()),
            *("--cgroup", str(self.cgroup / "cgroup.procs")),
        ]
        if self.rights is not None:
            arguments += ["--rights", f"{self.rights:x}"]
        environment = {"PATH": os.environ["PATH"], **self.node.stand_in()}
        if self.broker_dir is not None:
            arguments += ["--broker", str(self.broker_dir)]
            environment["LIBVGPU_HOSTPID_BROKER"] = "1"
        with theirs:
            self._launcher = subprocess.Popen(
                arguments, pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL
            )
        try:
            self.init_host_pid = self._started(f"container {self.name}")
            self.pidns = os.stat(f"/proc/{self.init_host_pid}/ns/pid").st_ino
            self._init_pidfd = os.pidfd_open(self.init_host_pid)
        except BaseException:
            self._launcher.kill()
            self._launcher.wait()
            self._control.close()
            raise
        self.node.log(self)
        self._running = True

    def _pidns_argument(self) -> str:
        if isinstance(self.pid_namespace, Container):
            return f"/proc/{self.pid_namespace.init_host_pid}/ns/pid"
        return "host" if self.pid_namespace == "host" else "new"

    def _started(self, what: str) -> int:
        """Waits for a new process to report; its host PID is the one in the kernel's credentials."""
        if not readable(self._control.fileno(), PATIENCE_S):
            raise NodeError(f"{what} did not start within {PATIENCE_S} s")
        text, ancillary, _, _ = self._control.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
        if text != b"started":
            raise NodeError(f"{what} did not start; the reason is on standard error")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                host_pid: int = _CREDENTIALS.unpack(data)[0]
                return host_pid
        raise NodeError(f"the kernel gave no credentials with the report of {what}")

    def stop(self) -> None:
        """Kills every process of the container and waits for them; the directory and its file stay."""
        if not self._running:
            return
        self._running = False
        for process in self.processes:
            process.kill()  # the end of a namespace's first process ends all others
            process.close()
        self.processes.clear()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)
        self._launcher.wait(PATIENCE_S)
        os.close(self._init_pidfd)
        self._control.close()
        remove(self.cgroup, kill=True)  # only the container's level: its pod may have others

    def restart(self) -> None:
        """Restart as a kubelet does: new processes, id and namespaces, but the same directory and cache file."""
        self.stop()
        self._start()

    @property
    def cache(self) -> Path:
        if self.placement.alone:
            return Path(f"/proc/{self.init_host_pid}/root{self.inside}")
        return self.directory / self.cache_name

    @property
    def known_as(self) -> str:
        """The container's name in the daemon's log."""
        return self.container_id if self.placement.alone else self.directory.name

    def region(self) -> Region:
        return read_file(self.cache)

    def monitor_view(self) -> dict[str, int]:
        """The percentage that all monitors would report now, by device UUID; -1 if they differ."""
        return monitor_view(self.region())

    def monitor_views(self, slots: int = SLOTS) -> dict[str, dict[str, int]]:
        """Return the percentages by the rule of each monitor, from at most ``slots`` slots."""
        return monitor_views(read_file(self.cache, slots))

    def spawn(self, arguments: Sequence[str], *, nested: bool = False) -> Process:
        host_pid, stdin, stdout = self._spawn(arguments, nested=nested)
        until(lambda: not _is_init(host_pid), f"{arguments[0]} in container {self.name}")
        process = Process(host_pid, stdin, stdout)
        self.processes.append(process)
        return process

    def tenant(
        self,
        *,
        load: int = 0,
        guess: str | int = "list",
        devices: Sequence[Device] | None = None,
        memory: int = 512 << 20,
        nested: bool = False,
        options: Sequence[str] = (),
        init_waits: bool = False,
        visible: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Tenant:
        """Starts a tenant and waits until it is ready: slot taken, contexts made, host PID guessed.

        With `init_waits` it comes back when the slot is taken, and the rest happens on `Tenant.init`.

        `visible` is CUDA_VISIBLE_DEVICES: places of the container's devices, and it uses these. Its guess fails then,
        as upstream's does; its release decides which of them its watcher asks NVML for.

        `load` is in percent of each of `devices` (default: all of the container's). `guess` is how it gets
        its host PID: `list` (as upstream), `none`, `self` (its own container PID), `wrong` (nobody's), or a
        number.
        """
        if visible:
            devices, guess = [self.devices[int(place)] for place in visible.split(",")], "none"
        arguments = self.tenant_arguments(load=load, guess=guess, devices=devices, memory=memory)
        variables = dict(environment or {})
        if visible:
            arguments += ["--cuda-order", visible]
            variables["CUDA_VISIBLE_DEVICES"] = visible
        if variables:
            arguments[:0] = ["/usr/bin/env", *(f"{name}={value}" for name, value in variables.items())]
        words = [*arguments, *["--init-waits"] * init_waits, *options]
        host_pid, stdin, stdout = self._spawn(words, nested=nested)
        tenant = Tenant(host_pid, stdin, stdout, load, self.region)
        self.processes.append(tenant)
        tenant.read_line()
        return tenant

    def mover(self, moves: int, *, slots: int = 8, ends: bool = False) -> Process:
        """Starts `moves` compaction moves: waits for a line on its input, ends with a verdict in JSON.

        With `ends` processes end and start as well, and all their loads are the same.
        """
        arguments = [*self.tenant_arguments(), "--mover", str(moves), "--slots", str(slots)]
        return self.spawn([*arguments, *["--ends"] * ends])

    def tenant_arguments(
        self,
        *,
        load: int = 0,
        guess: str | int = "list",
        devices: Sequence[Device] | None = None,
        memory: int = 512 << 20,
    ) -> list[str]:
        arguments = [str(self.node.built / "tenant"), "--cache", self.inside]
        for device in self.devices:
            arguments += ["--uuid", device.uuid]
        for device in devices or ():
            arguments += ["--use", device.uuid]
        arguments += [
            *self.release.arguments(),
            *("--sm-limit", str(self.sm_limit)),
            *("--priority", str(self.priority)),
        ]
        arguments += ["--memory", str(memory), "--load", str(load), "--guess", str(guess)]
        if self.broker_dir is not None:
            arguments += ["--broker-socket", "/usr/local/hostpid/broker.sock"]
        return [*arguments, "--driver-socket", str(self.node.driver_socket)]

    def _spawn(self, arguments: Sequence[str], *, nested: bool) -> tuple[int, int, int]:
        stdin_r, stdin_w = os.pipe()
        stdout_r, stdout_w = os.pipe()
        request = (b"n" if nested else b"-") + b"".join(os.fsencode(word) + b"\0" for word in arguments)
        descriptors = array.array("i", [stdin_r, stdout_w])
        try:
            self._control.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        finally:
            os.close(stdin_r)
            os.close(stdout_w)
        return self._started(f"{arguments[0]} in container {self.name}"), stdin_w, stdout_r


def _is_init(host_pid: int) -> bool:
    try:
        return Path(f"/proc/{host_pid}/comm").read_text() == "container-init\n"
    except (FileNotFoundError, ProcessLookupError):
        return False
