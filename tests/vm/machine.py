"""One virtual machine: QEMU's command line, whether KVM works, and a run from power on to power off."""

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from tests.vm.kernel import Kernel
from tests.vm.report import Line, parse

REPORT_BYTES: Final = 8 << 20
#: QEMU ends with this program, and yields the machine's CPUs to other programs.
_POLITELY: Final = ("setpriv", "--pdeathsig", "KILL", "nice", "-n", "10")
_PROBE_SECONDS: Final = 15
_MEMORY: Final = "3G"
#: With -icount the guest's clock follows its instructions, so that its time limits keep their meaning on a busy host.
_EMULATED: Final = ("-accel", "tcg,thread=single", "-icount", "shift=0,sleep=on", "-smp", "1")
_MACHINE: Final = {"x86_64": "pc", "aarch64": "virt"}
_CPU: Final = {"x86_64": "Westmere,+rdrand,+rdseed", "aarch64": "neoverse-n1"}
_CONSOLE: Final = {"x86_64": "ttyS0", "aarch64": "ttyAMA0"}
_PACKAGE: Final = {"x86_64": "qemu-system-x86", "aarch64": "qemu-system-arm"}


class Missing(Exception):
    """A program is not installed; the message names it and the command to install it."""


class Outcome(NamedTuple):
    """A run's result: the guest's lines, and if it did not end by itself, the reason and the console's last lines."""

    lines: list[Line]
    trouble: str
    seconds: float


def qemu(arch: str) -> str:
    """The program that emulates this machine. Raises `Missing`."""
    program = shutil.which(f"qemu-system-{arch}")
    if program is None:
        raise Missing(
            f"qemu-system-{arch} is missing: apt-get install -y --no-install-recommends {_PACKAGE[arch]}"
        )
    return program


def kvm_works(kernel: Kernel, arch: str) -> bool:
    """Whether KVM starts this kernel: /dev/kvm may be there and still run no kernel that was not made for it."""
    if arch != platform.machine() or not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    command = [qemu(arch), *_common(arch, kernel, "panic=-1 rdinit=/none"), "-accel", "kvm", "-cpu", "host"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_PROBE_SECONDS
        )
        said = done.stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
    return b"Linux version" in said


def _common(arch: str, kernel: Kernel, cmdline: str) -> list[str]:
    console = f"console={_CONSOLE[arch]} random.trust_cpu=on {cmdline}"
    return [
        *("-machine", _MACHINE[arch]),
        *("-m", _MEMORY, "-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio", "-net", "none"),
        *("-kernel", str(kernel.image), "-initrd", str(kernel.initrd), "-append", console),
    ]


def command_line(
    arch: str,
    kernel: Kernel,
    disks: tuple[Path, Path, Path],
    *,
    kvm: bool,
    cmdline: str,
    snapshot: bool = True,
) -> list[str]:
    """QEMU's arguments: the root, the checkout and the report are vda, vdb, vdc.

    With ``snapshot`` the first two are after each run as they were before. Without, an emulated guest is three times as
    fast, and its clock is the host's.
    """
    emulated = _EMULATED if snapshot else ("-accel", "tcg,thread=multi", "-smp", "2")
    accelerator = ("-accel", "kvm", "-cpu", "host", "-smp", "2") if kvm else (*emulated, "-cpu", _CPU[arch])
    command = [qemu(arch), *_common(arch, kernel, f"panic=-1 loglevel=4 {cmdline}"), *accelerator]
    for disk in disks[:2]:
        kept = "on" if snapshot else "off"
        command += ["-drive", f"file={disk},format=raw,if=virtio,snapshot={kept}"]
    return [*command, "-drive", f"file={disks[2]},format=raw,if=virtio"]


def run(
    command: list[str],
    report: Path,
    console: Path,
    seconds: float,
    news: Callable[[Line], None],
    stop: threading.Event,
) -> Outcome:
    """Start the machine and wait until it is off. ``news`` is called with each line of the guest as it comes."""
    with report.open("wb") as file:
        file.truncate(REPORT_BYTES)
    began, reported = time.monotonic(), 0
    with console.open("wb") as log, subprocess.Popen(
        (*_POLITELY, *command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
    ) as process:  # fmt: skip
        try:
            while True:
                running = process.poll() is None
                lines = parse(report.read_bytes())
                for line in lines[reported:]:
                    news(line)
                reported = len(lines)
                if not running or stop.is_set() or time.monotonic() - began > seconds:
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    trouble = ""
    if not any(line["step"] == "end" for line in lines):
        last = console.read_text(errors="replace").splitlines()[-12:]
        how = "it ended" if not running else f"it was not done after {seconds:.0f} s"
        trouble = f"{how}; its last words: " + " | ".join(line.strip() for line in last if line.strip())
    return Outcome(lines, trouble, time.monotonic() - began)
