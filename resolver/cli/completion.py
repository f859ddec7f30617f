"""Print a script that makes a shell complete resolver's commands, options and their values.

In bash and zsh:  source <(resolver completion bash)   source <(resolver completion zsh)
In fish:          resolver completion fish | source
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from resolver.cli.describe import Argument, Command

HELP = "print what makes a shell complete resolver's commands and options"

_TOP_OPTIONS = {"--help": "show the commands", "--version": "show the version"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("shell", choices=list(SHELLS), help="whose script it is to be")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from resolver.cli.describe import commands

    sys.stdout.write("\n".join(SHELLS[args.shell](commands())) + "\n")
    return 0


# ---- bash ---------------------------------------------------------------------------------------------------------

_BASH_HEAD = """\
# bash completion for resolver
_resolver() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words='' kind=''
    # bash takes --option=value for three words
    if [[ $cur == = ]]; then cur=''; elif [[ $prev == = ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi
    COMPREPLY=()"""

_BASH_TAIL = """\
    case $kind in
    file) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$cur") ;;
    directory) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$cur") ;;
    *) mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur") ;;
    esac
}
complete -F _resolver resolver"""


def bash(commands: Sequence[Command]) -> Iterator[str]:
    """Without any help of the bash-completion package."""
    yield _BASH_HEAD
    names = " ".join([*(command.name for command in commands), *_TOP_OPTIONS])
    yield f"    if ((COMP_CWORD == 1)); then words='{names}'; else"
    yield "    case ${COMP_WORDS[1]} in"
    for command in commands:
        yield f"    {command.name})"
        yield "        case $prev in"
        for option in command.options:
            if option.kind != "flag":
                yield f"        {'|'.join(option.flags)}) {_bash_value(option)} ;;"
        yield f"        *) {_bash_positional(command)} ;;"
        yield "        esac ;;"
    yield "    *) return ;;"
    yield "    esac"
    yield "    fi"
    yield _BASH_TAIL


def _bash_value(argument: Argument) -> str:
    if argument.choices:
        return f"words='{' '.join(argument.choices)}'"
    return f"kind={argument.kind}" if argument.kind in ("file", "directory") else "return"


def _bash_positional(command: Command) -> str:
    flags = " ".join(flag for option in command.options for flag in option.flags)
    kinds = {argument.kind for argument in command.positionals}
    if "file" in kinds:
        return f"if [[ $cur == -* ]]; then words='{flags}'; else kind=file; fi"
    choices = " ".join(choice for argument in command.positionals for choice in argument.choices)
    return f"words='{' '.join(filter(None, (choices, flags)))}'"


# ---- zsh ----------------------------------------------------------------------------------------------------------

_ZSH_HEAD = """\
#compdef resolver
# zsh completion for resolver
_resolver() {
    local curcontext=$curcontext state line
    local -a commands"""

_ZSH_TAIL = """\
        esac ;;
    esac
}
if [[ ${funcstack[1]} == _resolver ]]; then _resolver "$@"; else compdef _resolver resolver; fi"""


def zsh(commands: Sequence[Command]) -> Iterator[str]:
    """For ``source`` after compinit, and as a file ``_resolver`` in a directory of ``fpath``."""
    yield _ZSH_HEAD
    yield "    commands=("
    for command in commands:
        yield f"        {_quoted(f'{command.name}:{command.summary}')}"
    yield "    )"
    top = " ".join(_quoted(f"(- *){flag}[{text}]") for flag, text in _TOP_OPTIONS.items())
    yield f"    _arguments -C {top} '1: :->command' '*:: :->argument'"
    yield "    case $state in"
    yield "    command) _describe -t commands command commands ;;"
    yield "    argument)"
    yield "        case ${words[1]} in"
    for command in commands:
        yield f"        {command.name}) _arguments \\"
        yield " \\\n".join(f"            {_zsh_argument(argument)}" for argument in command.arguments) + " ;;"
    yield _ZSH_TAIL


def _zsh_argument(argument: Argument) -> str:
    action = {"file": "_files", "directory": "_files -/", "choice": f"({' '.join(argument.choices)})"}
    value = f":{argument.value.replace(':', ' ')}:{action.get(argument.kind, ' ')}"
    if not argument.flags:
        return _quoted(("*" if argument.repeated else "") + value)
    text = "".join("\\" + char if char in "[]:\\" else char for char in argument.help)
    ends = value if argument.kind != "flag" else ""
    equals = "=" if argument.kind != "flag" else ""
    repeated = "*" if argument.repeated else "(" + " ".join(argument.flags) + ")"
    return " ".join(
        _quoted(f"{repeated}{flag}{equals if flag.startswith('--') else ''}[{text}]{ends}")
        for flag in argument.flags
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# ---- fish ---------------------------------------------------------------------------------------------------------

_FISH_HEAD = """\
# fish completion for resolver
function __resolver_command
    set -l words (commandline -opc)
    test "$words[2]" = "$argv[1]"
end
function __resolver_no_command
    test (count (commandline -opc)) -eq 1
end
complete -c resolver -e
complete -c resolver -f"""


def fish(commands: Sequence[Command]) -> Iterator[str]:
    """For ``source``, and as a file in a directory of ``fish_complete_path``."""
    yield _FISH_HEAD
    for flag, text in _TOP_OPTIONS.items():
        yield f"complete -c resolver -n __resolver_no_command -l {flag[2:]} -d {_fish_quoted(text)}"
    for command in commands:
        summary = _fish_quoted(command.summary)
        yield f"complete -c resolver -n __resolver_no_command -a {command.name} -d {summary}"
        for argument in command.arguments:
            words = _fish_argument(argument)
            if words:
                yield f"complete -c resolver -n '__resolver_command {command.name}' {words}"


def _fish_argument(argument: Argument) -> str:
    values = {"file": "-r -F", "directory": "-x -a '(__fish_complete_directories)'", "text": "-x", "flag": ""}
    value = values.get(argument.kind, f"-x -a '{' '.join(argument.choices)}'")
    if not argument.flags:  # a positional value is completed alone, not after an option that takes one
        return {"file": "-F", "choice": f"-a '{' '.join(argument.choices)}'"}.get(argument.kind, "")
    flags = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in argument.flags]
    return " ".join(filter(None, (*flags, value, f"-d {_fish_quoted(argument.help)}")))


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[Sequence[Command]], Iterator[str]]] = {"bash": bash, "zsh": zsh, "fish": fish}
