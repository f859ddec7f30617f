"""`make gpu-check` as far as possible without a GPU: real containers, a CUDA caller, and fake libraries."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.gpu import DEFAULT_DEVICES
from tests.fakes.state import Fault
from tests.gpu import check
from tests.gpu.node import StandinNode
from tests.kernel.conftest import ROOT
from tests.programs import completed

LIST, SAMPLES = check.CALLS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return completed(sys.executable, "-m", "tests.gpu.check", *arguments, cwd=ROOT, timeout=240)


@pytest.mark.parametrize(
    ("driver", "in_list", "in_samples"),
    [
        ("535.183.01", "container", "host"),
        ("570.86.15", "container", "container"),
        ("568.10", "container", "host"),  # between the known versions
    ],
)
def test_a_process_that_uses_cuda_is_seen_and_repaired(driver: str, in_list: str, in_samples: str) -> None:
    cycles = driver == "535.183.01"
    done = run("--standin", driver, "--json", "--seconds", "6" if cycles else "0")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    shown = {(call, where): which for call, where, which, *_ in found["seen"]}
    assert shown == {
        (LIST, "outside"): "host",
        (SAMPLES, "outside"): "host",
        (LIST, "inside"): in_list,
        (SAMPLES, "inside"): in_samples,
    }
    assert found["hostpid"] == in_samples
    assert found["origin"] == ("forced" if driver == "568.10" else "by version")
    assert 0 < found["watched"] <= 100
    assert (found["wrong"], found["real"]) == ([], False)
    assert found["period_ms"] == pytest.approx(139, rel=0.05)
    assert [tuple(duty[:3]) for duty in found["duties"]] == [
        (busy, every, processes) for processes in (1, 2) for busy, every in check.DUTIES if cycles
    ]
    unseen = 2 * found["period_ms"] / 1e3  # NVML omits one period in 72; its neighbour replaces it
    assert all(
        shown == pytest.approx(measured, rel=0.1, abs=unknown + unseen)
        for *_, measured, shown, unknown in found["duties"]
    )
    assert (found["call"], found["virtualization"]) == (SAMPLES, "none")
    assert found["agree"] == (in_list == in_samples)


def test_gpu_check_names_the_answering_call_and_mode(tmp_path: Path) -> None:
    with StandinNode(tmp_path, "580.105.08") as node:
        node.gpu.set_faults(Fault.PROCESS_UTILIZATION_UNSUPPORTED | Fault.VGPU)
        findings = check.examine(node, DEFAULT_DEVICES[0], "580.105.08", 0.0)
    assert (findings.hostpid, findings.origin, findings.wrong) == ("host", "by machine", ())
    said = check.report(findings)
    assert "samples by nvmlDeviceGetProcessesUtilizationInfo; virtualization: vgpu" in said
    assert "list and samples differ inside" in said


@pytest.mark.parametrize(
    ("driver", "inside", "advice"),
    [
        ("535.183.01", "host", ""),
        ("535.183.01", "container", "--hostpid-namespace container"),
        ("568.10", "host", "--hostpid-namespace host"),
        ("568.10", "neither", ""),
    ],
)
def test_gpu_check_names_setting_where_version_is_wrong(driver: str, inside: str, advice: str) -> None:
    seen = tuple(
        check.Seen(call, where, inside, ()) for call in (LIST, SAMPLES) for where in ("outside", "inside")
    )
    found = check.Findings(driver, "GPU", 4711, 7, seen, inside, "forced", 60, 1.0, (), 139.0, ())
    assert [line.split(": ")[1] for line in check.report(found).splitlines() if line.startswith("set ")] == (
        [advice] if advice else []
    )


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "LIBRARY", "libcuda-of-nobody.so.1")
    assert check.main([]) == 4
    assert capsys.readouterr().err.startswith("no GPU: libcuda-of-nobody.so.1 not found. ")
