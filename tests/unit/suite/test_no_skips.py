"""The rule of tests/conftest.py: a test that did not run has failed."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable plugins, because each run would load them again."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


WAYS_OUT = {
    "skip": "import pytest\ndef test():\n    pytest.skip('no GPU')\n",
    "marker": "import pytest\n@pytest.mark.skipif(True, reason='no GPU')\ndef test():\n    assert True\n",
    "whole file": "import pytest\npytest.importorskip('no_such_module')\ndef test():\n    assert True\n",
    "expected failure": "import pytest\n@pytest.mark.xfail\ndef test():\n    assert False\n",
    "fixture": "import pytest\n@pytest.fixture\ndef f():\n    pytest.skip('no GPU')\ndef test(f): assert f\n",
}


def run_pytest(source: str, place: pytest.Pytester, root: Path) -> pytest.RunResult:
    place.makeconftest((root / "tests/conftest.py").read_text())
    place.makepyfile(test_it=source)
    return place.runpytest_inprocess("-q", "-p", "no:cacheprovider")


@pytest.mark.parametrize("way", WAYS_OUT)
def test_skipped_test_fails(way: str, pytester: pytest.Pytester, root: Path) -> None:
    done = run_pytest(WAYS_OUT[way], pytester, root)
    assert done.ret != 0
    assert "proves nothing" in done.stdout.str()
    assert not done.parseoutcomes().keys() & {"skipped", "xfailed"}


def test_executed_test_passes(pytester: pytest.Pytester, root: Path) -> None:
    done = run_pytest("def test():\n    assert True\n", pytester, root)
    assert done.ret == 0
    assert done.parseoutcomes() == {"passed": 1}
