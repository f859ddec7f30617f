"""`make kernels`: what it makes of apt's words, of modules, of a guest's report; and that the documents agree."""

from __future__ import annotations

import gzip
import json
import struct
from typing import Any

import pytest

from tests.vm import report
from tests.vm.__main__ import parser, wish_of
from tests.vm.kernel import cpio, depends, module_name, plain_image
from tests.vm.matrix import KERNELS, Guest, plan
from tests.vm.packages import SUITES, Package, Unavailable, kernel_packages, mirrors, parse_uris
from tests.vm.report import Expected, Row, expected, make_row, merge, parse, problems, put_table, table
from tests.vm.variants import VARIANTS

STEPS = ["loader", "auto", "demo"]


def row(pick: str = "6.1", **fields: Any) -> Row:
    """A row in which all is well."""
    about = {"pick": pick, "kernel": "6.1.0-1-amd64", "version": "6.1.192-2", "arch": "x86_64"}
    about |= {"suite": "Debian bookworm", "userspace": "Debian 12", "bcc": "0.26.0"}
    steps = {"loader": {"ok": True}, "auto": {"ok": True, "source": "bpf"}, "demo": {"ok": True}}
    return {**about, **steps, **fields}


# ---- packages ------------------------------------------------------------------------------------------------------


def test_a_kernel_in_one_package_and_one_in_three_are_found_among_what_apt_would_fetch() -> None:
    said = """'http://m/debian/pool/l/linux-base_4.6_all.deb' linux-base_4.6_all.deb 32384 MD5Sum:e0
'http://m/l/linux-image-6.1.0-5-amd64_6.1.9-1_amd64.deb' linux-image-6.1.0-5-amd64_6.1.9-1_amd64.deb 7 MD5Sum:0
'http://m/l/linux-image-amd64_6.1.9-1_amd64.deb' linux-image-amd64_6.1.9-1_amd64.deb 1484 SHA256:2f
'http://m/l/linux-binary-7.3+deb14-amd64_7.3-1_amd64.deb' linux-binary-7.3+deb14-amd64_7.3-1_amd64.deb 14\x20
'http://m/l/linux-modules-7.3+deb14-amd64_7.3-1_amd64.deb' linux-modules-7.3+deb14-amd64_7.3-1_amd64.deb 9 X:
'http://m/l/linux-base-7.3+deb14-amd64_7.3-1_amd64.deb' linux-base-7.3+deb14-amd64_7.3-1_amd64.deb 10\x20
'http://m/b/busybox_1.37-6_amd64.deb' busybox_1%3a1.37-6_amd64.deb 11 SHA256:0
"""
    wanted = parse_uris(said)
    assert wanted[-1] == Package("busybox", "busybox_1%3a1.37-6_amd64.deb", 11)
    assert [package.name for package in kernel_packages(wanted)] == [
        "linux-image-6.1.0-5-amd64",
        "linux-binary-7.3+deb14-amd64",
        "linux-modules-7.3+deb14-amd64",
    ]


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ("http://a/debian/\nhttp://a/debian/\nhttp://b/debian-security/\n", ("http://a/debian", "http://b/debian-security")),
        ("http://tools/apt/\nhttp://a/x/debian\n", ("http://a/x/debian", "http://a/x/debian-security")),
    ],
)  # fmt: skip
def test_the_mirror_is_the_one_that_apt_has(targets: str, found: tuple[str, str]) -> None:
    assert mirrors(targets) == found


def test_without_a_debian_mirror_it_says_how_to_name_one() -> None:
    with pytest.raises(Unavailable, match="--mirror"):
        mirrors("http://a/ubuntu/\n")


def test_every_kernel_has_a_release_to_come_from() -> None:
    assert set(KERNELS.values()) <= set(SUITES)


# ---- kernel and modules --------------------------------------------------------------------------------------------


def test_what_a_module_needs_is_read_out_of_it() -> None:
    assert depends(b"\x7fELF..\0depends=virtio-ring,virtio\0retpoline=Y\0") == ["virtio_ring", "virtio"]
    assert depends(b"\0depends=\0name=ext4\0") == []
    assert module_name("virtio-rng.ko.xz") == "virtio_rng"


def test_wrapped_kernels_are_unwrapped() -> None:
    kernel = b"MZ\0\0plain kernel"
    packed = gzip.compress(kernel)
    zboot = b"MZ\0\0zimg" + struct.pack("<II8s", 64, len(packed), b"\0" * 8) + b"gzip\0\0\0\0"
    assert plain_image(kernel) == kernel
    assert plain_image(packed) == kernel
    assert plain_image(zboot.ljust(64, b"\0") + packed + b"more") == kernel


def test_an_archive_holds_its_files_aligned_and_a_trailer() -> None:
    archive = cpio([("init", 0o100755, b"#!x"), ("dev", 0o040755, b"")])
    at, seen = 0, []
    while at < len(archive):
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name = archive[at + 110 : at + 109 + fields[11]].decode()
        data = (at + 110 + fields[11] + 3) & ~3
        seen.append((name, fields[1], archive[data : data + fields[6]]))
        at = (data + fields[6] + 3) & ~3
    assert seen == [("init", 0o100755, b"#!x"), ("dev", 0o040755, b""), ("TRAILER!!!", 0, b"")]


# ---- what is booted ------------------------------------------------------------------------------------------------


def test_the_whole_matrix_has_each_kernel_on_both_userspaces_and_arm64_on_its_own() -> None:
    guests = plan(parser().parse_args([]))
    assert {guest for guest in guests if guest.arch == "x86_64"} == {
        Guest(pick, "x86_64", space) for pick in KERNELS for space in ("bookworm", "trixie")
    }
    assert [(guest.pick, guest.userspace) for guest in guests if guest.arch == "aarch64"] == [
        ("6.1", "bookworm"),
        ("6.12", "trixie"),
    ]


def test_the_loader_alone_is_tried_on_the_userspace_that_the_kernel_came_with() -> None:
    guests = plan(parser().parse_args(["--loader", "--arch", "x86_64", "6.1", "6.12", "5.10"]))
    assert [(guest.pick, guest.userspace) for guest in guests] == [
        ("6.1", "bookworm"),
        ("6.12", "trixie"),
        ("5.10", "trixie"),
    ]


# ---- the report ----------------------------------------------------------------------------------------------------


def test_a_line_that_is_being_written_is_not_read_yet() -> None:
    assert parse(b'{"step": "boot"}\n{"step": "load' + bytes(99)) == [{"step": "boot"}]
    assert parse(bytes(99)) == []


def test_a_row_keeps_what_is_known_and_nothing_else() -> None:
    lines: list[Row] = [
        {"step": "boot", "kernel": "6.1", "bcc": "0.26.0", "cmdline": "long"},
        {"step": "loader begins"},
        {"step": "loader", "ok": False, "why": "refused", "said": "long"},
    ]
    assert make_row({"pick": "6.1"}, lines, "") == {
        "pick": "6.1", "kernel": "6.1", "bcc": "0.26.0", "loader": {"ok": False, "why": "refused"}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("release", "wanted"),
    [
        ("5.10.0-46-amd64", Expected(loads=False, source="netlink")),
        ("5.12.0", Expected(loads=True, source="bpf")),
        ("6.1.0-56-amd64", Expected(loads=True, source="bpf")),
        ("7.2.13+deb14-amd64", Expected(loads=True, source="bpf")),
    ],
)
def test_what_is_expected_of_a_kernel(release: str, wanted: Expected) -> None:
    assert expected(release) == wanted


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
            {"kernel": "5.10.0-46-amd64"},
            ["loader: it loads, and was not expected to", "auto: it took bpf: None"],
        ),
    ],
)
def test_what_is_not_as_it_has_to_be_is_said(fields: Row, found: list[str]) -> None:
    assert problems(row(**fields), STEPS) == found


def test_a_step_that_was_not_tried_is_no_success() -> None:
    assert problems(row(), ["doctor"]) == ["doctor: it was not tried"]


def test_a_variant_may_come_to_something_else_and_has_to_say_why() -> None:
    told = {check: words for check, (_, words) in VARIANTS["lockdown"].told.items()}
    locked = row(
        under="lockdown",
        loader={"ok": False},
        auto={"ok": True, "source": "netlink", "not_used": {"bpf": "blocked by kernel lockdown: no"}},
        doctor={
            "ok": True,
            "states": {"lockdown": "warning", "bpf": "warning", "netlink": "ok"},
            "told": told,
        },
    )
    assert problems(locked, STEPS, wish_of(locked)) == []
    assert problems(row(under="lockdown"), STEPS, wish_of(locked)) != []
    locked["auto"]["not_used"] = {"bpf": "CAP_BPF is missing"}
    locked["doctor"]["told"]["lockdown"] = "lockdown: [none]"
    assert [found.split(":")[0] for found in problems(locked, STEPS, wish_of(locked))] == ["auto", "doctor"]


def test_the_script_of_every_variant_is_there() -> None:
    for variant in VARIANTS.values():
        assert not variant.script or (report.ROOT / variant.script).is_file()


def test_a_newer_row_takes_the_place_of_the_older_and_keeps_what_was_not_tried_again_on_the_same_kernel() -> (
    None
):
    again = row()
    del again["demo"]
    assert merge([row()], [again]) == [row()]
    newer = {**again, "version": "6.1.200-1"}
    assert merge([row(), row("6.12")], [newer]) == [row("6.12"), newer]


def test_the_table_says_what_was_not_tried_and_what_is_wrong() -> None:
    text = table([row(demo={"ok": False}, loader={"ok": False, "why": "no: the log has it"})])
    (line,) = text.splitlines()[2:]
    assert "**wrong**" in line
    assert "| no: no |" in line
    assert line.endswith("| not tried | not tried |")


def test_the_table_in_the_documents_is_made_of_what_was_seen() -> None:
    page = report.PAGE.read_text()
    assert page == put_table(page, report.load())
    assert json.loads(report.FILE.read_text())["kernels"] == merge([], report.load())
