"""Reports of `make kernels` and `make engines`, and the documents' tables of their results."""

from typing import Any

import pytest

from tests.runtime.engines import report as engines
from tests.vm import report
from tests.vm.__main__ import parser
from tests.vm.matrix import plan
from tests.vm.report import Row, merge, problems

STEPS = ["loader", "auto", "demo"]


def row(pick: str = "6.1", **fields: Any) -> Row:
    about = {"pick": pick, "kernel": "6.1.0-1-amd64", "version": "6.1.192-2", "arch": "x86_64"}
    about |= {"suite": "Debian bookworm", "userspace": "Debian 12", "bcc": "0.26.0"}
    steps = {"loader": {"ok": True}, "auto": {"ok": True, "source": "bpf"}, "demo": {"ok": True}}
    return {**about, **steps, **fields}


@pytest.mark.parametrize(("arch", "there"), [("x86_64", False), ("aarch64", True)])
def test_kernel_with_16k_pages_is_booted_on_arm64(arch: str, *, there: bool) -> None:
    guests = plan(parser().parse_args(["--loader", "--arch", arch]))
    assert ("16k" in {guest.pick for guest in guests}) is there


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, []),
        ({"loader": {"ok": False, "why": "the verifier refused it"}}, ["loader: the verifier refused it"]),
        ({"auto": {"ok": True, "source": "scan", "not_used": {}}}, ["auto: it took scan: {}"]),
        ({"demo": {"ok": False}}, ["demo: it failed"]),
        ({"trouble": "it ended"}, ["the guest did not come to its end: it ended"]),
        ({"variant": {"ok": False, "said": "no profile"}}, ["variant: no profile"]),
        (
            {"kernel": "5.4.0-46-amd64"},
            ["loader: it loads, and was not expected to", "auto: it took bpf: None"],
        ),
    ],
)
def test_deviations_of_a_row_are_named(fields: Row, found: list[str]) -> None:
    assert problems(row(**fields), STEPS) == found


def test_untried_step_is_a_problem() -> None:
    assert problems(row(), ["doctor"]) == ["doctor: it was not tried"]


def test_containers_in_scopes_have_their_own_table() -> None:
    engine = {"engine": "crun 1.21, as CRI-O calls it", "cgroup": "/kubepods.slice/crio-<id>.scope"}
    lines = report.table([row(), row(containers={"ok": True, "engines": [engine]})])
    assert "crun" not in "".join(lines[:-3])
    assert lines[-3:] == [
        "| systemd's cgroup driver | kernel | the container's cgroup | `lookup` | `containers` | `reverse` |",
        "| --- | --- | --- | --- | --- | --- |",
        "| crun 1.21, as CRI-O calls it | 6.1 | `/kubepods.slice/crio-<id>.scope` | found | listed | right |",
    ]


@pytest.mark.parametrize("of", [report, engines])
def test_table_in_documents_is_made_of_results(of: Any) -> None:
    page = of.PAGE.read_text()
    assert page == of.put_table(page, of.load())


def test_rows_in_the_file_are_in_order() -> None:
    assert report.load() == merge([], report.load())
