"""The tests' isolated environment, which `tests/isolation.py` makes."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.isolation import HOST, PLACES, SET, VARIABLES


def test_default_places_are_the_tests_own() -> None:
    assert [place for place in PLACES if os.path.exists(place) and not os.path.ismount(place)] == []


def test_machine_variables_set_no_setting() -> None:
    left = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    assert left == SET | {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    assert Path.home().name.startswith("resolver-home-")
    assert (socket.gethostname(), time.tzname[0]) == (HOST, "UTC")


def test_children_share_the_tests_machine(tmp_path: Path) -> None:
    code = "import os; print(os.readlink('/proc/self/ns/mnt'), os.path.expanduser('~'))"
    said = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True).split()
    assert said == [os.readlink("/proc/self/ns/mnt"), str(Path.home())]
    assert said[0] != os.readlink("/proc/2/ns/mnt")
