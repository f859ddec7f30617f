"""Run a command on a machine full of obstacles that tests must not depend on: `make poisoned`.

    python -m tests.poisoned make test

A dead socket and foreign cache files in the default places, a live daemon that repairs them and has port 9395, another
program on port 9396, 30 foreign containers with 3,000 processes, a process that not even root can read, settings in
the environment, a home with broken settings, and a monotonic clock as after a boot. All of it ends with the command:
files lie in file systems of this process's own, and processes die with it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.bench.crowd import crowd, make_regions
from tests.isolation import PLACES, POISONED, empty, mount, own_mounts

CONTAINERS: Final = 30
PROCESSES: Final = 100  # in each
_BOUND: Final = ("setpriv", "--pdeathsig", "KILL")


@contextlib.contextmanager
def default_places() -> Iterator[None]:
    """Each of the default places, writable, and gone with this process; where there is none, a directory until then."""
    made = []
    for place in PLACES:
        if not os.path.isdir(place):
            os.makedirs(place)  # its parents stay: they are every machine's
            os.setxattr(place, POISONED, b"")
            made.append(place)
        empty(place)
    try:
        yield
    finally:
        for place in made:
            subprocess.run(["umount", "--lazy", place], check=False)
            with contextlib.suppress(OSError):
                os.rmdir(place)


def is_taken(port: int) -> bool:
    """Tell if another program of this machine has this port; that serves as well."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return True
    return False


@contextlib.contextmanager
def foreign_daemon() -> Iterator[str]:
    """Run a daemon with default settings; yield its socket. The default socket is a dead daemon's."""
    directory = Path("/run/resolver")
    path = str(directory / "live.sock")
    command = [*_BOUND, sys.executable, "-m", "resolver", "run", "--socket", path]
    command += ["--metrics-addr", "off"] if is_taken(9395) else []
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stderr=log) as daemon:
        while not os.path.exists(path):
            if daemon.poll() is not None:
                log.seek(0)
                sys.exit(f"poisoned: the foreign daemon did not start: {log.read().decode()}")
            time.sleep(0.05)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(directory / "resolver.sock"))
        try:
            yield path
        finally:
            daemon.terminate()


@contextlib.contextmanager
def unreadable_process() -> Iterator[None]:
    """Start a process whose namespaces root can't read, because another user's FUSE covers them."""
    if any(map(is_closed, filter(str.isdecimal, os.listdir("/proc")))):
        yield
        return
    with subprocess.Popen([*_BOUND, "sleep", "infinity"]) as process:
        fuse = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={fuse},rootmode=40000,user_id=65534,group_id=65534"
        mount("none", f"/proc/{process.pid}/ns", "fuse", data=options)
        try:
            yield
        finally:
            process.kill()
            os.close(fuse)


def is_closed(host_pid: str) -> bool:
    try:
        os.readlink(f"/proc/{host_pid}/ns/pid")
    except PermissionError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def broken_home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="poisoned-") as home:
        shells = (".zshrc", ".bashrc", ".profile", ".tmux.conf", ".config/fish/config.fish")
        for name in (*shells, ".kube/config"):
            path = Path(home, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("exit 3 ) }\n")
        yield home


def just_booted(command: list[str]) -> list[str]:
    """The command with a monotonic clock that is no later than a minute after a boot; only a time namespace sets it."""
    later = max(0, int(time.monotonic()) - 60)
    return ["unshare", "--time", "--fork", "--kill-child=TERM", f"--monotonic=-{later}", "--", *command]


def main() -> int:
    if os.geteuid() != 0:
        sys.exit("poisoned: this makes mounts and namespaces and needs root: sudo make poisoned")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # before the command runs
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    pip = os.environ.get("PIP_CONFIG_FILE") or str(Path.home() / ".config/pip/pip.conf")
    own_mounts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(default_places())
        directory = Path("/usr/local/vgpu/containers")
        make_regions(directory, CONTAINERS, PROCESSES)
        stack.enter_context(crowd(CONTAINERS, PROCESSES, directory))
        live = stack.enter_context(foreign_daemon())
        stack.enter_context(unreadable_process())
        if not is_taken(9396):
            stack.enter_context(socket.create_server(("", 9396)))
        home = stack.enter_context(broken_home())
        settings = {"RESOLVER_SOCKET": live, "RESOLVER_INTERVAL": "never", "NODE_NAME": "poisoned"}
        settings |= {"HOME": home, "XDG_CACHE_HOME": cache, "TZ": "Asia/Kathmandu", "LC_ALL": "tr_TR.UTF-8"}
        settings |= {"PYTHONWARNINGS": "error", "GIT_DIR": "/nowhere", "http_proxy": "http://127.0.0.1:9"}
        if os.path.exists(pip):
            settings["PIP_CONFIG_FILE"] = pip
        with subprocess.Popen(just_booted(sys.argv[1:]), env=os.environ | settings) as command:
            signal.signal(signal.SIGTERM, lambda *_: command.terminate())
            while True:
                try:
                    return command.wait()
                except KeyboardInterrupt:
                    continue  # the command has had it too, and ends by itself


if __name__ == "__main__":
    sys.exit(main())
