"""The reader of BTF, the kernel's description of its own structures."""

import __future__

import re
import struct
from pathlib import Path

import pytest

from resolver.pids.bpf_load import bpf_directory
from tests.unit.bpf import part

btf = part("btf")
INT, PTR, STRUCT, UNION, TYPEDEF, FWD, ENUM = 1, 2, 4, 5, 8, 7, 6


class Blob:
    def __init__(self) -> None:
        self.types, self.strings, self.count = b"", b"\0", 0

    def name(self, text: str) -> int:
        """Return the name's offset; a name already present is used again, as in every BTF writer."""
        entry = text.encode() + b"\0"
        if b"\0" + entry not in self.strings and text:
            self.strings += entry
        return self.strings.index(b"\0" + entry) + 1 if text else 0

    def add(self, kind: int, name: str, size_or_type: int, *words: int, vlen: int = 0, flag: int = 0) -> int:
        info = flag << 31 | kind << 24 | vlen
        self.types += struct.pack(f"<III{len(words)}I", self.name(name), info, size_or_type, *words)
        self.count += 1
        return self.count

    def structure(
        self, name: str, *members: tuple[str, int, int], size: int = 64, kind: int = STRUCT, flag: int = 0
    ) -> int:
        words = [word for text, type_id, bits in members for word in (self.name(text), type_id, bits)]
        return self.add(kind, name, size, *words, vlen=len(members), flag=flag)

    def bytes(self, magic: int = 0xEB9F, version: int = 1) -> bytes:
        header = struct.pack(
            "<HBBIIIII", magic, version, 0, 24, 0, len(self.types), len(self.types), len(self.strings)
        )
        return header + self.types + self.strings


@pytest.fixture
def blob() -> Blob:
    blob = Blob()
    number = blob.add(INT, "int", 4, 32)
    blob.add(ENUM, "color", 4, 0, 1, vlen=1)
    nested = blob.structure("", ("deep", number, 32), kind=UNION)
    blob.add(FWD, "task", 0)
    blob.structure("task", ("pid", number, 32), ("", nested, 256), size=96)
    blob.structure("bits", ("flag", number, 3 << 24 | 5), ("whole", number, 16), flag=1)
    blob.structure("tgid")
    return blob


def test_btf_gives_offsets_and_sizes(blob: Blob) -> None:
    read = btf.Btf(blob.bytes())
    assert read.offset("task", "pid") == 4
    assert read.offset("task", "deep") == 36, "a member of an anonymous union is the structure's own"
    assert read.offset("bits", "whole") == 2
    assert read.size("task") == 96


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("nothing", "pid"), "describes no struct nothing"),
        (("task", "tgid"), "struct task has no member tgid"),
        (("bits", "flag"), "as a bit field"),
        (("int", "x"), "describes no struct int"),
    ],
)
def test_missing_type_or_field_is_named(blob: Blob, names: tuple[str, ...], says: str) -> None:
    with pytest.raises(btf.BtfError, match=re.escape(says)):
        btf.Btf(blob.bytes()).offset(*names)


@pytest.mark.parametrize("how", ["empty", "magic", "version", "cut", "kind", "dangling"])
def test_broken_btf_is_refused(blob: Blob, how: str) -> None:
    if how == "kind":
        blob.add(30, "", 0)
    if how == "dangling":
        blob.structure("far", ("away", 4000, 0), ("", 5000, 0))
    broken = {
        "empty": b"",
        "magic": blob.bytes(magic=0x9FEB),
        "version": blob.bytes(version=2),
        "cut": blob.bytes()[:-4],
    }.get(how, blob.bytes())
    with pytest.raises(btf.BtfError):
        btf.Btf(broken).offset("far", "nearer")


def test_btf_gives_type_ids_by_name_and_kind(blob: Blob) -> None:
    prototype = blob.add(13, "", 0)
    traced = blob.add(TYPEDEF, "btf_trace_a", blob.add(PTR, "", prototype))
    blob.add(12, "pid", prototype)
    function = blob.add(12, "btf_trace_b", prototype)
    blob.add(TYPEDEF, "btf_trace_b", prototype)
    read = btf.Btf(blob.bytes())
    assert read.type_id(btf.TYPEDEF, "btf_trace_a") == traced
    assert read.type_id(btf.FUNCTION, "btf_trace_b") == function
    for kind, name in ((btf.FUNCTION, "btf_trace_a"), (btf.TYPEDEF, "nothing")):
        with pytest.raises(btf.BtfError, match=f"describes no {name}"):
            read.type_id(kind, name)


def test_loader_needs_no_annotations_of_a_newer_python() -> None:
    for path in Path(bpf_directory()).glob("*.py"):
        code = compile(path.read_text(), str(path), "exec", dont_inherit=True)
        assert code.co_flags & __future__.annotations.compiler_flag, f"{path.name} fails in Python 3.9"
