"""The front of the command line: help, versions, exit codes, and readers that go away."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resolver import __version__
from resolver.cli import COMMANDS, main
from tests.fakes import cachefiles
from tests.fakes.command import called
from tests.fakes.regions import read_file


def resolver(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "resolver", *arguments],
        env=os.environ | (environ or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_version() -> None:
    done = resolver("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"resolver {__version__}\n", "")


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


@pytest.mark.parametrize("arguments", [["frobnicate"], ["frobnicate", "--help"], ["Lookup", "a", "1"]])
def test_an_unknown_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    for word in (arguments[0], *COMMANDS):
        assert word in captured.err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["stats"], "did you mean status?"),
        (["Lookup", "a", "1"], "did you mean lookup?"),
        (["run", "--dry-rnu"], "did you mean --dry-run for --dry-rnu?"),
        (["run", "--nvml-intervall=1s"], "did you mean --nvml-interval for --nvml-intervall=1s?"),
        (["--versoin"], "did you mean --version for --versoin?"),
    ],
)
def test_the_nearest_word_is_suggested(arguments: list[str], meant: str) -> None:
    done = resolver(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert meant in done.stderr


def test_what_is_like_nothing_has_no_suggestion() -> None:
    assert "did you mean" not in resolver("frobnicate").stderr + resolver("run", "--zzz").stderr


def test_both_versions(tmp_path: Path) -> None:
    done = resolver("version", "--socket", str(tmp_path / "none.sock"))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(rf"^resolver +{re.escape(__version__)}$", done.stdout, re.MULTILINE)
    assert re.search(
        r"^daemon +unknown: no daemon answers at .*none\.sock: there is no such socket$",
        done.stdout,
        re.MULTILINE,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--frobnicate"],
        ["run", "--frobnicate"],
        ["run", "--interval"],
        ["run", "--interval", "soon"],
        ["run", "--interval", "9h", "--once"],
        ["run", "--source", "tea-leaves"],
        ["run", "--config", "/nonexistent.toml"],
        ["lookup"],
        ["lookup", "abcdef"],
        ["lookup", "abcdef", "seven"],
        ["slots", "--frobnicate"],
        ["reverse"],
        ["reverse", "seven"],
        ["status", "now"],
        ["containers", "--frobnicate"],
        ["events", "--kind", "tea"],
        ["config", "--source", "tea-leaves"],
        ["config", "--interval", "soon"],
        ["completion", "tcsh"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_2_with_a_word_on_standard_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert "resolver" in captured.err
    assert "Traceback" not in captured.err


def test_the_commands_are_loaded_only_when_asked_for() -> None:
    code = "import sys, resolver.cli; print([m for m in sys.modules if m.startswith('resolver.cli.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    cachefiles.container(tmp_path)
    for arguments in (
        ["slots", "--json", str(tmp_path)],
        ["slots", str(tmp_path)],
        ["--help"],
        ["--version"],
    ):
        reading, writing = os.pipe()
        os.close(reading)  # before the first byte: the buffer is found broken only when it is flushed
        try:
            done = subprocess.run(
                [sys.executable, "-m", "resolver", *arguments],
                stdout=writing,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        finally:
            os.close(writing)
        assert (done.returncode, done.stderr) == (0, ""), arguments


def test_no_standard_output_at_all(tmp_path: Path) -> None:
    cachefiles.container(tmp_path)
    command = f"{sys.executable} -m resolver slots --json {tmp_path} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_is_130() -> None:
    code = (
        "import resolver.cli.slots as s, resolver.cli, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background starts without
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


# ---- run ---------------------------------------------------------------------------------------


def run_once(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return resolver("run", "--once", "--run-dir", str(tmp_path / "run"), "--log-format", "json", *arguments)


def test_run_once_without_hami_or_gpu_says_so_and_is_1(tmp_path: Path) -> None:
    done = run_once(tmp_path, "--containers-dir", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert f"{tmp_path}/nothing does not exist" in done.stdout
    assert "0 regions, 0 slots" in done.stdout
    assert "NVML: " in done.stdout
    events = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert events.count("containers_dir_missing") == 1
    assert events.count("nvml_unavailable") == 1


def test_run_once_with_nothing_to_repair_is_0(tmp_path: Path) -> None:
    done = run_once(tmp_path, "--containers-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "repaired: nothing" in done.stdout


def test_run_once_tells_what_stays_unresolved(tmp_path: Path) -> None:
    containers = tmp_path / "containers"
    cache = cachefiles.container(containers, "main")
    before = [slot.hostpid for slot in read_file(cache).slots]
    done = run_once(tmp_path, "--containers-dir", str(containers), "--hostpid-namespace", "host")
    assert done.returncode == 1
    assert re.search(rf"unresolved: {cachefiles.POD_UID}_main slot \d+ pid \d+: no_such_process", done.stdout)
    # A run that takes long enough calls them dead, and zeroes what they seem to use.
    assert [slot.hostpid for slot in read_file(cache).slots] == before


def test_a_second_writer_is_refused_but_may_look(tmp_path: Path) -> None:
    arguments = ["run", "--run-dir", str(tmp_path), "--containers-dir", str(tmp_path), "--log-format", "json"]
    with subprocess.Popen(
        [sys.executable, "-m", "resolver", *arguments], stderr=subprocess.PIPE, text=True
    ) as first:
        try:
            assert first.stderr is not None
            while json.loads(first.stderr.readline())["event"] != "started":
                pass  # a source that was asked for is there before
            second = resolver(*arguments)
            assert second.returncode == 2
            assert f"another resolver (PID {first.pid})" in second.stderr
            assert resolver(*arguments, "--dry-run", "--once").returncode == 0
            first.send_signal(signal.SIGTERM)
            _, rest = first.communicate(timeout=60)
            assert first.returncode == 0
            assert json.loads(rest.splitlines()[-1])["event"] == "stopped"
        finally:
            first.kill()
