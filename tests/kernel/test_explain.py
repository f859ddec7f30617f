"""`resolver explain` on the demo's node, without a daemon and beside one."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.node import Node
from tests.fakes.scene import DRIVERS, Case, full_scene, settle
from tests.kernel.conftest import Start, command
from tests.patience import until

#: The container's name, and its broken link after all repairs.
BREAKS = {"serve": "monitor", "legacy": "value"}


@pytest.fixture
def cases(tmp_path: Path) -> Iterator[list[Case]]:
    with Node(tmp_path, DRIVERS[0][0]) as node:
        cases = full_scene(node)
        settle(cases)
        yield cases


def explain(case: Case, run_dir: Path, pods: Path, *words: str) -> tuple[int, str]:
    done = command(case.container.node, run_dir, pods, "explain", *words)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_node_is_explained_with_and_without_daemon(cases: list[Case], tmp_path: Path, start: Start) -> None:
    train = cases[0].container
    pods = tmp_path / "pods"
    (pods / f"research_train-0_{train.pod_uid}" / "train").mkdir(parents=True)
    before = [case.tenant.hostpid for case in cases if not case.ended]
    os.mkdir(tmp_path / "run")

    code, document = explain(cases[0], tmp_path / "run", pods, "research/train-0", "--json")
    (explained,) = json.loads(document)["containers"]
    assert code == 1
    assert (explained["breaks"]["name"], explained["breaks"]["reason"]) == ("hostpid", "wrong_namespace")
    assert {owner["host_pid"] for owner in explained["owners"]} == {
        case.tenant.host_pid for case in cases[:2]
    }
    assert [each["nvml"] for each in explained["reported"]] == [34, 27]
    assert [each["monitor"] for each in explained["reported"]] == [0, 0]
    _, text = explain(cases[0], tmp_path / "run", pods, "research/train-0")
    assert f"2, but must be {cases[0].tenant.host_pid}: wrong_namespace" in text
    assert "By a read-only check" in text
    # The check wrote nothing.
    assert before == [case.tenant.hostpid for case in cases if not case.ended]

    daemon = start(train.node, "--pod-logs-dir", str(pods), "--interval", "50ms", "--nvml-interval", "200ms")
    daemon.wait_for("repair")
    for case in {case.container.name: case for case in cases}.values():
        broken = BREAKS.get(case.container.name)
        found: dict[str, Any] = {}

        def is_settled(case: Case = case, broken: str | None = broken, found: dict[str, Any] = found) -> bool:
            """Check that no slot is being repaired, and that each chain breaks where it must, or holds."""
            _, document = explain(case, daemon.run_dir, pods, case.container.pod_uid, "--json")
            if not document:
                return False  # the daemon didn't answer in time
            found |= json.loads(document)["containers"][0]
            links = [*found["links"], *(link for owner in found["owners"] for link in owner["links"])]
            moving = {"soon", "unknown"} & {link["state"] for link in links}
            return not moving and (found["breaks"] and found["breaks"]["name"]) == broken

        until(is_settled, f"{case.container.name} with its break at {broken}")
        assert found["container_id"] == case.container.container_id
        alive = [each for each in cases if each.container is case.container and not each.ended]
        owners = {owner["host_pid"] for owner in found["owners"]}
        assert owners - {None} == {each.tenant.host_pid for each in alive}
        reported = found["reported"]
        assert broken or all(abs(each["monitor"] - each["nvml"]) <= 3 for each in reported), reported
