"""`make gpu-check` as far as it goes without a GPU: real containers, a CUDA caller, stand-ins for its libraries."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resolver.hami.hostpid_policy import by_version
from tests.gpu import check
from tests.gpu.check import Findings, Seen, report, row, which
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


def test_without_nvml_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "LIBRARY", "libc.so.6")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    monkeypatch.setenv("NVML_STANDIN_STATE", "/nowhere")
    assert check.main(["--device", "GPU-nobody"]) == 4
    assert capsys.readouterr().err.startswith("no GPU: NVML ")


def test_the_numbers_of_a_process_are_told_apart() -> None:
    assert which([], 4000, 7) == "neither"
    assert which([4000, 9], 4000, 7) == "host"
    assert which([7], 4000, 7) == "container"
    assert which([7, 4000], 4000, 7) == "both"
    (thread,) = (int(name) for name in os.listdir("/proc/self/task")[:1])
    assert which([thread], os.getpid(), 999_999_999) == "host"


def findings(*shown: str, hostpid: str = "host", watched: int = 60) -> Findings:
    sides = [(call, where) for where in ("outside", "inside") for call in (LIST, SAMPLES)]
    seen = [Seen(call, where, what, (7,)) for (call, where), what in zip(sides, shown, strict=True)]
    wrong = tuple(check._wrong(seen, shown[3], hostpid, watched))
    return Findings("999.1", "Card", 4000, 7, tuple(seen), hostpid, "measured", watched, 0.5, wrong)


def test_what_is_wrong_is_said() -> None:
    assert findings("host", "host", "container", "host").wrong == ()
    assert findings("host", "host", "container", "container", hostpid="container").wrong == ()
    assert "outside shows container" in findings("container", "host", "host", "host").wrong[0]
    assert findings("host", "host", "host", "container").wrong == (
        "its slot has host, and its samples carry container",
    )
    assert "cannot be told" in findings("host", "host", "host", "neither").wrong[0]
    assert findings("host", "host", "host", "host", watched=0).wrong == ("its own watcher sees no load",)


def test_the_line_for_the_document_has_its_columns(root: Path) -> None:
    found = findings("host", "host", "container", "host")
    line = row(found)
    assert line == "| 999.1 | container | host | `make gpu-check` on Card: right |"
    assert report(found).endswith(line)
    assert "drivers.md" not in report(found._replace(real=False))
    table = (root / "docs/drivers.md").read_text().split("## Measured on hardware")[1]
    assert {text.count("|") for text in table.splitlines() if text.startswith("|")} == {line.count("|")}


def test_the_document_and_the_policy_agree(root: Path) -> None:
    table = (root / "docs/drivers.md").read_text().split("## Measure")[0]
    rows = [line.split("|") for line in table.splitlines() if re.match(r"\| [^|]*\d+\.\d+", line)]
    assert len(rows) == 5
    for cells in rows:
        between = cells[1].strip().startswith("between")
        versions = ["566.03"] if between else re.findall(r"\d+(?:\.\d+)+", cells[1])
        for version in versions:
            namespace = by_version(version).namespace
            assert cells[4].strip() == (f"the {namespace.value} PID" if namespace else "nothing is written")
            if namespace:
                assert cells[3].strip() == namespace.value
