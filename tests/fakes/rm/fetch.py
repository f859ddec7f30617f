"""NVIDIA's own libnvidia-ml, fetched from Debian's non-free component, beside the simulated resource manager.

Nothing is installed, and nothing of it may be passed on: it stays in this user's cache. `libraries` gives directories
for LD_LIBRARY_PATH whose ``libnvidia-ml.so.1`` answers from the GPU stand-in's state, as the stand-in's own does.
"""

import re
import subprocess
from pathlib import Path
from typing import Final

from tests.fakes import build
from tests.programs import completed
from tests.vm.packages import Apt, Suite, configured_mirrors

HERE: Final = Path(__file__).resolve().parent
#: The driver's release, by the Debian release and the package that has it.
RELEASES: Final = {
    "470.256.02": ("bookworm", "libnvidia-tesla-470-ml1"),
    "535.261.03": ("bookworm", "libnvidia-ml1"),
    "550.163.01": ("trixie", "libnvidia-ml1"),
}
#: Those that the resource manager gives samples to.
USABLE: Final = tuple(RELEASES)[1:]
#: Loads NVIDIA's library in the scope of the resource manager, and sends each call on to it.
_LOADER: Final = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

void *table[%(count)d];
static const char *const names[] = {%(names)s};

__attribute__((constructor)) static void load(void)
{
    void *library = dlopen("%(directory)s/librm.so", RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (!library) {
        fprintf(stderr, "%%s\\n", dlerror());
        abort();
    }
    for (int i = 0; i < %(count)d; i++)
        table[i] = dlsym(library, names[i]);
}
"""
_CALL: Final = """__asm__(".globl {0}\\n.type {0}, @function\\n{0}: jmp *table+{1}(%rip)");\n"""


def library(version: str) -> Path:
    """Return the directory of a release's library, made if it is not there. Raises `Unavailable`."""
    original = _original(build.cache() / "nvidia", version)
    made = build.build() / f"rm-{version}"
    if not (made / "libnvidia-ml.so.1").exists():
        made.mkdir(exist_ok=True)
        _link(original, made)
    return made


def _original(base: Path, version: str) -> Path:
    """Return NVIDIA's file, taken out of its Debian package."""
    file = base / version / f"libnvidia-ml.so.{version}"
    if not file.exists():
        suite, name = RELEASES[version]
        apt = Apt(base, Suite(suite), "x86_64", configured_mirrors(), component="non-free")
        apt.update()
        (deb,) = apt.fetch([apt.alone(name)])
        file.parent.mkdir(parents=True, exist_ok=True)
        listed = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], capture_output=True, check=True).stdout
        subprocess.run(
            ["tar", "-x", "-C", file.parent, "--transform=s,.*/,,", "--wildcards", f"*/{file.name}"],
            input=listed,
            check=True,
        )
    return file


def _link(original: Path, made: Path) -> None:
    symbols = completed("readelf", "--dyn-syms", "--wide", original, check=True).stdout
    names = sorted(set(re.findall(r"FUNC +GLOBAL +DEFAULT +\d+ (nvml\w+)", symbols)))
    quoted = ", ".join(f'"{name}"' for name in names)
    loader = made / "loader.c"
    calls = "".join(_CALL.format(name, 8 * index) for index, name in enumerate(names))
    loader.write_text(_LOADER % {"count": len(names), "names": quoted, "directory": made} + calls)
    # The resource manager needs NVIDIA's file by path; the loader uses the other name.
    named = made / "named.so"
    shared = ("-shared", "-fPIC", "-fvisibility=hidden", "-O1")
    build.compile_c(*shared, f"-Wl,-soname,{original}", "-o", str(named), "-x", "c", "/dev/null")
    needed = ("-Wl,--no-as-needed", str(named), "-ldl")
    build.compile_c(*shared, "-o", str(made / "librm.so"), str(HERE / "rm.c"), *needed)
    build.compile_c(
        *shared, "-Wl,-soname,libnvidia-ml.so.1", "-o", str(made / "libnvidia-ml.so.1"), str(loader), "-ldl"
    )
