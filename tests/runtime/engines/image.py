"""The image of the engines' containers: busybox, and the libraries that a tenant and the driver's stand-in need."""

import hashlib
import io
import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Final

NAME: Final = "localhost/tenant:1"
_APPLETS: Final = ("sh", "sleep", "cat", "mkfifo", "id", "mount", "chroot", "unshare", "echo")
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def fill(rootfs: Path, debian: Path, built: Path) -> Path:
    for name in ("bin", "tmp", "proc", "sys", "dev", "run", "etc", "usr/local/vgpu"):
        (rootfs / name).mkdir(parents=True)
    (rootfs / "tmp").chmod(0o1777)
    (rootfs / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    (rootfs / "bin/busybox").write_bytes((debian / "bin/busybox").read_bytes())
    (rootfs / "bin/busybox").chmod(0o755)
    for applet in _APPLETS:
        (rootfs / "bin" / applet).symlink_to("busybox")
    for library in re.findall(r"(/\S+) \(0x", subprocess.check_output(["ldd", built / "tenant"], text=True)):
        target = rootfs / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(library).read_bytes())
        target.chmod(0o755)
    return rootfs


def archive(rootfs: Path, path: Path, machine: str) -> Path:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for each in sorted(rootfs.rglob("*")):
            tar.add(each, each.relative_to(rootfs), recursive=False)
    diff = f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"
    config = {
        "architecture": _ARCHITECTURES[machine],
        "os": "linux",
        "config": {"Env": ["PATH=/bin"], "Cmd": ["/bin/sleep", "100000"]},
        "rootfs": {"type": "layers", "diff_ids": [diff]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [NAME], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as tar:
        for name, data in (
            ("config.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
            ("layer.tar", layer.getvalue()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path
