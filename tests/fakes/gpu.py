"""The kernel driver's side of the GPU stand-in: it has the actual processes of each device.

A tenant connects to a Unix socket and sends what a CUDA program would do:

    context <device uuid> <bytes>              -> ok          (-1: the driver does not tell)
    mps <device uuid> <bytes>                  -> ok          (a context through the MPS server)
    load <device uuid> <sm> [<mem> <enc> <dec>] -> ok          (percent; 0 is idle)

The kernel names the sender (SO_PEERCRED), as for a real driver; the tenant can't. A closed connection is an ended
process: its entry leaves the process list, its samples stay in the buffer.
"""

import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Self

from tests.fakes.chain import Chain, read_chain
from tests.fakes.state import (
    CALLS,
    DEVICES,
    MIGS,
    PROCESSES,
    SAMPLES,
    XIDS,
    Answer,
    ChainStruct,
    DeviceStruct,
    StateFile,
)

SAMPLE_PERIOD_S: Final = 0.139
PLACES: Final = 72  # in the driver's ring of periods
SECOND_US: Final = 1_000_000
LATE_S: Final = 1.5  # that a slot's value may be old: the daemon asks once a second


@dataclass(frozen=True, slots=True)
class Mig:
    uuid: str
    gpu_instance: int
    compute_instance: int = 0
    memory_total: int = 5 << 30
    memory_used: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """A device as NVML shows it; the order of a list of these is the index order.

    ``ecc`` are uncorrected errors (volatile, aggregate), None where it is off. ``errors`` maps calls to the
    nvmlReturn_t that they answer instead of the truth. ``nvlinks`` lead to the device whose minor number differs in the
    last bit.
    """

    uuid: str
    name: str = "NVIDIA Stand-in 24GB"
    minor: int = 0
    memory_total: int = 24 << 30
    mig_enabled: bool = False
    lost: bool = False
    temperature_c: int = 61
    power_mw: int = 180_000
    ecc: tuple[int, int] | None = (0, 0)
    migs: tuple[Mig, ...] = ()
    nvlinks: int = 0
    errors: Mapping[Answer, int] = field(default_factory=dict)


#: Numbers that the state file has by the same names.
_SAME: Final = {each.name for each in fields(Device)} & {name for name, *_ in DeviceStruct._fields_} - {
    *("uuid", "name", "migs", "errors")
}
DEFAULT_DEVICES: Final = (
    Device("GPU-5a3c1e70-8d42-4f6b-9b1e-2f7d0c9a4e01", minor=1),
    Device("GPU-c0ffee12-3b7a-4d5c-8e9f-a1b2c3d4e502", minor=0),
)


@dataclass(slots=True)
class Load:
    memory: int = 0
    sm: int = 0
    mem: int = 0
    enc: int = 0
    dec: int = 0
    mps: bool = False
    due: int = 0  # of a process that waits for its turn


@dataclass(slots=True)
class Client:
    """A connected process. `on` maps a device's index to the process's load there."""

    chain: Chain
    on: dict[int, Load] = field(default_factory=dict)
    received: bytes = b""


class Gpu:
    """The driver of a miniature node. Use as a context manager; everything runs in one thread."""

    def __init__(
        self,
        state_path: Path,
        socket_path: Path,
        driver_version: str,
        devices: Sequence[Device] = DEFAULT_DEVICES,
        sample_period_s: float = SAMPLE_PERIOD_S,
        *,
        turns: bool = False,
    ) -> None:
        """Take ``turns`` to sample as drivers do: a period has the GPU's mean load and counts for one active process.

        Each process gets periods in proportion to its load. Without ``turns``, a period counts for all processes.
        """
        if len(devices) > DEVICES:
            raise ValueError(f"{len(devices)} devices: the state file has room for {DEVICES}")
        self.state_path = state_path
        self.socket_path = socket_path
        self.devices = tuple(devices)
        self._period_s, self.turns = sample_period_s, turns
        self._driver_version = driver_version
        self.ahead_s = 0.0  # its clock, of the wall clock
        self.mps_server: Chain | None = None  # process in the samples of MPS clients, or None
        self.skips_first_place = True
        self._last: dict[int, tuple[int, int]] = {}  # number and end of each device's last period
        self._period_us = 0  # when the last period ended
        #: The integral of each process's load, GPU-seconds, by host PID and the device's index.
        self.used: dict[tuple[int, int], float] = {}
        self._integrated, self._busy = time.monotonic(), [0.0] * DEVICES
        #: The last periods of each device, taken in turns: end, host PID (0: idle), load.
        self._periods = [deque[tuple[int, int, int]](maxlen=PLACES) for _ in range(DEVICES)]
        self._lock = threading.RLock()
        self._clients: dict[int, Client] = {}
        self._stop_r, self._stop_w = -1, -1

    def __enter__(self) -> Self:
        self._state = StateFile(self.state_path)
        with self._state.writing() as s:
            s.driver_version = self._driver_version.encode()
            s.driver_pidns = os.stat("/proc/self/ns/pid").st_ino
        self.set_devices(self.devices)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with suppress(FileNotFoundError):
            self.socket_path.unlink()
        self._listener.bind(str(self.socket_path))
        self.socket_path.chmod(0o666)
        self._listener.listen(64)
        self._stop_r, self._stop_w = os.pipe()
        self._sample()
        self._thread = threading.Thread(target=self._run, name="gpu", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._stop_w, b"x")
        self._thread.join()
        self._listener.close()
        os.close(self._stop_r)
        os.close(self._stop_w)
        with suppress(FileNotFoundError):
            self.socket_path.unlink()

    @property
    def driver_version(self) -> str:
        return self._driver_version

    @driver_version.setter
    def driver_version(self, version: str) -> None:
        with self._state.writing() as s:
            self._driver_version = version
            s.driver_version = version.encode()

    def set_faults(self, faults: int = 0, hang: int = 0, grow: int = 0) -> None:
        """Replaces all fault switches: bits of `Fault` and `Hang`, none by default.

        `grow` is how often a list grows between size query and fetch, counted in each calling process.
        """
        with self._state.writing() as s:
            s.faults, s.hang, s.grow = faults, hang, grow

    def set_errors(self, errors: Mapping[Answer, int] | None = None) -> None:
        """Replace the errors (nvmlReturn_t) that calls return, on any device."""
        with self._state.writing() as s:
            s.errors[:] = _answers(errors or {})

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Replaces the devices. Contexts and samples go by index and stay."""
        with self._lock, self._state.writing() as s:
            self.devices = tuple(devices)
            s.device_count = len(devices)
            for entry, device in zip(s.devices, devices, strict=False):
                entry.uuid, entry.name = device.uuid.encode(), device.name.encode()
                for name in _SAME:
                    setattr(entry, name, int(getattr(device, name)))
                entry.ecc_enabled = int(device.ecc is not None)
                entry.ecc_volatile, entry.ecc_aggregate = device.ecc or (0, 0)
                entry.errors[:] = _answers(device.errors)
                _fill_migs(entry, device.migs)

    def raise_xid(self, device: int, xid: int) -> None:
        with self._state.writing() as s:
            entry = s.devices[device]
            entry.xids[entry.xids_total % XIDS] = xid
            entry.xids_total += 1

    def connect(self, chain: Chain, device: int, load: Load) -> None:
        with self._lock:
            self._clients[-1 - len(self._clients)] = Client(chain, {device: load})
            self._publish_processes()

    def add_sample(self, chain: Chain, device: int, load: Load, time_us: int | None = None) -> None:
        """Appends one sample, as the driver's own clock does for every busy process."""
        with self._state.writing() as s:
            entry = s.samples[s.samples_total % SAMPLES]
            entry.time_us = self._now_us() if time_us is None else time_us
            entry.device, entry.period = device, self._period_of(device, entry.time_us)
            entry.sm, entry.mem, entry.enc, entry.dec = load.sm, load.mem, load.enc, load.dec
            _fill_chain(entry.chain, chain)
            s.samples_total += 1

    def _period_of(self, device: int, time_us: int) -> int:
        """Return the number of the period that ends at this time: the last one's, or the next."""
        number, end = self._last.get(device, (0, 0))
        if time_us != end:
            number += 1
            # NVIDIA's library leaves that place out.
            number += self.skips_first_place and number % PLACES == 0
            self._last[device] = number, time_us
        return number

    def _integrate(self) -> None:
        now = time.monotonic()
        seconds, self._integrated = now - self._integrated, now
        for device in range(len(self.devices)):
            loads = [
                (client, client.on[device].sm) for client in self._clients.values() if device in client.on
            ]
            total = sum(load for _, load in loads)
            for client, load in loads if total else ():
                key = client.chain.host_pid, device
                self.used[key] = self.used.get(key, 0.0) + seconds * load / max(total, 100)
            self._busy[device] += seconds * min(total, 100)

    def _end_periods(self) -> None:
        before, self._period_us = self._period_us, self._now_us()
        for device in range(len(self.devices)):
            users = [(each, each.on[device]) for each in self._clients.values() if device in each.on]
            active = [(client, load) for client, load in users if load.sm > 0]
            total = sum(load.sm for _, load in active)
            mean = round(1e6 * self._busy[device] / max(self._period_us - before, 1))
            period, chain = Load(sm=min(mean, 100)), None
            for name in ("mem", "enc", "dec"):
                setattr(period, name, min(sum(getattr(load, name) for _, load in active), 100))
            if active:
                for _, load in active:
                    load.due += load.sm
                client, load = max(active, key=lambda each: each[1].due)
                load.due -= total
                chain = self.mps_server if load.mps else client.chain
            self.add_sample(chain or Chain(()), device, period, self._period_us)
            self._periods[device].append((self._period_us, chain.host_pid if chain else 0, period.sm))
            self._busy[device] = 0.0

    def _now_us(self) -> int:
        return time.time_ns() // 1000 + int(self.ahead_s * 1e6)

    def clients(self) -> list[Client]:
        with self._lock:
            return list(self._clients.values())

    def host_pid(self, pidns: int, ns_pid: int) -> int | None:
        return next((c.chain.host_pid for c in self.clients() if c.chain.levels[-1] == (pidns, ns_pid)), None)

    def span(self, host_pid: int, device: int, seconds: float = LATE_S) -> tuple[int, int]:
        """Return the lowest and highest utilization of a process's last second, by NVML, in these ``seconds``."""
        with self._lock:
            periods, now = list(self._periods[device]), self._now_us()
        start, values = now - int(seconds * 1e6), []
        for at in {start, now, *(end + more for end, _, _ in periods for more in (0, SECOND_US))}:
            if start <= at <= now:
                loads = [(pid, sm) for end, pid, sm in periods if at - SECOND_US < end <= at]
                own = sum(sm for pid, sm in loads if pid == host_pid)
                active = sum(pid > 0 for pid, _ in loads)
                values.append(-(-own // max(active, 1)))
        return min(values), max(values)

    def _run(self) -> None:
        # A GPU takes its samples even if the node's CPUs are busy.
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -20)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._stop_r, selectors.EVENT_READ)
            due = time.monotonic() + self._period_s
            while True:
                for key, _ in selector.select(max(0.0, due - time.monotonic())):
                    if key.fd == self._stop_r:
                        for mapped in list(selector.get_map().values()):
                            if (
                                isinstance(mapped.fileobj, socket.socket)
                                and mapped.fileobj is not self._listener
                            ):
                                mapped.fileobj.close()
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket) and not self._serve(key.fileobj):
                        selector.unregister(key.fileobj)
                        key.fileobj.close()
                if time.monotonic() >= due:
                    self._sample()
                    due += self._period_s

    def _accept(self, selector: selectors.BaseSelector) -> None:
        connection, _ = self._listener.accept()
        host_pid, _, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        try:
            chain = read_chain(host_pid)
        except OSError:
            connection.close()  # already gone
            return
        selector.register(connection, selectors.EVENT_READ)
        with self._lock:
            self._clients[connection.fileno()] = Client(chain)

    def _serve(self, connection: socket.socket) -> bool:
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        with self._lock:
            client = self._clients[connection.fileno()]
            if not data:
                self._integrate()
                del self._clients[connection.fileno()]
                self._publish_processes()
                return False
            client.received += data
            while b"\n" in client.received:
                line, client.received = client.received.split(b"\n", 1)
                answer = self._command(client, line.decode(errors="replace").split())
                with suppress(OSError):
                    connection.send(answer.encode() + b"\n")
        return True

    def _command(self, client: Client, words: list[str]) -> str:
        index = {device.uuid: i for i, device in enumerate(self.devices)}
        match words:
            case ["context" | "mps" as how, uuid, memory] if uuid in index:
                client.on[index[uuid]] = Load(memory=int(memory), mps=how == "mps")
                self._publish_processes()
            case ["load", uuid, sm, *rest] if uuid in index and index[uuid] in client.on:
                load = client.on[index[uuid]]
                idle = not any(
                    other.sm or other.mem or other.enc or other.dec for other in client.on.values()
                )
                self._integrate()
                values = [int(sm), *(int(word) for word in rest)]
                load.sm = values[0]
                load.mem, load.enc, load.dec = values[1:] if len(values) == 4 else (values[0] // 2, 0, 0)
                if idle and not self.turns:
                    self._sample(only=client)
            case _:
                return "error: unknown command, device, or no context on it: " + " ".join(words)
        return "ok"

    def _sample(self, only: Client | None = None) -> None:
        """End a period of every device, or add to the last period a process that was idle in it."""
        with self._lock, self._state.writing():
            self._integrate()
            if self.turns:
                self._end_periods()
                return
            self._busy = [0.0] * DEVICES
            if only is None:
                self._period_us = self._now_us()
                for device in range(len(self.devices)):
                    self.add_sample(Chain(()), device, Load(), self._period_us)
            busy: dict[int, list[tuple[Chain, Load]]] = {}
            for client in self._clients.values() if only is None else [only]:
                for device, load in client.on.items():
                    chain = self.mps_server if load.mps else client.chain
                    if chain and (load.sm or load.mem or load.enc or load.dec):
                        busy.setdefault(device, []).append((chain, load))
            for device, parts in busy.items():
                for chain, load in parts:
                    self.add_sample(chain, device, load, self._period_us)

    def _publish_processes(self) -> None:
        entries = [(c, device, load) for c in self._clients.values() for device, load in c.on.items()]
        if len(entries) > PROCESSES:
            raise RuntimeError(f"{len(entries)} contexts: the state file has room for {PROCESSES}")
        with self._state.writing() as s:
            s.process_count = len(entries)
            for entry, (client, device, load) in zip(s.processes, entries, strict=False):
                entry.device, entry.mps = device, int(load.mps)
                entry.memory = load.memory % 2**64
                _fill_chain(entry.chain, client.chain)
            for i, device_entry in enumerate(s.devices):
                device_entry.memory_used = sum(
                    max(0, load.memory) for _, device, load in entries if device == i
                )


def _answers(errors: Mapping[Answer, int]) -> list[int]:
    answers = [0] * CALLS
    for call, code in errors.items():
        answers[call] = code
    return answers


def _fill_migs(entry: DeviceStruct, migs: Sequence[Mig]) -> None:
    if len(migs) >= MIGS:
        raise ValueError(f"{len(migs)} instances: a device has {MIGS - 1} at most")
    for i, place in enumerate(entry.migs):
        mig = migs[i] if i < len(migs) else Mig("", 0)
        place.uuid = mig.uuid.encode()
        for name in ("gpu_instance", "compute_instance", "memory_total", "memory_used"):
            setattr(place, name, getattr(mig, name))


def _fill_chain(entry: ChainStruct, chain: Chain) -> None:
    entry.depth = len(chain.levels)
    for level, (pidns, nr) in zip(entry.level, chain.levels, strict=False):
        level.pidns, level.nr = pidns, nr
