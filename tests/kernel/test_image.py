"""The compiled BPF program kept for the next start: conditions for its use."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resolver.pids.bpf_map import KernelMap, start
from tests.unit.bpf import part

image = part("image")


@pytest.fixture
def kept_in(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o755)
    return directory


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a kept program for tests to spoil: compiling one takes a second of CPU."""
    directory = tmp_path_factory.mktemp("compiled")
    with loaded(directory):
        pass
    return directory / str(image.NAME)


@contextlib.contextmanager
def loaded(directory: Path, processes: int = 32_768) -> Iterator[KernelMap]:
    with contextlib.closing(start(processes, kept_in=str(directory))) as pidmap:
        yield pidmap


def test_second_start_of_a_size_compiles_nothing(kept_in: Path) -> None:
    with loaded(kept_in) as first:
        assert first.report["bcc"] != "kept"
        file = kept_in / image.NAME
        assert (file.stat().st_mode & 0o777, file.stat().st_uid) == (0o600, os.geteuid())
        with loaded(kept_in) as second:
            assert second.report["bcc"] == "kept"
            assert second.report["maps"] == first.report["maps"]
            assert second.report["links"] == first.report["links"]
            assert second.by_host(os.getpid()) == first.by_host(os.getpid())
        with loaded(kept_in, 65_536) as other:
            assert other.report["bcc"] != "kept"
            sizes = [(each["name"], each["max_entries"]) for each in other.report["maps"]]
            assert ("processes", 131_072) in sizes


@pytest.mark.parametrize("spoil", ["code", "iterator", "maps", "text"])
def test_refused_program_is_compiled_again(kept_in: Path, compiled: Path, spoil: str) -> None:
    kept = Path(shutil.copy(compiled, kept_in))
    with loaded(kept_in) as taken:
        assert taken.report["bcc"] == "kept"
    whole = json.loads(kept.read_text())
    if spoil == "code":
        first = whole["image"]["programs"][0]
        first["code"] = "b7010000" + first["code"][8:]  # an instruction that leaves the context unknown
        first["code"] = first["code"][: len(first["code"]) - 16]  # and no exit
    elif spoil == "iterator":
        whole["image"]["programs"][-1]["btf_id"] = 1
    elif spoil == "maps":
        del whole["image"]["maps"][0]["key_size"]
    kept.write_text("{" if spoil == "text" else json.dumps(whole))
    with loaded(kept_in) as again:
        assert again.report["bcc"] != "kept"
    with loaded(kept_in) as after:
        assert after.report["bcc"] == "kept"  # the spoiled program was replaced


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


SPOILED: dict[str, Callable[[Path], object]] = {
    "readable": lambda file: file.chmod(0o644),
    "another's": lambda file: os.chown(file, 65534, -1),
    "linked": lambda file: os.link(file, file.parent / "more"),
    "symbolic": lambda file: file.symlink_to(file.rename(file.parent / "elsewhere")),
    "pipe": _pipe,
    "open directory": lambda file: file.parent.chmod(0o777),
    "another's directory": lambda file: os.chown(file.parent, 65534, -1),
    "deep": lambda file: file.write_text("[" * 100_000),
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_image_writable_by_others_is_not_used(kept_in: Path, spoil: str) -> None:
    made: dict[str, list[Any]] = {"maps": [], "programs": []}
    image.save(str(kept_in), "mark", made)
    assert image.find(str(kept_in), "mark") == made
    SPOILED[spoil](kept_in / image.NAME)
    with pytest.raises(image.ImageError):
        image.find(str(kept_in), "mark")


def test_the_mark_follows_source_and_constants(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    header = tmp_path / "include" / "a.h"
    header.write_text("one")
    (tmp_path / "b.c").write_text("two")
    first = image.fingerprint(str(tmp_path), {"A": 1})
    assert first == image.fingerprint(str(tmp_path), {"A": 1})
    assert first != image.fingerprint(str(tmp_path), {"A": 2})
    header.write_text("three")
    assert first != image.fingerprint(str(tmp_path), {"A": 1})
