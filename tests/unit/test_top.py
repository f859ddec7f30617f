"""What `resolver top` makes of the daemon's answers: the tree, the rows, the frame, and what a program gets."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from resolver.cli._top.cells import ASCII, UNICODE, Line, fit, glyphs_for
from resolver.cli._top.choose import ScreenPart
from resolver.cli._top.frame import _KEYS, _SIGNS, Shown, frame, page, percent, problems
from resolver.cli._top.keys import keys_in
from resolver.cli._top.live import LiveView
from resolver.cli._top.plain import _COLUMNS
from resolver.cli._top.reading import Reading
from resolver.cli._top.rows import SORTS, Choice, Row, rows_of
from resolver.cli._top.tree import HOST, Amount, ContainerNode, Tree, total
from resolver.cli.show import size
from resolver.gpu.inventory import GpuDetails
from resolver.reasons import SampleReason
from resolver.state import Snapshot
from scripts.pictures.top import PLACE, draw
from tests.fakes.busy import GIB, GPUS, Builder, busy, troubled
from tests.fakes.pictures import picture
from tests.fakes.served import Served, tree_of


def rows(snapshot: Snapshot, **choice: Any) -> list[Row]:
    return rows_of(tree_of(snapshot), Choice(**choice), UNICODE)


def containers(tree: Tree, gpu: int) -> dict[str, ContainerNode]:
    return {each.container_name or each.container_id[:4]: each for each in tree.gpus[gpu].containers}


def titles(found: list[Row], kind: str = "container") -> list[str]:
    return [row.title for row in found if row.kind == kind]


# ---- the tree -----------------------------------------------------------------------------------------------------


def test_a_containers_use_is_that_of_its_processes() -> None:
    first = containers(tree_of(troubled()), 0)
    main = first["main"]
    assert main.utilization == Amount(100)  # 52 + 61: two moments, and nothing can do more than all
    assert main.memory == Amount(int(2.6 * GIB) + int(0.5 * GIB))
    assert [process.repaired for process in main.processes] == ["missing", "wrong_namespace"]
    assert first["vllm"].processes[0].stuck.startswith("sm_util stays 0")


def test_nothing_where_the_driver_was_asked_is_0_and_unknown_where_it_was_not() -> None:
    assert containers(tree_of(troubled()), 0)["jupyter"].utilization == Amount(0)
    snapshot = troubled()
    failed = snapshot._replace(joined=snapshot.joined._replace(error="the driver hangs"))
    assert containers(tree_of(failed), 0)["jupyter"].utilization == Amount(None)
    build = Builder()
    build.named(GPUS[3], "a/b/idle")  # on a GPU that is lost
    assert containers(tree_of(build.picture()), 3)["idle"][5:7] == (Amount(None), Amount(None))


def test_a_part_that_is_not_known_makes_the_sum_a_least() -> None:
    whisper = containers(tree_of(troubled()), 1)["main"]
    assert whisper.memory == Amount(int(3.3 * GIB), at_least=True)
    assert total([3, None], most=100) == Amount(3, at_least=True)
    assert total([None]) == Amount(None)
    assert total([]) == Amount(0)
    assert total([], missing=True) == Amount(None)


def test_a_slots_owner_that_nvml_does_not_list_is_shown_all_the_same() -> None:
    whisper = containers(tree_of(troubled()), 1)["main"]
    (quiet,) = [process for process in whisper.processes if not process.listed]
    assert (quiet.host_pid, quiet.ns_pid, quiet.utilization, quiet.memory) == (47_000, 12, 0, None)


def limited(core: int, gib: float, busy: int | None = 52) -> Snapshot:
    """A container with these limits, and a process that is so busy and holds 2 GiB."""
    build = Builder()
    build.named(GPUS[0], "a/b/limited")
    build.process("x", 5, 5, busy, 2.0)
    build.limited(core, gib)
    return build.picture()


@pytest.mark.parametrize(
    ("core", "gib", "memory", "note", "tone"),
    [
        (100, 0, "2.0G", "", ""),
        (0, 0, "2.0G", "", ""),
        (60, 4, "2.0G/4.0G", "core limit 60%", ""),
        (50, 4, "2.0G/4.0G", "over core", "warn"),
        (60, 1.5, "2.0G/1.5G", "over memory", "warn"),
        (50, 1.5, "2.0G/1.5G", "over core and memory", "warn"),
        (60, 2.2, "2.0G/2.2G", "memory at 90%", "warn"),
    ],
)
def test_limits_stand_beside_the_use(core: int, gib: float, memory: str, note: str, tone: str) -> None:
    (row,) = [each for each in rows(limited(core, gib)) if each.kind == "container"]
    assert (row.memory, row.note, row.tone) == (memory, note, tone)


def test_the_bottom_line_says_how_close_to_its_limits_it_is() -> None:
    (row,) = [each for each in rows(limited(50, 4)) if each.kind == "container"]
    assert "core limit 50% · memory limit 4.0G (50% of it used) · over its core limit" in row.detail


def test_the_bottom_line_has_a_gpus_details_where_they_are_read() -> None:
    build = Builder()
    build.named(GPUS[0], "a/b/c")
    details = GpuDetails(1410, 1593, ("idle", "power_cap"), 400.0, 12.5, 4, 16, 0, 0, 31, 0)
    (first, *_) = rows(build.picture((replace(GPUS[0], details=details),)))
    assert "1410 MHz · throttled: power_cap · limit 400W · encoder 31%" in first.detail


def test_what_is_not_known_is_over_no_limit() -> None:
    (row,) = [each for each in rows(limited(50, 4, busy=None)) if each.kind == "container"]
    assert (row.note, row.tone) == ("core limit 50%", "")


def test_a_daemon_that_does_not_tell_limits_is_understood() -> None:
    tree = tree_of(limited(50, 4), without=("limit", "sm_limit"))
    assert containers(tree, 0)["limited"].core_limit is None


def test_processes_without_hami_and_without_a_container_have_their_place() -> None:
    tree = tree_of(troubled())
    second = containers(tree, 1)
    assert [process.comm for process in second[""].processes] == ["Xorg"] if "" in second else False
    assert [process.no_slot for process in second["abab"].processes] == ["no_shared_region"] * 2


def test_what_is_unresolved_is_told_with_its_reason() -> None:
    kinds = [(each.kind, each.reason) for each in tree_of(troubled()).unresolved]
    assert kinds == [("sample", "pid_unknown"), ("slot", "ambiguous"), ("file", "unknown_size")]


def test_a_gpu_that_only_a_process_names_and_one_without_uuid() -> None:
    build = Builder()
    strange = replace(GPUS[0], uuid="GPU-strange")
    build.named(strange, "a/b/c")
    build.process("x", 5, 5, 7, 1.0)
    nameless = replace(GPUS[1], uuid="", device_index=1), replace(GPUS[2], uuid="", device_index=2)
    tree = tree_of(build.picture(nameless))
    assert [gpu.key for gpu in tree.gpus] == ["device 1", "device 2", "GPU-strange"]
    assert tree.gpus[2].report == {}
    last = rows_of(tree, Choice(), UNICODE)[-3]
    assert (last.title, last.note, last.amount) == ("GPU-strange", "not in inventory", Amount(None))


def test_a_process_on_a_mig_instance_is_on_its_gpu() -> None:
    build = Builder()
    instance = GPUS[2].mig_instances[0]
    build.named(replace(GPUS[2], uuid=instance.uuid), "a/b/c")
    build.process("x", 5, 5, None, 1.0)
    tree = tree_of(build.picture())
    assert list(containers(tree, 2)) == ["c"]
    assert len(tree.gpus) == len(GPUS)


def test_a_container_whose_processes_nobody_knows_gets_its_name_only_if_it_is_the_only_one() -> None:
    build = Builder()
    build.named(GPUS[0], "ns/pod/main")
    build.regions[0] = replace(build.regions[0], container_id=None)
    alone = tree_of(build.picture())
    assert containers(alone, 0)["main"].pod == "pod"
    build.containers.append(
        replace(build.containers[0], container_id="f" * 64)
    )  # the one before it restarted
    assert containers(tree_of(build.picture()), 0)["main"].pod == ""


# ---- rows ---------------------------------------------------------------------------------------------------------


def test_unresolved_comes_last_and_every_state_has_its_note() -> None:
    found = rows(troubled())
    notes = {row.note for row in found}
    assert {
        "✓ missing",
        "✓ stale",
        "sm_util stuck",
        "no process",
        "not on the GPU",
        "no_shared_region",
    } <= notes
    assert {"unsupported", "MIG", "unhealthy: lost"} <= notes
    at = [row.key for row in found].index("unresolved")
    assert [row.note for row in found[at + 1 :]] == ["pid_unknown", "ambiguous", "unknown_size"]


def test_what_is_not_known_is_a_question_mark_with_a_reason() -> None:
    unknown = [row for row in rows(troubled()) if row.kind == "process" and row.amount == Amount(None)]
    assert len(unknown) == 3
    for row in unknown:
        assert percent(row.amount, UNICODE) == "?"
        assert "utilization not known: " in row.detail
    assert {"GPU is lost", "MIG mode: NVML tells no utilization of processes"} <= {
        row.detail.split("not known: ")[1].split(" · ")[0] for row in unknown
    }


@pytest.mark.parametrize("sort", SORTS)
def test_containers_are_sorted_within_their_gpu(sort: str) -> None:
    for gpu in tree_of(busy(40)).gpus[:2]:
        tree = Tree(tree_of(busy(0)).status, (gpu,), ())
        found = [row for row in rows_of(tree, Choice(sort=sort), UNICODE) if row.kind == "container"]
        by_name = {each.pod: each for each in gpu.containers}
        order = [by_name[row.title.split("/")[1]] for row in found]
        if sort == "name":
            assert [row.title for row in found] == sorted(row.title for row in found)
        else:
            values = [getattr(each, sort).value for each in order]
            assert values == sorted(values, reverse=True)
            assert len(set(values)) > 3


def test_what_is_not_known_is_sorted_last() -> None:
    build = Builder()
    for name, load in (("a", None), ("b", 0), ("c", 9)):
        build.named(GPUS[0], f"x/{name}/main")
        build.process("p", ord(name), 1, load, 1.0)
    assert titles(rows(build.picture())) == ["x/c/main", "x/b/main", "x/a/main"]


@pytest.mark.parametrize(
    ("needle", "kept"),
    [
        ("BERT", ["ml-prod/bert-trainer-7f9c8d-x2x9k/main"]),
        ("47000", ["default/whisper-eval/main"]),
        ("xorg", [HOST]),
        ("abababab", ["abababababab"]),
        ("wrong_namespace", ["ml-prod/bert-trainer-7f9c8d-x2x9k/main"]),
        ("nothing like it", []),
    ],
)
def test_a_filter_keeps_what_contains_it_and_what_it_is_in(needle: str, kept: list[str]) -> None:
    found = rows(troubled(), needle=needle)
    assert titles(found) == kept
    assert len(titles(found, "gpu")) == len(kept)


def test_a_filter_that_finds_a_process_leaves_out_its_neighbours() -> None:
    assert titles(rows(troubled(), needle="40014"), "process") == ["torchrun"]
    assert len(titles(rows(troubled(), needle="bert"), "process")) == 2
    assert len(titles(rows(troubled(), needle="a100-pcie"), "mig")) == 2


def test_what_is_folded_is_one_row() -> None:
    found = rows(troubled())
    bert = next(row for row in found if "bert" in row.title)
    folded = rows(troubled(), folded=frozenset({bert.key, GPUS[1].uuid, "unresolved"}))
    assert len(folded) < len(found)
    row = next(row for row in folded if row.key == bert.key)
    assert (row.note, row.folded) == ("2 processes", True)
    assert "default/whisper-eval/main" not in titles(folded)
    assert folded[-1].title == "unresolved (3)"


def test_that_nobody_uses_a_gpu_is_said_only_when_it_is_known() -> None:
    empty = busy(0)
    said = [row.title for row in rows(empty) if row.kind == "empty"]
    assert said == ["no container uses it"] * 3 + ["who uses it is not known"]
    hangs = empty._replace(joined=empty.joined._replace(error="the driver hangs"))
    assert {row.title for row in rows(hangs) if row.kind == "empty"} == {"who uses it is not known"}


def test_keys_of_rows_are_all_different() -> None:
    for snapshot in (troubled(), busy(60)):
        keys = [row.key for row in rows(snapshot)]
        assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1.0K"),
        (int(3.3 * GIB), "3.3G"),
        (512 << 20, "512M"),
        (2 << 40, "2.0T"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


# ---- the frame ----------------------------------------------------------------------------------------------------


def reading_of(snapshot: Snapshot, error: str = "") -> Reading:
    return Reading(tree_of(snapshot), snapshot.at, error, snapshot.at if error else 0.0)


def text_of(lines: list[Line]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_every_frame_fits_its_terminal_and_holds_nothing_that_could_harm_it(glyphs: Any) -> None:
    reading = reading_of(troubled(), error="gone\x1b[2J")
    found = rows_of(reading.tree, Choice(), glyphs)
    for width in (*range(1, 130, 3), 200, 400):
        for height in (1, 2, 3, 5, 7, 9, 12, 24, 60):
            for shown in (
                Shown(1, 0),
                Shown(len(found) - 1, 3, needle="x\x1b", editing=True),
                Shown(help_page=1),
                Shown(help_page=9),
            ):
                lines = text_of(
                    frame(reading, found, shown, (width, height), glyphs, "n\x07ode", reading.read_at)
                )
                assert len(lines) == height
                assert max(map(cell_len, lines)) <= width
                assert all(line.isprintable() for line in lines), lines
                assert glyphs is UNICODE or all(line.isascii() for line in lines), lines


def test_at_80_columns_there_is_everything() -> None:
    reading = reading_of(troubled())
    found = rows_of(reading.tree, Choice(), UNICODE)
    lines = text_of(page(reading, found, 80, UNICODE, "node", reading.read_at))
    whole = "\n".join(lines)
    assert re.search(r"^      torchrun +40010 +7 ━+─* +52% +2\.6G ✓ missing$", whole, re.MULTILINE), whole
    assert re.search(r"^  ▾ ml-prod/bert-trai…f9c8d-x2x9k/main ━{8}  100% +3\.1G ?$", whole, re.MULTILINE), (
        whole
    )
    assert re.search(r"^      模型服务 +1301 +32 ", whole, re.MULTILINE), whole
    assert r"\x1b[2Jevil\x0…" in whole
    assert "4 GPUs  7 containers  10 processes  3 repaired  3 unresolved" in whole


@pytest.mark.parametrize(("width", "lacks"), [(79, "NOTE"), (55, "HOST PID"), (35, "MEMORY")])
def test_narrow_screens_leave_out_columns(width: int, lacks: str) -> None:
    reading = reading_of(troubled())
    found = rows_of(reading.tree, Choice(), UNICODE)
    narrow, wide = (
        "\n".join(text_of(page(reading, found, each, UNICODE, "", reading.read_at)))
        for each in (width, width + 1)
    )
    assert lacks in wide
    assert lacks not in narrow
    assert "52%" in narrow


def test_a_narrow_screen_keeps_the_marks() -> None:
    reading = reading_of(troubled())
    found = rows_of(reading.tree, Choice(), UNICODE)
    lines = text_of(page(reading, found, 60, UNICODE, "", reading.read_at))
    assert [line[-1] for line in lines if line.startswith("      ") and line[-1] in "✓!"] == list("✓✓!✓")


def test_bars_grow_with_the_value_and_say_nothing_where_nothing_is_known() -> None:
    build = Builder()
    for load in (0, 1, 50, 100, None):
        build.named(GPUS[0], f"x/y/load{load}")
        build.process("p", 100 + (load or 200), 1, load, 1.0)
    reading = reading_of(build.picture())
    lines = text_of(page(reading, rows_of(reading.tree, Choice(), UNICODE), 80, UNICODE, "", reading.read_at))
    bars = {found[1]: found[2] for line in lines if (found := re.search(r"(load\w+) +(.{8}) ", line))}
    assert bars["load0"] == "─" * 8
    assert bars["load1"] == "╸" + "─" * 7
    assert bars["load50"] == "━━━━────"
    assert bars["load100"] == "━" * 8
    assert re.search(r"loadNone {10,}\?", "\n".join(lines))


def test_what_is_wrong_with_the_picture_is_said_above_it() -> None:
    snapshot = picture(dry_run=True, not_ready="the canary was not found")
    said = [text for text, _ in problems(reading_of(snapshot, error="no daemon answers"), snapshot.at)]
    assert re.match(r"no daemon since \d\d:\d\d:\d\d, retrying; what is shown is from before", said[0])
    assert said[1:] == [
        "no daemon answers",
        "NVML: NVML was not asked yet",
        "source scan: the canary was not found",
        "--dry-run: nothing is repaired",
    ]
    late = [text for text, _ in problems(reading_of(snapshot), snapshot.at + 60)]
    assert late[0] == "the daemon has made no pass for 60 s: what is shown is old"


def test_a_node_without_gpus_says_why() -> None:
    reading = reading_of(picture())
    assert "no GPU: NVML was not asked yet" in text_of(page(reading, [], 80, UNICODE, "", 0))[-1]


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
    assert fit(text, width, UNICODE, middle=middle) == fits
    assert cell_len(fits) == width


# ---- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "keys", "rest"),
    [
        ("q", ["q"], ""),
        ("\x1b[A\x1b[B\x1bOA", ["up", "down", "up"], ""),
        ("\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["page up", "page down", "home", "end"], ""),
        ("\r\x7f\x08\x15", ["enter", "backspace", "backspace", "clear"], ""),
        ("a\x1b", ["a"], "\x1b"),
        ("\x1b[", [], "\x1b["),
        ("\x1b[1;5", [], "\x1b[1;5"),
        ("\x1b[1;5Cx", ["x"], ""),  # Ctrl-Right is nothing, and not an x
        ("\x1b[<0;3;4Mj", ["j"], ""),
        ("\x1bq", ["escape", "q"], ""),
        ("\x01\x02é模", ["é", "模"], ""),
        ("", [], ""),
    ],
)
def test_keys(typed: str, keys: list[str], rest: str) -> None:
    assert keys_in(typed) == (keys, rest)


@pytest.mark.parametrize(
    ("environ", "encoding", "glyphs"),
    [
        ({"LANG": "C.UTF-8"}, "utf-8", UNICODE),
        ({"LANG": "de_DE.UTF-8@euro"}, "utf-8", UNICODE),
        ({"LANG": "en_US.utf8", "TERM": "xterm"}, "utf-8", UNICODE),
        ({"LC_ALL": "C", "LANG": "C.UTF-8"}, "utf-8", ASCII),
        ({"LC_CTYPE": "C.UTF-8"}, "utf-8", ASCII),  # that was Python
        ({"LC_CTYPE": "C.UTF-8", "LANG": "C.UTF-8"}, "utf-8", UNICODE),
        ({"LANG": "de_DE.ISO-8859-1"}, "utf-8", ASCII),
        ({"LANG": "C.UTF-8"}, "latin-1", ASCII),
        ({"LANG": "C.UTF-8"}, None, ASCII),
        ({"LANG": "C.UTF-8", "TERM": "linux"}, "utf-8", ASCII),
        ({}, "utf-8", ASCII),
    ],
)
def test_signs_by_locale(environ: dict[str, str], encoding: str | None, glyphs: Any) -> None:
    assert glyphs_for(encoding, environ) is glyphs


def seen(view: LiveView, reading: Reading, size: tuple[int, int] = (80, 24)) -> str:
    return "\n".join(text_of(view.frame(reading, size, "node", reading.read_at)))


def test_the_help_fits_80_by_24_at_once() -> None:
    view, reading = LiveView(UNICODE), reading_of(troubled())
    seen(view, reading, (80, 24))
    view.press("h")
    text = seen(view, reading, (80, 24))
    assert "move far" in text
    assert "a container without HAMi" in text
    view.press("x")
    assert "torchrun" in seen(view, reading, (80, 24))


@pytest.mark.parametrize("size", [(80, 24), (50, 15), (30, 10), (200, 60)], ids=str)
def test_nothing_of_the_help_is_cut(size: tuple[int, int]) -> None:
    view, reading = LiveView(UNICODE), reading_of(troubled())
    seen(view, reading, size)
    view.press("h")
    pages = []
    while "torchrun" not in (text := seen(view, reading, size)):
        pages.append(text)
        assert len(pages) < 20
        view.press("x")
    words = " ".join(pages).split()
    for told in (*_KEYS, *_SIGNS):
        for word in told[1].split():
            assert word in words, f"{word} of {told}"


def loaded(*loads: tuple[str, int | None]) -> Reading:
    """A reading with these containers, each with a process so busy."""
    build = Builder()
    for number, (name, load) in enumerate(loads):
        build.named(GPUS[0], f"ns/{name}/main")
        build.process("x", 100 + number, 1, load, 1.0)
    return reading_of(build.picture((GPUS[0],)))


def test_a_container_has_its_history_and_a_gap_where_it_is_not_known() -> None:
    view = LiveView(UNICODE)
    text = seen(view, loaded(("a", 0)), (80, 24))
    assert re.search(r"ns/a/main +─{8} +0%", text)  # one reading is no history
    for load in (1, 50, None, 100):
        text = seen(view, loaded(("a", load)), (80, 24))
    assert "▁▂▅ █  100%" in text
    seen(view, loaded(("b", 10)), (80, 24))
    text = seen(view, loaded(("a", 7), ("b", 20)), (80, 24))
    assert re.search(r"ns/a/main +━?[╸─]+ +7%", text)  # gone and back: another one, as far as anybody knows
    assert "▂▃   20%" in text


def test_histories_are_bounded() -> None:
    view = LiveView(UNICODE)
    for load in range(100):
        seen(view, loaded(("a", load), (f"b{load}", 1)), (400, 24))
    assert {len(row.history) for row in view.rows if row.kind == "container"} == {1, 60}
    assert len(view._history) == 2


def test_command_lines_of_what_is_on_the_screen() -> None:
    build = Builder()
    build.named(GPUS[0], "ns/a/main")
    build.process("x", os.getpid(), 1, 5, 1.0)
    tree = tree_of(build.picture((GPUS[0],)))
    view, now = LiveView(UNICODE), time.time() + 10  # the test may be young
    seen(view, Reading(tree, now), (160, 24))
    view.press("c")
    seen(view, Reading(tree, now), (160, 24))
    sum(number * number for number in range(100_000))
    text = seen(view, Reading(tree, now + 1), (160, 24))
    assert re.search(rf"^ +root \S*python\S* .*{os.getpid()} .* CPU \d+% [\d.]+M$", text, re.MULTILINE), text
    view.press("c")
    assert "CPU" not in seen(view, Reading(tree, now + 1), (160, 24))


# ---- a part of it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "gpus", "names"),
    [
        (ScreenPart(), [0, 1, 2, 3], None),
        (ScreenPart(("1",)), [1], ["main", "", ""]),
        (ScreenPart(("0", GPUS[2].uuid[:10])), [0, 2], ["main", "vllm", "jupyter", "worker"]),
        (ScreenPart(name="research/llm-serving-0"), [0], ["vllm"]),
        (ScreenPart(name="vllm"), [0], ["vllm"]),
        (ScreenPart(name="main"), [0, 1, 3], ["main", "main", "main"]),
        (ScreenPart(("1",), "main"), [1], ["main"]),
        (ScreenPart(name="abababab"), [1], [""]),
    ],
)
def test_a_part_of_the_tree(part: ScreenPart, gpus: list[int], names: list[str] | None) -> None:
    tree = tree_of(troubled())
    part.require(tree)
    found = part.of(tree)
    assert [gpu.report["device_index"] for gpu in found.gpus] == gpus
    if names is not None:
        assert [each.container_name for gpu in found.gpus for each in gpu.containers] == names


def test_what_is_unresolved_elsewhere_is_left_out() -> None:
    tree = tree_of(troubled())
    assert [each.kind for each in ScreenPart(("0",)).of(tree).unresolved] == ["sample"]
    assert [each.kind for each in ScreenPart(name="default/whisper-eval").of(tree).unresolved] == ["slot"]
    assert ScreenPart(name="vllm").of(tree).unresolved == ()


def test_what_is_not_there_is_said_and_1(tmp_path: Path) -> None:
    with Served(tmp_path / "socket", troubled()) as served:
        for arguments, words in (
            (("research/nobody",), "no container called 'research/nobody' has a GPU here"),
            (("--gpu", "7"), "no GPU of this node is '7'"),
        ):
            done = top(served.path, *arguments)
            assert (done.returncode, done.stdout) == (1, "")
            assert words in done.stderr
        only = top(served.path, "--gpu", "0", "vllm")
        assert [line.split()[0] for line in only.stdout.splitlines()[1:]] == ["gpu", "container", "process"]


# ---- the view -----------------------------------------------------------------------------------------------------


def test_the_cursor_stays_on_its_row_when_the_order_changes() -> None:
    reading = reading_of(busy(30))
    view = LiveView(UNICODE)
    seen(view, reading)
    for _ in range(7):
        view.press("down")
    key = view.rows[7].key
    for sort in "nmu":
        view.press(sort)
        seen(view, reading)
        assert view.rows[view._cursor].key == key
    other = reading_of(busy(29))
    seen(view, other)
    assert view.rows[view._cursor].key == key


def test_the_list_moves_under_the_cursor_and_fills_the_screen() -> None:
    reading = reading_of(busy(30))
    view = LiveView(UNICODE)
    first = seen(view, reading)
    view.press("end")
    assert view.rows[-1].title in seen(view, reading).splitlines()[-3]
    for _ in range(200):
        view.press("page up")
    assert seen(view, reading) == first
    view.press("down")
    view.press("/")
    for letter in "whisper":
        view.press(letter)
    view.press("enter")
    assert "filter: whisper" in seen(view, reading)
    assert all("whisper" in title for title in titles(view.rows))
    view.press("escape")
    assert len(titles(view.rows)) < 30
    seen(view, reading)
    assert len(titles(view.rows)) == 30


def test_letters_are_letters_in_a_filter_and_keys_outside() -> None:
    reading = reading_of(busy(3))
    view = LiveView(UNICODE)
    assert view.press("/")
    for key in ("q", "u", "h", "backspace", " ", "home"):
        assert view.press(key)
    assert view.choice.needle == "qu "
    assert view.press("clear")
    assert view.choice.needle == ""
    assert view.press("escape")
    assert view.press("h")
    assert "sort by utilization, memory, name" in seen(view, reading)
    assert view.press("x")
    assert "sort by utilization" not in seen(view, reading)
    assert not view.press("q")


def test_one_key_folds_all_containers_and_opens_them_again() -> None:
    reading = reading_of(busy(10))
    view = LiveView(UNICODE)
    seen(view, reading)
    whole = len(view.rows)
    view.press("f")
    seen(view, reading)
    assert titles(view.rows, "process") == []
    view.press("f")
    seen(view, reading)
    assert len(view.rows) == whole
    view.press("home")
    view.press("enter")
    seen(view, reading)
    assert len(view.rows) < whole


# ---- for programs -------------------------------------------------------------------------------------------------


def top(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "resolver", "top", "--socket", str(where), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_into_a_pipe_it_is_one_plain_line_each(tmp_path: Path) -> None:
    with Served(tmp_path / "socket", troubled()) as served:
        done = top(served.path)
        assert (done.returncode, done.stderr) == (0, "")
        assert top(served.path, "--once").stdout == done.stdout
    header, *lines = done.stdout.splitlines()
    assert header.split() == list(_COLUMNS)
    assert all(line.isprintable() for line in lines)
    cells = [re.split(r"  +", line) for line in lines]
    kinds = [cell[0] for cell in cells]
    assert kinds.count("gpu") == 4
    assert kinds[-3:] == ["sample", "slot", "file"]
    name = "ml-prod/bert-trainer-7f9c8d-x2x9k/main"
    assert ["container", "0", name, "-", "-", "-", "100%", "3.1G", "-", "-", "-"] in cells
    assert [
        "process",
        "0",
        name,
        "torchrun",
        "40010",
        "7",
        "52%",
        "2.6G",
        "-",
        "-",
        "repaired:missing",
    ] in cells
    assert [
        "gpu",
        "3",
        "-",
        "-",
        "-",
        "-",
        "?",
        "?",
        "-",
        "-",
        "NVIDIA A100-SXM4-80GB; unhealthy:lost",
    ] in cells
    assert ["slot", "-", "default/whisper-eval/main", "-", "?", "9", "?", "-", "-", "-", "ambiguous"] in cells


def test_json_is_the_tree(tmp_path: Path) -> None:
    with Served(tmp_path / "socket", troubled()) as served:
        done = top(served.path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer.keys() == {"at", "driver_version", "driver_error", "gpus", "unresolved"}
    gpu = answer["gpus"][1]
    assert (gpu["uuid"], gpu["device_index"], gpu["healthy"]) == (GPUS[1].uuid, 1, True)
    whisper = next(each for each in gpu["containers"] if each["pod"] == "whisper-eval")
    assert whisper["memory"] == {"value": int(3.3 * GIB), "at_least": True}
    assert [(each["host_pid"], each["utilization"], each["memory"]) for each in whisper["processes"]] == [
        (40053, 12, int(3.3 * GIB)),
        (47000, 0, None),
    ]
    assert [each["reason"] for each in answer["unresolved"]] == ["pid_unknown", "ambiguous", "unknown_size"]


def test_without_a_daemon_it_says_what_to_do(tmp_path: Path) -> None:
    done = top(tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (4, "")
    assert "no daemon answers" in done.stderr
    assert "resolver run" in done.stderr


@pytest.mark.parametrize("interval", ["soon", "50ms", "2h", "0", "-1s"])
def test_an_interval_that_cannot_be(interval: str, tmp_path: Path) -> None:
    done = top(tmp_path / "nowhere", f"--interval={interval}")
    assert done.returncode == 2
    assert "100ms to 1h" in done.stderr


def test_an_answer_of_another_version_is_no_traceback(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()

        def answer() -> None:
            with contextlib.suppress(OSError):  # until the listener is shut
                while True:
                    channel, _ = listener.accept()
                    with channel:
                        channel.recv(4096)
                        channel.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"regions": 7}')

        thread = threading.Thread(target=answer)
        thread.start()
        done = top(tmp_path / "socket")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert done.returncode == 4
    assert "is it of another version?" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_that_draws_is_loaded_before_the_daemon_answers(tmp_path: Path) -> None:
    code = (
        "import sys; from resolver.cli import main\n"
        f"main(['top', '--socket', '{tmp_path}/no']); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not set(done.stdout.split()) & {"rich", "termios", "asyncio", "psutil", "structlog"}


def test_a_reading_of_200_containers_is_soon_a_frame() -> None:
    reading = reading_of(busy(200))
    began = time.process_time()
    for _ in range(5):
        LiveView(UNICODE).frame(reading, (160, 50), "node", reading.read_at)
    took = (time.process_time() - began) / 5
    print(f"{took * 1e3:.1f} ms")
    assert took < 0.5  # some milliseconds; this is for what would grow with the square


# ---- the picture in the documents ---------------------------------------------------------------------------------


def test_the_picture_in_the_documents_is_what_it_draws() -> None:
    assert PLACE.read_text() == draw(), "run: .venv/bin/python -m scripts.pictures.top"


def test_reasons_of_samples_are_those_of_the_daemon() -> None:
    from resolver.cli._top.tree import _UNPLACED

    assert set(map(str, SampleReason)) >= _UNPLACED
