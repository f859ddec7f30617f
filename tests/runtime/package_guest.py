"""In the machine of `make package-check`: install, ask, restart, upgrade, reboot, purge. Standard library only.

Lines of JSON go to the raw disk /dev/vdc, as in tests/vm/guest.py.
"""

import json
import os
import re
import stat
import subprocess
import time
from pathlib import Path

MEDIA = "/resolver"
REBOOTED = Path("/var/tmp/package-check")  # noqa: S108 - inside a virtual machine
BEFORE = Path("/var/tmp/package-check.before")  # noqa: S108
SOCKET = "/run/resolver/resolver.sock"
#: Changed by any installation of any package: notes of dpkg, ldconfig and systemd, backups, logs.
_NOISE = re.compile(
    r"/(var/(lib/dpkg|log|cache|lib/apt|lib/systemd|tmp)|tmp|run|proc|sys|dev|resolver)(/.*)?"
    r"|/etc/(group|gshadow|passwd|shadow|subuid|subgid)-?|/etc/\.pwd\.lock|/etc/systemd/system(/multi-user\.target\.wants)?"
    r"|.*/__pycache__(/.*)?|/etc/ld\.so\.cache|/lost\+found|/root/.*|/var/spool(/.*)?|/etc/(mtab|resolv\.conf)"
)
_PATIENCE_S = 900


class Report:
    """The raw disk that the host reads, empty at each boot."""

    def __init__(self) -> None:
        self._fd = os.open("/dev/vdc", os.O_WRONLY | os.O_SYNC)

    def line(self, step: str, **fields: object) -> None:
        os.write(self._fd, json.dumps({"step": step, **fields}).encode() + b"\n")


class Wrong(Exception):
    pass


def run(*command: str, ok: bool = True) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ok and done.returncode != 0:
        raise Wrong(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-1500:]}")
    return done.stdout.strip()


def until(answer: str, *command: str) -> str:
    ends = time.monotonic() + _PATIENCE_S
    while not (said := run(*command, ok=False)).startswith(answer):
        if time.monotonic() > ends:
            log = run("journalctl", "--no-pager", "-n", "30", "-u", "resolver", ok=False)
            raise Wrong(f"{' '.join(command)} said {said[-500:]!r}, not {answer!r}\n{log[-1500:]}")
        time.sleep(1)
    return said


def shown(name: str) -> str:
    return run("systemctl", "show", "--property", name, "--value", "resolver")


def serves(version: str = "") -> None:
    """Assert that only root and a member of the group are answered."""
    until("active", "systemctl", "is-active", "resolver")
    status = json.loads(until("{", "resolver", "status", "--json"))
    if version and status["version"] != version:
        raise Wrong(f"the daemon is {status['version']}, not {version}")
    member = ("setpriv", "--reuid=4000", "--regid=4000")
    until("{", *member, "--groups=resolver", "resolver", "status", "--json")
    said = run(*member, "--clear-groups", "resolver", "status", "--json", ok=False)
    if said.startswith("{"):
        raise Wrong("a stranger is answered")
    owner = run("stat", "--format=%U %G %a", SOCKET)
    if owner != "root resolver 660":
        raise Wrong(f"the socket is {owner}")
    if not shown("StatusText").startswith("source "):
        raise Wrong(f"systemd was told {shown('StatusText')!r}")


def files() -> dict[str, str]:
    """Return ``{path: mode, owner, size and time}`` of everything that counts."""
    found = {}
    for directory, names, leaves in os.walk("/"):
        names[:] = [name for name in names if not _NOISE.fullmatch(os.path.join(directory, name))]
        for name in (*names, *leaves):
            path = os.path.join(directory, name)
            if _NOISE.fullmatch(path):
                continue
            info = os.lstat(path)
            plain = f" {info.st_size} {info.st_mtime_ns}" if stat.S_ISREG(info.st_mode) else ""
            found[path] = f"{info.st_mode:o} {info.st_uid} {info.st_gid}{plain}"
    return found


def install() -> None:
    BEFORE.write_text(json.dumps(files()))
    run("dpkg", "-i", f"{MEDIA}/old.deb")
    said = run("systemd-analyze", "verify", "--man=no", "/usr/lib/systemd/system/resolver.service")
    newer = int(run("systemctl", "--version").split()[1]) >= 254
    if said and newer:
        raise Wrong(said)


def ask() -> None:
    serves("0.0.1")
    run("resolver", "bundle", "--redact", "-o", "/root/bundle.tar.gz")


def restart() -> None:
    run("systemctl", "restart", "resolver")
    serves()


def upgrade() -> None:
    run("dpkg", "-i", f"{MEDIA}/new.deb")
    serves(run("resolver", "--version").split()[1])
    version = run("dpkg-deb", "--field", f"{MEDIA}/new.deb", "Version")
    if run("dpkg-query", "--show", "--showformat=${Version}", "hami-resolver") != version:
        raise Wrong("not upgraded")


def back_off() -> None:
    """A daemon that ends with 4 at each start is started ever more rarely, where systemd can."""
    if int(run("systemctl", "--version").split()[1]) < 254:
        return
    drop_in = Path("/run/systemd/system/resolver.service.d/fails.conf")
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("[Service]\nType=simple\nExecStart=\nExecStart=/bin/sh -c 'exit 4'\n")
    run("systemctl", "daemon-reload")
    run("systemctl", "restart", "resolver")
    ends = time.monotonic() + _PATIENCE_S
    while shown("RestartUSecNext") in ("0", "2s") or int(shown("NRestarts")) < 2:
        if time.monotonic() > ends:
            raise Wrong(
                f"after {shown('NRestarts')} restarts the next comes after {shown('RestartUSecNext')}"
            )
        time.sleep(1)
    drop_in.unlink()
    run("systemctl", "daemon-reload")
    run("systemctl", "restart", "resolver")


def purge() -> None:
    run("dpkg", "--purge", "hami-resolver")
    before, after = json.loads(BEFORE.read_text()), files()
    BEFORE.unlink()
    left = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    if left or os.path.exists("/run/resolver"):
        raise Wrong(f"not as before: {sorted(left)[:30]} {os.path.exists('/run/resolver')}")
    if run("getent", "group", "resolver", ok=False):
        raise Wrong("the group is left")


def main() -> None:
    report = Report()
    first = not REBOOTED.exists()
    steps = (install, ask, restart, upgrade, back_off) if first else (serves, purge)
    for step in steps:
        began = time.monotonic()
        try:
            step()
            report.line(step.__name__, ok=True, seconds=round(time.monotonic() - began))
        except (Wrong, OSError, ValueError) as error:
            report.line(step.__name__, ok=False, said=f"{type(error).__name__}: {error}")
            first = first and step is not install  # nothing else would be right
            if step is install:
                break
    report.line("reboot" if first else "end")
    REBOOTED.touch()
    subprocess.run(["systemctl", "--no-block", "reboot" if first else "poweroff"], check=False)


if __name__ == "__main__":
    main()
