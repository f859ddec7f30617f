"""Log lines of the decision, and of tenants' watchers that contradict it, which never change it."""

from typing import Any

import pytest

from resolver.base.journal import Journal
from resolver.config import HostpidNamespace
from resolver.daemon import hostpid_decision
from resolver.daemon.hostpid_decision import Decision
from resolver.hami.hostpid_policy import Origin

AUTO, HOST, CONTAINER = HostpidNamespace.AUTO, HostpidNamespace.HOST, HostpidNamespace.CONTAINER


class Scene:
    """A decision for a driver, a clock that the test sets, and all log lines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[dict[str, Any]] = []
        self.now = 100.0
        journal = self.journal = Journal()
        monkeypatch.setattr(
            journal, "record", lambda event, **fields: self.lines.append({"event": event, **fields})
        )
        monkeypatch.setattr(hostpid_decision, "time", self)
        self.decision = Decision(AUTO, journal)
        assert self.decision.policy.namespace is None
        self.decision.decide(AUTO, "535.104.05")

    def monotonic(self) -> float:
        return self.now

    def weigh(self, confirms: int, doubts: int, seconds: float = 60.0, contradicts: int = 0) -> None:
        for _ in range(int(seconds)):
            self.decision.weigh({"confirms": confirms, "contradicts": contradicts, "doubts": doubts})
            self.now += 1.0

    def warnings(self) -> list[str]:
        return [line["why"] for line in self.lines if line["event"] == "driver_contradicts_version"]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_it_is_logged_when_it_is_made_and_when_it_changes(scene: Scene) -> None:
    scene.decision.decide(AUTO, "535.104.05")
    scene.decision.decide(CONTAINER, "535.104.05")
    assert [(line["event"], line["hostpid_namespace"], str(line["origin"])) for line in scene.lines] == [
        ("policy", HOST, "by version"),
        ("policy", CONTAINER, "forced"),
    ]
    Decision(AUTO, scene.journal).decide(AUTO, None)
    assert scene.lines[-1]["hostpid_namespace"] == "unknown"


def test_watchers_decide_where_the_version_does_not(scene: Scene) -> None:
    decide, weigh = scene.decision.decide, scene.decision.weigh
    decide(AUTO, "590.48.01")
    assert scene.decision.policy.namespace is None
    weigh({}, {CONTAINER: 1})
    weigh({}, {CONTAINER: 5, HOST: 1})
    assert scene.decision.policy.namespace is None, "one container, or two numbers"
    weigh({}, {HOST: 2})
    decide(AUTO, "590.48.01")
    assert scene.decision.policy.wanted(4711, 7) == 4711
    assert scene.decision.policy.origin is Origin.BY_WATCHERS


def test_contradicted_decision_is_a_warning(scene: Scene) -> None:
    scene.weigh(0, 2, 30)
    assert scene.warnings() == []
    scene.weigh(0, 2)
    (why,) = scene.warnings()
    assert "as its version says" in why
    assert "set --hostpid-namespace container" in why
    assert why.endswith("or all 2 containers with such watchers use HAMi 2.4.1 or CUDA_VISIBLE_DEVICES")
    assert scene.decision.policy.namespace is HOST
    scene.weigh(1, 1)
    scene.weigh(0, 5)
    assert len(scene.warnings()) == 1  # reported once
    scene.decision.decide(CONTAINER, "535.104.05")
    scene.weigh(0, 2, contradicts=3)
    assert len(scene.warnings()) == 2  # and once for another decision
    assert "try auto" in scene.warnings()[1]
    assert scene.decision.policy.namespace is CONTAINER, "what is forced stays"


def test_contradicted_decision_is_unknown_until_watchers_decide(scene: Scene) -> None:
    scene.weigh(1, 0, contradicts=5)
    scene.weigh(0, 5, contradicts=1)
    assert scene.decision.policy.namespace is HOST
    scene.weigh(0, 0, contradicts=2)
    assert scene.decision.policy.namespace is None
    assert "not written until watchers show the right number" in scene.warnings()[-1]
    scene.decision.decide(AUTO, "535.104.05")
    assert scene.decision.policy.namespace is None, "the version is refuted"
    scene.decision.weigh({}, {CONTAINER: 2})
    assert scene.decision.policy.namespace is CONTAINER


def test_one_container_or_one_that_confirms_is_no_contradiction(scene: Scene) -> None:
    scene.weigh(0, 1, 90)
    scene.weigh(1, 7, 90)
    for _ in range(3):
        scene.weigh(0, 2, 25)
        scene.weigh(0, 1, 1)
    assert scene.warnings() == []
