"""`make image-check`: every image that the recipe can make, built, held to the tests, and measured.

    make image-check                         each Debian with and without BPF, and the other machine where it can run
    make image-check ARGS=bookworm           one Debian only

The other machine's programs run here where the kernel has an interpreter for them: install qemu-user-static. Without it
its packages are fetched and checked against the locks, and nothing more. Exit status: 1 if anything is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.runtime.image import ARCHITECTURES, ROOT, SUITES, Builder, Image, parts

_INTERPRETERS: Final = Path("/proc/sys/fs/binfmt_misc")
_IMPORTS: Final = (
    "import curses, msgspec, psutil, pyroute2, h11, resolver.daemon.service, platform; "
    "print(platform.machine())"
)


def main() -> int:
    """Runs it all."""
    suites = sys.argv[1:] or list(SUITES)
    for suite in suites:
        print(f"Debian {suite}, Python {SUITES[suite]}: the tests", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "long", "tests/runtime/test_image.py"]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"IMAGE_SUITE": suite}, check=False)
        if done.returncode != 0:
            return 1
    with tempfile.TemporaryDirectory(prefix="image-check-") as work, Builder(Path(work)) as builder:
        for suite in suites:
            for line in _measured(builder, suite):
                print(line, flush=True)
        for machine in ARCHITECTURES.keys() - {os.uname().machine}:
            print(_elsewhere(builder, suites[0], machine), flush=True)
    return 0


def _measured(builder: Builder, suite: str) -> Iterator[str]:
    for with_bpf in (True, False):
        image = builder.build(suite, with_bpf=with_bpf)
        what = f"{suite}, {'with' if with_bpf else 'without'} BPF"
        yield f"{what}: {_sizes(image)}; `resolver --version` {_start(image):.0f} ms"


def _start(image: Image) -> float:
    """The best of ten, in milliseconds."""
    took = []
    for _ in range(10):
        began = time.perf_counter()
        _inside(image, "/opt/resolver/bin/resolver", "--version")
        took.append(time.perf_counter() - began)
    return min(took) * 1000


def _elsewhere(builder: Builder, suite: str, machine: str) -> str:
    for python in SUITES.values():
        count = len(list(builder.wheels(python, machine).iterdir()))
        print(f"{machine}, Python {python}: all {count} packages are published for it, as locked", flush=True)
    if not list(_INTERPRETERS.glob(f"qemu-{machine}*")):
        return f"{machine}: not built, nothing here runs its programs: apt-get install qemu-user-static binfmt-support"
    image = builder.build(suite, machine)
    assert _inside(image, "/opt/resolver/bin/python", "-c", _IMPORTS) == machine
    assert (
        _inside(image, "/usr/bin/python3", "-c", "import bcc, platform; print(platform.machine())") == machine
    )
    return f"{machine}, {suite}, with BPF: built and started; {_sizes(image)}"


def _sizes(image: Image) -> str:
    return "MiB " + ", ".join(f"{name} {size:.0f}" for name, size in parts(image).items())


def _inside(image: Image, *command: str) -> str:
    return subprocess.check_output(["chroot", image.root, *command], text=True).strip()


if __name__ == "__main__":
    sys.exit(main())
