"""The systemd unit: sound, tight, and enough for the whole job."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from resolver.base.source_records import SOURCE_RECORDS
from tests.fakes.node import Node
from tests.kernel.conftest import NVML, ROOT, SOURCES, WRITER
from tests.kernel.rights import rights, works
from tests.patience import until
from tests.programs import completed, script
from tests.runtime.systemd import DEPLOY, UNIT, Unit

#: Highest exposure from `systemd-analyze security`: 0 is fully sandboxed, 10 not at all.
WORST_SCORE = 3.7


def installed(directory: Path) -> Path:
    program = script(directory / "resolver", "")
    unit = directory / UNIT
    unit.write_text((DEPLOY / UNIT).read_text().replace("/opt/resolver/bin/resolver", str(program)))
    return unit


def test_systemd_verifies_the_unit_without_complaint(tmp_path: Path) -> None:
    unit = installed(tmp_path)
    done = completed("systemd-analyze", "verify", "--man=no", str(unit))
    # The two keys of the back-off came with systemd 254; before, it waits 2 s each time.
    newer = ("Unknown key 'RestartSteps'", "Unknown key 'RestartMaxDelaySec'")
    lines = [line for line in done.stderr.splitlines() if "resolver" in line]
    ours = [line for line in lines if not any(each in line for each in newer)]
    assert (done.returncode, ours) == (0, [])


def test_unit_exposure_is_as_documented(tmp_path: Path) -> None:
    rate = ["systemd-analyze", "security", "--offline=true", f"--threshold={WORST_SCORE * 10:.0f}"]
    done = completed(*rate, str(installed(tmp_path)))
    assert done.returncode == 0, done
    assert f"rates it {WORST_SCORE} " in (ROOT / "docs/node.md").read_text()


@pytest.mark.parametrize("source", SOURCES)
def test_unit_does_the_whole_job(node: Node, open_place: Path, source: str) -> None:
    with contextlib.closing(Unit(node, open_place, environment={"RESOLVER_SOURCE": source})) as unit:
        works(node, unit, source)
        own = rights(unit.host_pid)
        assert own.bounding == frozenset().union(*(each.rights for each in SOURCE_RECORDS.values()))
        assert own.effective <= SOURCE_RECORDS["scan"].rights | SOURCE_RECORDS[source].rights
        for name in (WRITER, NVML):
            assert rights(unit.child(name)).no_new_privs
        for event in ("capabilities_kept", "source_unavailable", "internal_error"):
            assert unit.said(event) == []
        assert unit.other_output == []
        assert unit.stop() == 0


def test_unit_has_a_read_only_system(node: Node, open_place: Path) -> None:
    with contextlib.closing(Unit(node, open_place, environment={"RESOLVER_SOURCE": "scan"})) as unit:
        unit.wait_for("source")
        inside = ["nsenter", "--mount", "--target", str(unit.host_pid)]

        def writable(path: Path | str) -> bool:
            test = subprocess.run([*inside, "test", "-w", path], check=False)
            return test.returncode == 0

        assert writable(node.containers_dir)
        assert writable("/run/resolver")
        for path in ("/", "/usr", "/etc", "/var", "/proc/sys/kernel", "/sys/fs/cgroup", node.root):
            assert not writable(path), path


def test_unit_notifies_readiness_and_status(node: Node, open_place: Path) -> None:
    with contextlib.closing(Unit(node, open_place, environment={"RESOLVER_SOURCE": "scan"})) as unit:

        def shown(name: str) -> str:
            return unit.systemctl("show", "--property", name, "--value", UNIT)

        unit.wait_for("started")
        until(lambda: shown("ActiveState") == "active", "active")
        assert unit.said("source")  # and not before
        inside = ["nsenter", "--mount", "--target", str(unit.host_pid)]
        subprocess.run([*inside, "test", "-S", "/run/resolver/resolver.sock"], check=True)
        until(lambda: shown("StatusText").startswith("source scan, 0 cache files"), "a status")
        assert int(shown("WatchdogTimestampMonotonic")) > 0
        assert b"NOTIFY_SOCKET" not in Path(f"/proc/{unit.child(NVML)}/environ").read_bytes()
        assert unit.stop() == 0


def test_unit_restarts_a_hanging_daemon(node: Node, open_place: Path) -> None:
    with contextlib.closing(
        Unit(node, open_place, environment={"RESOLVER_SOURCE": "scan"}, lines=("WatchdogSec=4s",))
    ) as unit:
        unit.wait_for("source")
        show = ("show", "--value", UNIT, "--property")
        fed = unit.systemctl(*show, (stamp := "WatchdogTimestampMonotonic"))
        until(lambda: unit.systemctl(*show, stamp) != fed, "that it feeds the watchdog")
        first = unit.host_pid
        os.kill(first, signal.SIGSTOP)
        until(lambda: unit.host_pid not in (0, first), "another one")
        assert int(unit.systemctl(*show, "NRestarts")) > 0


def test_unit_reloads_settings_and_restarts_after_crash(node: Node, open_place: Path) -> None:
    with contextlib.closing(Unit(node, open_place, environment={"RESOLVER_SOURCE": "scan"})) as unit:
        unit.wait_for("source")
        first = unit.host_pid
        until(
            lambda: unit.systemctl("show", "--property", "ActiveState", "--value", UNIT) == "active", "active"
        )
        unit.systemctl("reload", UNIT)
        unit.wait_for("settings_reloaded")
        unit.systemctl("kill", "--kill-whom=main", "--signal=KILL", UNIT)
        until(lambda: unit.host_pid not in (0, first), "another one")
