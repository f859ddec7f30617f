"""The command line's basics: help, versions, exit codes, and readers that close the pipe."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resolver.base.version import VERSION
from resolver.cli import COMMANDS, parser_of
from resolver.cli.run import summary
from tests.fakes import cachefiles
from tests.fakes.command import called
from tests.fakes.pictures import picture


def test_version() -> None:
    done = called("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"resolver {VERSION}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_command(arguments: list[str]) -> None:
    done = called(*arguments)
    assert done.returncode == 0
    assert done.stderr == ""
    for name, text in COMMANDS.items():
        assert re.search(rf"^ +{name} +{re.escape(text)}$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    done = called(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: resolver {command} ")
    if example := re.search(rf"^example: resolver {command} (.*)$", done.stdout, re.MULTILINE):
        parser_of(command)[0].parse_args(shlex.split(example[1].partition(" > ")[0]))


@pytest.mark.parametrize("command", ["lookup", "status"])
def test_help_of_a_command(command: str) -> None:
    assert called("help", command).stdout == called(command, "--help").stdout
    assert called("help").stdout == called("--help").stdout


NEXT_STEPS = {
    ("frobnicate", "--help"): f"'frobnicate'; the commands are: {', '.join(COMMANDS)}",
    ("--frobnicate",): "unrecognized arguments: --frobnicate. See resolver --help",
    ("run", "--dry-rnu"): "arguments: --dry-rnu; did you mean --dry-run? See resolver run --help",
    ("run", "--dry", "--once"): "arguments: --dry; did you mean --dry-run? See",  # no abbreviations
    ("run", "--sorce=bpf"): "unrecognized arguments: --sorce=bpf; did you mean --source? See resolver run",
    ("status", "--h"): "unrecognized arguments: --h. See resolver status --help",
    ("events", "--since", "x"): "unrecognized arguments: --since x. See resolver events --help",
    ("run", "--source", "bpff"): "invalid choice: 'bpff'",
    ("run", "--interval"): "argument --interval: expected one argument",
    ("run", "--interval", "9h", "--once"): "'9h' is not possible: write a duration from 10ms to",
    ("run", "--config", "/nonexistent.toml"): "the settings file /nonexistent.toml",
    ("doctor", "--only", "nvlm"): "resolver doctor: there is no check 'nvlm'; there are: settings, view",
    ("lookup", "abcdef"): "the following arguments are required: PID",
    ("lookup", "abcdef", "seven"): "'seven' is not a number of at most 40 digits",
    ("status", "now"): "unrecognized arguments: now",
    ("config", "--interval", "soon"): "'soon' is not possible: write a duration",
    ("lookup", "abcdef123456", "9" * 5000): "'99999999999999999999...' is not a number of at most 40 digits",
    ("reverse", "9" * 5000): "is not a number of at most 40 digits",
    ("slots", "-o", "json"): "there is no -o: --json prints JSON",
    ("lookup", "-o", "json", "abcdef123456", "1"): "there is no -o: --json prints JSON",
    ("run", "-o", "json"): "unrecognized arguments: -o json. See resolver run --help",
    ("run", "--containers-dir", "vgpu"): "'vgpu' is not an absolute path: begin it with /",
    ("run", "--metrics-addr", "99999"): "'99999' is not possible: write HOST:PORT",
    ("run", "--metrics-addr", ":99999"): "the highest PORT is 65535",
    ("run", "--run-dir", "/nope/x"): "there is no /nope, and the daemon makes none in /: make it",
    ("lookpu",): "did you mean lookup?",
    ("events", "--pod", "a/b/c"): "--pod a/b/c: use NAMESPACE/POD, or a pod's UID",
    ("top", "--interval=50ms"): "it takes a time from 100ms to 1h",
    ("top", "--interval=2h"): "it takes a time from 100ms to 1h",
    ("top", "--interval=-1s"): "is not a duration",
    ("report-devices",): "this is not a pod",
    ("report-devices", "--api-server", "http://x"): "the token is sent by https",
    ("report-devices", "--spread", "soon"): "is not a duration",
    ("report-devices", "--metrics-addr", "x:y"): "write HOST:PORT",
}


@pytest.mark.parametrize("words", NEXT_STEPS, ids=lambda words: words[0])
def test_misuse_names_the_next_step(words: tuple[str, ...]) -> None:
    done = called(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert NEXT_STEPS[words] in done.stderr
    assert len(done.stderr) < 300
    assert done.stderr.count("\n") == 1


def test_the_commands_are_loaded_only_when_asked_for() -> None:
    code = "import sys, resolver.cli; print([m for m in sys.modules if m.startswith('resolver.cli.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    cachefiles.container(tmp_path)
    for arguments in (["slots", "--json", str(tmp_path)], ["slots", str(tmp_path)], ["--help"]):
        reading, writing = os.pipe()
        os.close(reading)  # before the first byte, so the write fails only at the flush
        try:
            line = [sys.executable, "-m", "resolver", *arguments]
            done = subprocess.run(line, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
        finally:
            os.close(writing)
        assert (done.returncode, done.stderr) == (0, ""), arguments


@pytest.mark.parametrize("command", ["slots", "slots --json", "--help", "config"])
def test_a_full_disk_is_a_sentence_and_an_exit_code_of_its_own(tmp_path: Path, command: str) -> None:
    cachefiles.container(tmp_path)
    path = str(tmp_path) if "slots" in command else ""
    words = f"{sys.executable} -m resolver {command} {path} >/dev/full"
    done = subprocess.run(["sh", "-c", words], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr.splitlines()[-1] == (
        "resolver: the output is not complete (No space left on device): make room for it"
    )
    assert "Traceback" not in done.stderr


def test_no_standard_output_at_all(tmp_path: Path) -> None:
    cachefiles.container(tmp_path)
    command = f"{sys.executable} -m resolver slots --json {tmp_path} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_is_130() -> None:
    code = (
        "import resolver.cli.slots as s, resolver.cli, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job ignores SIGINT
        "def run(args): print('ready', flush=True); time.sleep(60)\n"
        "s.run = run\nsys.exit(resolver.cli.main(['slots']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_a_missing_directory_is_named_and_not_auto() -> None:
    text = "\n".join(summary(picture(missing_dirs=("auto",)), dry_run=True))
    assert "auto" not in text
    assert "/usr/local/vgpu/containers, " in text
    assert ": is HAMi installed on this node?" in text


def test_a_user_without_rights_is_told_in_a_sentence() -> None:
    code = "import os, resolver.cli.run as run; os.setuid(65534); run._require_rights()"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
    assert "the daemon needs root to see which files other users' processes map: run it with" in done.stderr


def test_root_is_not_told_to_be_root(tmp_path: Path) -> None:
    """The run directory is on a read-only file system, so root's rights don't help."""
    code = f"from resolver.linux.node_lock import NodeLock; NodeLock('{tmp_path}/run')"
    mount = f"mount --bind {tmp_path} {tmp_path}; mount -o remount,ro,bind {tmp_path}"
    words = ["unshare", "--mount", "sh", "-ec", f'{mount}; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    assert "(Read-only file system): mount it writable, or name another with --run-dir" in done.stderr
