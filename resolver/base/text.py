"""Text for people: counted nouns, and names that tenants chose."""

from __future__ import annotations


def several(number: int, one: str, more: str = "") -> str:
    """Return the number with its noun: ``1 slot``, ``2 slots``. ``more`` is an irregular plural."""
    return f"{number} {one if number == 1 else more or one + 's'}"


def printable(text: str) -> str:
    """Escape control characters: tenants choose names, and terminals obey them."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
