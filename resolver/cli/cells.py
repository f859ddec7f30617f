"""Text in a terminal's cells: the part that fits, and the signs that the terminal can show."""

from __future__ import annotations

import unicodedata

from resolver.base.text import printable

#: Texts, each with the name of its style; `screen` knows how the styles look.
Line = list[tuple[str, str]]

#: Our own signs in ASCII.
ASCII_SIGNS = str.maketrans("━─✓…≥·↑↓", "#.*~>|^v")


def in_ascii(text: str) -> str:
    """Return the text in ASCII and in as many cells; ``?`` for letters of other alphabets."""
    signs = text.translate(ASCII_SIGNS)
    return signs if signs.isascii() else "".join(c if c.isascii() else "?" * cells(c) for c in signs)


def cells(text: str) -> int:
    """Return how many cells of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        2 if unicodedata.east_asian_width(each) in "WF" else unicodedata.category(each) not in ("Mn", "Me")
        for each in text
    )


def fit(text: str, width: int, *, middle: bool = False, ellipsis: str = "…") -> str:
    """Return the text in exactly ``width`` cells, with an ellipsis for a cut in the middle or at the end."""
    if (length := cells(text)) <= width:
        return text + " " * (width - length)
    if width <= 1:
        return ellipsis[:width]
    end = ""
    for each in reversed(text) if middle else ():
        if cells(each + end) > (width - 1) // 2:
            break
        end = each + end
    start, room = "", width - 1 - cells(end)
    for each in text:
        if cells(start + each) > room:
            break
        start += each
    return start + " " * (room - cells(start)) + ellipsis + end


def clip(line: Line, width: int) -> Line:
    """Return the line in at most ``width`` cells, without characters that a terminal obeys."""
    clipped: Line = []
    for words, style in line:
        text = printable(words)
        length = cells(text)
        if length > width:
            return [*clipped, (fit(text, width), style)] if width > 0 else clipped
        if length:
            clipped.append((text, style))
        width -= length
    return clipped
