"""Builds the C parts of the miniature node; the result is cached by the hash of the sources.

`build()` gives the directory that holds

- `nvml-550/`, `nvml-510/`, `nvml-470/`: one `libnvidia-ml.so.1` each, with the symbols that a driver of at
  least that series exports (470 has no `_v3` process list, 510 no `nvmlDeviceGetProcessesUtilizationInfo`);
- `cuda/libcuda.so.1`: the few calls of CUDA's driver API that the tenant makes on a real GPU, over the same driver;
- `tenant`: the process that uses HAMi's cache protocol;
- `container-init`: the first process of a container;
- `hostile`: a tenant that causes the daemon and other tenants high costs.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tests.fakes.layouts import TABLE
from tests.fakes.regions import LAYOUTS, Layout
from tests.programs import completed

HERE: Final = Path(__file__).resolve().parent
FLAGS: Final = ("-O2", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread")
NVML_SERIES: Final = (550, 510, 470)
TENANT_SOURCES: Final = ("tenant.c", "region.c", "broker.c", "driver.c", "cuda.c", "watcher.c", "mover.c")

_UNUSED_BY_TENANT: Final = ("name", "sm_init_flag", "sm_util")


class BuildError(RuntimeError):
    """The C parts cannot be built: no compiler, or the compiler's complaint."""


def cache() -> Path:
    """Return the directory of build results: outside the source tree, private to this user."""
    base = os.environ.get("XDG_CACHE_HOME")
    return ((Path(base) if base else Path.home() / ".cache") / "resolver-fakes").resolve()


def build() -> Path:
    """Compile the C parts if their sources changed; return the absolute path of the results.

    Raises BuildError without a C compiler, and after any error or warning.
    """
    base = cache()
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"cannot make {base} ({error.strerror}): set XDG_CACHE_HOME to a directory of yours"
        ) from None
    result = base / _source_hash()
    with (base / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two test runs, the second waits and uses the first one's result
        if not result.is_dir():
            _drop_old(base)
            scratch = Path(tempfile.mkdtemp(dir=base))
            try:
                _compile_all(scratch)
                scratch.chmod(0o755)
                scratch.rename(result)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return result


def library_dir(built: Path, driver_version: str) -> Path:
    """Return the directory in ``built`` with the `libnvidia-ml.so.1` of this driver version."""
    major = int(driver_version.split(".", 1)[0])
    for series in NVML_SERIES:
        if major >= series:
            return built / f"nvml-{series}"
    raise ValueError(f"driver {driver_version} is older than the oldest stand-in ({NVML_SERIES[-1]})")


def _source_hash() -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in [*sorted(p for p in HERE.rglob("*") if p.suffix in (".c", ".h")), Path(__file__)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(TABLE.read_bytes())
    return digest.hexdigest()[:16]


def _drop_old(base: Path) -> None:
    yesterday = time.time() - 86400  # another checkout's tests may use younger ones
    for old in base.iterdir():
        if old.is_dir() and old.stat().st_mtime < yesterday:
            shutil.rmtree(old, ignore_errors=True)


def _compile_all(out: Path) -> None:
    for series in NVML_SERIES:
        directory = out / f"nvml-{series}"
        directory.mkdir()
        library = directory / "libnvidia-ml.so.1"
        shared = (
            "-shared",
            "-fPIC",
            "-fvisibility=hidden",
            "-Wl,-soname,libnvidia-ml.so.1",
            f"-DNVML_SINCE={series}",
        )
        compile_c(*shared, "-o", str(library), str(HERE / "nvml" / "nvml.c"))
    (out / "cuda").mkdir()
    cuda = ("-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1")
    compile_c(*cuda, "-o", str(out / "cuda" / "libcuda.so.1"), str(HERE / "nvml" / "cuda.c"))
    (out / "layouts.h").write_text("".join(map(_initializer, LAYOUTS.values())))
    tenant = [str(HERE / "tenant" / name) for name in TENANT_SOURCES]
    compile_c(f"-I{out}", "-o", str(out / "tenant"), *tenant, "-ldl")
    compile_c("-o", str(out / "container-init"), str(HERE / "container_init.c"))
    compile_c("-o", str(out / "hostile"), str(HERE / "hostile" / "hostile.c"))


def _initializer(layout: Layout) -> str:
    """Return a row of the tenant's table, a ``struct layout`` in C."""
    offsets = {key: value for key, value in asdict(layout).items() if key not in _UNUSED_BY_TENANT}
    fields = (f".{key} = {'ABSENT' if value is None else value}" for key, value in offsets.items())
    return f'{{.name = "{layout.name}", {", ".join(fields)}}},\n'


def compile_c(*arguments: str) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BuildError(
            "no C compiler: `cc` is not on PATH. Run `make setup` as root, or install gcc and libc6-dev."
        )
    done = completed(compiler, *FLAGS, *arguments)
    if done.returncode != 0:
        raise BuildError(f"{compiler} failed ({done.returncode}) on {arguments[-1]}:\n{done.stderr}")
