"""`resolver slots`: its output for people and for programs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resolver.cli import slots
from resolver.gpu.inventory import Gpu, Inventory
from resolver.hami.layout import LAYOUTS
from tests.fakes.cachefiles import NAMES, POD_UID, container, expected, poke, recorded, write
from tests.fakes.command import called, on_terminal
from tests.fakes.pictures import picture
from tests.fakes.served import Served


def call(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return called("slots", *map(str, args))


def as_json(*args: str | Path) -> tuple[int, list[dict[str, Any]]]:
    done = call("--json", *args)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_json_equals_the_recorded_json(name: str, tmp_path: Path) -> None:
    path = container(tmp_path, layout=name)
    code, (file,) = as_json(path)
    content = expected(name)
    assert code == 0
    assert file["path"] == str(path)
    assert {key: file[key] for key in content} == content


def test_paths_may_be_root_container_or_file(tmp_path: Path) -> None:
    main, side = container(tmp_path, "main"), container(tmp_path, "side", "v0")
    lone = write(tmp_path / "cudevshr.cache", recorded("v1.1"))
    both = [str(lone), str(main), str(side)]
    assert [file["path"] for file in as_json(tmp_path)[1]] == both
    assert [file["path"] for file in as_json(side.parent)[1]] == [str(side)]
    assert [file["layout"] for file in as_json(lone, side)[1]] == ["v1.1", "v0"]


def test_a_broken_file_is_one_row_and_the_others_are_still_shown(tmp_path: Path) -> None:
    good = container(tmp_path, "good")
    broken = container(tmp_path, "broken")
    poke(broken, 0, "i", 0)
    code, files = as_json(tmp_path, tmp_path / "nowhere.cache")
    assert code == 1
    assert [file["path"] for file in files] == [str(broken), str(good), str(tmp_path / "nowhere.cache")]
    assert [file.get("reason") for file in files] == ["not_initialized", None, "gone"]
    assert files[0].keys() == {"path", "error", "reason"}

    done = call(tmp_path)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1 + 4 * 2
    assert done.stderr.startswith(f"resolver slots: {broken}: not_initialized: initialized_flag is 0")


def test_piped_output_is_plain_aligned_and_complete(tmp_path: Path) -> None:
    container(tmp_path)
    done = call(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    header, *rows = done.stdout.splitlines()
    assert re.split(r"  +", header) == list(slots.COLUMNS)
    start = header.index("HINT")
    hints = [row[start:] for row in rows]
    assert hints[::2] == hints[1::2] == ["missing", "-", "-", "ended"]
    first, second = expected("v1.2")["uuids"]
    assert rows[4].split() == [f"{POD_UID}/main", "v1.2", "2", "23", "41234", "1", first, "25", "3.0M", "-"]
    assert rows[5].split() == [f"{POD_UID}/main", "v1.2", "2", "23", "41234", "1", second, "26", "3.0M", "-"]


def test_a_person_has_80_columns(tmp_path: Path) -> None:
    container(tmp_path, "a-rather-long-name-of-a-container")
    container(tmp_path, "main")
    text = on_terminal("slots", str(tmp_path), NO_COLOR="1")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80, text
    assert lines[0].split() == ["CONTAINER", "SLOT", "PID", "HOSTPID", "GPU", "SM", "%", "MEMORY", "HINT"]
    first, second = (uuid.removeprefix("GPU-")[:8] for uuid in expected("v1.2")["uuids"])
    shown = "\n".join(lines)
    assert re.search(rf"^\S+main +0 +\d+ +0  {first} +\d+ +\S+  missing$", shown, re.MULTILINE), text
    assert re.search(rf"^\S+main +0 +\d+ +0  {second} +\d+ +\S+  missing$", shown, re.MULTILINE), text


def _version_file(version: str) -> str:
    return f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"


@pytest.mark.parametrize(
    ("decided_by", "text"),
    [
        ("daemon: host", "wrong_namespace?"),
        ("daemon: container", ""),
        ("daemon: unknown", ""),
        (_version_file("535.104.05"), "wrong_namespace?"),
        (_version_file("580.105.08"), ""),
        (_version_file("590.48.01"), ""),
        ("", ""),
    ],
)
def test_equal_numbers_are_a_fault_by_driver_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decided_by: str, text: str
) -> None:
    (tmp_path / "version").write_text(decided_by)
    monkeypatch.setattr(slots, "DRIVER_FILE", str(tmp_path / "version"))
    shown = picture(policy={"namespace": decided_by.rpartition(" ")[2]})
    with Served(tmp_path / "socket", shown) as served:
        facts = slots.read_facts(served.path if decided_by.startswith("daemon") else str(tmp_path / "none"))
    slot = slots.SlotRow(0, 7, 7, 1)
    assert slots.hint(slot, [0], host_pids=facts.host_pids) == text


@pytest.mark.parametrize(
    ("count", "memory", "limit", "shown"),
    [
        (2**64 - 1813876, None, 0, "?"),
        (81 << 30, 80 << 30, 0, "?"),
        (81 << 30, None, 0, "81.0G"),
        (81 << 30, 80 << 30, 160 << 30, "81.0G"),  # oversubscribed
        (80 << 30, 80 << 30, 8 << 30, "80.0G"),
    ],
)
def test_impossible_memory_is_unknown(
    tmp_path: Path, count: int, memory: int | None, limit: int, shown: str
) -> None:
    path, layout = container(tmp_path), LAYOUTS["v1.2"]
    poke(path, layout.slot_offset(2) + layout.used + 32, "Q", count)
    poke(path, layout.limit, "Q", limit)
    gpus = tuple(
        Gpu(uuid, index, memory_total=memory) for index, uuid in enumerate(expected("v1.2")["uuids"])
    )
    with Served(tmp_path / "socket", picture(inventory=Inventory(1, 1.0, "550.54.15", gpus))) as served:
        row = call("--socket", served.path, tmp_path).stdout.splitlines()[5]
        (file,) = json.loads(call("--json", "--socket", served.path, tmp_path).stdout)
    assert row.split()[8] == shown
    assert file["slots"][2]["used"][0]["total"] == (None if shown == "?" else count)


def test_layout_without_utilization_shows_none(tmp_path: Path) -> None:
    container(tmp_path, layout="v0-no-util")
    assert call(tmp_path).stdout.splitlines()[3].split()[5:9:2] == ["1", "-"]


def test_an_empty_directory_is_no_error(tmp_path: Path) -> None:
    done = call(tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "no .cache files" in done.stderr
    assert as_json(tmp_path) == (0, [])


def test_a_file_name_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    name = os.fsdecode(b"\x1b]0;owned\x07\n\xff.cache")
    write(tmp_path / "uid_name" / name, b"x")
    done = call(tmp_path)
    assert done.returncode == 1
    assert not re.search(r"[^\n -~]", done.stderr)
    assert r"\x1b]0;owned" in done.stderr
    assert as_json(tmp_path)[1][0]["path"] == f"{tmp_path}/uid_name/{name}"


@pytest.mark.parametrize(
    ("slot_pid", "hostpid", "status", "others", "text"),
    [
        (1, 0, 1, [], "missing"),
        (7, 4000, 1, [0], ""),
        (7, 4000, 1, [0, 3, 5], "duplicate of 3,5"),
        (7, 7, 1, [0, 3], "duplicate of 3"),
        (0, 4000, 1, [0], "invalid_pid"),
        (-1, 0, 2, [], "invalid_pid"),
        (0, 4000, 0, [], "ended"),
        (7, 4000, 0, [], "status 0"),
    ],
)
def test_hints(slot_pid: int, hostpid: int, status: int, others: list[int], text: str) -> None:
    slot = slots.SlotRow(0, slot_pid, hostpid, status)
    assert slots.hint(slot, others, host_pids=True) == text


def test_expensive_modules_are_imported_on_use(tmp_path: Path) -> None:
    container(tmp_path)
    code = f"import sys; from resolver.cli import main; main(['slots', '{tmp_path}']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"json", "ctypes", "asyncio", "msgspec", "structlog", "psutil", "pynvml"}
