"""In the guest, under systemd: real containers in scopes that systemd makes, and what the command line answers.

Prints one line of JSON: ``ok``, ``said`` when it is not, and ``engines``, a row for each container. The truth is what
/proc says: the processes of the container's cgroup, each with its PIDs in ``NSpid:``.
"""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

PLACE: Final = Path("/run/containers-step")
RESOLVER: Final = "/venv/bin/resolver"
_PATIENCE_S: Final = 300  # an emulated processor on a busy machine
_POD: Final = "0c5e0a52_7a5f_4d0e_9a55_2f7e9a2f7c11"
#: The first process of the container, and its second.
_TENANTS: Final = ("/bin/busybox", "sh", "-c", "/bin/busybox sleep 99999 & exec /bin/busybox sleep 99999")
_MOUNTS: Final = (("/proc", "proc"), ("/dev", "tmpfs"))
_NAMESPACES: Final = ("pid", "mount", "ipc", "uts", "network", "cgroup")


class Case(NamedTuple):
    """A container as an engine asks the runtime for it (``slice:prefix:id``), and how that is told."""

    runtime: str
    how: str
    slice: str
    prefix: str


_BURSTABLE: Final = f"kubepods-burstable-pod{_POD}.slice"
CASES: Final = (
    Case("crun", "as CRI-O calls it", _BURSTABLE, "crio"),
    Case("runc", "as containerd calls it", _BURSTABLE, "cri-containerd"),
    Case("crun", "as Docker calls it", "system.slice", "docker"),
)


class Wrong(Exception):
    pass


def main() -> int:
    rows: list[dict[str, str]] = []
    try:
        bundle = PLACE / "root/bin"
        bundle.mkdir(parents=True)
        shutil.copy("/usr/bin/busybox", bundle)
        containers = {f"{number:x}" * 64: case for number, case in enumerate(CASES, 10)}
        for container_id, case in containers.items():
            _start(container_id, case)
        how = f"called by Podman {_version('podman')}"
        containers[_start_podman()] = Case("crun", how, "machine.slice", "libpod")
        with _daemon() as socket:
            listed = {each["container_id"]: each for each in _ask("containers", *socket)["containers"]}
            for container_id, case in containers.items():
                rows.append(_checked(container_id, case, listed, socket))
    except (Wrong, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        print(json.dumps({"ok": False, "said": f"{type(error).__name__}: {error}", "engines": rows}))
        return 1
    finally:
        for scope in _scopes("*"):  # systemd's SIGTERM ends no first process
            (scope / "cgroup.kill").write_text("1")
    print(json.dumps({"ok": True, "engines": rows}))
    return 0


def _start(container_id: str, case: Case) -> None:
    bundle = PLACE / container_id
    bundle.mkdir()
    config = {
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 0, "gid": 0}, "args": _TENANTS, "cwd": "/"},
        "root": {"path": str(PLACE / "root")},
        "mounts": [{"destination": place, "type": kind, "source": kind} for place, kind in _MOUNTS],
        "linux": {
            "cgroupsPath": f"{case.slice}:{case.prefix}:{container_id}",
            "namespaces": [{"type": kind} for kind in _NAMESPACES],
        },
    }
    (bundle / "config.json").write_text(json.dumps(config))
    _run(case.runtime, "--systemd-cgroup", "run", "--detach", "--bundle", str(bundle), container_id)


def _start_podman() -> str:
    """Start one by Podman; return its id."""
    words = ("--cgroup-manager=systemd", "--runtime=crun", "--events-backend=none", "run", "--detach")
    rootfs = ("--network=none", "--log-driver=none", "--rootfs", str(PLACE / "root"))
    return _run("podman", *words, *rootfs, *_TENANTS).split()[-1]


def _run(*command: str) -> str:
    """Return its output, through files: what it starts keeps them open."""
    with (PLACE / "said").open("w+") as said, (PLACE / "complaints").open("w+") as complaints:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=complaints,
            timeout=_PATIENCE_S,
            check=False,
        )
        said.seek(0)
        complaints.seek(0)
        if done.returncode:
            raise Wrong(f"{' '.join(command)} ended with {done.returncode}: {complaints.read()[-800:]}")
        return said.read()


def _version(program: str) -> str:
    return _run(program, "--version").split()[2]


def _ask(*words: str) -> Any:
    return json.loads(_run(RESOLVER, *words, "--json"))


@contextlib.contextmanager
def _daemon() -> Iterator[tuple[str, str]]:
    """Yield the option with the socket of a daemon that lists every container."""
    hami, own = PLACE / "hami", PLACE / "daemon"
    hami.mkdir()
    socket = ("--socket", str(own / "resolver.sock"))
    command = [RESOLVER, "run", "--containers-dir", str(hami), "--run-dir", str(own), "--metrics-addr", "off"]
    with (PLACE / "log").open("w+") as log, subprocess.Popen(command, stderr=log, stdout=log) as daemon:
        try:
            ends = time.monotonic() + _PATIENCE_S
            while True:
                with contextlib.suppress(Wrong):
                    if len(_ask("containers", *socket)["containers"]) > len(CASES):
                        break
                if time.monotonic() > ends or daemon.poll() is not None:
                    raise Wrong(
                        f"the daemon does not list every container: {(PLACE / 'log').read_text()[-800:]}"
                    )
                time.sleep(1)
            yield socket
        finally:
            daemon.terminate()


def _checked(
    container_id: str, case: Case, listed: dict[str, dict[str, Any]], socket: tuple[str, str]
) -> dict[str, str]:
    scope = f"{case.prefix}-{container_id}"
    tenants, cgroup = _truth(scope)
    if not cgroup.split("/container")[0].endswith(f"/{case.slice}/{scope}.scope"):
        raise Wrong(f"the container is in {cgroup}, not in {case.slice}/{scope}.scope")
    for ns_pid, host_pid in tenants.items():
        for name, where in ((container_id, ()), (container_id[:12], socket)):
            _equal(_ask("lookup", name, str(ns_pid), *where)["host_pid"], host_pid, f"lookup {name} {ns_pid}")
        found = _ask("reverse", str(host_pid))
        pod_uid = _POD.replace("_", "-") if _POD in case.slice else None
        _equal([found["container_id"], found["pod_uid"]], [container_id, pod_uid], f"reverse {host_pid}")
        _equal([level["ns_pid"] for level in found["levels"]], _pids(host_pid), f"reverse {host_pid}")
    _equal(listed[container_id]["init_host_pid"], tenants[1], "containers")
    pretty = cgroup.replace(container_id, "<id>").replace(_POD, "<uid>")
    return {"engine": f"{case.runtime} {_version(case.runtime)}, {case.how}", "cgroup": pretty}


def _scopes(name: str) -> list[Path]:
    return [*Path("/sys/fs/cgroup").glob(f"*.slice/**/{name}.scope")]


def _truth(name: str) -> tuple[dict[int, int], str]:
    """Return the host PID of every process by its PID in the container, and the path of their cgroup."""
    (scope,) = _scopes(name)
    ends = time.monotonic() + _PATIENCE_S
    while True:
        tenants = {}
        for file in scope.rglob("cgroup.procs"):
            for host_pid in map(int, file.read_text().split()):
                *_, before, ns_pid = [0, *_pids(host_pid)]
                if before:
                    tenants[ns_pid] = host_pid
        if len(tenants) == 2 and all(_name(host_pid) == "busybox" for host_pid in tenants.values()):
            break
        if time.monotonic() > ends:
            raise Wrong(f"the container has no two processes: {tenants}")
        time.sleep(1)
    cgroup = Path(f"/proc/{tenants[1]}/cgroup").read_text().strip().removeprefix("0::")
    return tenants, cgroup


def _pids(host_pid: int) -> list[int]:
    status = Path(f"/proc/{host_pid}/status").read_text()
    return [int(word) for word in status.split("\nNSpid:")[1].split("\n")[0].split()]


def _name(host_pid: int) -> str:
    return Path(f"/proc/{host_pid}/cmdline").read_bytes().split(b"\0")[0].decode().rsplit("/", 1)[-1]


def _equal(answer: object, truth: object, what: str) -> None:
    if answer != truth:
        raise Wrong(f"{what} answers {answer!r}, and the truth is {truth!r}")


if __name__ == "__main__":
    sys.exit(main())
