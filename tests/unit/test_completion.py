"""Completion in the real shells: what is typed, then the Tab of a person, then what the shell made of it."""

from __future__ import annotations

import os
import pty
import re
import runpy
import select
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from resolver.cli import COMMANDS, completion, main, parser_of
from resolver.cli.completion import FILES
from resolver.config import SourceName
from resolver.log.event_names import KINDS
from tests.patience import PATIENCE_S

SOURCES: Final = {name.value for name in SourceName}
#: Keys that the shells below are told to put all completions into the line for.
EVERYTHING: Final = b"\x18\x05"
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


def script(shell: str, place: Path) -> Path:
    """The script as the command prints it, in a file."""
    file = place / f"completion.{shell}"
    with file.open("w") as out:
        subprocess.run([sys.executable, "-m", "resolver", "completion", shell], stdout=out, check=True)
    return file


class Terminal:
    """An interactive shell on a terminal of its own."""

    def __init__(self, command: list[str], home: Path) -> None:
        environ = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "LC_ALL": "C.UTF-8"}
        master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (50, 4000))  # no line is broken
        self._master = master
        self._shell = subprocess.Popen(
            command, cwd=home, env=environ, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self._seen = ""

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Reads until it is there; what comes before it is forgotten."""
        deadline = time.monotonic() + _LIMIT_S
        while (found := re.search(pattern, self._seen)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"not seen: {pattern}; seen: {self._seen!r}"
            if select.select([self._master], [], [], left)[0]:
                self._seen += os.read(self._master, 65536).decode(errors="replace")
        self._seen = self._seen[found.end() :]
        return found

    def close(self) -> None:
        self._shell.kill()
        self._shell.wait()
        os.close(self._master)


Complete = Callable[[str], set[str]]


def in_terminal(shell: str, setup: str, place: Path) -> Iterator[Complete]:
    """What each Tab would offer: all of it is put into the line, and the line made an argument list."""
    rc = place / f"rc.{shell}"
    rc.write_text(setup % script(shell, place))
    plain = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}[shell]
    terminal = Terminal(plain, place)
    try:
        terminal.type(f"source '{rc}'; echo its'-'ready\n".encode())
        terminal.wait_for("its-ready")

        def complete(typed: str) -> set[str]:
            line, _, word = typed.rpartition(" ")
            terminal.type(typed.encode() + EVERYTHING + b"\x01show \n")
            shown = terminal.wait_for(r"\x02(.*)\x03").group(1).split("\x1f")
            return {each for each in shown[len(line.split()) :] if each not in ("", word)}

        terminal.type(rb"""show() { printf '\002'; printf '%s\037' "$@"; printf '\003\n'; }""" + b"\n")
        yield complete
    finally:
        terminal.close()


def in_fish(place: Path) -> Iterator[Complete]:
    """Fish tells by itself what it would offer."""
    file = script("fish", place)

    def complete(typed: str) -> set[str]:
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source {file}; complete -C '{typed}'"],
            cwd=place,
            env={"PATH": os.environ["PATH"], "HOME": str(place), "TERM": "dumb"},
            capture_output=True,
            text=True,
            check=True,
            timeout=_LIMIT_S,
        )
        assert done.stderr == ""
        return {line.split("\t")[0] for line in done.stdout.splitlines()}

    yield complete


@pytest.fixture(scope="module", params=FILES)
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
    assert complete("resolver completion ") - {"-h", "--help"} == set(FILES)


def test_files_and_directories(complete: Complete) -> None:
    assert "settings.toml" in complete("resolver run --config ")
    assert complete("resolver run --config sett") == {"settings.toml"}
    assert complete("resolver run --config with") == {"with blank.toml"}
    assert {word.rstrip("/") for word in complete("resolver run --run-dir ")} == {"directory"}
    assert complete("resolver slots sett") == {"settings.toml"}


def test_where_nothing_can_be_known_nothing_is_offered(complete: Complete) -> None:
    for typed in ("resolver run --interval ", "resolver events --last "):
        assert complete(typed) == set(), typed


def test_a_word_that_only_looks_like_a_command(complete: Complete) -> None:
    assert "--containers-dir" not in {word.rstrip("=") for word in complete("resolver lookup run --")}


def test_the_files_are_those_of_the_parsers(root: Path) -> None:
    for name, text in runpy.run_path(str(root / "scripts/completion.py"))["written"]().items():
        assert (root / "deploy/completion" / name).read_text() == text, f"{name} is stale: make completion"


def test_a_file_that_is_not_installed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(completion, "__file__", str(tmp_path / "a/b/c.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert main(["completion", "zsh"]) == 1
    assert f"{tmp_path}/share/zsh/site-functions/_resolver is not there" in capsys.readouterr().err


def test_an_unknown_shell_is_wrong_usage() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "resolver", "completion", "tcsh"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "bash" in done.stderr
