"""`resolver explain` over pictures that the real API serves: the chain's broken link, and its text."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from resolver.base.reasons import BypassReason, RegionReason, RepairReason, SampleReason, UnresolvedReason
from resolver.cli import main, show
from resolver.gpu.attribution import NOTHING
from resolver.gpu.inventory import Gpu
from resolver.linux.procfs import Procfs
from resolver.state import Container, ContainerUse, LimitState, Process, SlotReport, UsageReport, WithoutSlot
from tests.fakes.chains import CID, GPU, GPUS, MAIN, OTHER, PATH, POD, RIGHT, USING, region, whole
from tests.fakes.family import Family
from tests.fakes.served import serving

Asked = Callable[..., tuple[int, str]]


@pytest.fixture
def asked(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Return a function that runs the command against a picture; it returns the exit code and output."""
    # The command searches the node's processes for each container.
    monkeypatch.setattr(Procfs, "each_entry", Family.each_entry)

    def ask(picture: dict[str, Any], *arguments: str) -> tuple[int, str]:
        with serving(tmp_path / "s", group=os.getgid(), **picture) as served:
            code = main(["explain", *(arguments or ("research/train-0",)), "--socket", served.path])
        told = capsys.readouterr()
        return code, told.out or told.err

    return ask


def breaks(asked: Asked, picture: dict[str, Any]) -> dict[str, Any]:
    """Return the broken link from the JSON, after a check that the text names the same link."""
    code, text = asked(picture)
    assert code == 1
    said_code, document = asked(picture, "research/train-0", "--json")
    (container,) = json.loads(document)["containers"]
    assert all(part["links"][0]["name"] for part in (container, *container["owners"]))
    broken: dict[str, Any] = container["breaks"]
    assert said_code == 1
    assert f'breaks at "{broken["name"]}"' in " ".join(text.split())
    assert broken["cause"]
    assert broken["fix"]
    return broken


def test_unbroken_chain_goes_from_process_to_monitor(asked: Asked) -> None:
    code, text = asked(whole())
    assert code == 0
    shown = [line.split(None, 2) for line in text.splitlines() if line.startswith("  ok ")]
    assert [line[1] for line in shown] == [
        "processes", "namespace", "map", "cache", "driver", "slot", "hostpid", "sample", "value", "monitor",
    ]  # fmt: skip
    assert "GPU 0: HAMi's monitor 40 %, NVML 40 %" in text
    assert "4711, the host PID; it was missing, and is repaired" in text
    assert "The chain holds" in text


@pytest.mark.parametrize(
    "name", ["research/train-0/main", POD, POD[:8], f"{POD}/main", "main", CID, CID[:12], f"docker://{CID}"]
)
def test_every_name_that_a_person_has_for_it_is_understood(asked: Asked, name: str) -> None:
    code, text = asked(whole(), name)
    assert (code, "research/train-0/main" in text) == (0, True)


def test_pod_name_explains_all_its_containers(asked: Asked) -> None:
    side = Container(OTHER, POD, "side", "research", "train-0", "containerd", 4026532001, 4800, (), 1e9)
    code, text = asked(whole(containers=(MAIN, side)))
    assert code == 0
    assert text.index("research/train-0/main") < text.index("research/train-0/side")
    assert "no process of it has used a GPU yet" in text
    files = {f"/usr/local/vgpu/containers/{POD}_{name}/x.cache": RegionReason.BAD_HEADER for name in "ab"}
    _, text = asked(whole(rejected=files))  # no process of these containers is known
    assert text.index("research/train-0/a") < text.index("research/train-0/b")
    code, text = asked(whole(), "prod/nothing")
    assert (code, "no container here is called 'prod/nothing'" in text) == (1, True)
    stranger = Container(OTHER, "99" + POD[2:], "main", "prod", "train-0", "containerd", 1, 2, (), 1e9)
    code, text = asked(whole(containers=(MAIN, stranger)), "main")  # the other container has no cache file
    assert (code, "research/train-0/main" in text) == (0, True)
    stranger = replace(stranger, regions=("/x/main/y.cache",))
    code, text = asked(whole(containers=(MAIN, stranger)), "main")
    assert code == 3
    assert f"{CID}  research/train-0/main" in text
    assert f"{OTHER}  prod/train-0/main" in text


def test_claim_file_belongs_to_containers_with_slots(asked: Asked) -> None:
    path = "/run/claims/x.cache"
    names = dict.fromkeys(("pod_uid", "container_name", "container_id"))
    shared = region(replace(RIGHT, container_id=CID), path=path, **names)
    code, text = asked(whole(regions=(shared,), containers=(replace(MAIN, regions=()),)))
    assert (code, "x.cache, layout v1.2" in text) == (0, True), text


@pytest.mark.parametrize("reason", [reason for reason in UnresolvedReason if not reason.passing])
def test_every_slot_reason_has_a_next_step(asked: Asked, reason: UnresolvedReason) -> None:
    owner = 4711 if reason.of_writing else None
    slot = replace(RIGHT, unresolved=reason, host_pid=owner, hostpid=9, repaired=None, utilization=(None,))
    policy = {"policy": {"namespace": "unknown"}} if reason is UnresolvedReason.DRIVER_UNKNOWN else {}
    broken = breaks(asked, whole(slot, **policy))
    where = "driver" if policy else "hostpid" if reason.of_writing else "slot"
    assert (broken["name"], broken["reason"]) == (where, reason)


@pytest.mark.parametrize("reason", [reason for reason in UnresolvedReason if reason.passing])
def test_transient_reason_is_no_break(asked: Asked, reason: UnresolvedReason) -> None:
    code, text = asked(whole(replace(RIGHT, unresolved=reason, hostpid=9, repaired=None)))
    assert (code, "resolver is repairing" in text) == (0, True)


@pytest.mark.parametrize("reason", list(RegionReason))
def test_a_file_that_is_ignored_is_where_it_breaks(asked: Asked, reason: RegionReason) -> None:
    path = PATH.rpartition("/")[0] if reason is RegionReason.TOO_MANY_ENTRIES else PATH
    broken = breaks(asked, whole(regions=(), rejected={path: reason}))
    assert (broken["name"], broken["reason"]) == ("cache file", reason)


@pytest.mark.parametrize(
    "reason", sorted(set(SampleReason) - {SampleReason.NOT_IN_CONTAINER, SampleReason.NOT_FOUND_YET})
)
def test_a_process_without_a_slot_is_where_it_breaks(asked: Asked, reason: SampleReason) -> None:
    broken = breaks(asked, whole(gpu_processes=(USING, _stray(reason))))
    assert (broken["name"], broken["reason"], broken["ns_pid"]) == ("slot", reason, 9)


def _stray(reason: SampleReason) -> Process:
    return Process(4800, 9, GPU, CID, POD, "main", "research", "train-0", "python", 40, 1 << 30, reason)


def test_a_container_without_hami_breaks_at_the_cache_file(asked: Asked) -> None:
    stray = _stray(SampleReason.NO_SHARED_REGION)
    broken = breaks(asked, whole(regions=(), gpu_processes=(stray,)))
    assert (broken["name"], broken["reason"]) == ("cache file", "no_shared_region")
    code, text = asked(whole(regions=(), gpu_processes=(_stray(SampleReason.NOT_FOUND_YET),)))
    assert (code, "BREAKS" in text, "not_found_yet" in text) == (4, False, True)
    picture = whole(regions=(), gpu_processes=(stray,), missing_dirs=("/usr/local/vgpu/containers",))
    broken = breaks(asked, picture)
    assert "there is no /usr/local/vgpu/containers" in broken["found"]


@pytest.mark.parametrize(
    ("hostpid", "others", "reason"),
    [
        (0, (), RepairReason.MISSING),
        (7, (), RepairReason.WRONG_NAMESPACE),
        (99, (), RepairReason.STALE),
        (99, (SlotReport(8, 1, 99, 4712, False, None, None, (0,), (0,)),), RepairReason.DUPLICATE),
    ],
)
def test_wrong_hostpid_breaks_without_a_writer(
    asked: Asked, hostpid: int, others: tuple[SlotReport, ...], reason: RepairReason
) -> None:
    wrong = replace(RIGHT, hostpid=hostpid, repaired=None, sm_util=(0,))
    broken = breaks(asked, whole(wrong, *others, dry_run=True))
    assert (broken["name"], broken["reason"], broken["ns_pid"]) == ("hostpid", reason, 7)
    assert "--dry-run" in broken["fix"]
    code, text = asked(whole(wrong, *others))
    assert (code, f"{hostpid}, but must be 4711: {reason}" in text) == (0, True)
    assert "0 % on GPU 0" in text  # later links are shown without blame


@pytest.mark.parametrize(
    ("picture", "link", "words"),
    [
        (whole(source={"not_ready": "the canary was not found"}), "map", "the canary was not found"),
        (whole(policy={"namespace": "unknown"}), "driver", "the PID namespace of this driver's samples"),
        (whole(replace(RIGHT, stuck="somebody else writes it")), "value", "somebody else writes"),
        (whole(replace(RIGHT, sm_util=())), "value", "no place for utilization"),
        (whole(regions=(region(RIGHT, quarantined=True),)), "cache file", "died or hung"),
        (whole(regions=(region(RIGHT, layout="v1.1-shifted"),)), "monitor", "every monitor of HAMi drops it"),
    ],
)
def test_each_link_can_break(asked: Asked, picture: dict[str, Any], link: str, words: str) -> None:
    broken = breaks(asked, picture)
    assert (broken["name"], words in broken["cause"]) == (link, True)


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        (whole(joined=NOTHING._replace(error="the driver hangs")), "NVML does not answer: the driver hangs"),
        (whole(replace(RIGHT, utilization=(None,))), "NVML has not reported this process yet"),
        (
            whole(
                replace(RIGHT, utilization=(None,)),
                inventory=GPUS._replace(
                    gpus=(Gpu(GPU, 0, 0, "A", 1, 1, 4, 5, 7.0, True, (), 0, "unsupported", "MIG mode", ()),)
                ),
            ),
            "no samples of processes there: MIG mode",
        ),
        (whole(source={"incomplete": "the map is full"}), "the map is full"),
    ],
)
def test_unknown_is_neither_right_nor_broken(asked: Asked, picture: dict[str, Any], words: str) -> None:
    code, text = asked(picture)
    assert (code, words in " ".join(text.split())) == (4, True), text


@pytest.mark.parametrize(
    ("left", "words", "dry_run", "code"),
    [
        ({"ended": (18,)}, "the monitor of HAMi 2.10 40 %, of 2.7 to 2.9 58 %, NVML 40 %", True, 1),
        ({"moved": (25,)}, "HAMi's monitor 40 %, up to 2.6 65 %, NVML 40 %", True, 1),
        ({"ended": (18,), "moved": (25,)}, "of 2.7 to 2.9 58 %, up to 2.6 83 %, NVML 40 %", False, 0),
    ],
)
def test_monitors_that_show_something_else_are_named(
    asked: Asked, left: dict[str, Any], words: str, *, dry_run: bool, code: int
) -> None:
    picture = whole(regions=(region(RIGHT, **left),), dry_run=dry_run)
    exit_code, text = asked(picture)
    assert words in " ".join(text.split())
    assert exit_code == code
    assert ("The chain holds" in text) is False
    assert ("resolver is repairing" in text) is not dry_run


@pytest.mark.parametrize("terminal", [True, False])
def test_no_word_is_broken_and_no_line_in_a_pipe(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, *, terminal: bool
) -> None:
    monkeypatch.setattr(show, "on_terminal", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    path = "/opt/" + "x" * 90
    _, text = asked(whole(replace(RIGHT, stuck=f"{path} says so, at length: " + "word " * 20)))
    assert path in text
    widest = max(map(len, text.replace(path, "").splitlines()))
    assert (widest <= 80) is terminal


def test_outdated_values_are_unknown_with_their_age(asked: Asked) -> None:
    hangs = NOTHING._replace(error="the driver hangs")
    picture = whole(joined=hangs, at=1e9 + 26, collected_at=1e9)
    code, text = asked(picture)
    assert code == 4
    assert "NVML: ? on GPU 0" in text
    assert "its last answer is 26s old" in text


def test_a_killed_process_adds_up_until_its_slot_is_cleared(asked: Asked) -> None:
    dead = replace(RIGHT, host_pid=None, dead=True, sm_util=(55,), utilization=(0,))
    code, text = asked(whole(dead, gpu_processes=()))
    assert (code, "its process's last value" in " ".join(text.split())) == (0, True)
    assert breaks(asked, whole(dead, gpu_processes=(), dry_run=True))["name"] == "value"


def test_a_name_that_a_tenant_chose_reaches_no_terminal(asked: Asked) -> None:
    code, text = asked(whole(gpu_processes=(replace(USING, comm="\x1b[2Jpy"),)))
    assert (code, "\x1b" in text, "\\x1b[2Jpy" in text) == (0, False, True)


def test_explain_without_daemon_or_root_names_next_step() -> None:
    code = (
        "import os, sys; from resolver.cli import main; os.setuid(65534); "
        "sys.exit(main(['explain', 'x', '--socket', '/nonexistent/resolver.sock']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (4, "")
    assert "Start one with" in done.stderr
    assert "Root (sudo) can run this command without a daemon" in done.stderr


def test_processes_without_slot_come_last(asked: Asked) -> None:
    names = MAIN.namespace, MAIN.pod, MAIN.container_name, MAIN.pod_uid, MAIN.container_id
    use = ContainerUse(*names, GPU, 1e9, 4321.0, 0.0, 0.0, None, 0.6, None, None, 30, LimitState.EXCEEDED, 0)
    other = replace(use, pod_uid="another")
    namespace, pod, name, uid, cid = names
    process = Process(47, 9, GPU, cid, uid, name, namespace, pod, "python", 5, 1, SampleReason.NO_SLOT)
    without = WithoutSlot(process, time.time() - 300, (BypassReason.STATIC, BypassReason.NOT_PRELOADED))
    picture = whole() | {"used": lambda: UsageReport((use, other), (without,))}
    text = " ".join(asked(picture)[1].split())
    assert re.search(r"PID 47 on the host, python, has had no slot for 5m \S+: it is a static program", text)
    document = json.loads(asked(picture, "research/train-0", "--json")[1])
    (record,) = document["containers"][0]["without_slot"]
    assert record["causes"] == ["static", "not_preloaded"]
    assert [use["limit_state"] for use in document["containers"][0]["uses"]] == ["exceeded"]
