"""The machine of the tests' own: what `tests/isolation.py` takes out of their way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.isolation import PLACES, VARIABLES


def test_default_places_are_the_tests_own() -> None:
    assert [place for place in PLACES if os.path.exists(place) and not os.path.ismount(place)] == []


def test_nothing_of_the_machines_environment_is_a_setting() -> None:
    left = {name for name in os.environ if name.startswith(VARIABLES)}
    assert left <= {"XDG_CACHE_HOME"}
    assert Path.home().name.startswith("resolver-home-")


def test_children_are_where_the_tests_are(tmp_path: Path) -> None:
    code = "import os; print(os.readlink('/proc/self/ns/mnt'), os.path.expanduser('~'))"
    said = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True).split()
    assert said == [os.readlink("/proc/self/ns/mnt"), str(Path.home())]
    assert said[0] != os.readlink("/proc/2/ns/mnt")
