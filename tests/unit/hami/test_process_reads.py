"""Causes of a process without a slot: real programs with and without HAMi's library, and mount tables."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.base.errors import ProcessGone
from resolver.base.reasons import BypassReason
from resolver.hami.process_reads import hami_variables, library_causes, mount_causes, reordering
from resolver.linux.procfs import Procfs, usage
from tests.fakes.procs import OURS, mountinfo
from tests.patience import until

NOBODY = 65534
LIBRARY = ("/mnt/x", "/mnt/x/libvgpu.so", "/usr/local/vgpu/libvgpu.so")
PRELOAD = ("/mnt/x", "/mnt/x/ld.so.preload", "/etc/ld.so.preload")
PAUSE = "#include <unistd.h>\nint main(void) { return pause(); }\n"


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    """A directory that every user may enter, with a static and a dynamic program and a library of HAMi's name."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        _compile(directory)
        yield directory


def _compile(directory: Path) -> None:
    (directory / "pause.c").write_text(PAUSE)
    for name, *options in (
        ("static", "-static"),
        ("dynamic",),
        ("libvgpu.so", "-shared", "-fPIC", "-Dmain=other"),
    ):
        command = ["gcc", "-o", str(directory / name), *options, str(directory / "pause.c")]
        subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def started(*command: Path, user: int = 0, **environment: str) -> Iterator[int]:
    """Start a program; yield its PID once it is loaded and sleeps."""
    running = subprocess.Popen(command, env=environment, user=user, stderr=subprocess.DEVNULL)
    try:
        until(lambda: usage(running.pid).state == b"S", "its pause")
        yield running.pid
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize(
    ("program", "preloaded", "user", "causes"),
    [
        ("dynamic", "", 0, [BypassReason.NOT_PRELOADED]),
        ("dynamic", "/nowhere/libvgpu.so", 0, []),
        ("static", "", 0, [BypassReason.STATIC, BypassReason.NOT_PRELOADED]),
        ("static", "libvgpu.so", 0, [BypassReason.STATIC]),
        ("dynamic", "libvgpu.so", 0, [BypassReason.LOADED]),
        ("dynamic", "libvgpu.so", NOBODY, [BypassReason.OTHER_USER]),
    ],
)
def test_a_program_shows_whether_it_has_the_library(
    programs: Path, program: str, preloaded: str, user: int, causes: list[str]
) -> None:
    environment = {"LD_PRELOAD": str(programs / preloaded)} if preloaded else {}
    with started(programs / program, user=user, **environment) as host_pid:
        assert library_causes(Procfs(), host_pid, os.getpid()) == causes


@pytest.mark.parametrize("value", ["true", "false"])
def test_control_that_is_disabled_is_a_cause_of_its_own(programs: Path, value: str) -> None:
    causes = [BypassReason.CONTROL_DISABLED if value == "true" else BypassReason.NOT_PRELOADED]
    with (
        started(programs / "dynamic", CUDA_DISABLE_CONTROL=value) as first,
        started(programs / "dynamic") as later,
    ):
        assert library_causes(Procfs(), first, None) == causes
        assert library_causes(Procfs(), later, first) == causes  # `env -i` changes no mount


def test_variables_are_those_of_the_process_that_is_meant(programs: Path) -> None:
    procfs = Procfs()
    with started(
        programs / "dynamic", GPU_CORE_UTILIZATION_POLICY="force", CUDA_VISIBLE_DEVICES="9" * 5000
    ) as pid:
        began = procfs.start_time(pid)
        assert hami_variables(procfs, pid, began) == ["force", "9" * 1024]
        with pytest.raises(ProcessGone):
            hami_variables(procfs, pid, began - 1)


def test_program_run_by_dynamic_linker_is_not_static(programs: Path) -> None:
    (linker,) = Path("/lib64").glob("ld-linux*")
    with started(linker, programs / "dynamic") as host_pid:
        assert library_causes(Procfs(), host_pid, None) == [BypassReason.NOT_PRELOADED]


BOTH = [LIBRARY, PRELOAD]
LACKED = [BypassReason.PRELOAD_MISSING]
UNUSED = [BypassReason.NOT_LOADED]


@pytest.mark.parametrize(
    ("mounts", "preloaded", "earlier", "causes"),
    [
        ([], "", [BypassReason.STATIC], [BypassReason.NOT_MOUNTED]),
        ([PRELOAD], "", [], [BypassReason.NOT_MOUNTED]),
        ([OURS], "", [BypassReason.NOT_PRELOADED], [BypassReason.NOT_PRELOADED]),
        ([LIBRARY], "", [BypassReason.STATIC], [BypassReason.STATIC]),
        ([LIBRARY], "", [], UNUSED),
        (BOTH, "", [BypassReason.NOT_PRELOADED], UNUSED),
        (BOTH, "", [BypassReason.STATIC, BypassReason.NOT_PRELOADED], [BypassReason.STATIC]),
        (BOTH, "/usr/local/vgpu/libvgpu.so", [], LACKED),
        (BOTH, "/lib/other.so /usr/local/vgpu/libvgpu.so\n", [], LACKED),
        (BOTH, "/opt/vgpu/libvgpu.so", [], UNUSED),  # the library is listed
        (BOTH, "/link/vgpu/libvgpu.so", [], UNUSED),  # a link may lead to the library
        (BOTH, "/lib/other.so", [], UNUSED),
    ],
)
def test_mounts_and_preload_tell_if_library_is_there(
    tmp_path: Path, mounts: list[tuple[str, str, str]], preloaded: str, earlier: list[str], causes: list[str]
) -> None:
    inside = tmp_path / "100/root"
    for directory in ("etc", "opt/vgpu", "usr/local"):
        (inside / directory).mkdir(parents=True)
    (tmp_path / "100/task").mkdir()
    (tmp_path / "100/mountinfo").write_text(mountinfo(*mounts))
    if preloaded:
        (inside / "etc/ld.so.preload").write_text(preloaded)
    (inside / "opt/vgpu/libvgpu.so").touch()
    (inside / "link").symlink_to("/opt")
    assert mount_causes(Procfs(str(tmp_path)), 100, earlier) == causes


@pytest.mark.parametrize(
    ("visible", "reordered"),
    [("1", True), ("2,3", True), ("0, 2", True), ("GPU-c,GPU-a", True), ("", False), ("0,1", False), ("GPU-a", False),
     ("-1", False), ("7,1", False), ("GPU-", False), ("x", False)],
)  # fmt: skip
def test_order_of_cuda_visible_devices_is_a_cause(visible: str, *, reordered: bool) -> None:
    assert bool(reordering(visible, ("GPU-a", "GPU-b", "GPU-c", "GPU-d"))) is reordered
