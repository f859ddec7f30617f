"""A machine of the tests' own: none of this one's default places, settings and secrets is in their way.

`isolate` is called before anything is collected. It gives pytest and every child a mount namespace in which each of the
product's default places is empty, one host name, umask, language, time zone and search path for all machines, and no
variable that the product or its tools would read. It can't hide other processes, since the kernel's map has all of
them: a test counts its own, or asks for the machine (`alone`).
"""

import atexit
import ctypes
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Final

#: Directories of the product, HAMi, kubelet and the journal, hidden from tests.
PLACES: Final = (
    *("/run/resolver", "/run/hami", "/run/log/journal", "/usr/local/vgpu", "/usr/local/hostpid"),
    *("/tmp/vgpu", "/var/lib/hami", "/var/lib/kubelet", "/var/log/pods"),  # noqa: S108
    *("/var/log/containers", "/var/log/journal"),
)
#: Beginnings of variables that the product, the stand-ins and the tools would go by.
VARIABLES: Final = (
    *("RESOLVER_", "KUBE", "NODE_NAME", "NVIDIA_", "NVML_", "CUDA_", "LD_", "NOTIFY_SOCKET", "WATCHDOG_"),
    *("LISTEN_", "XDG_", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "DOCKER_", "CONTAINER_HOST"),
    *("LANG", "LC_", "TZ", "TERM", "PYTHON", "GIT_", "MAKE", "MFLAGS"),
)
#: The same on every machine.
SET: Final = {"LANG": "C.UTF-8", "TZ": "UTC0"}
HOST: Final = "machine-of-the-tests"
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Attribute of directories that `make poisoned` has made, of another checkout perhaps, for as long as it runs.
POISONED: Final = "trusted.resolver-poisoned"
_MARK: Final = "TESTS_ARE_ISOLATED"
_OWN, _PRIVATE = 0x20000 | 0x4000000, 1 << 14 | 1 << 18  # CLONE_NEWNS | CLONE_NEWUTS; MS_REC | MS_PRIVATE
_BIND = 1 << 12 | 1 << 14  # MS_BIND | MS_REC
_ROOT: Final = Path(__file__).resolve().parents[1]
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def isolate() -> None:
    """Put this process and its children onto a machine of their own; a worker inherits that of its starter."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    pip = Path.home() / ".config/pip/pip.conf"  # where this machine's packages come from
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        del os.environ[name]
    os.environ |= SET | {"XDG_CACHE_HOME": cache}
    time.tzset()
    if _MARK in os.environ:
        return
    os.environ["PATH"] = ":".join(filter(None, (os.environ.get("PATH"), _PATH)))  # root's may lack sbin
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost,resolver")))
    os.umask(0o022)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:  # as in a job that a shell runs in the background
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    home = tempfile.mkdtemp(prefix="resolver-home-")
    atexit.register(_remove, home, os.getpid())
    os.environ.update({"HOME": home, _MARK: "1"})
    if pip.exists():
        os.environ.setdefault("PIP_CONFIG_FILE", str(pip))
    if os.geteuid() == 0:
        own_mounts()
        for place in PLACES:
            if os.path.isdir(place):
                empty(place)
        for directory in reversed((_ROOT, *_ROOT.parents)):
            if directory.stat().st_mode & 0o5 != 0o5:
                _open_to_all(directory)
        os.chdir(os.getcwd())  # enter the new mount


def own_mounts() -> None:
    """Take own mounts and an own host name, so that later mounts show in no other process."""
    _must(_LIBC.unshare(_OWN), "a mount namespace of the tests' own")
    mount("none", "/", flags=_PRIVATE)
    _must(_LIBC.sethostname(HOST.encode(), len(HOST)), "a host name of the tests' own")


def empty(place: str) -> None:
    mount("tmpfs", place, "tmpfs", data="mode=755")


def _open_to_all(directory: Path) -> None:
    """Let other users into a closed directory, such as root's home: tests start programs as they would.

    Its entries are mounted below a directory with the same path; the directory itself is not changed.
    """
    closed = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    empty(str(directory))
    for name in os.listdir(f"/proc/self/fd/{closed}"):
        source, place = Path(f"/proc/self/fd/{closed}/{name}"), directory / name
        if source.is_symlink():
            place.symlink_to(source.readlink())
            continue
        place.mkdir() if source.is_dir() else place.touch()
        mount(str(source), str(place), flags=_BIND)
    os.close(closed)


def mount(source: str, place: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Mount a file system; `OSError` names the place where that failed."""
    words = (os.fsencode(word) for word in (source, place, kind))
    _must(_LIBC.mount(*words, ctypes.c_ulong(flags), os.fsencode(data)), f"a mount at {place}")


def absent() -> set[str]:
    """Places that this machine doesn't have: a test that makes one writes where it must not."""
    return {place for place in PLACES if not _exists(place)}


def _exists(place: str) -> bool:
    try:
        return POISONED not in os.listxattr(place, follow_symlinks=False)
    except FileNotFoundError:
        return False


def _must(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _remove(home: str, maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(home, ignore_errors=True)
