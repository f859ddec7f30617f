"""A kernel out of its package, and an initial RAM disk with the modules that the guest cannot start without."""

import fcntl
import gzip
import hashlib
import lzma
import re
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.programs import completed
from tests.vm.packages import Unavailable
from tests.vm.rootfs import unpack_deb

#: Modules that are loaded at the start, with those that they need, where they are not built in. ext4 asks for crc32c by
#: an alias, which nothing here resolves.
MODULES: Final = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "overlay")
_DEPENDS: Final = re.compile(rb"\0depends=([^\0]*)\0")
_INIT: Final = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for module in $(/bin/busybox cat /modules); do
    /bin/busybox insmod "/$module" || echo "init: cannot load $module"
done
tries=0
while [ ! -b /dev/vdc ] && [ $tries -lt 100 ]; do /bin/busybox sleep 0.1; tries=$((tries + 1)); done
/bin/busybox mount -t ext4 /dev/vda /root || echo "init: no root file system"
/bin/busybox mount -t ext4 /dev/vdb /root/resolver || echo "init: no checkout"
# The kernel passes first=PROGRAM of its command line on as a variable.
exec /bin/busybox switch_root /root ${first:-/usr/bin/python3 /resolver/tests/vm/guest.py}
"""


class Kernel(NamedTuple):
    """A kernel for QEMU. ``release`` is that of ``uname -r``, ``version`` the package's."""

    release: str
    version: str
    image: Path
    initrd: Path


def kernel_of(debs: Sequence[Path], cache: Path, busybox: Path, extra: tuple[str, ...] = ()) -> Kernel:
    """The kernel in these packages; unpacked once, and kept. Raises `Unavailable` when there is none in them."""
    modules = (*MODULES, *extra)
    digest = hashlib.sha256(f"{_INIT} {modules} {busybox.name}".encode())
    for deb in debs:
        digest.update(f"{deb.name} {deb.stat().st_size}".encode())
    place = cache / f"kernel-{digest.hexdigest()[:16]}"
    with (cache / "kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                tree, made = Path(scratch, "tree"), Path(scratch, "made")
                for deb in debs:
                    unpack_deb(deb, tree)
                made.mkdir()
                _take(tree, made, busybox, modules)
                made.rename(place)
    # 6.1.148-1 is Debian's first build of 6.1.148
    version = completed("dpkg-deb", "--field", debs[0], "Version", check=True).stdout.strip()
    return Kernel((place / "release").read_text(), version, place / "vmlinuz", place / "initrd")


def _take(tree: Path, made: Path, busybox: Path, wanted: Sequence[str]) -> None:
    images = sorted([*tree.glob("boot/vmlinu*"), *tree.glob("usr/lib/modules/*/vmlinuz")])
    if not images:
        raise Unavailable("no kernel (boot/vmlinuz-*) is in the package: name a linux-image package")
    image = images[0]
    release = image.parent.name if image.parent.parent.name == "modules" else image.name.split("-", 1)[1]
    (made / "vmlinuz").write_bytes(plain_image(image.read_bytes()))
    (made / "release").write_text(release)
    folders = [place for top in ("lib", "usr/lib") if (place := tree / top / "modules" / release).exists()]
    modules = {module_name(path.name): path for place in folders for path in place.rglob("*.ko*")}
    files: list[tuple[str, int, bytes]] = [
        ("bin", stat.S_IFDIR | 0o755, b""),
        ("dev", stat.S_IFDIR | 0o755, b""),
        ("root", stat.S_IFDIR | 0o755, b""),
        ("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes()),
        ("init", stat.S_IFREG | 0o755, _INIT.encode()),
    ]
    order: dict[str, bytes] = {}
    for name in wanted:
        _add(name, modules, order)
    files += [(f"{name}.ko", stat.S_IFREG | 0o644, data) for name, data in order.items()]
    files.append(("modules", stat.S_IFREG | 0o644, "\n".join(f"{name}.ko" for name in order).encode()))
    (made / "initrd").write_bytes(gzip.compress(cpio(files), 1))
    shutil.rmtree(tree)


def _add(name: str, modules: dict[str, Path], order: dict[str, bytes]) -> None:
    """Append a module after those that it needs; a module without a file is built in."""
    path = modules.get(name)
    if path is None or name in order:
        return
    data = _module(path)
    for other in depends(data):
        _add(other, modules, order)
    order[name] = data


def module_name(file: str) -> str:
    """Return the kernel's name of a module's file: ``virtio_rng`` for ``virtio-rng.ko.xz``."""
    return file.split(".ko", 1)[0].replace("-", "_")


def depends(module: bytes) -> list[str]:
    """The modules that a module names as needed, in its own words (``modinfo --field depends``)."""
    found = _DEPENDS.search(module)
    return [module_name(name) for name in found[1].decode().split(",") if name] if found else []


def _module(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".zst":  # Ubuntu's; the standard library has no zstd before Python 3.14
        return subprocess.run(("zstd", "-dc", path), capture_output=True, check=True).stdout
    return gzip.decompress(data) if path.suffix == ".gz" else data


def plain_image(image: bytes) -> bytes:
    """The kernel without the wrappers that QEMU does not know: gzip, or the EFI one of arm64 (EFI_ZBOOT)."""
    if image[4:8] == b"zimg":  # drivers/firmware/efi/libstub/zboot-header.S
        offset, size = struct.unpack_from("<II", image, 8)
        kind, packed = image[24:32].split(b"\0", 1)[0], image[offset : offset + size]
        if kind == b"gzip":
            return gzip.decompress(packed)
        if kind.startswith(b"zstd"):
            return subprocess.run(("zstd", "-dc"), input=packed, capture_output=True, check=True).stdout
        raise Unavailable(f"this kernel is packed with {kind.decode()}, which is not known here")
    return gzip.decompress(image) if image[:2] == b"\x1f\x8b" else image


def cpio(files: Sequence[tuple[str, int, bytes]]) -> bytes:
    """An archive as the kernel unpacks it, of ``(name, mode, content)``: Documentation/driver-api/early-userspace."""
    archive = bytearray()
    for number, (name, mode, data) in enumerate((*files, ("TRAILER!!!", 0, b"")), 1):
        encoded = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
        archive += b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        archive += bytes(-len(archive) % 4) + data
        archive += bytes(-len(archive) % 4)
    return bytes(archive)
