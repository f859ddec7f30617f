"""Look-ups a second through the API, in batches of 10,000; `hostile` measures it beside bad clients."""

import contextlib
import json
import secrets
import socket
import time
import uuid
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

from tests.bench.crowd import host_pids
from tests.bench.timing import RowValues, progress
from tests.fakes.cgroups import CgroupTree
from tests.fakes.daemon import BOUND, Daemon
from tests.patience import until

_BATCHES = 12
_MAP_SIZE = 65_536

Truth = dict[tuple[str, int], int]


def measure(scratch: Path, starter: int) -> list[RowValues]:
    """Turn the namespaces of the running crowd of ``starter`` into containers, and look up their processes."""
    rows: list[RowValues] = []
    with _containers(host_pids(starter)) as truth:
        for source in ("bpf", "scan"):
            options = ("--dry-run", "--source", source, "--map-size", str(_MAP_SIZE), "--log-level", "error")
            with Daemon(None, scratch / source, *options, wrapper=BOUND) as running:
                until(running.socket.exists, "its socket")
                time.sleep(2)
                progress(f"10,000 look-ups at once, {_BATCHES} times, --source {source}")
                rows.append(_batches(str(running.socket), truth, source))
    return rows


@contextlib.contextmanager
def _containers(members: dict[int, list[int]]) -> Iterator[Truth]:
    """Move each namespace's processes to a container's cgroup; yield host PIDs by container id and PID."""
    tree = CgroupTree()
    truth: Truth = {}
    try:
        for processes in members.values():
            container_id = secrets.token_hex(32)
            cgroup = tree.make("containerd-systemd", "burstable", str(uuid.uuid4()), container_id)
            for number, host_pid in enumerate(processes, 1):
                (cgroup / "cgroup.procs").write_text(str(host_pid))
                truth[container_id, number] = host_pid
        yield truth
    finally:
        for host_pid in truth.values():  # a cgroup with processes can't be removed
            (tree.root.parent / "cgroup.procs").write_text(str(host_pid))
        tree.close()


def _batches(path: str, truth: Truth, source: str) -> RowValues:
    """Look up the same pairs in each batch, at most 10,000, and compare the answers with the actual PIDs."""
    pairs = [list(pair) for pair in truth][:10_000]
    body = json.dumps({"pairs": pairs}).encode()
    rates = []
    with contextlib.closing(HTTPConnection("resolver")) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(60)
        connection.sock.connect(path)
        for _ in range(_BATCHES):
            began = time.perf_counter()
            connection.request("POST", "/v1/lookup", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            status, answer = response.status, response.read()
            rates.append(len(pairs) / (time.perf_counter() - began))
            host_pids = [lookup.get("host_pid") for lookup in json.loads(answer)["answers"]]
            if status != 200 or host_pids != list(truth.values())[:10_000]:
                wrong = sum(a != b for a, b in zip(host_pids, truth.values(), strict=False))
                raise RuntimeError(
                    f"a batch was answered with {status}, {wrong} of {len(pairs)} answers wrong"
                )
    rates.sort()
    return (
        f"look-ups by POST, {len(pairs)} pairs, --source {source}",
        rates[len(rates) // 2],
        "/s",
        None,
        f"from {rates[0]:.0f} to {rates[-1]:.0f}" + (", target: 100000 or more" if source == "bpf" else ""),
    )
