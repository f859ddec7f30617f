"""Runs the daemon in a real container by runc, made from a rendered pod's spec as a kubelet and containerd make it.

Capabilities, seccomp, mounts, namespaces and the read-only root are the manifest's. Three things differ: the image is
this machine's root directory (through an overlay, which leaves it unchanged), the node's paths are a test's, and the
stand-in for the driver is mounted in place of NVIDIA's toolkit.
"""

import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from resolver.base.source_records import SOURCE_RECORDS
from tests.fakes import cgroups
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.kernel.rights import rights
from tests.manifests import ROOT, Manifest, container_of
from tests.patience import until
from tests.programs import completed
from tests.runtime.image import Image

_NAMESPACES: Final = {"pid": "hostPID", "network": "hostNetwork", "ipc": "hostIPC"}


#: Everything that pods make in the cgroup hierarchies is below directories of this name, and goes with them.
CGROUP_TOP: Final = f"resolver-runtime-{os.getpid()}"


def cgroup_mounts() -> list[Path]:
    return [each.mount for each in cgroups.hierarchies()]


class Pod(Daemon):
    """The container called ``name`` of a pod. ``paths`` maps those of the node to where the test has them.

    ``source`` is a directory with the program, in place of this checkout, or ``image`` has it; ``seccomp`` are the
    node's profiles. ``environment`` is added, and may be the image's as well. ``wrapper`` runs the checkout's program.
    """

    def __init__(
        self,
        node: Node,
        pod: Manifest,
        work: Path,
        *,
        paths: Mapping[str, Path],
        seccomp: Mapping[str, Path],
        name: str = "resolver",
        source: Path = ROOT,
        environment: Mapping[str, str] | None = None,
        image: Image | None = None,
        wrapper: tuple[str, ...] = (),
    ) -> None:
        self.run_dir = paths["/run/resolver"]
        self._name = f"pod-{os.getpid()}-{os.urandom(4).hex()}"
        self._cgroup = f"/{CGROUP_TOP}/{self._name}"
        self._state = work / "state"
        bundle = work / self._name
        for each in ("rootfs", "layers"):
            (bundle / each).mkdir(parents=True)
        container = container_of(pod, name)
        config = _config(bundle, pod, container, paths, seccomp)
        if image is None:  # this machine's root and interpreter, and the checkout
            image = Image(
                Path("/"), {"Entrypoint": [*wrapper, sys.executable, "-m", "resolver"]}, dict(os.environ)
            )
            config["mounts"] += [_bind(path, str(path), read_only=True) for path in (ROOT, source)]
            config["process"]["cwd"] = str(source)
        environment = image.environment | _environment(container) | dict(environment or {}) | node.stand_in()
        config["process"] |= {
            "args": [*image.config["Entrypoint"], *container["args"]],
            "env": [f"{key}={value}" for key, value in environment.items()],
        }
        config["root"] = {
            "path": "rootfs",
            "readonly": container["securityContext"].get("readOnlyRootFilesystem", False),
        }
        config["linux"]["cgroupsPath"] = self._cgroup
        # From the toolkit: the driver's library and its dependencies.
        config["mounts"] += [_bind(path, str(path), read_only=True) for path in (node.built, node.root)]
        (bundle / "config.json").write_text(json.dumps(config))
        layers, rootfs = shlex.quote(str(bundle / "layers")), shlex.quote(str(bundle / "rootfs"))
        # In a private mount namespace: no mount stays behind.
        overlay = f"mount -t tmpfs none {layers} && mkdir {layers}/upper {layers}/work && mount -t overlay"
        overlay += f" -o lowerdir={image.root},upperdir={layers}/upper,workdir={layers}/work overlay {rootfs}"
        start = ["runc", "--root", str(self._state), "run", "--bundle", str(bundle), self._name]
        self._launch(
            ["unshare", "--mount", "sh", "-ec", f'{overlay} && exec "$@"', "sh", *start], dict(os.environ)
        )

    @property
    def host_pid(self) -> int:
        found: list[int] = []

        def started() -> bool:
            done = completed("runc", "--root", str(self._state), "state", self._name)
            if done.returncode == 0 and json.loads(done.stdout)["status"] == "running":
                found.append(json.loads(done.stdout)["pid"])
            return bool(found)

        until(started, f"a container: {self.tail()}")
        return found[0]

    def inside(self, *command: str) -> str:
        """Return the output of a command in the container, as by a kubelet's probe or `kubectl exec`."""
        done = completed("runc", "--root", str(self._state), "exec", self._name, *command)
        assert done.returncode == 0, done
        return done.stdout

    def get(self, path: str) -> int:
        """Return the status of a probe at the metrics' port in the pod's network; 0 without a listener."""
        code = (
            "import sys, urllib.request as r, urllib.error as e\n"
            f"try: print(r.urlopen('http://127.0.0.1:9395{path}', timeout=3).status)\n"
            "except e.HTTPError as error: print(error.code)\n"
            "except OSError: print(0)\n"
        )
        enter = ["nsenter", "--net", "--target", str(self.host_pid), sys.executable, "-c", code]
        return int(subprocess.check_output(enter, text=True))

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.host_pid, number)

    def stop(self) -> int:
        """SIGTERM to its first process, as a kubelet does; returns its exit code."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, AssertionError):
                self.signal(signal.SIGTERM)
        return self.wait()

    def close(self) -> None:
        """Kill the container, and remove its state of runc and its cgroups."""
        delete = ["runc", "--root", str(self._state), "delete", "--force", self._name]
        subprocess.run(delete, capture_output=True, check=False)
        self.kill()
        for mount in cgroup_mounts():
            cgroups.remove(mount / self._cgroup.lstrip("/"))


def _environment(container: Manifest) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container.get("env", ())}


def _config(
    bundle: Path,
    pod: Manifest,
    container: Manifest,
    paths: Mapping[str, Path],
    seccomp: Mapping[str, Path],
) -> dict[str, Any]:
    """Return runc's default configuration, whose mounts and masks are containerd's but for ``/run``, as the pod's."""
    security = container["securityContext"]
    assert not security.get("privileged"), "these tests are about containers that are not privileged"
    asked = security["capabilities"]
    assert asked["drop"] == ["ALL"], "what is not dropped depends on the runtime"
    here = rights(os.getpid()).bounding  # runc refuses more than this machine's root has
    capabilities = [f"CAP_{name}" for name in asked.get("add", ()) if name in here]
    subprocess.run(["runc", "spec", "--bundle", str(bundle)], check=True)
    config: dict[str, Any] = json.loads((bundle / "config.json").read_text())
    options = ["nosuid", "nodev", "mode=755"]
    config["mounts"].append({"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": options})
    for volume_mount in container["volumeMounts"]:
        (volume,) = [each for each in pod["volumes"] if each["name"] == volume_mount["name"]]
        path = _host_path(volume["hostPath"], paths)
        read_only = volume_mount.get("readOnly", False)
        config["mounts"].append(_bind(path, volume_mount["mountPath"], read_only=read_only))
    memory = container["resources"]["limits"]["memory"]
    assert memory.endswith("Mi"), memory
    namespaces = ["mount", "uts", "cgroup"]
    namespaces += [kind for kind, field in _NAMESPACES.items() if not pod.get(field, False)]
    config["process"] = {
        "cwd": "/",
        "user": {"uid": security["runAsUser"], "gid": security["runAsGroup"]},
        "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
        "noNewPrivileges": not security["allowPrivilegeEscalation"],
    }
    config["linux"] |= {
        "namespaces": [{"type": kind} for kind in namespaces],
        "resources": {"memory": {"limit": int(memory[:-2]) << 20}},
        "seccomp": _seccomp(security["seccompProfile"], seccomp, capabilities),
    }
    return config


def _host_path(volume: Mapping[str, str], paths: Mapping[str, Path]) -> Path:
    """Return a volume's path as a kubelet does: the directory exists, or is made, or the pod does not start."""
    path = paths[volume["path"]]
    if volume["type"] == "DirectoryOrCreate":
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
    assert path.is_dir(), f"hostPath type check failed: {volume['path']} is not a directory"
    return path


def _bind(source: Path, destination: str, *, read_only: bool) -> dict[str, Any]:
    options = ["rbind", "rprivate", "ro" if read_only else "rw"]
    return {"destination": destination, "type": "bind", "source": str(source), "options": options}


def _seccomp(
    profile: Mapping[str, str], profiles: Mapping[str, Path], capabilities: list[str]
) -> dict[str, Any]:
    if profile["type"] == "Localhost":
        whole: dict[str, Any] = json.loads(profiles[profile["localhostProfile"]].read_text())
        return whole
    return _resolved(json.loads(profiles[profile["type"]].read_text()), set(capabilities))


def _resolved(default: dict[str, Any], capabilities: set[str]) -> dict[str, Any]:
    """A runtime's default profile, whose rules depend on architecture and capabilities, as one container's rules."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]

    def holds(rule: Mapping[str, Any]) -> bool:
        wanted, unwanted = rule.get("includes") or {}, rule.get("excludes") or {}
        return (
            machine in wanted.get("arches", [machine])
            and machine not in unwanted.get("arches", ())
            and capabilities.issuperset(wanted.get("caps", ()))
            and capabilities.isdisjoint(unwanted.get("caps", ()))
        )

    native = {"amd64": "SCMP_ARCH_X86_64", "arm64": "SCMP_ARCH_AARCH64"}[machine]
    return {
        "defaultAction": default["defaultAction"],
        "defaultErrnoRet": default["defaultErrnoRet"],
        "architectures": [native],
        "syscalls": [
            {
                field: rule[field]
                for field in ("names", "action", "args", "errnoRet")
                if rule.get(field) is not None
            }
            for rule in default["syscalls"]
            if holds(rule)
        ],
    }


def runtime_default(directory: Path, *, knows_bpf: bool) -> Path:
    """Write the profile for RuntimeDefault: a distribution's, with the prohibitions of containerd and Docker.

    That of Podman and CRI-O lets everybody make namespaces and mounts; containerd's and Docker's only who has
    CAP_SYS_ADMIN. ``knows_bpf``: one from the time when they began to let CAP_BPF and CAP_PERFMON count.
    """
    default = json.loads(distribution_profile().read_text())
    admin = {
        *("clone3", "fsconfig", "fsmount", "fsopen", "fspick", "mount", "mount_setattr", "move_mount"),
        *("open_tree", "setns", "umount", "umount2", "unshare", "keyctl", "add_key", "request_key"),
    }
    counted = {"bpf": "CAP_BPF", "perf_event_open": "CAP_PERFMON"} if knows_bpf else {}
    rules = []
    for rule in default["syscalls"]:
        names = [name for name in rule["names"] if name not in admin | counted.keys() | {"clone"}]
        if names:
            rules.append({**rule, "names": names})
    errno = {"action": "SCMP_ACT_ERRNO", "errnoRet": 1}
    rules.append({"names": sorted(admin - {"clone3"}), **errno, "excludes": {"caps": ["CAP_SYS_ADMIN"]}})
    rules.append(
        {"names": sorted(admin), "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}}
    )
    no_namespaces = {"index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    rules.append({"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [no_namespaces]})
    for name, capability in counted.items():
        rules.append({"names": [name], "action": "SCMP_ACT_ALLOW", "includes": {"caps": [capability]}})
        rules.append({"names": [name], **errno, "excludes": {"caps": [capability]}})
    fd, path = tempfile.mkstemp(dir=directory, suffix=".json")
    with os.fdopen(fd, "w") as file:
        json.dump({**default, "syscalls": rules}, file)
    return Path(path)


def distribution_profile() -> Path:
    for path in (ROOT / ".venv/share/seccomp.json", Path("/usr/share/containers/seccomp.json")):
        if path.exists():
            return path
    raise AssertionError("there is no container runtime's default seccomp profile here: run make setup-dev")


def confined(pod: Pod, given: set[str]) -> None:
    """Assert by /proc: only these capabilities, a seccomp filter, and a read-only root."""
    own, possible = rights(pod.host_pid), given & rights(os.getpid()).bounding
    assert own.bounding == possible
    early = SOURCE_RECORDS["bpf"].early
    assert own.effective <= own.permitted == possible - early  # so that a failed source can start again
    assert own.inheritable == own.ambient == frozenset()
    assert own.no_new_privs
    proc = Path(f"/proc/{pod.host_pid}")
    assert "Seccomp:\t2" in (proc / "status").read_text()
    (root,) = [line for line in (proc / "mountinfo").read_text().splitlines() if line.split()[4] == "/"]
    assert root.split()[5].split(",")[0] == "ro"
