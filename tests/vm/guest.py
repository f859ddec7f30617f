"""PID 1 of the guest, or a unit of systemd, and the steps that run there.

Standard library only: it runs under the guest's own Python.

The report consists of lines of JSON, written to the raw disk /dev/vdc at once. Each has ``step``; the last is ``end``.
The kernel's command line has the steps, ``resolver.steps=loader,auto,doctor,demo``, and a variant's script,
``resolver.script=PATH``, which ``sh -e`` runs before the steps.
"""

import ctypes
import json
import os
import platform
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

CHECKOUT = "/resolver"
PYTHON = f"{CHECKOUT}/.venv/bin/python"
#: In the checkout's .venv, which is /venv. A security module's profile names it.
RESOLVER = "/venv/bin/resolver"
_LAUNCHER = """#!/venv/bin/python
import sys
from resolver.cli import main
sys.exit(main())
"""
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "TERM": "dumb",
    "LANG": "C.UTF-8",
    "XDG_CACHE_HOME": f"{CHECKOUT}/.cache",
}
#: Files of base-files' script, which did not run.
_DIRECTORIES = ("/usr/local", "/var/tmp", "/var/log", "/home", "/mnt", "/opt", "/srv")  # noqa: S108
_MOUNTS = (
    ("proc", "/proc", "proc", ""),
    ("sysfs", "/sys", "sysfs", ""),
    ("devtmpfs", "/dev", "devtmpfs", ""),
    ("tmpfs", "/run", "tmpfs", "mode=0755"),
    ("tmpfs", "/tmp", "tmpfs", ""),  # noqa: S108 - the guest's own
    ("tmpfs", "/dev/shm", "tmpfs", ""),  # noqa: S108
    ("devpts", "/dev/pts", "devpts", ""),
    ("cgroup2", "/sys/fs/cgroup", "cgroup2", ""),
    ("securityfs", "/sys/kernel/security", "securityfs", ""),
    ("tracefs", "/sys/kernel/tracing", "tracefs", ""),
    ("bpf", "/sys/fs/bpf", "bpf", ""),
)
#: Of the doctor's checks, those that a kernel decides.
CHECKS = ("view", "scan", "netlink", "bpf")
_WORDS = 4000  # of a program's last output go into the report


def main() -> None:
    """As PID 1: let a child do the work, reap orphans, then switch the machine off.

    Under systemd it is a unit, at whose end systemd switches the machine off.
    """
    if os.getpid() != 1 and "resolver.steps" not in _wishes():
        raise SystemExit("this runs in a virtual machine: see tests/vm/__main__.py")
    if os.getpid() != 1:
        work()
        return
    worker = os.fork()
    if worker == 0:
        os.setsid()
        work()
        os._exit(0)
    while os.wait()[0] != worker:
        pass
    os.sync()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ctypes.CDLL(None).reboot(0x4321FEDC)  # RB_POWER_OFF in sys/reboot.h
    time.sleep(60)


class Report:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_SYNC)

    def line(self, step: str, **fields: Any) -> None:
        if "said" in fields:
            fields["said"] = fields["said"][-_WORDS:]
        os.write(self._fd, json.dumps({"step": step, **fields}).encode() + b"\n")


def work() -> None:
    begun = time.monotonic()
    for what, where, kind, options in _MOUNTS:
        os.makedirs(where, exist_ok=True)
        if os.path.ismount(where):  # by systemd
            continue
        subprocess.run(
            ["mount", "-n", "-t", kind, *(["-o", options] if options else []), what, where], check=False
        )
    for place in _DIRECTORIES:
        os.makedirs(place, exist_ok=True)
    os.environ.update(_ENVIRONMENT)
    os.chdir(CHECKOUT)
    Path(RESOLVER).write_text(_LAUNCHER)
    os.chmod(RESOLVER, 0o755)  # noqa: S103 - as any program
    report = Report("/dev/vdc")
    wishes = _wishes()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=False)
    subprocess.run(["/sbin/ldconfig"], check=False)
    if not os.path.isdir("resolver/__pycache__"):  # the host compiled it for its architecture
        subprocess.run([PYTHON, "-m", "compileall", "-q", "resolver", "bpf", "tests/fakes"], check=False)
    report.line("boot", **about())
    steps = {"loader": loader, "auto": auto, "doctor": doctor, "demo": demo, "containers": containers}
    if script := wishes.get("resolver.script"):
        report.line("variant", **run(["sh", "-e", script], 300))
    for name in wishes.get("resolver.steps", "loader").split(","):
        report.line(name + " begins")
        try:
            report.line(name, **steps[name]())
        except Exception as error:  # noqa: BLE001 - the others are still worth trying
            report.line(name, ok=False, said=f"{type(error).__name__}: {error}")
    report.line("end", seconds=round(time.monotonic() - begun, 1))


def _wishes() -> dict[str, str]:
    return dict(word.split("=", 1) for word in Path("/proc/cmdline").read_text().split() if "=" in word)


def about() -> dict[str, Any]:
    words = "import bcc; print(bcc.__version__)"
    bcc = subprocess.run(["/usr/bin/python3", "-c", words], capture_output=True, text=True, check=False)
    system = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line
    )
    return {
        "kernel": platform.release(),
        "system": system.get("PRETTY_NAME", "").strip('"'),
        "bcc": bcc.stdout.strip() or bcc.stderr.strip()[-200:],
        "python": platform.python_version(),
    }


def run(command: list[str], seconds: float) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, text=True, check=False
        )
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code = -1
        said = f"{(error.stdout or b'').decode(errors='replace')}\nnot done after {seconds:g} s"
    return {"ok": code == 0, "code": code, "said": said, "seconds": round(time.monotonic() - begun, 1)}


def loader() -> dict[str, Any]:
    """Check that the program loads and its map is right, by `tests.vm.loader`, which prints one line of JSON."""
    forks = _wishes().get("resolver.forks", "3000")
    done = run([PYTHON, "-m", "tests.vm.loader", forks], 240 + int(forks) / 50)
    return {**done, **_last_json(done["said"])}


def auto() -> dict[str, Any]:
    """Return the source that the daemon chooses, and why it chose none of the better ones."""
    os.makedirs("/run/auto/containers", exist_ok=True)
    command = [RESOLVER, "run", "--containers-dir", "/run/auto/containers"]
    command += ["--run-dir", "/run/auto/run", "--metrics-addr", "off", "--source", "auto"]
    command += ["--log-format", "json", "--log-level", "debug"]
    begun = time.monotonic()
    daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGALRM, lambda *_: daemon.kill())
    signal.alarm(180)
    assert daemon.stderr is not None
    said, detail = "", {}
    for text in daemon.stderr:
        said = (said + text)[-_WORDS:]
        line = json.loads(text) if text.startswith("{") else {}
        if line.get("event") == "source_detail":
            detail[line["source"]] = str(line["detail"])[-1500:]
        if line.get("event") == "source":
            signal.alarm(0)
            daemon.terminate()
            daemon.communicate()
            return {
                "ok": True, "source": line["source"], "not_used": line.get("not_used", {}), "detail": detail,
                "seconds": round(time.monotonic() - begun, 1), "code": daemon.returncode,
            }  # fmt: skip
    daemon.wait()
    return {"ok": False, "code": daemon.returncode, "said": said}


def doctor() -> dict[str, Any]:
    """Return the results of the checks in ``resolver doctor`` that depend on the kernel."""
    begun = time.monotonic()
    only = [word for name in CHECKS for word in ("--only", name)]
    done = subprocess.run(
        [RESOLVER, "doctor", "--json", *only], capture_output=True, text=True, check=False, timeout=240
    )
    seconds = round(time.monotonic() - begun, 1)
    try:
        found = {each["check"]: each for each in json.loads(done.stdout)}
    except ValueError:
        return {"ok": False, "states": {}, "said": (done.stdout + done.stderr)[-_WORDS:], "seconds": seconds}
    states = {name: each["state"] for name, each in found.items()}
    findings = {name: f"{each['found']}: {each['cause']}".rstrip(": ") for name, each in found.items()}
    return {"ok": bool(states), "states": states, "told": findings, "seconds": seconds}


def demo() -> dict[str, Any]:
    return run([PYTHON, "-m", "tests.fakes.demo"], 600)


def containers() -> dict[str, Any]:
    """Check real containers in systemd's scopes, by `tests.vm.containers`, which prints one line of JSON."""
    done = run([PYTHON, "-m", "tests.vm.containers"], 1200)
    return {**done, **_last_json(done["said"])}


def _last_json(said: str) -> dict[str, Any]:
    for line in reversed(said.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return {}


if __name__ == "__main__":
    main()
