"""Look-ups by a running daemon, single and in batches: an answer equals the kernel's, or there is none."""

import random
import time
from collections.abc import Sequence
from typing import Any

from resolver import client
from resolver.base.errors import NotFound, ProcessGone
from resolver.linux.procfs import Procfs
from resolver.lookup.forward import lookup
from tests.fakes.container import Container
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node
from tests.kernel.conftest import EVERY_SOURCE, Start
from tests.kernel.serving import SLEEP, Orders, serving
from tests.patience import PATIENCE_S, until

Pair = tuple[str, int]


def ask(daemon: Daemon, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    found = client.look_up_many(pairs, socket_path=str(daemon.socket), seconds=PATIENCE_S)
    answers: list[dict[str, Any]] = found["answers"]
    assert len(answers) == len(pairs)
    return answers


def complete(daemon: Daemon, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Ask again until each pair has an answer, because the daemon walks for only five seconds."""
    answers = ask(daemon, pairs)
    while {"reason": "too_slow"} in answers:
        answers = ask(daemon, pairs)
    return answers


def alone(daemon: Daemon, pair: Pair) -> dict[str, Any]:
    try:
        return client.look_up(*pair, socket_path=str(daemon.socket), seconds=PATIENCE_S)
    except (NotFound, ProcessGone):
        return {}


def by_walk(pair: Pair) -> dict[str, Any]:
    try:
        return lookup(Procfs(), *pair)._asdict()
    except (NotFound, ProcessGone):
        return {}


@EVERY_SOURCE
def test_each_answer_is_that_of_a_single_look_up(node: Node, start: Start, source: str) -> None:
    many, few = node.container(name="many"), node.container(name="few")
    sharing = node.container(many.pod_uid, "sharing", pid_namespace=many)
    on_host = node.container(name="on-host", pid_namespace="host")
    everyone: list[Pair] = []
    for container, count in ((many, 20), (few, 2), (sharing, 8), (on_host, 3)):
        everyone += [(container.container_id, container.spawn(SLEEP).ns_pid) for _ in range(count)]
    unshared = [pair for pair in everyone if pair[0] in (many.container_id, few.container_id)]
    shared, hosts = everyone[22], everyone[30]
    nested = [many.spawn(SLEEP, nested=True) for _ in range(3)]
    everyone += [(many.container_id, Procfs().ns_pids(each.host_pid)[1]) for each in nested]
    inner = many.spawn(SLEEP)  # in a nested cgroup, as systemd makes them
    away = many.spawn(SLEEP)  # cgroup of another container, PID namespace of this one
    (many.cgroup / "inner").mkdir()
    (many.cgroup / "inner" / "cgroup.procs").write_text(str(inner.host_pid))
    (few.cgroup / "cgroup.procs").write_text(str(away.host_pid))
    everyone += [(many.container_id, inner.ns_pid), (many.container_id, 1), (few.container_id, 1)]
    nobody: list[Pair] = [
        *((each.container_id, 4000) for each in (many, few, sharing, on_host)),
        (many.container_id, away.ns_pid),
        (few.container_id, away.ns_pid),
        ("ab" * 32, 1),
        ("abcdefabcdef", 1),
    ]
    by_other_names: list[Pair] = [
        (many.container_id[:12], 1),
        (f"containerd://{few.container_id}", 1),
        (f"{few.pod_uid}/nobody", 1),
        (f"{many.pod_uid}/many", 1),
    ]
    daemon = serving(start, node)
    pairs = everyone + nobody + by_other_names
    pairs += pairs[:10]  # equal pairs get one answer each
    random.Random(4).shuffle(pairs)
    for each in (many, few):  # names are for people, and may come later than the rest
        until(lambda cid=each.container_id: alone(daemon, (cid, 1))["container_name"], "its name")  # type: ignore[misc]
    answers = complete(daemon, pairs)
    for pair, answer in zip(pairs, answers, strict=True):
        wanted, single = by_walk(pair), alone(daemon, pair)
        while single.get("container_name") is None is not wanted.get("container_name"):  # until it is read
            single = alone(daemon, pair)
        assert single | {"source": ""} == wanted | {"source": ""}, pair
        assert source != "bpf" or pair not in unshared or single["source"] == "bpf"
        briefly = {key: wanted[key] for key in wanted if key in ("host_pid", "start_time")}
        assert briefly == {key: answer[key] for key in answer if key != "reason"}, (pair, answer)
        assert ("reason" in answer) == (not wanted)
    found = dict(zip(pairs, answers, strict=True))
    assert all("host_pid" in found[pair] for pair in everyone)
    reasons = {pair: found[pair]["reason"] for pair in nobody}
    assert {reasons["ab" * 32, 1], reasons["abcdefabcdef", 1]} == {"no_such_container"}
    assert {why for pair, why in reasons.items() if len(pair[0]) == 64 and pair[0] != "ab" * 32} == {
        "no_such_process"
    }
    assert found[f"{few.pod_uid}/nobody", 1]["reason"] == "no_such_container"
    for said, pair in ((source, unshared[0]), (source, unshared[-1]), ("cgroup", shared), ("cgroup", hosts)):
        until(lambda p=pair, s=said: alone(daemon, p)["source"] == s, f"an answer by {said}")  # type: ignore[misc]
    inner.kill()
    (many.cgroup / "inner").rmdir()


def test_answers_stay_right_while_processes_come_and_go(node: Node, start: Start, source: str) -> None:
    """In a storm of short processes, each process in an answer has the number that was asked for."""
    container = node.container()
    kept = [container.spawn(SLEEP) for _ in range(10)]
    storm = container.spawn(["/bin/sh", "-c", "read line; while :; do /bin/true & /bin/true & wait; done"])
    daemon = serving(start, node)
    storm.write_line("begin")
    pairs = [(container.container_id, ns_pid) for ns_pid in range(1, 3000)]
    known = {each.ns_pid: each.host_pid for each in [*kept, storm]} | {1: container.init_host_pid}
    ends = time.monotonic() + 2.5
    rounds = 0
    while rounds < 2 or time.monotonic() < ends:
        for (_, ns_pid), answer in zip(pairs, complete(daemon, pairs), strict=True):
            if ns_pid in known:
                assert answer.get("host_pid") == known[ns_pid], (ns_pid, answer)
            elif "host_pid" in answer:
                _must_be(answer, ns_pid, container)
        rounds += 1


def _must_be(answer: dict[str, Any], ns_pid: int, container: Container) -> None:
    """Check that the process has this number, unless it has ended."""
    procfs = Procfs()
    try:
        with procfs.open_handle(answer["host_pid"]) as handle:
            if handle.process.start_time == answer["start_time"]:
                chain = procfs.pidns_chain(answer["host_pid"])
                if handle.alive():
                    assert (ns_pid, container.pidns) in zip(handle.process.ns_pids, chain, strict=True)
    except ProcessGone:
        pass


def test_two_thousand_unknown_names_delay_no_other_lookup(node: Node, start: Start) -> None:
    """Each needs its own walk; a pair that is not reached in time is answered with too_slow."""
    pairs = [(f"{number:064x}", 1) for number in range(2_000)]
    answers = ask(serving(start, node, "--source", "scan"), pairs)
    reasons = {each["reason"] for each in answers}
    assert reasons <= {"no_such_container", "too_slow"}
    assert answers[0] == {"reason": "no_such_container"}


@EVERY_SOURCE
def test_a_number_that_is_used_again_is_another_process(node: Node, start: Start, source: str) -> None:
    container = node.container()
    order = Orders(container)
    daemon = serving(start, node)
    seen = 0
    for _ in range(40):
        host_pid = order("as 777")
        for _ in range(5):
            found = alone(daemon, (container.container_id, 777))
            if found:
                assert (found["host_pid"], found["start_time"]) == (host_pid, Procfs().start_time(host_pid))
                seen += 1
        order("kill 777")
        assert alone(daemon, (container.container_id, 777)) == {}
    container.stop()
    assert alone(daemon, (container.container_id, 1)) == {}
    assert seen >= (40 if source == "bpf" else 1)  # a scan pauses between two walks
