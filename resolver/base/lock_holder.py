"""The daemon that holds a run directory's lock, and the package's unit, seen from outside."""

import os

from resolver.base.text import printable

#: The Debian package's unit.
UNIT = "/usr/lib/systemd/system/resolver.service"
#: The file in its `EnvironmentFile=`.
UNIT_SETTINGS = "/etc/default/resolver"
_JOURNAL_SECONDS = 5.0


# A line: '1: FLOCK  ADVISORY  WRITE 48213 fd:01:1311072 0 EOF'
def lock_holder(run_dir: str) -> int | None:
    """Return the host PID of the daemon that holds the lock, without taking it."""
    try:
        info = os.stat(f"{run_dir}/lock")
        with open("/proc/locks", "rb") as file:
            locks = [line.split() for line in file]  # a waiter's line has "->" before the kind
    except OSError:
        return None
    exact = b"%02x:%02x:%d" % (os.major(info.st_dev), os.minor(info.st_dev), info.st_ino)
    for fields in locks:
        if len(fields) < 6 or fields[1] != b"FLOCK" or not fields[5].endswith(b":%d" % info.st_ino):
            continue
        # On an overlay, stat and the kernel's list give different device numbers: then the holder must be a daemon.
        if fields[5] == exact or b"resolver" in _file_of(int(fields[4]), "cmdline"):
            return int(fields[4])
    return None


def ailment(host_pid: int, socket_path: str) -> tuple[str, str]:
    """Explain why a running daemon does not answer at its socket, with the fix."""
    state = _file_of(host_pid, "stat").rpartition(b") ")[2][:1]
    if state in (b"T", b"t"):
        return "is stopped", f"kill -CONT {host_pid}, or restart it"
    if state == b"D":
        return "waits in the kernel", f"cat /proc/{host_pid}/stack shows where; restart it"
    if not os.path.exists(socket_path):
        return "runs without its socket", "restart it"
    return "hangs, or the node is overloaded", "see uptime, then restart it"


def unit_says() -> str:
    """Return the last line that the installed unit has logged, in quotes; empty without a unit."""
    if not os.path.exists(UNIT):
        return ""
    import subprocess

    command = ["journalctl", "--unit=resolver", "--lines=1", "--output=cat", "--quiet"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_JOURNAL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown (journalctl --unit=resolver)"
    return f'"{printable(done.stdout.strip())}"' if done.stdout.strip() else "none yet"


def _file_of(host_pid: int, name: str) -> bytes:
    """Return a file of a process in ``/proc``; empty if it is invisible."""
    try:
        with open(f"/proc/{host_pid}/{name}", "rb") as file:
            return file.read(4096)
    except OSError:
        return b""
