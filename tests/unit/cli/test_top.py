"""`resolver top` on the daemon's answers: the tree, the rows, the frame, and output for programs."""

import functools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from resolver.cli._top.rows import Amount, Choice, Row, chosen, rows_of, total
from resolver.cli._top.screen import Reading, Screen
from resolver.cli.container_names import HOST
from resolver.cli.documents import of_snapshot
from resolver.cli.show import cells, clip, fit, size
from resolver.cli.top import COLUMNS, print_plain
from resolver.state import Container, ContainerUse, LimitState, Snapshot, UsageReport
from scripts.picture import PLACE, draw
from tests.fakes.busy import GIB, GPUS, Builder, busy, troubled
from tests.fakes.command import called
from tests.fakes.pictures import picture
from tests.fakes.served import Served

BERT = "ml-prod/bert-trainer-7f9c8d-x2x9k/main"


def tree_of(snapshot: Snapshot, name: str = "") -> list[Row]:
    return rows_of(of_snapshot(snapshot), name)


def rows(snapshot: Snapshot, **choice: Any) -> list[Row]:
    return list(chosen(tree_of(snapshot), Choice(**choice)))


def containers(tree: list[Row], gpu: int) -> dict[object, Row]:
    below = [row for row in tree[gpu].below if row.kind == "container"]
    return {row.facts["container_name"] or str(row.facts["container_id"])[:4]: row for row in below}


def titles(rows: list[Row], kind: str = "container") -> list[str]:
    return [row.title for row in rows if row.kind == kind]


# ---- the tree -----------------------------------------------------------------------------------------------------


def test_a_containers_use_is_that_of_its_processes() -> None:
    first = containers(tree_of(troubled()), 0)
    main = first["main"]
    assert main.use == Amount(100)  # 52 + 61 are from two moments; the sum is limited to 100
    assert main.memory == Amount(int(2.6 * GIB) + int(0.5 * GIB))
    assert [process.facts["repaired"] for process in main.below] == ["missing", "wrong_namespace"]
    assert str(first["vllm"].below[0].facts["stuck"]).startswith("sm_util stays 0")


def test_absent_sample_is_0_only_if_the_driver_was_asked() -> None:
    assert containers(tree_of(troubled()), 0)["jupyter"].use == Amount(0)
    snapshot = troubled()
    failed = snapshot._replace(joined=snapshot.joined._replace(error="the driver hangs"))
    assert containers(tree_of(failed), 0)["jupyter"].use == Amount(None)
    build = Builder()
    build.named(GPUS[3], "a/b/idle")  # on a lost GPU
    idle = containers(tree_of(build.picture()), 3)["idle"]
    assert (idle.use, idle.memory) == (Amount(None), Amount(None))


def test_unknown_part_makes_the_sum_a_minimum() -> None:
    whisper = containers(tree_of(troubled()), 1)["main"]
    assert whisper.memory == Amount(int(3.3 * GIB), at_least=True)
    assert total([Amount(3), None], most=100) == Amount(3, at_least=True)
    assert total([None]) == Amount(None)
    assert total([]) == Amount(0)
    assert total([], missing=True) == Amount(None)
    (quiet,) = [process for process in whisper.below if not process.facts["listed"]]
    assert (quiet.pids, quiet.use, quiet.memory) == ((47_000, 12), Amount(0), Amount(None))


def used(its: Container, idle_since: float | None, state: LimitState) -> ContainerUse:
    names = its.namespace, its.pod, its.container_name, its.pod_uid, its.container_id
    return ContainerUse(*names, GPUS[0].uuid, 0, 0, 0, 0, None, None, None, idle_since, 60, state, 0)


def limited(core: int, gib: float, busy: int | None = 52, state: str = "in_force") -> Snapshot:
    """Return a container with these limits, and a process with load ``busy`` and 2 GiB of memory."""
    build = Builder()
    build.named(GPUS[0], "a/b/limited")
    build.process("x", 5, 5, busy, 2.0)
    build.limited(core, gib)
    use = used(build.containers[0], None, LimitState(state))
    return build.picture()._replace(used=lambda: UsageReport((use,)))


@pytest.mark.parametrize(
    ("limits", "memory", "note", "tone"),
    [
        ((100, 0), "2.0G", "", ""),
        ((0, 0), "2.0G", "", ""),
        ((60, 4), "2.0G/4.0G", "core limit 60%", ""),
        ((60, 4, 52, "switched_off"), "2.0G/4.0G", "core limit 60%, switched off", ""),
        ((50, 4, None), "2.0G/4.0G", "core limit 50%", ""),  # unknown use never exceeds a limit
        ((50, 4), "2.0G/4.0G", "over core", "warn"),
        ((60, 1.5), "2.0G/1.5G", "over memory", "warn"),
        ((50, 1.5), "2.0G/1.5G", "over core and memory", "warn"),
    ],
)
def test_limits_stand_beside_the_use(limits: tuple[Any, ...], memory: str, note: str, tone: str) -> None:
    (row,) = [row for row in rows(limited(*limits)) if row.kind == "container"]
    assert (row.bytes(), row.note, row.tone) == (memory, note, tone)
    assert not note or f"core limit {limits[0]}%" in row.detail


def test_processes_without_hami_or_container_are_listed() -> None:
    second = containers(tree_of(troubled()), 1)
    assert [process.title for process in second["None"].below] == ["Xorg"]
    assert [process.facts["no_slot"] for process in second["abab"].below] == ["no_shared_region"] * 2
    assert "no_shared_region: a container without HAMi" in second["abab"].below[0].detail


def test_a_gpu_that_only_a_process_names_and_one_without_uuid() -> None:
    build = Builder()
    strange = replace(GPUS[0], uuid="GPU-strange")
    build.named(strange, "a/b/c")
    build.process("x", 5, 5, 7, 1.0)
    nameless = replace(GPUS[1], uuid="", device_index=1), replace(GPUS[2], uuid="", device_index=2)
    tree = tree_of(build.picture(nameless))
    assert [gpu.key for gpu in tree] == ["device 1", "device 2", "GPU-strange"]
    assert (tree[2].title, tree[2].note, tree[2].use) == ("GPU-strange", "not in inventory", Amount(None))


def test_a_process_on_a_mig_instance_is_on_its_gpu() -> None:
    build = Builder()
    instance = GPUS[2].mig_instances[0]
    build.named(replace(GPUS[2], uuid=instance.uuid), "a/b/c")
    build.process("x", 5, 5, None, 1.0)
    tree = tree_of(build.picture())
    assert list(containers(tree, 2)) == ["c"]
    assert len(tree) == len(GPUS)


def test_unresolved_container_is_named_only_if_unique() -> None:
    build = Builder()
    build.named(GPUS[0], "ns/pod/main")
    build.regions[0] = replace(build.regions[0], container_id=None)
    alone = tree_of(build.picture())
    assert containers(alone, 0)["main"].facts["pod"] == "pod"
    build.containers.append(replace(build.containers[0], container_id="f" * 64))  # the container restarted
    assert containers(tree_of(build.picture()), 0)["main"].facts["pod"] is None


# ---- rows ---------------------------------------------------------------------------------------------------------


def test_unresolved_comes_last_and_every_state_has_its_note() -> None:
    shown = rows(troubled())
    notes = {row.note for row in shown}
    states = {"✓ missing", "✓ stale", "sm_util stuck", "no process", "not on the GPU", "no_shared_region"}
    assert states | {"MIG", "unhealthy: lost"} <= notes
    at = [row.key for row in shown].index("unresolved")
    last = [(row.kind, row.note) for row in shown[at + 1 :]]
    assert last == [("sample", "pid_unknown"), ("slot", "ambiguous"), ("file", "unknown_size")]
    gpu, *_ = tree_of(Builder().picture((replace(GPUS[0], samples="unsupported"),)))
    assert (gpu.note, gpu.tone) == ("samples unsupported", "warn")


def test_unknown_is_a_question_mark_with_reason() -> None:
    unknown = [row for row in rows(troubled()) if row.kind == "process" and row.use == Amount(None)]
    assert len(unknown) == 3
    for row in unknown:
        assert row.percent() == "?"
        assert "utilization not known: " in row.detail
    assert {"GPU is lost", "MIG mode: NVML tells no utilization of processes"} <= {
        row.detail.split("not known: ")[1].split(" · ")[0] for row in unknown
    }


@pytest.mark.parametrize(
    ("sort", "column"), [("utilization", "use"), ("memory", "memory"), ("name", "title")]
)
@pytest.mark.parametrize("reverse", [False, True])
def test_containers_are_sorted_within_their_gpu(sort: str, column: str, *, reverse: bool) -> None:
    for gpu in tree_of(busy(40))[:2]:
        listed = [row for row in chosen([gpu], Choice(sort, reverse)) if row.kind == "container"]
        values = [getattr(row, column) for row in listed]
        assert values == sorted(values, reverse=reverse is (sort == "name"))
        assert len(set(values)) > 3


def test_values_too_old_are_question_marks_with_their_age(capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = troubled()
    hangs = snapshot._replace(at=snapshot.at + 26, joined=snapshot.joined._replace(error="the driver hangs"))
    shown = [row for row in rows(hangs) if row.kind in ("gpu", "container", "process")]
    assert {row.use for row in shown} <= {Amount(None), Amount(0)}
    assert {row.use for row in shown if row.kind != "process"} == {Amount(None)}
    assert "NVML last answered 26s ago" in shown[0].detail
    print_plain(tree_of(hangs))
    first = capsys.readouterr().out.splitlines()[1]
    assert re.search(r" \? +\?/80.0G .*; NVML last answered 26s ago$", first), first


def test_unknown_is_sorted_last() -> None:
    build = Builder()
    for name, load in (("a", None), ("b", 0), ("c", 9)):
        build.named(GPUS[0], f"x/{name}/main")
        build.process("p", ord(name), 1, load, 1.0)
    assert titles(rows(build.picture())) == ["x/c/main", "x/b/main", "x/a/main"]
    assert titles(rows(build.picture(), reverse=True)) == ["x/b/main", "x/c/main", "x/a/main"]


def test_longest_idle_container_comes_first() -> None:
    build = Builder()
    for name in ("a", "b", "c"):
        build.named(GPUS[0], f"x/{name}/main")
    idle = dict(zip("abc", (None, time.time() - 60, time.time() - 7260), strict=True))
    uses = tuple(used(its, idle[str(its.pod)], LimitState.NO_LIMIT) for its in build.containers)
    shown = rows(build.picture()._replace(used=lambda: UsageReport(uses)), sort="idle time")
    assert titles(shown) == ["x/c/main", "x/b/main", "x/a/main"]
    words = [re.findall(r"idle for (\S+)", row.detail) for row in shown if row.kind == "container"]
    assert words == [["2h"], ["1m"], []]


@pytest.mark.parametrize(
    ("needle", "kept"),
    [
        ("BERT", [BERT]),
        ("47000", ["default/whisper-eval/main"]),
        ("xorg", [HOST]),
        ("abababab", ["abababababab"]),
        ("gpu 0", [BERT, "research/llm-serving-0/vllm", "vision/notebook-ana/jupyter"]),
        ("wrong_namespace", [BERT]),
        ("nothing like it", []),
    ],
)
def test_filter_keeps_matches_and_their_parents(needle: str, kept: list[str]) -> None:
    shown = rows(troubled(), needle=needle)
    assert titles(shown) == kept
    assert len(titles(shown, "gpu")) == min(len(kept), 1)
    neighbours = {"BERT": 2, "wrong_namespace": 1}
    assert len(titles(shown, "process")) == neighbours.get(needle, len(titles(shown, "process")))


def test_gpu_is_called_unused_only_after_an_answer() -> None:
    empty = busy(0)
    texts = [row.title for row in rows(empty) if row.kind == "empty"]
    assert texts == ["no container uses it"] * 3 + ["its users are not known"]
    hangs = empty._replace(joined=empty.joined._replace(error="the driver hangs"))
    assert {row.title for row in rows(hangs) if row.kind == "empty"} == {"its users are not known"}


def test_keys_of_rows_are_all_different() -> None:
    for snapshot in (troubled(), busy(60)):
        keys = [row.key for row in rows(snapshot)]
        assert len(set(keys)) == len(keys)


def test_sizes() -> None:
    counts = (0, 1023, 1024, int(3.3 * GIB), 512 << 20, 2 << 40)
    assert list(map(size, counts)) == ["0B", "1023B", "1.0K", "3.3G", "512M", "2.0T"]


# ---- the frame ----------------------------------------------------------------------------------------------------


def reading_of(snapshot: Snapshot, error: str = "") -> Reading:
    documents = of_snapshot(snapshot)
    return Reading(documents.status, rows_of(documents), snapshot.at, error, snapshot.at if error else 0.0)


def seen(screen: Screen, reading: Reading, size: tuple[int, int] = (80, 24)) -> str:
    lines = screen.frame(reading, *size)
    return "\n".join("".join(text for text, _ in line) for line in lines)


def whole(snapshot: Snapshot, width: int) -> str:
    """Return all rows at this width, with the first row selected."""
    return seen(Screen("node"), reading_of(snapshot), (width, 100))


def test_every_screen_fits_and_is_printable() -> None:
    reading = reading_of(troubled(), error="gone\x1b[2J")
    for keys in ((), ("KEY_END", "/", "x", "\x1b"), ("KEY_RIGHT",) * 9):
        for width in (*range(1, 130, 3), 200, 400):
            for height in (1, 2, 3, 5, 7, 9, 12, 24, 60):
                screen = Screen("n\x07ode")
                seen(screen, reading, (width, height))
                for key in keys:
                    screen.press(key)
                lines = seen(screen, reading, (width, height)).split("\n")
                assert len(lines) == height
                assert max(map(cells, lines)) <= width
                assert all(line.isprintable() for line in lines), lines


def test_at_80_columns_there_is_everything() -> None:
    text = whole(troubled(), 80)
    assert re.search(r"^    torchrun +40010 +7 ━+─* +52% +2\.6G ✓ missing$", text, re.MULTILINE), text
    assert re.search(r"^  ml-prod/bert-\S+…\S+x2x9k/main ━{8}  100% +3\.1G ?$", text, re.MULTILINE), text
    assert re.search(r"^    模型服务 +1301 +32 ", text, re.MULTILINE), text
    assert r"\x1b[2Jevil\x07\n" in text
    assert "4 GPUs  3 repaired  3 unresolved" in text


def test_narrow_screen_scrolls_sideways() -> None:
    screen, reading = Screen("node"), reading_of(troubled())
    left = seen(screen, reading, (40, 100)).splitlines()
    for _ in range(5):
        screen.press("KEY_RIGHT")
    right = seen(screen, reading, (40, 100)).splitlines()
    wide = whole(troubled(), 80).splitlines()
    for before, after in zip(left, right, strict=True):
        assert not before.startswith("    torchrun") or before + after in wide
    screen.press("KEY_LEFT")
    assert "NOTE" not in "".join(left)
    assert "NOTE" in "".join(right)
    assert right != seen(screen, reading, (40, 100)).splitlines()


def test_problem_is_whole_on_a_narrow_screen() -> None:
    reading = reading_of(troubled(), error="no daemon answers at /run/resolver/resolver.sock")
    words = " ".join(seen(Screen("node"), reading, (40, 30)).split())
    for problem in reading.problems():
        assert problem in words


def test_wide_character_is_cut_to_a_blank() -> None:
    assert clip([("a模型b", "x"), ("c", "")], 4, 2) == [(" 型b", "x")]
    assert clip([("模型", "")], 3) == [("模", "")]


def test_bars_grow_with_value_and_are_empty_if_unknown() -> None:
    build = Builder()
    for load in (0, 1, 50, 100, None):
        build.named(GPUS[0], f"x/y/load{load}")
        build.process("p", 100 + (load or 200), 1, load, 1.0)
    text = whole(build.picture(), 80)
    bars = dict(re.findall(r"(?m)(load\w+) +(.{8}) ", text))
    assert bars["load0"] == "─" * 8
    assert bars["load1"] == "━" + "─" * 7
    assert bars["load50"] == "━━━━────"
    assert bars["load100"] == "━" * 8
    assert re.search(r"loadNone {10,}\?", text)


def test_trouble_is_shown_above_the_table() -> None:
    snapshot = picture(passed_at=1.7e9, dry_run=True, source={"not_ready": "the canary was not found"})
    texts = reading_of(snapshot, error="no daemon answers").problems()
    assert re.match(r"no daemon since \d\d:\d\d:\d\d, retrying; the values shown are from before", texts[0])
    assert texts[1] == "no daemon answers"
    assert texts[2].startswith("its passes have stopped: the last pass over the slots is")
    assert re.search("0-0 of 0.*no GPU: NVML is starting", whole(snapshot, 80), re.DOTALL)
    assert texts[3:] == [
        "not ready: the canary was not found",
        "it is a dry run: so it writes nothing",
    ]


@pytest.mark.parametrize(
    ("text", "width", "middle", "fits"),
    [
        ("short", 8, False, "short   "),
        ("exactly8", 8, False, "exactly8"),
        ("much too long", 8, False, "much to…"),
        ("much too long", 8, True, "much…ong"),
        ("模型服务", 8, False, "模型服务"),
        ("模型服务", 7, False, "模型服…"),
        ("模型服务", 6, False, "模型 …"),
        ("x", 0, False, ""),
        ("xy", 1, True, "…"),
    ],
)
def test_text_is_cut_to_cells(text: str, width: int, middle: bool, fits: str) -> None:  # noqa: FBT001 (a table)
    assert fit(text, width, middle=middle) == fits
    assert cells(fits) == width


# ---- a part of it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gpus", "names", "unresolved"),
    [
        ("research/llm-serving-0", [0], ["vllm"], []),
        ("vllm", [0], ["vllm"], []),
        ("main", [0, 1, 3], ["main", "main", "main"], ["slot"]),
        ("default/whisper-eval", [1], ["main"], ["slot"]),
        ("abababab", [1], [None], []),
    ],
)
def test_a_part_of_the_tree(
    name: str, gpus: list[int], names: list[str | None], unresolved: list[str]
) -> None:
    rows = list(chosen(tree_of(troubled(), name), Choice("name", folded=True)))
    assert titles(rows, "gpu") == [f"{index} {GPUS[index].name}" for index in gpus]
    assert [row.facts["container_name"] for row in rows if row.kind == "container"] == names
    assert [row.kind for row in rows if row.kind in ("sample", "slot", "file")] == unresolved


def test_missing_container_is_named_with_exit_1(tmp_path: Path) -> None:
    with Served(tmp_path / "socket", troubled()) as served:
        done = top("--socket", str(served.path), "research/nobody")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no container here is called 'research/nobody'" in done.stderr


# ---- the view -----------------------------------------------------------------------------------------------------


def test_help_lists_the_keys() -> None:
    keys = re.split(r"[\s,;]+", called("top", "--help").stdout.partition("Keys:")[2])
    assert {*"qjkumnirf/", "Esc", "Ctrl-Z"} <= set(keys)


def test_the_cursor_stays_on_its_row_when_the_order_changes() -> None:
    reading = reading_of(busy(30))
    screen = Screen("node")
    seen(screen, reading)
    for _ in range(7):
        screen.press("KEY_DOWN")
    key = screen.rows[7].key
    for sort in "nmu":
        screen.press(sort)
        seen(screen, reading)
        assert screen.rows[screen.cursor].key == key
    other = reading_of(busy(29))
    seen(screen, other)
    assert screen.rows[screen.cursor].key == key


def test_letters_are_letters_in_a_filter_and_keys_outside() -> None:
    screen = Screen("node")
    assert screen.press("/")
    for key in ("q", "u", "h", "KEY_BACKSPACE", " ", "KEY_HOME"):
        assert screen.press(key)
    assert screen.choice.needle == "qu "
    assert screen.press("\x1b")
    assert screen.choice.needle == ""
    assert not screen.press("q")


top = functools.partial(called, "top")


# ---- for programs -------------------------------------------------------------------------------------------------


def test_into_a_pipe_it_is_one_plain_line_each(tmp_path: Path) -> None:
    with Served(tmp_path / "socket", troubled()) as served:
        done = top("--socket", str(served.path))
        assert (done.returncode, done.stderr) == (0, "")
        assert top("--socket", str(served.path), "--once").stdout == done.stdout
    header, *lines = done.stdout.splitlines()
    assert header.split() == list(COLUMNS)
    assert all(line.isprintable() for line in lines)
    cells = [re.split(r"  +", line) for line in lines]
    kinds = [cell[0] for cell in cells]
    assert kinds.count("gpu") == 4
    assert kinds[-3:] == ["sample", "slot", "file"]
    assert ["container", "0", BERT, "-", "-", "-", "100%", "3.1G", "-"] in cells
    assert ["process", "0", BERT, "torchrun", "40010", "7", "52%", "2.6G", "repaired missing"] in cells
    (lost,) = [cell for cell in cells if cell[:2] == ["gpu", "3"]]
    assert lost[2:-1] == ["-", "-", "-", "-", "?", "?/80.0G"]
    assert "NVIDIA A100-SXM4-80GB; " in lost[-1]
    assert "unhealthy: lost" in lost[-1]
    assert ["slot", "-", "default/whisper-eval/main", "-", "?", "9", "?", "-", "ambiguous"] in cells


def test_plain_table_without_gpu_says_why(tmp_path: Path) -> None:
    with Served(tmp_path / "socket", picture()) as served:
        done = top("--socket", str(served.path))
    assert (done.returncode, done.stderr) == (0, "resolver top: no GPU: NVML is starting\n")


def test_json_is_the_tree(tmp_path: Path) -> None:
    with Served(tmp_path / "socket", troubled()) as served:
        done = top("--socket", str(served.path), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer.keys() == {"at", "driver_version", "driver_error", "gpus", "unresolved"}
    gpu = answer["gpus"][1]
    assert (gpu["uuid"], gpu["device_index"], gpu["healthy"]) == (GPUS[1].uuid, 1, True)
    whisper = next(container for container in gpu["containers"] if container["pod"] == "whisper-eval")
    assert whisper["memory"] == {"value": int(3.3 * GIB), "at_least": True}
    assert [
        (process["host_pid"], process["utilization"], process["memory"]) for process in whisper["processes"]
    ] == [
        (40053, 12, int(3.3 * GIB)),
        (47000, 0, None),
    ]
    assert [item["reason"] for item in answer["unresolved"]] == ["pid_unknown", "ambiguous", "unknown_size"]


def test_nothing_that_draws_is_loaded_before_the_daemon_answers(tmp_path: Path) -> None:
    code = f"import sys, resolver.cli as c; c.main(['top', '--socket', '{tmp_path}/no']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not set(done.stdout.split()) & {"curses", "termios", "asyncio", "psutil", "structlog"}


def test_picture_in_documents_equals_the_screen() -> None:
    assert PLACE.read_text() == draw(), "run: make tables"
