"""Completion in real shells: a typed text, a press of Tab, and the completed line."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from resolver.base.event_log import KINDS
from resolver.base.source_records import SourceName
from resolver.cli import COMMANDS, parser_of
from scripts.build_hook import PATHS
from tests.fakes.terminal import Terminal
from tests.patience import PATIENCE_S

ROOT: Final = Path(__file__).parents[3]
SOURCES: Final = {name.value for name in SourceName}
#: Keys bound to insert all completions in the shells below.
EVERYTHING: Final = "\x18\x05"
_LIMIT_S: Final = PATIENCE_S

_BASH = r"""
PS1='ready> '; bind 'set enable-bracketed-paste off' 'set completion-query-items -1'
bind '"\C-x\C-e": insert-completions'
source '%s'
"""
_ZSH = r"""
PS1='ready> '; unsetopt zle_bracketed_paste prompt_sp prompt_cr 2>/dev/null; zle_highlight=(none)
autoload -U compinit; compinit -u -D
source '%s'
_everything() { _main_complete; compstate[insert]=all; compstate[list]=''; }
zle -C everything complete-word _everything; bindkey '^X^E' everything
"""
#: A shell function that prints its line's words between numbered marks.
_SHOW = r"""
number=0; show() { number=$((number + 1)); clear; printf 'begin %s' $number; printf '|%s' "$@"; echo "|end $number."; }
"""


def script(shell: str, place: Path) -> Path:
    """Return the wheel's completion file for a shell."""
    share = place.with_name(f"{place.name}-share")
    subprocess.run([sys.executable, "scripts/build_hook.py", share], cwd=ROOT, check=True)
    return share / PATHS[shell]


Complete = Callable[[str], set[str]]


def in_terminal(shell: str, setup: str, place: Path) -> Iterator[Complete]:
    """Yield a function that returns Tab's offers: the shell inserts all of them, and prints the words."""
    rc = place / f"rc.{shell}"
    rc.write_text(setup % script(shell, place) + _SHOW)
    plain = {"bash": "bash --norc --noprofile -i", "zsh": "zsh -f -i"}[shell]
    numbers = itertools.count(1)
    environ = {"PATH": os.environ["PATH"], "HOME": str(place), "TERM": "dumb", "LC_ALL": "C.UTF-8"}
    with Terminal(f"cd {place}; exec {plain}", 4000, 50, environ) as terminal:  # so wide that no line wraps
        terminal.type(f"source '{rc}'; echo its'-'ready\n")
        terminal.wait("its-ready")

        def complete(typed: str) -> set[str]:
            line, _, word = typed.rpartition(" ")
            terminal.type(f"{typed}{EVERYTHING}\x01show \n")
            number = next(numbers)
            text = terminal.wait(lambda text: f"end {number}." in text)
            shown = text.rpartition(f"begin {number}|")[2].partition(f"|end {number}.")[0].split("|")
            return {offer for offer in shown[len(line.split()) :] if offer not in ("", word)}

        yield complete


def in_fish(place: Path) -> Iterator[Complete]:
    """Fish has a command that prints its completions."""
    file = script("fish", place)

    def complete(typed: str) -> set[str]:
        line = ["fish", "--no-config", "-c", f"source {file}; complete -C '{typed}'"]
        env = {"PATH": os.environ["PATH"], "HOME": str(place), "TERM": "dumb"}
        done = subprocess.run(
            line, cwd=place, env=env, capture_output=True, text=True, check=True, timeout=_LIMIT_S
        )
        assert done.stderr == ""
        return {line.split("\t")[0] for line in done.stdout.splitlines()}

    yield complete


@pytest.fixture(scope="module", params=PATHS)
def complete(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Complete]:
    shell = str(request.param)
    if shutil.which(shell) is None:
        pytest.fail(f"{shell} is not installed: make setup-dev installs it", pytrace=False)
    place = tmp_path_factory.mktemp(shell)
    for name in ("settings.toml", "with blank.toml"):
        (place / name).touch()
    (place / "directory").mkdir()
    yield from {
        "bash": lambda: in_terminal("bash", _BASH, place),
        "zsh": lambda: in_terminal("zsh", _ZSH, place),
        "fish": lambda: in_fish(place),
    }[shell]()


def options_of(command: str) -> set[str]:
    return {
        flag for action in parser_of(command)[0]._actions for flag in action.option_strings if "--" in flag
    }


def test_the_commands(complete: Complete) -> None:
    assert complete("resolver ") - {"--help", "--version"} == set(COMMANDS)
    assert complete("resolver con") == {"config", "containers"}
    assert complete("resolver --") == {"--help", "--version"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_of_each(complete: Complete, command: str) -> None:
    assert {word.rstrip("=") for word in complete(f"resolver {command} --")} == options_of(command)


def test_values_out_of_a_list(complete: Complete) -> None:
    assert complete("resolver run --source ") == SOURCES
    assert complete("resolver run --dry-run --source n") == {"netlink"}
    assert {word.removeprefix("--source=") for word in complete("resolver run --source=n")} == {"netlink"}
    assert complete("resolver events --kind ") == set(KINDS)


def test_files_and_directories(complete: Complete) -> None:
    assert "settings.toml" in complete("resolver run --config ")
    assert complete("resolver run --config sett") == {"settings.toml"}
    assert complete("resolver run --config with") == {"with blank.toml"}
    assert {word.rstrip("/") for word in complete("resolver run --run-dir ")} == {"directory"}
    assert complete("resolver slots sett") == {"settings.toml"}


def test_options_with_free_text_complete_to_nothing(complete: Complete) -> None:
    for typed in ("resolver run --interval ", "resolver events --pod "):
        assert complete(typed) == set(), typed


def test_a_word_that_only_looks_like_a_command(complete: Complete) -> None:
    assert "--containers-dir" not in {word.rstrip("=") for word in complete("resolver lookup run --")}
