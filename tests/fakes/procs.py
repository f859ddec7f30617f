"""A /proc of files, with owners of slots that are no real processes."""

import asyncio
import contextlib
import math
import os
from pathlib import Path
from typing import Any

from resolver.base.budget import Slices
from resolver.containers.known_namespaces import KnownNamespaces
from resolver.hami.discovery import SharedDirectory
from resolver.hami.slot_owner import OwnerFinder
from resolver.linux.procfs import ProcessHandle, Procfs
from resolver.pids.pidmap import PidMap
from resolver.pids.scan import ScanSource
from tests.fakes.direct import at_once, catch_up

DEVICE, HOOK = "8:1", "/usr/local/vgpu/containers"
OURS, OTHERS = (SharedDirectory(DEVICE, f"{HOOK}/uid-{number}_main") for number in (1, 2))
INODE = 4242


def mountinfo(*mounts: SharedDirectory | tuple[str, str, str]) -> str:
    lines = ["20 1 0:30 / / rw - overlay overlay rw"]
    for number, mount in enumerate(mounts):
        device, root, point = mount if len(mount) == 3 else (*mount, "/usr/local/vgpu")
        lines.append(f"{30 + number} 20 {device} {root} {point} rw,relatime - ext4 /dev/sda1 rw")
    return "\n".join(lines) + "\n"


def maps(inode: int = INODE, device: str = "08:01", path: str = "/usr/local/vgpu/a.cache") -> str:
    return (
        "55d0a0000000-55d0a0001000 r-xp 00000000 00:1e 77                         /bin/train\n"
        f"7f1000000000-7f10001eb000 rw-s 00000000 {device} {inode}                       {path}\n"
        "7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]\n"
    )


def changes(source: ScanSource, look: int = 0) -> tuple[list[int], list[int]]:
    """Refresh the source, or look at one process; return the PIDs that came and that went."""
    before = {host_pid: known.inode for host_pid, known in source.known.items()}
    source.read(look) if look else source.refresh()
    after = {host_pid: known.inode for host_pid, known in source.known.items()}
    came = sorted(each for each, inode in after.items() if before.get(each) != inode)
    return came, sorted(each for each, inode in before.items() if after.get(each) != inode)


def numbers(source: ScanSource) -> dict[int, tuple[int, ...]]:
    return {host_pid: known.ns_pids for host_pid, known in source.known.items()}


class FakeProc:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.procfs = Procfs(str(root), use_pidfd=False)
        self.pidmap = PidMap(ScanSource(self.procfs))
        self.index = KnownNamespaces(self.procfs, self.pidmap)
        self.containers = OwnerFinder(self.procfs, self.pidmap, self.index)

    def put(
        self,
        host_pid: int,
        *ns_pids: int,
        mounts: str | None = None,
        mapped: str | None = None,
        state: str = "S",
        cgroup: str = "0::/",
        pidns: int = 0,
        parent: int = 1,
        start: int | None = None,
    ) -> Path:
        place = self.root / str(host_pid)
        (place / "task" / str(host_pid)).mkdir(parents=True, exist_ok=True)
        if pidns:
            (place / "ns").mkdir(exist_ok=True)
            (place / "ns/pid").unlink(missing_ok=True)
            (place / "ns/pid").symlink_to(f"pid:[{pidns}]")
        numbers, start = "\t".join(map(str, (host_pid, *ns_pids))), host_pid * 10 if start is None else start
        stat = f"{host_pid} (a) b) {state} {parent} " + " ".join(["0"] * 17) + f" {start} 0 0\n"
        files = {
            "status": f"Name:\tx\nState:\t{state}\nTgid:\t{host_pid}\nPPid:\t{parent}\nNSpid:\t{numbers}\n",
            "stat": stat,
            f"task/{host_pid}/stat": stat,
            "comm": "x\n",
            "cgroup": f"{cgroup}\n",
            "mountinfo": mountinfo(OURS) if mounts is None else mounts,
            "maps": maps() if mapped is None else mapped,
        }
        for name, text in files.items():
            (place / name).write_text(text)
        return place

    def refresh(self) -> None:
        catch_up(self.pidmap)
        asyncio.run(self.index.catch_up(Slices(math.inf), bounded=False))

    def held(self) -> int:
        """Return descriptors into this /proc, since other tests' threads have descriptors of their own."""
        count = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                count += os.readlink(f"/proc/self/fd/{fd}").startswith(str(self.root))
        return count

    def find(self, ns_pid: int = 7, directory: SharedDirectory = OURS, inode: int = INODE) -> object:
        """Return the owner's host PID, or the reason for having none."""
        self.refresh()
        return self.ask(ns_pid, directory, inode)

    def ask(
        self, ns_pid: int = 7, directory: SharedDirectory = OURS, inode: int = INODE, **more: Any
    ) -> object:
        before = self.held()
        found = at_once(self.containers.owner(directory, (directory.device, inode), ns_pid, **more))
        if isinstance(found, ProcessHandle):
            with found:
                assert found.process.start_time == found.process.host_pid * 10
            assert self.held() == before
            return found.process.host_pid
        assert self.held() == before
        return found
