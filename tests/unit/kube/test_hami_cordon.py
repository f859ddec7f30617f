"""HAMi's cordon: the reporter adds and removes unhealthy GPUs, and keeps the entries of others."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resolver.kube import hami_cordon
from resolver.kube.device import HAMI_CORDON, entries
from resolver.kube.hami_cordon import OWN_ENTRIES, change, foreign_entries
from tests.fakes.kube import CORDON_RULE, RULES, KubeServer
from tests.fakes.reported import NODE, gpu, impatient
from tests.unit.kube.test_reporter import ILL, A, B, synced

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def node(cordon: str | None = None, own: str | None = None) -> dict[str, Any]:
    annotations = {HAMI_CORDON: cordon, OWN_ENTRIES: own}
    return {"resourceVersion": "7", "annotations": {name: text for name, text in annotations.items() if text}}


@pytest.mark.parametrize(
    ("cordon", "own", "sick", "well", "after"),
    [
        (None, None, ["GPU-a"], [], ("GPU-a", "GPU-a")),
        ("GPU-x, ,GPU-y", None, ["GPU-a"], [], ("GPU-x,GPU-y,GPU-a", "GPU-a")),
        ("GPU-x,GPU-a", "GPU-a", [], ["GPU-a"], ("GPU-x", None)),
        ("GPU-a", "GPU-a", [], ["GPU-a"], (None, None)),
        ("GPU-a", None, [], ["GPU-a"], None),  # an operator's entry of a healthy GPU
        ("GPU-a", None, ["GPU-a"], [], None),  # and of an unhealthy one
        ("GPU-x", "GPU-a", [], [], ("GPU-x", None)),  # an operator removed our entry
        ("GPU-x", None, [], ["GPU-a"], None),
    ],
)
def test_change_touches_own_entries_only(
    cordon: str | None,
    own: str | None,
    sick: list[str],
    well: list[str],
    after: tuple[str | None, ...] | None,
) -> None:
    patch = change(node(cordon, own), sick, well)
    assert foreign_entries(node(cordon, own)) == set(entries(node(cordon), HAMI_CORDON)) - {own}
    if after is None:
        assert patch == {}
    else:
        assert patch["metadata"]["annotations"] == dict(zip((HAMI_CORDON, OWN_ENTRIES), after, strict=True))
        assert patch["metadata"]["resourceVersion"] == "7"


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    impatient(monkeypatch)
    monkeypatch.setattr(hami_cordon, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(hami_cordon, "UNHEALTHY_SECONDS", 0.3)
    monkeypatch.setattr(hami_cordon, "HEALTHY_SECONDS", 0.3)
    with KubeServer(tmp_path / "kube", RULES | {CORDON_RULE}) as server:
        server.set_node(NODE, {HAMI_CORDON: "GPU-x"})
        yield server
    gc.collect()


def cordoned(kube: KubeServer) -> str:
    return str(kube.nodes[NODE]["metadata"]["annotations"].get(HAMI_CORDON, ""))


async def test_unhealthy_gpu_is_entered_until_it_is_well(kube: KubeServer) -> None:
    async with synced(kube, hami_cordon=True) as run:
        run.daemon.say(A, ILL)
        await run.until(lambda: cordoned(kube) == "GPU-x,GPU-b")
        await run.in_sync()
        assert run.reasons()["GPU-b"] == "TooHot"  # our own entry doesn't count as a cordon
        run.daemon.say(A, gpu("GPU-b", 1), error="NVML does not answer")
        await run.until(lambda: run.reasons().get("GPU-a") == "NvmlUnavailable")
        assert cordoned(kube) == "GPU-x,GPU-b"  # a silent driver removes no entry
        run.daemon.say(A, B)
        await run.until(lambda: cordoned(kube) == "GPU-x")
        await run.until(lambda: run.health() == {"GPU-a": True, "GPU-b": True})


async def test_gpu_that_flaps_is_not_entered(kube: KubeServer) -> None:
    async with synced(kube, hami_cordon=True) as run:
        for state in (ILL, B) * 4:
            run.daemon.say(A, state)
            await run.until(lambda state=state: run.health()["GPU-b"] == (state is B))  # type: ignore[misc]
    assert cordoned(kube) == "GPU-x"


async def test_entry_of_an_operator_shows_in_the_device(kube: KubeServer) -> None:
    kube.set_node(NODE, {HAMI_CORDON: "GPU-b"})
    async with synced(kube) as run:
        await run.until(lambda: run.reasons() == {"GPU-a": "", "GPU-b": "Cordoned"})
        assert run.tally.cordoned == 1
        assert run.daemon.cordoned == ["GPU-b"]  # which `resolver devices` shows
        kube.set_node(NODE, {})
        await run.until(lambda: run.daemon.cordoned == [])
