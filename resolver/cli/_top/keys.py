"""What a person typed, as keys: letters, and names such as ``up`` and ``page down``."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O[@-~])")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")
_NAMED = {
    "A": "up",
    "B": "down",
    "H": "home",
    "F": "end",
    "1~": "home",
    "7~": "home",
    "4~": "end",
    "8~": "end",
    "5~": "page up",
    "6~": "page down",
}
_SINGLE = {
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x15": "clear",
    "\x1b": "escape",
}


def keys_in(text: str) -> tuple[list[str], str]:
    """The keys of what was typed, by name or by letter, and the unfinished rest. What is not known is left out."""
    keys: list[str] = []
    while text:
        if _UNFINISHED.match(text):
            return keys, text
        found = _CONTROL.match(text)
        if found:
            name = _NAMED.get(found.group()[2:])
            keys += [name] if name else []
            text = text[found.end() :]
            continue
        char, text = text[0], text[1:]
        if char in _SINGLE:
            keys.append(_SINGLE[char])
        elif char.isprintable():
            keys.append(char)
    return keys, text
