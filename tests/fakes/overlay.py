"""A container whose root is an overlay, as bare Docker's is."""

import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.container import Container
from tests.fakes.node import Node
from tests.fakes.process import Tenant
from tests.fakes.regions import LAYOUTS, read_file

CACHE = "/tmp/cudevshr.cache"  # noqa: S108 - where HAMi-core has it


@contextmanager
def btrfs(image: Path, place: Path) -> Iterator[Path]:
    """Mount a new btrfs from a loop device at this place."""
    with image.open("wb") as file:
        file.truncate(256 << 20)
    place.mkdir(parents=True, exist_ok=True)
    subprocess.check_call(["mkfs.btrfs", "--quiet", str(image)])
    subprocess.check_call(["mount", "-o", "loop", str(image), str(place)])
    try:
        yield place
    finally:
        subprocess.check_call(["umount", "--lazy", str(place)])


class Docker:
    """A container whose root is an overlay, as Docker's is. ``upper`` is a directory of the host, or on a tmpfs.

    With ``btrfs`` its root is a snapshot of the subvolume ``base`` there, as Docker's btrfs driver makes them.
    """

    def __init__(
        self, node: Node, name: str = "main", *, upper: str = "host", btrfs: Path | None = None
    ) -> None:
        self.container: Container = node.container(name=name, cgroup_format="docker-systemd")
        base = node.root / f"docker-{name}"
        layers, root = base / "layers", base / "merged"
        layers.mkdir(parents=True)
        root.mkdir()
        shown = ("/proc", "/dev", node.root, node.built)
        if btrfs is not None:
            snapshot = btrfs / name
            subprocess.check_call(
                ["btrfs", "--quiet", "subvolume", "snapshot", str(btrfs / "base"), str(snapshot)]
            )
            self.run(
                f"mount --bind {snapshot} {root}",
                f"cd {root}; mkdir -m 1777 tmp; mkdir old",
                *(
                    f"if [ -d {path} ]; then mkdir -p .{path}; mount --rbind {path} .{path}; fi"
                    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", *shown)
                ),
                "pivot_root . old; umount -l /old",
            )
            return
        self.run(
            *([f"mount -t tmpfs none {layers}"] if upper == "tmpfs" else []),
            f"mkdir {layers}/upper {layers}/work",
            f"mount -t overlay overlay -o lowerdir=/,upperdir={layers}/upper,workdir={layers}/work {root}",
            *(f"mkdir -p {root}{path}; mount --rbind {path} {root}{path}" for path in shown),
            f"mkdir {root}/old; cd {root}; pivot_root . old; umount -l /old",
        )

    def run(self, *commands: str) -> str:
        enter = ["nsenter", "--mount", "--pid", "--target", str(self.container.init_host_pid)]
        return subprocess.check_output([*enter, "sh", "-ec", ";".join(commands)], text=True)

    def tenant(self, *, load: int = 0, guess: str = "wrong", cache: str = CACHE) -> Tenant:
        return self.container.tenant(load=load, guess=guess, options=["--cache", cache])

    def file(self, cache: str = CACHE) -> Path:
        return Path(f"/proc/{self.container.init_host_pid}/root{cache}")

    def claim(self, ns_pid: int) -> None:
        """Write another slot with that PID, as a tenant can."""
        layout, file = LAYOUTS[self.container.layout], self.file()
        count = len(read_file(file).slots)
        with file.open("r+b") as opened:
            place = layout.procs + count * layout.slot_size
            opened.seek(place)
            opened.write(struct.pack("<ii", ns_pid, 0))
            opened.seek(place + layout.status)
            opened.write(struct.pack("<i", 1))
            opened.seek(layout.proc_num)
            opened.write(struct.pack("<i", count + 1))

    def hostpid(self, tenant: Tenant, cache: str = CACHE) -> int:
        slot = read_file(self.file(cache)).slot(tenant.ns_pid)
        assert slot is not None
        return slot.hostpid
