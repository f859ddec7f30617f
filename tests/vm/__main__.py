"""`make kernels`: boots kernels of distributions under QEMU and tries `resolver` on each.

    make kernels                                      the whole matrix (an hour on two cores without KVM)
    make kernels ARGS="--loader 6.1 6.12"             does the BPF program load there, and is its map right
    make kernels ARGS="--package linux-image-X.deb"   any other kernel (Ubuntu's: linux-modules-X.deb beside it)
    make kernels ARGS="--variant lockdown 6.12"       see tests/vm/variants.py, which says how to add one

Kernels are named as in tests/vm/matrix.py. Results go into docs/kernels.json and docs/compatibility.md; with --check
nothing is written. Downloads and file systems are kept in $XDG_CACHE_HOME/resolver-kernels.

Exit status: 0 if all is as it has to be, 1 if something is not, 2 if this machine lacks something (which is said).
"""

import argparse
import datetime as dt
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tests.vm import machine, report
from tests.vm.kernel import Kernel, kernel_of
from tests.vm.matrix import FLAVOURS, KERNELS, USERSPACES, Guest, plan
from tests.vm.packages import DEBIAN_ARCH, SUITES, Apt, Unavailable, configured_mirrors, kernel_packages
from tests.vm.report import PLAIN, STEPS, Expected, Line, Row
from tests.vm.rootfs import checkout_image, root_image, unpack_deb
from tests.vm.variants import VARIANTS

#: Time limits of the host. The guest has others: its clock is slow on a busy host.
_SECONDS: Final = {"loader": 600, "auto": 600, "doctor": 900, "demo": 1800, "containers": 3600}


class Ready(NamedTuple):
    guest: Guest
    kernel: Kernel
    root: Path
    suite: str


def steps_of(options: argparse.Namespace) -> tuple[str, ...]:
    if options.loader:
        return ("loader",)
    # Under a variant probes may be forbidden, and their tests would fail.
    return ("auto", "doctor", "demo", *VARIANTS[options.variant].steps) if options.variant else PLAIN


class Workshop:
    """Prepare guests, boot them, and print the progress."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._cache = Path(base) / "resolver-kernels"
        self._cache.mkdir(parents=True, exist_ok=True)
        self._archives = configured_mirrors()
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._kvm: dict[str, bool] = {}
        self.stop = threading.Event()  # set, every guest is switched off at once

    def say(self, text: str) -> None:
        with self._lock:
            print(f"kernels: {time.monotonic() - self._began:5.0f} s  {text}", file=sys.stderr, flush=True)

    def prepare(self, guest: Guest) -> Ready:
        """Download and build the guest's missing files. Raises `Unavailable` and `machine.Missing`."""
        machine.qemu(guest.arch)
        variant = VARIANTS[guest.variant]
        own = Apt(self._cache, SUITES[guest.userspace], guest.arch, self._archives)
        own.update()
        kernel = self.kernel(guest.pick, guest.arch, variant.modules)
        root = root_image(self._cache, own, guest.userspace, guest.arch, variant.packages, self.say)
        if guest.arch not in self._kvm:
            self._kvm[guest.arch] = self.kvm_works(kernel, guest.arch)
            how = (
                "by KVM" if self._kvm[guest.arch] else "by emulation: KVM is not there or does not start them"
            )
            self.say(f"{guest.arch} kernels run {how}")
        return Ready(guest, kernel, root, KERNELS.get(guest.pick, ""))

    def kernel(self, pick: str, arch: str, modules: tuple[str, ...] = ()) -> Kernel:
        """Fetch a kernel by its name in `KERNELS`, or take it from packages. Raises `Unavailable`."""
        if suite := KERNELS.get(pick, ""):
            apt = Apt(self._cache, SUITES[suite], arch, self._archives)
            apt.update()
            flavour = FLAVOURS.get(pick, ("", ""))[1]
            wanted = kernel_packages(apt.wanted(f"linux-image-{DEBIAN_ARCH[arch]}{flavour}"))
            size = sum(package.size for package in wanted) >> 20
            self.say(f"{pick} {arch}: {wanted[0].file if wanted else 'no kernel'} ({size} MiB)")
            debs = apt.fetch(wanted)
        else:
            debs = [Path(file) for file in pick.split(",")]
            for deb in debs:
                if not deb.exists():
                    raise Unavailable(f"{deb} is not there")
        return kernel_of(debs, self._cache, self._busybox(arch), modules)

    def kvm_works(self, kernel: Kernel, arch: str) -> bool:
        """Try KVM once per boot of this machine, because a failure takes 15 s."""
        boot, note = Path("/proc/sys/kernel/random/boot_id").read_text(), self._cache / f"kvm-{arch}"
        known = {f"{boot}works": True, f"{boot}fails": False}
        said = note.read_text() if note.exists() else ""
        if said not in known:
            works = machine.kvm_works(kernel, arch)
            note.write_text(said := f"{boot}{'works' if works else 'fails'}")
        return known[said]

    def _busybox(self, arch: str) -> Path:
        """Return a static busybox for the initial RAM disk, always of one release, so that kernels stay cached."""
        apt = Apt(self._cache, SUITES["trixie"], arch, self._archives)
        apt.update()
        (deb,) = apt.fetch([each for each in apt.wanted("busybox-static") if each.name == "busybox-static"])
        place = self._cache / f"busybox-{deb.stem}"
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=self._cache) as scratch:
                unpack_deb(deb, Path(scratch))
                next(each for each in Path(scratch).rglob("busybox") if each.parent.name == "bin").rename(
                    place
                )
        return place

    def boot(self, ready: Ready, checkout: Path, place: Path) -> Row:
        guest, variant = ready.guest, VARIANTS[ready.guest.variant]
        kvm = self._kvm[guest.arch]
        forks = self._options.forks
        cmdline = (
            f"resolver.steps={','.join(steps_of(self._options))} resolver.forks={forks} {variant.cmdline}"
        )
        if variant.script:
            cmdline += f" resolver.script={variant.script}"
        name = "-".join(
            filter(None, (Path(guest.pick.split(",")[0]).name, guest.arch, guest.userspace, guest.variant))
        )
        disk, console = place / f"{name}.report", self._cache / f"console-{name}.log"
        command = machine.command_line(
            guest.arch, ready.kernel, (ready.root, checkout, disk), kvm=kvm, cmdline=cmdline
        )
        self.say(f"{guest}: boots {ready.kernel.release}")
        seconds = 300 + sum(_SECONDS[step] for step in steps_of(self._options)) + forks / 50
        outcome = machine.run(
            command, disk, console, seconds, lambda line: self._news(guest, line), self.stop
        )
        disk.unlink()
        about = {
            "pick": guest.pick if ready.suite else ready.kernel.release,
            "kernel": ready.kernel.release,
            "version": ready.kernel.version,
            "suite": f"Debian {ready.suite}" if ready.suite else Path(guest.pick.split(",")[0]).name,
            "arch": guest.arch,
            "userspace": USERSPACES[guest.userspace],
            "accelerator": "kvm" if kvm else "tcg",
            "seen": dt.datetime.now(dt.UTC).date().isoformat(),
        }
        if guest.variant:
            about["under"] = guest.variant
        trouble = "" if self.stop.is_set() else outcome.trouble  # results until then still count
        row = report.make_row(about, outcome.lines, trouble)
        self.say(f"{guest}: done after {outcome.seconds:.0f} s")
        if not self._options.check:
            with self._lock:  # at once: an early end keeps the results
                report.publish([row])
        return row

    def _news(self, guest: Guest, line: Line) -> None:
        step = line["step"]
        if step in STEPS or step == "variant":
            took = f" ({line['seconds']} s)" if "seconds" in line else ""
            word = line.get("source") or ("ok" if line.get("ok") else "failed")
            why = f": {line['why']}" if line.get("why") else ""
            self.say(f"{guest}: {step}: {word}{why}{took}")
            if not line.get("ok"):
                self.say(str(line.get("detail") or line.get("said")))


def wish_of(row: Row) -> Expected:
    variant, plain = VARIANTS[row.get("under", "")], report.expected(row["kernel"])
    return Expected(
        plain.loads if variant.loads is None else variant.loads,
        plain.source if variant.source is None else variant.source,
        variant.why,
        variant.told,
    )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="make kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("kernels", nargs="*", metavar="KERNEL", choices=[*KERNELS, []], help=f"of {', '.join(KERNELS)} (all)")
    package = "boot the kernel in these packages: linux-image, and where they are apart linux-modules"
    add("--package", action="append", nargs="+", default=[], metavar="FILE.deb", help=package)
    add("--loader", action="store_true", help="only load the BPF program and compare its map")
    add("--forks", type=int, default=3000, help="during which the map is compared (%(default)s)")
    add("--arch", choices=list(DEBIAN_ARCH), help="this kind of machine only")
    add("--variant", default="", choices=list(VARIANTS), help="other conditions: see tests/vm/variants.py")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="so many guests at once (%(default)s)")
    add("--check", action="store_true", help="write neither docs/kernels.json nor the table")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an orderly end: no guest stays behind
    try:
        shop = Workshop(options)
        rows, failed = _all(shop, options)
    except (Unavailable, machine.Missing) as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 2
    print(*report.table(sorted(rows, key=report.order)), sep="\n")
    wrong = 0
    for row in rows:
        found = report.problems(row, steps_of(options), wish_of(row))
        wrong += bool(found)
        for sentence in found:
            print(f"FAILED {row['pick']} {row['arch']} {row['userspace']}: {sentence}")
    for sentence in failed:
        print(f"FAILED {sentence}")
    print(f"=== kernels: {len(rows) - wrong} passed, {wrong + len(failed)} failed ===")
    return 1 if wrong or failed else 0


def _all(shop: Workshop, options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Return the guests' rows, and a reason for each guest without one."""
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="resolver-kernels-") as scratch, ThreadPoolExecutor(
        max(1, options.jobs)
    ) as pool:  # fmt: skip
        place = Path(scratch)
        try:
            started = []
            for guest in plan(options):
                try:
                    ready = shop.prepare(guest)
                    checkout = checkout_image(place, ready.root, guest.arch, programs=not options.loader)
                except Unavailable as error:
                    shop.say(f"{guest}: {error}")
                    failed.append(f"{guest}: {error}")
                    continue
                started.append(pool.submit(shop.boot, ready, checkout, place))
            return [each.result() for each in started], failed
        except BaseException:
            shop.stop.set()
            pool.shutdown(cancel_futures=True)
            raise


if __name__ == "__main__":
    sys.exit(main())
