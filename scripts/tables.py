"""Writes those tables of the documents that come from the code; ``--check`` only says which are stale.

A table stands in its document between ``<!-- table: NAME -->`` and ``<!-- /table -->``. To add one: a function that
returns its lines, an entry in TABLES, and the two marks.
"""  # noqa: INP001 - a program that is run by its path

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def event_kinds() -> list[str]:
    """The events that the API serves."""
    from resolver.events import KINDS

    return rows(("kind", "meaning"), ((f"`{kind}`", meaning) for kind, meaning in KINDS.items()))


def log_events() -> list[str]:
    """The events that only the log has."""
    from resolver.events import LOGGED

    return rows(("event", "meaning"), ((f"`{event}`", meaning) for event, meaning in sorted(LOGGED.items())))


#: (document, name of the table) -> what writes its lines
TABLES: dict[tuple[str, str], Callable[[], list[str]]] = {
    ("docs/cli.md", "event-kinds"): event_kinds,
    ("docs/log-events.md", "event-kinds"): event_kinds,
    ("docs/log-events.md", "log-events"): log_events,
}


def written(text: str, name: str, lines: list[str]) -> str:
    """``text`` with the table ``name`` replaced. Raises SystemExit where its marks are missing."""
    marks = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- /table -->)", re.DOTALL)
    if not marks.search(text):
        sys.exit(f"tables: no mark '<!-- table: {name} -->' with '<!-- /table -->' after it")
    return marks.sub(lambda found: found[1] + "\n" + "\n".join(lines) + "\n\n" + found[2], text)


def main() -> int:
    """Write every table anew, or say which are stale (exit code 1)."""
    stale = []
    for (document, name), lines in TABLES.items():
        path = ROOT / document
        before = path.read_text()
        after = written(before, name, lines())
        if after != before:
            stale.append(f"{document} ({name})")
            if "--check" not in sys.argv:
                path.write_text(after)
    for each in stale:
        sys.stdout.write(f"{'stale' if '--check' in sys.argv else 'written'}: {each}\n")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
