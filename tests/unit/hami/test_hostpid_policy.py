"""The PID that ``hostpid`` must hold, determined by the driver version; reasons for a wrong one."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resolver.base.reasons import RepairReason
from resolver.config import HostpidNamespace
from resolver.hami import hostpid_policy
from resolver.hami.hostpid_policy import (
    DRIVERS,
    HostpidPolicy,
    Origin,
    classify,
    contradiction,
    decide,
    known,
    parse_driver_version,
)

AUTO, HOST, CONTAINER = HostpidNamespace.AUTO, HostpidNamespace.HOST, HostpidNamespace.CONTAINER


@pytest.mark.parametrize(
    ("driver_version", "namespace"),
    [
        # the four rows: the first and last tested release of each
        ("470.256.02", HOST),
        ("535.104.05", HOST),
        ("560.35.03", HOST),
        ("565.77", HOST),
        ("570.86.15", CONTAINER),
        ("570.124.06", CONTAINER),
        ("580.65.06", CONTAINER),
        ("580.142", CONTAINER),
        # two paths for samples; NVML uses either
        ("590.48.01", None),
        ("595.45.04", None),
        # between the last version known to behave one way and the first known to behave the other way
        ("565.77.01", None),
        ("566.36", None),
        ("570", None),
        ("570.86.14", None),
        (None, None),
        # not a driver version
        ("", None),
        ("570.86.15-beta", None),
        ("v570.86.15", None),
        ("570.86.15.1.2", None),
        ("N/A", None),
        ("570.86.15\n", None),
        (" 535.104.05", None),
    ],
)
def test_the_drivers_version_decides(driver_version: str | None, namespace: HostpidNamespace | None) -> None:
    policy = decide(AUTO, driver_version)
    assert policy.namespace is namespace
    if namespace is None:
        assert "--hostpid-namespace" in policy.why
    assert driver_version is None or driver_version in policy.why or repr(driver_version) in policy.why


@pytest.mark.parametrize("driver_version", ["535.104.05", "580.105.08", "590.48.01"])
def test_vgpu_guest_needs_host_pids(driver_version: str) -> None:
    policy = decide(AUTO, driver_version, vgpu=True)
    assert (policy.namespace, policy.origin) == (HOST, Origin.BY_MACHINE)
    assert decide(AUTO, driver_version, vgpu=None).namespace is None
    assert decide(CONTAINER, driver_version, vgpu=True).namespace is CONTAINER


def test_version_under_wsl_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostpid_policy, "WSL", True)
    assert decide(AUTO, "526.98").namespace is None
    assert "WSL" in decide(AUTO, "591.44").why


@pytest.mark.parametrize("forced", [HOST, CONTAINER])
@pytest.mark.parametrize("driver_version", [None, "535.104.05", "570.86.15", "568.1", "nonsense"])
def test_an_operator_overrides_every_driver(forced: HostpidNamespace, driver_version: str | None) -> None:
    policy = decide(forced, driver_version)
    assert policy.namespace is forced
    assert "forced" in policy.why


@given(st.lists(st.integers(0, 999), min_size=2, max_size=4).map(tuple))
def test_versions_are_compared_as_numbers(version: tuple[int, ...]) -> None:
    assert parse_driver_version(".".join(map(str, version))) == version
    namespace = decide(AUTO, ".".join(map(str, version))).namespace
    assert (namespace is HOST) == (version <= (565, 77))
    assert (namespace is CONTAINER) == ((570, 86, 15) <= version <= (580, 142))


def test_the_rows_are_in_order_and_have_no_gap_at_their_ends() -> None:
    bounds = [parse_driver_version(text) for row in DRIVERS for text in (row.first, row.last) if text]
    assert bounds == sorted(bounds, key=lambda bound: bound or ())
    assert (DRIVERS[0].first, DRIVERS[-1].last) == ("", "")
    assert all(row.known_from for row in DRIVERS)


@pytest.mark.parametrize(
    ("namespace", "wanted"),
    [(HOST, 4711), (CONTAINER, 7), (None, None)],
    ids=["host", "container", "unknown"],
)
def test_the_number_a_slot_must_hold(namespace: HostpidNamespace | None, wanted: int | None) -> None:
    assert HostpidPolicy(namespace, "").wanted(host_pid=4711, ns_pid=7) == wanted


@pytest.mark.parametrize(
    ("hostpid", "wanted", "other", "shared", "reason"),
    [
        (4711, 4711, 7, False, None),
        (4711, 4711, 7, True, None),  # right, even if another slot claims the same number
        (0, 4711, 7, False, RepairReason.MISSING),
        (0, 4711, 7, True, RepairReason.MISSING),  # many slots hold 0
        (7, 4711, 7, False, RepairReason.WRONG_NAMESPACE),
        (7, 4711, 7, True, RepairReason.WRONG_NAMESPACE),
        (4711, 7, 4711, False, RepairReason.WRONG_NAMESPACE),  # the driver wants container PIDs
        (815, 4711, 7, True, RepairReason.DUPLICATE),
        (815, 4711, 7, False, RepairReason.STALE),
        (-1, 4711, 7, False, RepairReason.STALE),
        (7, 7, 7, False, None),  # a container in the host's PID namespace
        (0, 7, 7, False, RepairReason.MISSING),
    ],
)
def test_why_a_number_is_wrong(
    hostpid: int, wanted: int, other: int, *, shared: bool, reason: RepairReason | None
) -> None:
    assert classify(hostpid, wanted, other, shared=shared) is reason


def test_the_reason_says_how_far_the_table_goes() -> None:
    host, container = "host PIDs up to 565.77", "container PIDs from 570.86.15 to 580.142"
    assert known() == f"samples carry {host}, {container}"
    assert decide(AUTO, "535.104.05").why == f"driver 535.104.05: samples carry {host}"
    assert decide(AUTO, "580.65.06").why == f"driver 580.65.06: samples carry {container}"


@pytest.mark.parametrize(
    ("setting", "driver_version", "said"),
    [
        (AUTO, "535.104.05", "do not carry host PIDs as its version says.*set --hostpid-namespace container"),
        (AUTO, "580.65.06", "do not carry container PIDs as its version says.*set --hostpid-namespace host"),
        (HOST, "580.65.06", "--hostpid-namespace host is wrong for this driver: try auto"),
    ],
)
def test_contradicted_policy_has_a_remedy(setting: HostpidNamespace, driver_version: str, said: str) -> None:
    assert re.search(said, contradiction(decide(setting, driver_version)))
