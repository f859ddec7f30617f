"""The parser of a command line, with the nearest word for one that there isn't."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

from resolver.lean import lean

with lean("shutil"):
    import shutil  # noqa: F401 - argparse imports it to ask how wide the terminal is

if TYPE_CHECKING:
    from collections.abc import Iterable


class Parser(argparse.ArgumentParser):
    """argparse's, which leaves descriptions as they are, with the nearest option for one that there isn't."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Print usage, the message and perhaps a suggestion; exit code 2."""
        if message.startswith("unrecognized arguments: "):
            flags = [flag for action in self._actions for flag in action.option_strings]
            for word in message.partition(": ")[2].split():
                near = nearest(word.partition("=")[0], flags) if word.startswith("-") else ""
                message += f"; did you mean {near} for {word}?" if near else ""
        super().error(message)


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word with the nearest spelling; empty if none is near."""
    from difflib import get_close_matches  # for mistakes only

    return next(iter(get_close_matches(word, known, n=1)), "")
