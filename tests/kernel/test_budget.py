"""One tenant's cost delays no other: the attacks of ``make bench ARGS=hostile``, at small sizes.

They measure CPU of the loop's thread, which a busy machine doesn't change, or count; bounds of times are far above the
aims. A daemon without budgets fails each by a factor.
"""

import time
from pathlib import Path

import pytest

from tests.bench.attacks import ATTACKS
from tests.bench.hostile import Good, Stage, by_container
from tests.bench.usage import rss
from tests.patience import PATIENCE_S, until

_SECONDS = 2.0


def _repaired(stage: Stage, seconds: float) -> None:
    good, end = Good(stage.node, "patient", PATIENCE_S), time.monotonic() + seconds
    while time.monotonic() < end:
        good.repair()
    assert [each.trouble for each in good.samples if each.trouble] == []


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mappings", 8),
        ("mounts", 2),
        ("namespaces", 278),
        ("flips", 14),
        ("dead", 7),
        ("events", 2),
        ("tree", 10),
    ],
)
def test_the_loop_gives_way(name: str, size: int, open_place: Path) -> None:
    """The aim is at most 50 ms of CPU time in one go; it once was 350 ms to 1.5 s."""
    with Stage(open_place, everywhere=ATTACKS[name].everywhere) as stage:
        stage.good.repair()
        stage.daemon.reset_longest()
        with ATTACKS[name].begin(stage.scene, size):
            _repaired(stage, _SECONDS)
        block = stage.daemon.longest_block()
        lines = by_container(stage.daemon.lines)
        assert stage.daemon.said("internal_error") == []
    print(
        f"{ATTACKS[name].name(size)}: {block * 1e3:.0f} ms of CPU in one go; lines of the log: {lines.total()}"
    )
    assert block < 0.3  # a busy hypervisor adds some
    # One line per second and file, and some for files that come and go; it once was 5,000 a second.
    assert max(lines.values(), default=0) < 100


def test_sigterm_is_obeyed_among_thousands_of_namespaces(open_place: Path) -> None:
    """The bench measures the aim of one second; this test only checks that the daemon ends."""
    with Stage(open_place) as stage, ATTACKS["namespaces"].begin(stage.scene, 2000):
        time.sleep(_SECONDS)
        ended = stage.daemon.stopped_after()
    print(f"ended {ended} s after SIGTERM")
    assert ended is not None


def test_aborted_scrape_leaves_nothing_behind(open_place: Path) -> None:
    """The aim is 2 MiB. 3,000 aborted scrapes once took 20 MiB, and the next scrape waited for them."""
    with Stage(open_place) as stage:
        stage.good.repair()
        first = stage.client("scrape", str(stage.port))
        until(lambda: first.samples, "a first scrape")
        before = rss(stage.daemon.process.pid)
        with ATTACKS["scrapes"].begin(stage.scene, 800):
            time.sleep(_SECONDS)
        until(lambda: rss(stage.daemon.process.pid) - before < 6.0, "memory given back")
        first.end()
    slowest = max(each.seconds for each in first.samples)
    print(f"the slowest of {len(first.samples)} scrapes took {slowest:.2f} s")
    assert [each.trouble for each in first.samples if each.trouble] == []


@pytest.mark.parametrize(("name", "size"), [("knocks", 2), ("holds", 9)])
def test_busy_tenants_keep_no_other_from_the_socket(name: str, size: int, open_place: Path) -> None:
    """Two tenants once shut out root, and one with nine PID namespaces a good container, on every try."""
    with Stage(open_place) as stage:
        root, own = stage.root_client(), stage.own_client()
        with ATTACKS[name].begin(stage.scene, size):
            _repaired(stage, _SECONDS)
            until(lambda: min(len(root.samples), len(own.samples)) >= 3, "three answers of each")
            asked = [len(root.samples), len(own.samples)]
        root.end()
        own.end()
    troubles = [
        [each.trouble for each in client.samples[:count]]
        for client, count in zip((root, own), asked, strict=True)
    ]
    print(
        f"{ATTACKS[name].name(size)}: root asked {asked[0]} times, the container {asked[1]} times; {troubles}"
    )
    assert not any(troubles[0])
    assert not any(troubles[1])
