"""Runs the daemon as a unit of a real systemd, with everything that the unit's file forbids.

systemd's manager applies the unit, as root, in its form for one user, which doesn't have to be the machine's first
process. Its mount namespace, cgroup and /run are its own, so that it meets nothing of the machine's systemd. It limits
neither memory nor tasks if the machine gives it no such controllers.
"""

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.fakes import cgroups
from tests.fakes.daemon import Daemon, children_of
from tests.fakes.node import Node
from tests.kernel.conftest import ROOT
from tests.programs import completed

DEPLOY: Final = ROOT / "deploy/systemd"
UNIT: Final = "resolver.service"
MANAGER: Final = Path("/lib/systemd/systemd")
#: Targets that every unit depends on by default.
_TARGETS: Final = ("basic.target", "shutdown.target")


class Unit(Daemon):
    """`resolver.service`, started. ``drop_ins`` are names of files beside it; ``environment`` is added to its own.

    ``lines`` are added to its section [Service].

    Changed for the test: the program is this checkout's, HAMi's directory the node's, the driver a stand-in.
    """

    def __init__(
        self,
        node: Node,
        work: Path,
        *drop_ins: str,
        environment: Mapping[str, str] | None = None,
        lines: tuple[str, ...] = (),
    ) -> None:
        assert MANAGER.exists(), "there is no systemd here: run make setup-dev"
        self.run_dir = Path("/run/resolver")
        mount = next(each.mount for each in cgroups.hierarchies() if not each.controllers)
        self._cgroup = mount / f"systemd-{os.getpid()}-{os.urandom(4).hex()}"
        units, log = work / "units", work / "log"
        _write_units(units, node, log, drop_ins, environment or {}, lines)
        os.mkfifo(log)
        self._cgroup.mkdir()
        script = f"""
            cat {shlex.quote(str(log))} >&2 &
            echo $$ >{self._cgroup}/cgroup.procs
            mount -t tmpfs none /run
            mkdir -p /run/systemd/system
            mountpoint -q /sys/fs/cgroup/cgroup.procs || mount -t cgroup2 none /sys/fs/cgroup
            exec {MANAGER} --user --unit={UNIT} --log-target=null
        """
        self._environment = {**os.environ, "XDG_RUNTIME_DIR": "/run", "SYSTEMD_UNIT_PATH": str(units)}
        isolated = ["unshare", "--mount", "--propagation", "private"]
        self._launch([*isolated, "sh", "-ec", script], self._environment)

    def systemctl(self, *arguments: str) -> str:
        enter = ["nsenter", "--mount", "--target", str(self.process.pid), "systemctl", "--user", *arguments]
        done = completed(*enter, env=self._environment)
        assert done.returncode == 0, done
        return done.stdout.strip()

    @property
    def host_pid(self) -> int:
        return int(self.systemctl("show", "--property", "MainPID", "--value", UNIT))

    def children(self) -> dict[str, int]:
        return children_of(self.host_pid) if self.process.poll() is None else {}

    def stop(self) -> int:
        """As `systemctl stop`; returns the daemon's exit code, then ends the manager as well."""
        self.systemctl("stop", UNIT)
        code = int(self.systemctl("show", "--property", "ExecMainStatus", "--value", UNIT))
        self.process.send_signal(signal.SIGKILL)
        self.wait()
        return code

    def close(self) -> None:
        cgroups.remove(self._cgroup, kill=True)
        self.kill()


def _write_units(
    units: Path,
    node: Node,
    log: Path,
    drop_ins: tuple[str, ...],
    environment: Mapping[str, str],
    more: tuple[str, ...],
) -> None:
    beside = units / f"{UNIT}.d"
    beside.mkdir(parents=True)
    for name in _TARGETS:
        (units / name).write_text("[Unit]\nDefaultDependencies=no\n")
    text = (DEPLOY / UNIT).read_text()
    assert text.count("/usr/local/vgpu/containers") == 1
    (units / UNIT).write_text(text.replace("/usr/local/vgpu/containers", str(node.containers_dir)))
    for name in drop_ins:
        (beside / name).write_text((DEPLOY / name).read_text())
    settings = {
        "RESOLVER_CONTAINERS_DIR": str(node.containers_dir),
        "RESOLVER_METRICS_ADDR": "off",
        "RESOLVER_LOG_FORMAT": "json",
        "RESOLVER_INTERVAL": "50ms",
        "RESOLVER_NVML_INTERVAL": "200ms",
    }
    lines = ["[Service]", *more, "ExecStart=", f"ExecStart={sys.executable} -m resolver run"]
    lines += [
        f'Environment="{key}={value}"'
        for key, value in (node.stand_in() | settings | dict(environment)).items()
    ]
    # The test's places are in /tmp and in homes, which the unit hides: let them show through, read-only.
    lines += [
        "ProtectHome=tmpfs",
        f"WorkingDirectory={ROOT}",
        f"BindReadOnlyPaths={ROOT} {node.root} {node.built} {node.library_dir}",
        f"StandardError=file:{log}",
    ]
    (beside / "test.conf").write_text("\n".join(lines) + "\n")
