"""The rule of tests/conftest.py: a test that did not run has failed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WAYS_OUT = {
    "skip": "import pytest\ndef test():\n    pytest.skip('no GPU')\n",
    "marker": "import pytest\n@pytest.mark.skipif(True, reason='no GPU')\ndef test():\n    assert True\n",
    "whole file": "import pytest\npytest.importorskip('no_such_module')\ndef test():\n    assert True\n",
    "expected failure": "import pytest\n@pytest.mark.xfail\ndef test():\n    assert False\n",
    "fixture": "import pytest\n@pytest.fixture\ndef f():\n    pytest.skip('no GPU')\ndef test(f): assert f\n",
}


def run_pytest(source: str, place: Path, root: Path) -> subprocess.CompletedProcess[str]:
    shutil.copy(root / "tests/conftest.py", place / "conftest.py")
    (place / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={place}"]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("way", WAYS_OUT)
def test_a_skipped_test_has_failed(way: str, tmp_path: Path, root: Path) -> None:
    done = run_pytest(WAYS_OUT[way], tmp_path, root)
    assert done.returncode != 0, done.stdout
    assert "proves nothing" in done.stdout
    closing = done.stdout.splitlines()[-1]
    assert "skipped" not in closing
    assert "xfailed" not in closing


def test_a_test_that_ran_has_passed(tmp_path: Path, root: Path) -> None:
    done = run_pytest("def test():\n    assert True\n", tmp_path, root)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 passed")
