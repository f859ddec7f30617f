"""`make package-check`: the Debian package's whole life in bare Debians, with systemd as the first process.

    make package-check                       Debian 12, 13 and sid
    make package-check ARGS=bookworm         one of them

A bare Debian is what mmdebstrap makes, with the package's dependencies and nothing else; it is kept for a week, as the
image's is (IMAGE_CACHE). QEMU boots it with a kernel of `make kernels`; package_guest.py runs in it as a service, and
asks the daemon as root and as members of its group, before and after restart, upgrade and reboot. Exit status: 1 if
anything is wrong.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from resolver.cli import COMMANDS
from tests.runtime.debian import bootstrap
from tests.runtime.image import KEEP, ROOT
from tests.vm import __main__ as vm
from tests.vm import machine
from tests.vm.report import Line
from tests.vm.rootfs import write_image

#: Each Debian with the kernel that it boots.
KERNELS: Final = {"bookworm": "6.1", "trixie": "6.12", "sid": "6.12"}
#: Emulated, on a busy machine; a boot takes one to ten minutes.
_SECONDS: Final = 3600
_BASH: Final = "./usr/share/bash-completion/completions/resolver"
_CHECK: Final = """[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStart=/usr/bin/python3 /resolver/package_guest.py
StandardOutput=journal+console
StandardError=journal+console
"""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="package-check-") as work:
        package = _built(Path(work))
        complete(package)
        for suite in sys.argv[1:] or KERNELS:
            began = time.monotonic()
            boots = check(package, suite, Path(work))
            print(f"{suite}: right over {boots} boots ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


def complete(package: Path) -> None:
    listed = subprocess.check_output(["dpkg-deb", "--contents", package], text=True)
    for command in COMMANDS:
        assert f"./usr/share/man/man1/resolver-{command}.1.gz" in listed
    assert _BASH in listed


def check(package: Path, suite: str, work: Path) -> int:
    """Boot until the guest has ended; return the number of boots. Raises AssertionError."""
    shop = vm.Workshop(vm.parser().parse_args(["--check", "--loader"]))
    arch = os.uname().machine
    kernel = shop.kernel(KERNELS[suite], arch)
    disks = _root(package, suite, work), _media(package, work), work / "report"
    command = machine.command_line(
        arch,
        kernel,
        disks,
        kvm=shop.kvm_works(kernel, arch),
        cmdline="first=/lib/systemd/systemd systemd.show_status=0",
        snapshot=False,
    )
    boots, lines = 0, list[Line]()
    while not any(line["step"] == "end" for line in lines):
        boots += 1
        console = work / f"console-{suite}-{boots}"
        outcome = machine.run(
            command, disks[2], console, _SECONDS, lambda line: _news(suite, line), shop.stop
        )
        lines += outcome.lines
        assert outcome.lines, outcome.trouble
        assert lines[-1]["step"] in ("reboot", "end"), outcome.trouble
    wrong = [line for line in lines if not line.get("ok", True)]
    assert not wrong, f"{suite}: {wrong}"
    return boots


def _news(suite: str, line: Line) -> None:
    said = "" if line.get("ok", True) else f" WRONG: {line.get('said')}"
    print(f"{suite}: {line['step']}{said}", file=sys.stderr, flush=True)


def _built(work: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", work],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (wheel,) = work.glob("*.whl")
    package = subprocess.check_output([sys.executable, ROOT / "scripts/deb.py", wheel, work], text=True)
    return Path(package.strip())


def _root(package: Path, suite: str, work: Path) -> Path:
    tree, image = work / suite, work / f"{suite}.img"
    tree.mkdir()
    subprocess.run(["tar", "-xf", str(_bare(package, suite)), "-C", str(tree)], check=True)
    (tree / "resolver").mkdir()
    units = tree / "etc/systemd/system"
    (units / "check.service").write_text(_CHECK)
    wants = units / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "check.service").symlink_to("../check.service")
    for unit in ("systemd-firstboot.service", "systemd-timesyncd.service", "systemd-networkd.service"):
        (units / unit).symlink_to("/dev/null")
    slow = tree / "etc/systemd/system.conf.d/slow.conf"  # an emulated processor on a busy machine
    slow.parent.mkdir()
    slow.write_text("[Manager]\nDefaultTimeoutStartSec=30min\n")
    (tree / "etc/machine-id").write_text(f"{hashlib.md5(suite.encode()).hexdigest()}\n")  # noqa: S324
    write_image(tree, image, spare_mib=400)
    shutil.rmtree(tree)
    return image


def _media(package: Path, work: Path) -> Path:
    """Write the disk with the guest's program, the package, and the same package with a lower version."""
    media, old, image = work / "media", work / "old", work / "media.img"
    media.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests/runtime/package_guest.py", media)
    shutil.copy(package, media / "new.deb")
    shutil.rmtree(old, ignore_errors=True)
    subprocess.run(["dpkg-deb", "--raw-extract", package, old], check=True)
    control = old / "DEBIAN/control"
    control.write_text(re.sub(r"(?m)^Version: .*", "Version: 0.0.1", control.read_text()))
    (about,) = old.glob("usr/lib/hami-resolver/lib/python3/site-packages/hami_resolver-*.dist-info")
    about.rename(about.with_name("hami_resolver-0.0.1.dist-info"))
    build = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(old), str(media / "old.deb")]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    write_image(media, image, spare_mib=20)
    return image


def _bare(package: Path, suite: str) -> Path:
    depends = subprocess.check_output(["dpkg-deb", "--field", package, "Depends"], text=True)
    names = sorted({re.split(r"[ (]", each.strip())[0] for each in depends.split(",")})
    kept = (
        KEEP
        / f"package-{suite}-{time.strftime('%G-%V')}-{hashlib.sha256(depends.encode()).hexdigest()[:8]}.tar"
    )
    if not kept.exists():
        KEEP.mkdir(parents=True, exist_ok=True)
        for old in KEEP.glob(f"package-{suite}-*"):
            old.unlink()
        fresh = kept.with_name(f"{kept.name}.new.tar")
        bootstrap(suite, fresh, packages=names)
        fresh.rename(kept)
    return kept


if __name__ == "__main__":
    sys.exit(main())
