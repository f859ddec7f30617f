"""`resolver doctor` names the cause on a node that is really broken, in one way at a time.

Rights are taken away with setpriv, views with unshare and mounts; daemons are real ones. Nothing is left behind: every
mount is in a mount namespace that ends with its process.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fakes import cachefiles
from tests.fakes.command import run
from tests.fakes.daemon import free_port
from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.node import Node
from tests.kernel.conftest import NVML, ROOT, STARVED, WRITER, Start
from tests.kernel.rights import mounted, without
from tests.patience import until
from tests.programs import completed

Result = dict[str, str]
RELEASE: Final = tuple(map(int, os.uname().release.split(".")[:2]))


def doctor(*checks: str, options: tuple[str, ...] = (), **how: Any) -> dict[str, Result]:
    """Return the results by check. No check may have a defect, and each problem must have a cause and a fix."""
    only = [word for check in checks for word in ("--only", check)]
    done = run("doctor", "--json", *only, *options, **how)
    assert done.returncode in (0, 1, 4), done.stderr
    assert done.stderr == ""
    results = {result["check"]: result for result in json.loads(done.stdout)}
    assert set(results) == set(checks) or not checks
    for result in results.values():
        assert "a defect in the check" not in result["found"], result
        assert bool(result["cause"]) == bool(result["fix"]) == (result["state"] != "ok"), result
    states = {result["state"] for result in results.values()}
    assert done.returncode == (1 if "failed" in states else 4 if "unknown" in states else 0)
    return results


def names(result: Result, state: str, *words: str) -> None:
    assert result["state"] == state, result
    text = f"{result['found']}\n{result['cause']}\n{result['fix']}"
    assert [word for word in words if word not in text] == [], result


PTRACE = without("sys_ptrace")
NETWORK = ("unshare", "--net", *without("sys_admin", "sys_ptrace", "net_admin"))
BCC = '$(dirname "$(/usr/bin/python3 -I -c "import bcc; print(bcc.__file__)")")'
LIBATOMIC = "$(/sbin/ldconfig -p | sed -n 's/.*libatomic.so.1 .*=> //p')"
HIDDEN = mounted("mount -t proc -o hidepid=2 proc /proc")
#: By the missing part: the command's wrapper, and words of each check's result.
TAKEN: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "SYS_PTRACE": (PTRACE, {"view": "failed: CAP_SYS_PTRACE is missing"}),
    "BPF": (without("bpf", "sys_admin"), {"bpf": "warning: CAP_BPF is missing"}),
    "PERFMON": (without("perfmon", "sys_admin"), {"bpf": "warning: CAP_PERFMON is missing"}),
    "NET_ADMIN": (
        without("net_admin"),
        {"netlink": "ok: " if RELEASE >= (6, 6) else "warning: CAP_NET_ADMIN"},
    ),
    "--source bpf": (without("bpf", "sys_admin"), {"bpf": "failed: CAP_BPF is missing: source = auto"}),
    "--source netlink": (
        NETWORK,
        {"netlink": "failed: hostNetwork: true: set source = auto", "bpf": "ok: not tried"},
    ),
    "the host's PIDs": (
        ("unshare", "--pid", "--fork", "--mount-proc"),
        {
            "view": "failed: not in the host's PID namespace: hostPID: true: --pid=host",
            "netlink": "warning: PID namespace: the daemon falls back to scan",
            "bpf": "warning: PID namespace: the daemon falls back to scan",
        },
    ),
    "the host's users": (
        ("unshare", "--user", "--map-root-user"),
        {
            "view": "failed: a user namespace other than the host's: hostUsers: true",
            "bpf": "warning: user namespace",
        },
    ),
    "the host's network": (NETWORK, {"netlink": "warning: hostNetwork: true: falls back to scan"}),
    "nothing but hidepid": (HIDDEN, {"view": "ok: "}),
    "other processes": (
        (*mounted("mount -t proc -o hidepid=2,gid=12345 proc /proc"), *PTRACE),  # root's group would see all
        {"view": "failed: hides other users' processes: run as root with CAP_SYS_PTRACE: mount -o remount"},
    ),
    "cgroups": (
        mounted("umount -R -l /sys/fs/cgroup"),
        {"view": "warning: no cgroup hierarchy: mount -t cgroup2"},
    ),
    "BTF": (
        mounted("mount -t tmpfs none /sys/kernel/btf"),
        {
            "bpf": "warning: this kernel has no BTF: CONFIG_DEBUG_INFO_BTF=y: falls back to netlink",
            "netlink": "ok: found a process",
        },
    ),
    "bcc": (
        mounted(f"mount -t tmpfs none {BCC}"),
        {"bpf": "warning: bcc is not installed: apt-get install python3-bpfcc"},
    ),
    "libatomic": (
        mounted(f"mount --bind /dev/null {LIBATOMIC}"),
        {"writer": "failed: it cannot write: libatomic.so.1: apt-get install libatomic1"},
    ),
}


@pytest.mark.parametrize("what", TAKEN)
def test_missing_part_is_named(what: str) -> None:
    wrapper, said = TAKEN[what]
    found = doctor(*said, options=tuple(what.split()) if what.startswith("-") else (), wrapper=wrapper)
    for check, words in said.items():
        names(found[check], *words.split(": "))


def test_unwritable_files_are_named(tmp_path: Path) -> None:
    """Files are unwritable on a read-only mount, or by a tenant's umask if CAP_DAC_OVERRIDE is missing."""
    path, options = cachefiles.container(tmp_path), ("--containers-dir", str(tmp_path))
    wrapper = mounted(f"mount --bind {tmp_path} {tmp_path}; mount -o remount,ro,bind {tmp_path}")
    found = doctor("containers_dir", "regions", options=options, wrapper=wrapper)
    names(found["containers_dir"], "failed", "is mounted read-only", f"mount -o remount,rw {tmp_path}")
    names(found["regions"], "failed", "1 region not writable", "1 of layout v1.2")
    path.chmod(0o644)
    os.chown(path, 12345, 12345)
    names(doctor("regions", options=options)["regions"], "ok")
    result = doctor("regions", options=options, wrapper=without("dac_override"))["regions"]
    names(result, "failed", "not writable", "umask", "CAP_DAC_OVERRIDE")


def test_doctor_disturbs_no_daemon_and_finds_all_ok(node: Node, start: Start, tmp_path: Path) -> None:
    """Doctor also names a dry run, a missing socket and an ended daemon."""
    node.container().tenant(load=50, guess="none")
    daemon = start(node, "--metrics-addr", f"127.0.0.1:{free_port()}", "--source", "auto")
    daemon.wait_for("source", source="bpf")
    daemon.wait_for("repair")
    # Its servers are loaded after the first repairs.
    until(lambda: daemon.socket.exists() and daemon.said("metrics_on"), "its API and its metrics")
    children, lines = {name: daemon.child(name) for name in (WRITER, NVML)}, len(daemon.lines)
    before = [slot.hostpid for slot in node.containers[0].region().slots]
    options = ("--run-dir", str(daemon.run_dir))
    found = doctor(options=options, env=node.environment())
    said = {line["event"] for line in daemon.lines[lines:]}
    assert said <= {"capabilities_kept", "policy"} | STARVED  # events that doctor doesn't cause
    if "writer_failed" not in said:
        assert {name: daemon.child(name) for name in children} == children
    assert [slot.hostpid for slot in node.containers[0].region().slots] == before
    names(found["settings"], "ok", f"the daemon that runs, PID {daemon.process.pid}")
    names(found["daemon"], "ok", f"PID {daemon.process.pid}", "source bpf", "1 region, 1 slot")
    names(found["driver"], "ok", "hostpid = host PID", "from the daemon: ")
    names(found["nvml"], "ok", DEFAULT_DEVICES[0].uuid)
    names(found["regions"], "ok", "1 region: 1 of layout v1.2")
    names(found["containers_dir"], "ok", str(node.containers_dir))  # the daemon's own setting
    for source in ("scan", "netlink", "bpf"):
        names(found[source], "ok", "found a process that was just made")
    assert {name for name, result in found.items() if result["state"] != "ok"} <= {"pod_names"}

    dry = start(node, "--source", "scan", "--dry-run", run_dir=tmp_path / "dry")
    dry.wait_for("gpu_found")  # after an NVML answer
    until(dry.socket.exists, "the socket of the dry run")
    found = doctor("daemon", options=("--run-dir", str(dry.run_dir)), env=node.environment())
    names(found["daemon"], "warning", f"PID {dry.process.pid}", "it is a dry run")

    daemon.socket.unlink()
    beside = (*options, "--containers-dir", str(node.containers_dir))
    found = doctor("daemon", options=beside, env=node.environment())
    names(found["daemon"], "failed", f"PID {daemon.process.pid}", "runs without its socket", "restart it")
    names(found["daemon"], "failed", "no such socket")
    daemon.kill()
    found = doctor("daemon", options=beside, env=node.environment())
    names(found["daemon"], "failed", "none runs")


def test_doctor_takes_no_lock(tmp_path: Path) -> None:
    """Otherwise a daemon that starts at that moment would find its lock taken."""
    (tmp_path / "lock").touch()
    trace = tmp_path / "trace"
    code = (
        "import sys, fcntl\n"
        "def refuse(event, arguments):\n"
        f"    if event in ('fcntl.flock', 'fcntl.lockf', 'socket.bind'): open({str(trace)!r}, 'a').write(event)\n"
        "sys.addaudithook(refuse)\n"
        "from resolver.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    options = ("--only", "daemon", "--run-dir", str(tmp_path), "--containers-dir", str(tmp_path))
    environment = os.environ | {"RESOLVER_METRICS_ADDR": f"127.0.0.1:{free_port()}"}
    done = completed(sys.executable, "-c", code, "doctor", *options, env=environment, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert not trace.exists()
    assert "none runs" in done.stdout
