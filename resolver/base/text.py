"""Text for people: counted nouns, and names that tenants chose."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing is slow to import, and every command imports this module
if TYPE_CHECKING:
    from collections.abc import Iterable


def several(number: int, one: str, more: str = "") -> str:
    """Return the number with its noun: ``1 slot``, ``2 slots``. ``more`` is an irregular plural."""
    return f"{number} {one if number == 1 else more or one + 's'}"


def some(names: Iterable[str], most: int = 3) -> str:
    """Return a few of the names, and the number of the others."""
    first, others = (listed := list(names))[:most], listed[most:]
    return ", ".join(first) + (f" and {len(others)} more" if others else "")


def cause(error: OSError | ValueError) -> str:
    """Return an error's text; the kernel's without number and path."""
    code = getattr(error, "errno", None)
    return os.strerror(code) if code else str(error)


def printable(text: str) -> str:
    """Escape control characters: tenants choose names, and terminals obey them."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
