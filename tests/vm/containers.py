"""In the guest, under systemd: real containers in scopes that systemd makes, and the commands' answers.

Prints one line of JSON: ``ok``, ``said`` when it is not, and ``engines``, a row for each container. The truth is what
/proc says: the processes of the container's cgroup, each with its PIDs in ``NSpid:``.
"""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.fakes.cgroups import processes
from tests.fakes.chain import read_chain
from tests.fakes.daemon import Daemon
from tests.patience import until

PLACE: Final = Path("/run/containers-step")
RESOLVER: Final = "/venv/bin/resolver"
_PATIENCE_S: Final = 300  # an emulated processor on a busy machine
_POD: Final = "0c5e0a52_7a5f_4d0e_9a55_2f7e9a2f7c11"
#: The first process of the container, and its second.
_TENANTS: Final = ("/bin/busybox", "sh", "-c", "/bin/busybox sleep 99999 & exec /bin/busybox sleep 99999")
_MOUNTS: Final = (("/proc", "proc"), ("/dev", "tmpfs"))
_NAMESPACES: Final = ("pid", "mount", "ipc", "uts", "network", "cgroup")


class Case(NamedTuple):
    """A container as an engine asks the runtime for it (``slice:prefix:id``), and its name in the report."""

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
        hami = PLACE / "hami"
        hami.mkdir()
        with Daemon(None, PLACE / "daemon", containers_dir=hami) as daemon:
            socket = ("--socket", str(daemon.socket))
            until(
                lambda: len(_listed(*socket)) > len(CASES),
                "every container in the daemon's list",
                _PATIENCE_S,
            )
            listed = _listed(*socket)
            for container_id, case in containers.items():
                rows.append(_checked(container_id, case, listed, socket))
    except (AssertionError, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
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
    """Return a command's output, through files, because its children keep the output open."""
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
            raise OSError(f"{' '.join(command)} ended with {done.returncode}: {complaints.read()[-800:]}")
        return said.read()


def _version(program: str) -> str:
    return _run(program, "--version").split()[2]


def _ask(*words: str) -> Any:
    return json.loads(_run(RESOLVER, *words, "--json"))


def _listed(*socket: str) -> dict[str, dict[str, Any]]:
    """The containers that the daemon lists; none before it answers."""
    with contextlib.suppress(OSError):
        return {each["container_id"]: each for each in _ask("containers", *socket)["containers"]}
    return {}


def _checked(
    container_id: str, case: Case, listed: dict[str, dict[str, Any]], socket: tuple[str, str]
) -> dict[str, str]:
    scope = f"{case.prefix}-{container_id}"
    (place,) = _scopes(scope)
    until(lambda: _tenants(place), "the container's two processes", _PATIENCE_S)
    tenants = _tenants(place)
    cgroup = Path(f"/proc/{tenants[1]}/cgroup").read_text().strip().removeprefix("0::")
    assert cgroup.split("/container")[0].endswith(f"/{case.slice}/{scope}.scope"), cgroup
    for ns_pid, host_pid in tenants.items():
        for name, where in ((container_id, ()), (container_id[:12], socket)):
            _equal(_ask("lookup", name, str(ns_pid), *where)["host_pid"], host_pid, f"lookup {name} {ns_pid}")
        found = _ask("reverse", str(host_pid))
        pod_uid = _POD.replace("_", "-") if _POD in case.slice else None
        _equal([found["container_id"], found["pod_uid"]], [container_id, pod_uid], f"reverse {host_pid}")
        levels = tuple((level["pidns"], level["ns_pid"]) for level in found["levels"])
        _equal(levels, read_chain(host_pid).levels, f"reverse {host_pid}")
    _equal(listed[container_id]["init_host_pid"], tenants[1], "containers")
    pretty = cgroup.replace(container_id, "<id>").replace(_POD, "<uid>")
    return {"engine": f"{case.runtime} {_version(case.runtime)}, {case.how}", "cgroup": pretty}


def _scopes(name: str) -> list[Path]:
    return [*Path("/sys/fs/cgroup").glob(f"*.slice/**/{name}.scope")]


def _tenants(scope: Path) -> dict[int, int]:
    """Return the host PIDs of the container's two processes by their PIDs there; none while they start."""
    chains = [chain for chain in map(read_chain, processes(scope)) if len(chain.levels) > 1]
    ready = len(chains) == 2 and all(_name(chain.host_pid) == "busybox" for chain in chains)
    return {chain.ns_pid: chain.host_pid for chain in chains} if ready else {}


def _name(host_pid: int) -> str:
    return Path(f"/proc/{host_pid}/cmdline").read_bytes().split(b"\0")[0].decode().rsplit("/", 1)[-1]


def _equal(answer: object, truth: object, what: str) -> None:
    assert answer == truth, f"{what} answers {answer!r}, and the truth is {truth!r}"


if __name__ == "__main__":
    sys.exit(main())
