"""The summary of a process: read from the kernel, never of another process, and empty if unknown."""

import getpass
import os
import subprocess
import sys
import time

import pytest

from resolver.cli.process_summary import ProcessSummary, facts_of
from resolver.linux.procfs import Procfs
from tests.patience import until


def test_summary_has_user_command_and_start() -> None:
    began = time.time()
    with subprocess.Popen(["/bin/sleep", "1000"]) as child:
        until(lambda: facts_of(child.pid).command_line, "its words, which the kernel notes late in exec")
        facts = facts_of(child.pid, Procfs().start_time(child.pid))
        assert facts.user == getpass.getuser()
        assert facts.in_words()["command"] == "/bin/sleep 1000"
        assert facts.started_at == pytest.approx(began, abs=5)
        assert facts.cpu_seconds is not None
        assert facts.memory is not None
        assert facts_of(child.pid, Procfs().start_time(child.pid) + 1) == ProcessSummary()
        child.kill()
        child.wait()
        assert facts_of(child.pid) == ProcessSummary()
    assert set(ProcessSummary().in_words().values()) == {None}


def test_a_command_line_of_a_megabyte_is_cut() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()", *["x" * 1000] * 100], stdin=subprocess.PIPE
    ) as child:
        until(lambda: facts_of(child.pid).command_line, "its words, which the kernel notes late in exec")
        command = facts_of(child.pid).in_words()["command"]
        child.kill()
    assert command is not None
    assert len(command) < 400
    assert command.endswith(" ...")


def test_another_pid_namespace_has_other_numbers() -> None:
    code = "from resolver.cli.process_summary import facts_of; print(facts_of(1) == facts_of(1)._make([None] * 5))"
    words = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert done.stdout == "True\n"
