"""The node's lock admits one writing daemon, and refuses a second one with a fix."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from resolver.base.errors import UsageError
from resolver.linux.node_lock import Held, NodeLock


def test_killed_daemon_leaves_no_lock(tmp_path: Path) -> None:
    code = "import sys, time; from resolver.linux.node_lock import NodeLock; l = NodeLock(sys.argv[1])"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(flush=True); time.sleep(60)", str(tmp_path)],
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(UsageError, match=rf"PID {process.pid}.*--dry-run") as caught:
            NodeLock(str(tmp_path))
        assert str(tmp_path / "lock") in str(caught.value)
        process.kill()
        process.wait()
        with NodeLock(str(tmp_path)) as lock:
            assert Path(lock.path).read_text() == f"{os.getpid()}\n"


def test_children_do_not_inherit_the_lock(tmp_path: Path) -> None:
    run_dir = tmp_path / "a" / "b"  # NodeLock makes it
    with NodeLock(str(run_dir)):
        assert (run_dir / "lock").stat().st_mode & 0o777 == 0o600
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with NodeLock(str(run_dir)):
            pass
    finally:
        child.kill()
        child.wait()


def test_waiting_daemon_locks_the_file_in_place(tmp_path: Path) -> None:
    """The first holder removes its file at its end, so a lock on that file would exclude no other daemon."""
    order: list[int] = []
    first = NodeLock(str(tmp_path))

    def wait(number: int) -> None:
        with NodeLock(str(tmp_path), wait=True) as lock:
            assert Path(lock.path).stat().st_ino == os.fstat(lock.fd).st_ino
            order.append(number)
            with pytest.raises(Held):
                NodeLock(str(tmp_path))
            time.sleep(0.05)
            order.append(number)

    waiting = [threading.Thread(target=wait, args=(number,)) for number in range(4)]
    for thread in waiting:
        thread.start()
    time.sleep(0.2)
    assert order == []
    first.__exit__()
    for thread in waiting:
        thread.join(60)
    assert sorted(order) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert order[::2] == order[1::2]  # never two at a time
    assert list(tmp_path.iterdir()) == []


def test_symbolic_link_is_no_lock_file(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "lock").symlink_to(precious)
    with pytest.raises(UsageError, match="cannot be used"):
        NodeLock(str(tmp_path))
    assert precious.read_text() == "kept"


def test_unusable_run_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, cause in {
        str(tmp_path / "file"): "a file has its name: move that away",
        "/proc/nowhere": "cannot be used",
        "": "cannot be used",
        "/nope/x/y": "there is no /nope, and the daemon makes none in /: make it",
    }.items():
        with pytest.raises(UsageError, match=f"{cause}.*--run-dir"):
            NodeLock(place)
    assert not os.path.lexists("/nope")
