"""Offsets of kernel fields from BTF (Documentation/bpf/btf.rst). Standard library only."""

from __future__ import annotations

import struct

_MAGIC = 0xEB9F
_STRUCT, _UNION = 4, 5
TYPEDEF, FUNCTION = 8, 12
#: Words after every type's first three, by kind: a fixed number, and a number for each of vlen members.
_FIXED = {1: 1, 3: 3, 14: 1, 17: 1}  # int, array, variable, declaration tag
_EACH = {4: 3, 5: 3, 6: 2, 13: 2, 15: 3, 19: 3}  # struct, union, enum, prototype, section, 64-bit enum
_LAST_KIND = 19


class BtfError(Exception):
    """Invalid BTF, or a missing item, which ``str()`` names."""


class Btf:
    """Types of a BTF blob, by name."""

    def __init__(self, blob: bytes) -> None:
        if len(blob) < 24:
            raise BtfError("it is shorter than its own header")
        magic, version, _flags, length, types, types_size, strings, strings_size = struct.unpack_from(
            "<HBBIIIII", blob
        )
        if magic != _MAGIC or version != 1:
            raise BtfError(f"it starts with {magic:#06x} version {version}, not with 0xeb9f version 1")
        start, end = length + types, length + types + types_size
        first, last = length + strings, length + strings + strings_size
        if end > len(blob) or last > len(blob) or types_size % 4:
            raise BtfError("it is cut off")
        self._words = memoryview(blob)[start:end].cast("I")
        self._strings = blob[first:last]
        self._starts = starts = [0]  # by type id; 0 is void and has no description
        #: By kind, and by the offset of the name: the first type id.
        self._ids: dict[int, dict[int, int]] = {_STRUCT: {}, TYPEDEF: {}, FUNCTION: {}}
        words, ids, at = self._words, self._ids, 0
        while at + 3 <= len(words):
            info = words[at + 1]
            kind = info >> 24 & 0x1F
            if not 0 < kind <= _LAST_KIND:
                raise BtfError(f"type {len(starts)} is of kind {kind}, which is newer than this program")
            if kind in ids:
                ids[kind].setdefault(words[at], len(starts))
            starts.append(at)
            at += 3 + _FIXED.get(kind, 0) + _EACH.get(kind, 0) * (info & 0xFFFF)
        if at > len(words):
            raise BtfError("its last type goes on beyond the end")

    def offset(self, name: str, *members: str) -> int:
        """Byte offset in ``struct name`` of its first member among these, anonymous ones' too. Raises `BtfError`."""
        for member in members:
            bits = self._member(self.type_id(_STRUCT, name), self._name(member))
            if bits is None:
                continue
            if bits % 8:
                raise BtfError(f"struct {name} has {member} as a bit field")
            return bits // 8
        raise BtfError(f"struct {name} has no member {' or '.join(members)}")

    def size(self, name: str) -> int:
        """Size of ``struct name`` in bytes. Raises `BtfError`."""
        return self._words[self._starts[self.type_id(_STRUCT, name)] + 2]

    def type_id(self, kind: int, name: str) -> int:
        """Id of a structure, function or typedef. Raises `BtfError`."""
        type_id = self._ids[kind].get(self._name(name))
        if type_id is None:
            raise BtfError(f"it describes no {'struct ' if kind == _STRUCT else ''}{name}")
        return type_id

    def _name(self, text: str) -> int:
        """Return a name's offset in the string section; or -1."""
        offset = self._strings.find(b"\0" + text.encode() + b"\0")
        return offset + 1 if offset >= 0 else -1

    def _member(self, type_id: int, wanted: int) -> int | None:
        if type_id >= len(self._starts):
            raise BtfError(f"it refers to type {type_id}, which is not there")
        words, at = self._words, self._starts[type_id]
        info = words[at + 1]
        if info >> 24 & 0x1F not in (_STRUCT, _UNION):
            return None
        for member in range(at + 3, at + 3 + 3 * (info & 0xFFFF), 3):
            name, inner, bits = words[member], words[member + 1], words[member + 2]
            if info >> 31:  # the offset shares its word with the width of a bit field
                bits &= 0xFFFFFF
            if name == wanted:
                return bits
            offset = self._member(inner, wanted) if name == 0 else None
            if offset is not None:
                return bits + offset
        return None
