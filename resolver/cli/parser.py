"""Parser of a command's arguments, and the types of their values."""

import argparse
from typing import Any, NoReturn

_MOST_DIGITS, _MOST_SHOWN = 40, 20


class Parser(argparse.ArgumentParser):
    """An argument parser that refuses abbreviated options."""

    def __init__(self, prog: str, usage: str | None = None, description: str = "", epilog: str = "") -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, usage, description, epilog, formatter_class=formatter, allow_abbrev=False)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse ``-o json``, where argparse would take ``json`` for the first argument."""
        if "-o" in (args or ()) and "--json" in self._option_string_actions:
            self.error("there is no -o: --json prints JSON")
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message in one sentence; exit code 2."""
        from difflib import get_close_matches

        word = message.partition("unrecognized arguments: ")[2].partition(" ")[0].partition("=")[0]
        names = [option[2:] for option in self._option_string_actions if option.startswith("--")]
        near = get_close_matches(word.lstrip("-"), names, n=1)  # their dashes would make any two similar
        hint = f"; did you mean --{near[0]}?" if near else "."
        self.exit(2, f"{self.prog}: {message}{hint} See {self.prog} --help\n")


def number(text: str) -> int:
    """Return a PID or an inode: a number of at most 40 digits."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is not a number of at most {_MOST_DIGITS} digits")
    return int(text)


def seconds(text: str) -> float:
    """Return the seconds of an option such as ``500ms`` or ``10m``."""
    from resolver.config import parse_duration  # most commands have no such option

    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
