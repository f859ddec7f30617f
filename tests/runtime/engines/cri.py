"""Pods in containerd, asked for by the CRI as a kubelet does.

Debian has no client of it, so the few messages are written here, by field number (api.proto of k8s.io/cri-api), and go
through the gRPC of the engines' Debian.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tests.runtime.engines.containerd import Containerd
from tests.runtime.engines.engine import Asked
from tests.runtime.engines.image import NAME
from tests.runtime.engines.machine import Machine

#: Sandboxes: no program, no network, no right to lower the OOM score.
_CONFIG: Final = f"""sandbox_image = "{NAME}"
restrict_oom_score_adj = true
"""
_CALL: Final = """
import grpc, sys
channel = grpc.insecure_channel("unix:///run/containerd.sock")
print(channel.unary_unary(f"/runtime.v1.RuntimeService/{sys.argv[1]}")(bytes.fromhex(sys.argv[2]), timeout=60).hex())
"""
#: Of a NamespaceOption: one for the pod, one for each container, the node's.
POD, CONTAINER, NODE = 0, 1, 2
#: A message by field number; a list is a repeated field.
Message = Mapping[int, Any]


def encode(message: Message) -> bytes:
    wire = bytearray()
    for field, value in message.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, int):
                wire += _varint(field << 3) + _varint(each)
            else:
                data = encode(each) if isinstance(each, Mapping) else os.fsencode(each)
                wire += _varint(field << 3 | 2) + _varint(len(data)) + data
    return bytes(wire)


def decode(wire: bytes) -> dict[int, list[Any]]:
    """Return a message's fields: numbers, and bytes, which may be a message."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(wire):
        key, at = _read_varint(wire, at)
        number, at = _read_varint(wire, at)
        if key & 7 == 2:
            found.setdefault(key >> 3, []).append(wire[at : at + number])
            at += number
        else:
            found.setdefault(key >> 3, []).append(number)
    return found


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])


def _read_varint(wire: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while wire[at] > 127:
        number |= (wire[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return number | wire[at] << shift, at + 1


class Cri(Containerd):
    """One pod; ``pid`` is the mode of its PID namespace."""

    def __init__(self, machine: Machine, pod_uid: str, pid: int = CONTAINER) -> None:
        super().__init__(machine, _CONFIG)
        self._ids: dict[str, str] = {}
        self._pod_uid = pod_uid
        options = {1: NODE, 2: pid}
        self._of_containers = {2: {3: options}}
        self._config: Message = {
            1: {1: "pod", 2: pod_uid, 3: "default"},
            3: str(machine.work),
            8: {1: f"/kubepods/burstable/pod{pod_uid}", 2: {1: options}},
        }
        self.sandbox = self._tell("RunPodSandbox", {1: self._config})[1][0].decode()

    def start(self, asked: Asked, *options: str) -> None:
        config = {
            1: {1: asked.name, 2: int(options[0]) if options else 0},
            2: {1: NAME},
            3: list(asked.command),
            6: [{1: key, 2: value} for key, value in asked.env.items()],
            7: [
                {1: mount.target, 2: str(mount.source), 3: int(mount.read_only), 5: 0}
                for mount in asked.mounts
            ],
            15: self._of_containers,
        }
        request = {1: self.sandbox, 2: config, 3: self._config}
        self._ids[asked.name] = self._tell("CreateContainer", request)[1][0].decode()
        self._tell("StartContainer", {1: self._ids[asked.name]})

    def enter(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:  # noqa: ARG002 - the engine sets it
        words = ["sh", "-c", '"$@" </dev/null >/dev/null 2>&1 &', "sh", *command]
        self._tell("ExecSync", {1: self._ids[name], 2: words, 3: 30})

    def ids(self, name: str) -> dict[str, str]:
        listed = [decode(each) for each in self._tell("ListContainers", {})[1]]
        (container_id,) = (each[1][0].decode() for each in listed if decode(each[3][0])[1] == [name.encode()])
        return {
            "crictl ps --no-trunc": container_id,
            "crictl ps": container_id[:13],
            "kubectl get pod": f"containerd://{container_id}",
            "<pod UID>/<container>": f"{self._pod_uid}/{name}",
        }

    def kill(self, name: str) -> None:
        self._tell("StopContainer", {1: self._ids[name], 2: 0})
        self._tell("RemoveContainer", {1: self._ids.pop(name)})

    def stop(self, name: str) -> None:
        self.kill(name)
        if not self._ids:
            self._tell("StopPodSandbox", {1: self.sandbox})
            self._tell("RemovePodSandbox", {1: self.sandbox})

    def _tell(self, method: str, request: Message) -> dict[int, list[Any]]:
        said = self.machine.run("python3", "-c", _CALL, method, encode(request).hex())
        return decode(bytes.fromhex(said))
