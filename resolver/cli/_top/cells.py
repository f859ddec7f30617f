"""Signs and text in a terminal's cells: which it can show, and how much of a text has room."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from collections.abc import Mapping

#: A text and the name of its style, one after the other; `screen` knows what the styles look like.
Line = list[tuple[str, str]]

#: The kernel's console knows lines and blocks, but not those that are used here.
_PLAIN_TERMINALS = ("dumb", "linux")


class Glyphs(NamedTuple):
    """The signs that are drawn."""

    open: str
    closed: str
    full: str
    half: str
    rest: str
    repaired: str
    ellipsis: str
    at_least: str
    dot: str
    levels: str  # of a history, from none to all


UNICODE = Glyphs(
    open="▾",
    closed="▸",
    full="━",
    half="╸",
    rest="─",
    repaired="✓",
    ellipsis="…",
    at_least="≥",
    dot="·",
    levels="▁▂▃▄▅▆▇█",
)
ASCII = Glyphs(
    open="-",
    closed="+",
    full="#",
    half="",
    rest=".",
    repaired="*",
    ellipsis="~",
    at_least=">",
    dot="|",
    levels="_.:-=+*#",
)


def glyphs_for(encoding: str | None, environ: Mapping[str, str]) -> Glyphs:
    """The signs that a terminal can show: by what the person's locale says, whatever Python makes of it."""
    ctype, lang = environ.get("LC_CTYPE", ""), environ.get("LANG", "")
    locale = environ.get("LC_ALL") or ctype or lang
    if environ.get("TERM") in _PLAIN_TERMINALS:
        return ASCII
    # In the C locale Python sets this itself (PEP 538), and the terminal knows nothing of it.
    coerced = locale == ctype == "C.UTF-8" and lang in ("", "C", "POSIX")
    if coerced or locale.lower().replace("-", "").rpartition(".")[2].partition("@")[0] != "utf8":
        return ASCII
    try:
        "".join(UNICODE).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def printable(text: str, *, ascii_only: bool = False) -> str:
    """Tenants choose names, so no control character of one may reach a terminal."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char.isprintable() and (char.isascii() or not ascii_only) else ascii(char)[1:-1]
        for char in text
    )


def fit(text: str, width: int, glyphs: Glyphs, *, middle: bool = False) -> str:
    """The text in exactly ``width`` cells; what is cut out leaves an ellipsis, in the middle if that keeps more."""
    length = len(text) if text.isascii() else cell_len(text)
    if length <= width:
        return text + " " * (width - length)
    if width <= 1:
        return glyphs.ellipsis[:width]
    tail = (width - 1) // 2 if middle else 0
    end = ""
    if tail:
        end = text[-tail:]
        while cell_len(end) > tail:
            end = end[1:]
    return set_cell_size(text, width - 1 - cell_len(end)) + glyphs.ellipsis + end


def clip(line: Line, width: int, glyphs: Glyphs) -> Line:
    """The line in at most ``width`` cells, of signs that the terminal knows and that do nothing but show."""
    clipped: Line = []
    for words, style in line:
        text = printable(words, ascii_only=glyphs is ASCII)
        length = len(text) if text.isascii() else cell_len(text)
        if length > width:
            return [*clipped, (fit(text, width, glyphs), style)] if width > 0 else clipped
        if length:
            clipped.append((text, style))
        width -= length
    return clipped
