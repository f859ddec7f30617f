"""The parser of a command line, with the nearest word for one that there isn't."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable


class Parser(argparse.ArgumentParser):
    """argparse's, without abbreviations, and with the nearest word for one that there isn't."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Print the message in one sentence, perhaps with a suggestion; exit code 2."""
        if message.startswith("unrecognized arguments: "):
            flags = [flag for action in self._actions for flag in action.option_strings]
            for word in message.partition(": ")[2].split():
                near = suggestion(word.partition("=")[0], flags) if word.startswith("-") else ""
                message += f"{near.removesuffix('?)')} for {word}?)" if near else ""
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            near, known = suggestion(str(value), action.choices), ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"{value!r} is not possible{near}; there are: {known}")


def seconds(text: str) -> float:
    """Return the seconds of an option such as ``500ms`` or ``10m``."""
    from resolver.config import parse_duration  # most commands have no such option

    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean X?)`` with the known word of the nearest spelling; empty if none is near."""
    from difflib import get_close_matches  # for mistakes only

    return "".join(f" (did you mean {near}?)" for near in get_close_matches(word, known, n=1))
