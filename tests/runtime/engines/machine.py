"""Where an engine runs: Debian's userspace in mount and cgroup namespaces of their own, on this kernel.

PID and user namespaces are the host's, as an engine's are. What it mounts goes with the mount namespace; every process
that it leaves is in this machine's own part of the cgroup hierarchies, and is killed with it. Inside, that part is the
root, so an engine's cgroups are called as everywhere: ``/docker/<id>``.
"""

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

from tests.fakes.cgroups import hierarchies, remove, remove_leftovers
from tests.patience import until
from tests.programs import completed

#: Control group hierarchies that an engine sees: all, version 1 only, version 2 only.
VIEWS: Final = ("hybrid", "v1", "v2")

_PREFIX: Final = "resolver-engines-"
ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}


def views() -> tuple[str, ...]:
    """The views that this kernel can give, its own first."""
    versions = {each.controllers == "" for each in hierarchies()}
    return VIEWS if len(versions) == 2 else ("v2",) if versions == {True} else ("v1",)


def views_with_limits() -> tuple[str, ...]:
    """Those in which an engine can limit CPU: where version 1 has the controllers, version 2 has none."""
    two = [each.mount / "cgroup.controllers" for each in hierarchies() if not each.controllers]
    limits = any("cpu" in each.read_text().split() for each in two)
    return tuple(view for view in views() if view != "v2" or limits)


class Machine:
    """One such machine; ``with`` starts it, and nothing of it is left behind.

    ``work`` is a directory that it shares with the host under the same path, as are those ``shown``.
    """

    def __init__(self, debian: Path, work: Path, shown: Iterable[Path], view: str) -> None:
        self.work, self.view = work, view
        self._debian, self._shown, self._scratch = debian, (work, *shown), work.with_name(f"{work.name}-root")
        self._top = f"{_PREFIX}{os.getpid()}-{time.monotonic_ns():x}"
        self._hierarchies = hierarchies()
        self._daemons: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        self.work.mkdir(parents=True, exist_ok=True)
        for each in self._hierarchies:
            remove_leftovers(each.mount, _PREFIX)
            _make_cgroup(each.mount / self._top)
        for name in ("layers", "root"):
            (self._scratch / name).mkdir(parents=True)
        self._holder = subprocess.Popen(
            [*self._enter_cgroups(""), "unshare", "--mount", "--cgroup", "sh", "-euc", self._script()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            self.__exit__(None, None, None)
            raise AssertionError("the engines' machine did not start; the reason is on standard error")
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._hierarchies:
            remove(each.mount / self._top, kill=True)
        self._holder.communicate()
        for daemon in self._daemons:
            daemon.wait()

    def _script(self) -> str:
        """Return a script of mounts with an own root, which Docker needs to use ``pivot_root`` for its layers."""
        layers, root = self._scratch / "layers", self._scratch / "root"
        lines = [
            *(f"echo $$ >{each.mount / self._top / 'engines/cgroup.procs'}" for each in self._hierarchies),
            "mount --make-rprivate /",
            f"mount -t tmpfs none {layers}",
            f"mkdir {layers}/upper {layers}/work",
            f"mount -t overlay -o lowerdir={self._debian},upperdir={layers}/upper,workdir={layers}/work overlay {root}",
            f"mount --rbind /dev {root}/dev",
            f"mount -t proc proc {root}/proc",
            f"mount -t sysfs sysfs {root}/sys",
            f"mount -t tmpfs -o mode=755 none {root}/run",
            f"mount -t tmpfs -o mode=1777 none {root}/tmp",  # noqa: S108 - inside the test's root
            f"chmod 755 {root}/root",  # the stand-in for the driver is below it, and users have containers, too
            *(f"mkdir -p {root}{path}; mount --rbind {path} {root}{path}" for path in self._shown),
            *self._cgroup_mounts(root / "sys/fs/cgroup"),
            f"cd {root}; mkdir -p old; pivot_root . old; umount -l /old",
            "echo ready; exec cat",
        ]
        return "\n".join(lines)

    def _cgroup_mounts(self, place: Path) -> Iterable[str]:
        if self.view == "v2":
            yield f"mount -t cgroup2 none {place}"
            return
        yield f"mount -t tmpfs -o mode=755 none {place}"
        if self.view == "hybrid":
            yield f"mkdir {place}/unified; mount -t cgroup2 none {place}/unified"
        for each in self._hierarchies:
            if each.controllers:
                where = place / each.mount.name
                yield f"mkdir {where}; mount -t cgroup -o {each.controllers} none {where}"

    def _enter_cgroups(self, below: str) -> list[str]:
        """Return a prefix that starts a command as a process of this machine."""
        places = [each.mount / self._top / below / "cgroup.procs" for each in self._hierarchies]
        entered = "; ".join(f"echo $$ >{shlex.quote(str(place))}" for place in places)
        return ["sh", "-ec", f'{entered}; exec "$@"', "sh"]

    def command(self, *words: str | Path) -> list[str]:
        enter = ["nsenter", "--mount", "--cgroup", "--target", str(self._holder.pid)]
        return [*self._enter_cgroups("engines"), *enter, "--", *map(str, words)]

    def run(self, *words: str | Path) -> str:
        """Return a command's output. Fails with its complaint."""
        done = completed(*self.command(*words), env=ENVIRONMENT, timeout=60, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{shlex.join(map(str, words))}: {done.stdout}{done.stderr}"
        return done.stdout

    def daemon(self, *words: str | Path) -> None:
        """Start a command that ends with the machine; its output goes to ``daemon.log`` in the working directory."""
        with (self.work / "daemon.log").open("a") as log:
            started = subprocess.Popen(
                self.command(*words),
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )
        self._daemons.append(started)

    def until(self, *words: str | Path) -> None:
        """Wait until a command succeeds, such as an engine's ``info``."""

        def succeeds() -> bool:
            assert all(each.poll() is None for each in self._daemons), self.log()
            command = self.command(*words)
            return not subprocess.run(command, capture_output=True, check=False, env=ENVIRONMENT).returncode

        until(succeeds, f"success of {words}", 40)

    def log(self) -> str:
        path = self.work / "daemon.log"
        return path.read_text()[-3000:] if path.exists() else ""


def _make_cgroup(directory: Path) -> None:
    """A directory for the machine, and one below for the engines: one with controllers on may have no processes."""
    for place in (directory, directory / "engines"):
        place.mkdir()
        for name in ("cpuset.cpus", "cpuset.mems"):  # version 1: empty in a new group
            with contextlib.suppress(FileNotFoundError):
                (place / name).write_text((place.parent / name).read_text())
