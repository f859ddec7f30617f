"""Offsets of kernel fields, read from the running kernel's BTF (Documentation/bpf/btf.rst).

Standard library only: the loader uses it under any Python that has bcc.
"""

from __future__ import annotations

import struct

_MAGIC = 0xEB9F
_STRUCT, _UNION = 4, 5
TYPEDEF, FUNCTION = 8, 12
#: Words after the three of every type, by its kind: (fixed, for each of vlen). 0 is no kind.
_TAIL = {
    1: (1, 0),  # int
    2: (0, 0),  # pointer
    3: (3, 0),  # array
    4: (0, 3),  # struct
    5: (0, 3),  # union
    6: (0, 2),  # enum
    7: (0, 0),  # forward
    8: (0, 0),  # typedef
    9: (0, 0),  # volatile
    10: (0, 0),  # const
    11: (0, 0),  # restrict
    12: (0, 0),  # function
    13: (0, 2),  # prototype
    14: (1, 0),  # variable
    15: (0, 3),  # section
    16: (0, 0),  # float
    17: (1, 0),  # declaration tag
    18: (0, 0),  # type tag
    19: (0, 3),  # 64-bit enum
}


class BtfError(Exception):
    """Raised for invalid BTF, or for a missing item, which ``str()`` names."""


class Btf:
    """The types of one BTF blob, found by name."""

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
        self._starts = [0]  # by type id; 0 is void and has no description
        #: By kind, and by the offset of the name: the first type id, as far as the walk has come.
        self._ids: dict[int, dict[int, int]] = {_STRUCT: {}, TYPEDEF: {}, FUNCTION: {}}
        self._next = 0

    def _walk(self) -> bool:
        """Go on by a thousand types; False at the end."""
        words, starts, ids, at, end = self._words, self._starts, self._ids, self._next, len(self._words)
        for _ in range(1024):
            if at + 3 > end:
                break
            info = words[at + 1]
            kind = info >> 24 & 0x1F
            if kind not in _TAIL:
                raise BtfError(f"type {len(starts)} is of kind {kind}, which is newer than this program")
            if kind in ids:
                ids[kind].setdefault(words[at], len(starts))
            starts.append(at)
            fixed, each = _TAIL[kind]
            at += 3 + fixed + each * (info & 0xFFFF)
            if at > end:
                raise BtfError(f"type {len(starts) - 1} goes on beyond the end")
        moved, self._next = at > self._next, at
        return moved

    def offset(self, name: str, *members: str) -> int:
        """Return the byte offset of a member of ``struct name``; several names descend into nested members.

        Members of anonymous structures and unions count as the outer structure's. Raises `BtfError` if there is no such
        structure or member, or if it doesn't start at a whole byte.
        """
        where: int | None = self.type_id(_STRUCT, name)
        total = 0
        for member in members:
            if where is None:
                raise BtfError(f"struct {name} has no structure on the way to {'.'.join(members)}")
            found = self._member(self._starts[where], self._name(member))
            if found is None:
                raise BtfError(f"struct {name} has no member {'.'.join(members)}")
            bits, type_id = found
            total += bits
            where = self._structure(type_id)
        if total % 8:
            raise BtfError(f"struct {name} has {'.'.join(members)} as a bit field")
        return total // 8

    def size(self, name: str) -> int:
        """Return the size of ``struct name`` in bytes."""
        return self._words[self._starts[self.type_id(_STRUCT, name)] + 2]

    def type_id(self, kind: int, name: str) -> int:
        """Return the type id of a structure, function or typedef. Raises `BtfError`."""
        known, wanted = self._ids[kind], self._name(name)
        while wanted not in known:
            if wanted < 0 or not self._walk():
                raise BtfError(f"it describes no {'struct ' if kind == _STRUCT else ''}{name}")
        return known[wanted]

    def _name(self, text: str) -> int:
        """Offset of a name in the string section; -1 if nothing is called so."""
        found = self._strings.find(b"\0" + text.encode() + b"\0")
        return found + 1 if found >= 0 else -1

    def _structure(self, type_id: int) -> int | None:
        """Resolve typedefs and qualifiers to a structure or union; None for another type."""
        for _ in range(16):
            while type_id >= len(self._starts):
                if not self._walk():
                    raise BtfError(f"it refers to type {type_id}, which is not there")
            at = self._starts[type_id]
            kind = self._words[at + 1] >> 24 & 0x1F
            if kind in (_STRUCT, _UNION):
                return type_id
            if kind not in (8, 9, 10, 11, 18):
                return None
            type_id = self._words[at + 2]
        return None

    def _member(self, at: int, wanted: int) -> tuple[int, int] | None:
        """Bit offset and type of a member, also of one inside an anonymous member."""
        words = self._words
        info = words[at + 1]
        for member in range(at + 3, at + 3 + 3 * (info & 0xFFFF), 3):
            name, type_id, bits = words[member], words[member + 1], words[member + 2]
            if info >> 31:  # the offset shares its word with the width of a bit field
                bits &= 0xFFFFFF
            if name == wanted:
                return bits, type_id
            if name == 0 and (inner := self._structure(type_id)) is not None:
                found = self._member(self._starts[inner], wanted)
                if found is not None:
                    return bits + found[0], found[1]
        return None
