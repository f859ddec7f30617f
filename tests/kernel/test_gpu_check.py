"""`make gpu-check` as far as it goes without a GPU: real containers, a CUDA caller, stand-ins for its libraries."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.gpu import check
from tests.kernel.conftest import ROOT

LIST, SAMPLES = check._CALLS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu.check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("driver", "in_list", "in_samples"),
    [("535.183.01", "container", "host"), ("570.86.15", "container", "container")],
)
def test_a_process_that_uses_cuda_is_seen_and_repaired(driver: str, in_list: str, in_samples: str) -> None:
    done = run("--standin", driver, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    shown = {(call, where): which for call, where, which, _numbers in found["seen"]}
    assert shown == {
        (LIST, "outside"): "host",
        (SAMPLES, "outside"): "host",
        (LIST, "inside"): in_list,
        (SAMPLES, "inside"): in_samples,
    }
    assert found["hostpid"] == in_samples
    assert found["origin"] in ("measured", "by version")
    assert 0 < found["watched"] <= 100
    assert (found["wrong"], found["real"]) == ([], False)


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "LIBRARY", "libcuda-of-nobody.so.1")
    assert check.main([]) == 4
    assert capsys.readouterr().err.startswith("no GPU: libcuda-of-nobody.so.1 not found. ")
