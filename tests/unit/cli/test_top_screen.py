"""`resolver top` in a real terminal: its screen, its keys, and the terminal's state after its end."""

import contextlib
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.busy import GPUS, Builder, busy, troubled
from tests.fakes.process import watched
from tests.fakes.served import Served
from tests.fakes.terminal import Terminal
from tests.patience import until

TOP = f"{sys.executable} -m resolver top --interval 200ms"
#: Saves the terminal's modes before and after to files, and keeps the shell open after top's end.
AND_AFTER = (
    "trap : INT; stty -g > {0}/before; {1}; code=$?; stty -g > {0}/after; echo ended with $code; exec cat"
)


@pytest.fixture
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as place, Served(Path(place) / "socket", troubled()) as served:
        yield served


def top(served: Served, *options: str) -> str:
    return f"exec {TOP} --socket {served.path} {' '.join(options)}"


def and_after(served: Served, tmp_path: Path) -> str:
    command = f"{TOP} --socket {served.path}"
    return AND_AFTER.format(shlex.quote(str(tmp_path)), command)


def shows(*texts: str, lacks: str = "\0") -> Callable[[str], bool]:
    """Return a check for a whole frame with these texts; a read can come between two writes of a frame."""

    def is_it(text: str) -> bool:
        whole = text.startswith("resolver top") and text.count("resolver top") == 1 and "q quit" in text
        return whole and lacks not in text and all(shown in text for shown in texts)

    return is_it


def left_as_it_was(terminal: Terminal, tmp_path: Path) -> None:
    """Check that modes, screen and cursor are as before."""
    terminal.wait("ended with")
    assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()
    assert [terminal.get(name) for name in ("alternate_on", "cursor_flag", "wrap_flag")] == ["0", "1", "1"]
    assert "resolver top" not in terminal.text()


def test_another_size_is_another_frame(served: Served) -> None:
    with Terminal(top(served), 200, 50) as terminal:
        terminal.wait(shows("research/llm-serving-0/vllm"))
        for width, height, shown, hidden in (
            (80, 24, "NOTE", "x1b[31mbad.cache"),
            (60, 10, "UTILIZATION", "NOTE"),
            (120, 60, "unknown_size", "no container"),
        ):
            terminal.resize(width, height)
            terminal.wait(shows(shown, lacks=hidden))
        # Escape sequences are shown, never executed.
        terminal.wait(shows(r"\x1b[2Jevil\x07\n", r"\x1b[31mbad.cache", "模型服务"))
        assert terminal.get("pane_title") != "owned"


# ---- keys ---------------------------------------------------------------------------------------------------------


def order(text: str) -> list[str]:
    return re.findall(r"^  ([a-z]\S+)", text, re.MULTILINE)


def test_keys_sort_filter_fold_and_quit(served: Served, tmp_path: Path) -> None:
    build = Builder()
    for name, load, gib in (("m", 9, 3.0), ("a", 5, 1.0), ("z", 1, 9.0)):
        build.named(GPUS[0], f"ns/{name}/main")
        build.process(f"proc{name}", 1000 + ord(name), 1, load, gib)
    served.shown = build.picture((GPUS[0],))
    with Terminal(and_after(served, tmp_path), 100, 24) as terminal:
        for key, names in (("", "maz"), ("m", "zma"), ("n", "amz"), ("u", "maz")):
            if key:
                terminal.press(key)
            terminal.wait(lambda text, n=names: order(text) == [f"ns/{name}/main" for name in n])  # type: ignore[misc]
        terminal.press("/")
        terminal.wait("Enter keep")
        terminal.type("procA")
        terminal.wait(lambda text: order(text) == ["ns/a/main"])
        terminal.press("Enter")
        terminal.wait("filter: procA   Esc shows all")
        terminal.press("Escape")
        terminal.wait(lambda text: len(order(text)) == 3)
        terminal.press("r")
        terminal.wait(lambda text: order(text) == [f"ns/{name}/main" for name in "zam"])
        terminal.press("f")
        terminal.wait(lambda text: "ns/m/main" in text and "procm" not in text)
        terminal.press("f")
        terminal.wait("procm")
        terminal.press("Down", "Down")
        terminal.wait("procz in ns/z/main")  # the bottom line describes the selected row
        terminal.press("q")
        terminal.wait("ended with 0")
        left_as_it_was(terminal, tmp_path)


def test_the_list_moves(served: Served) -> None:
    served.shown = busy(200)
    with Terminal(top(served), 100, 24) as terminal:
        terminal.wait(" 1-")
        terminal.press("End")
        terminal.wait(lambda text: "NVIDIA A100-PCIE" in text)  # the third GPU comes after 400 rows
        terminal.press("PPage", "PPage")
        terminal.wait(lambda text: "A100-PCIE" not in text)
        terminal.press("Home")
        terminal.wait(" 1-")
        for _ in range(30):
            terminal.press("j")
        terminal.wait(lambda text: re.search(r" 1[0-9]-\d\d of ", text))
        terminal.resize(40, 24)
        terminal.wait(shows(lacks="MEMORY"))
        terminal.press(*["Right"] * 5)
        terminal.wait(shows("MEMORY", "NOTE", lacks="CONTAINER"))


# ---- ends ---------------------------------------------------------------------------------------------------------


def child_of(host_pid: int) -> int:
    (child,) = Path(f"/proc/{host_pid}/task/{host_pid}/children").read_text().split()
    return int(child)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGQUIT, 131)],
)
def test_whatever_ends_it_the_terminal_is_as_it_was(
    served: Served, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with Terminal(and_after(served, tmp_path)) as terminal:
        terminal.wait("q quit")
        assert terminal.get("alternate_on") == "1"
        os.kill(child_of(int(terminal.get("pane_pid"))), number)
        terminal.wait(f"ended with {code}")
        left_as_it_was(terminal, tmp_path)


@pytest.mark.parametrize("by", ["C-c", "SIGTERM"])
def test_ctrl_s_does_not_hold_it_back(served: Served, tmp_path: Path, by: str) -> None:
    """Ctrl-S would stop all output, even the writes that restore the terminal at the end."""
    with Terminal(and_after(served, tmp_path)) as terminal:
        terminal.wait("q quit")
        host_pid = child_of(int(terminal.get("pane_pid")))
        terminal.press("C-s")
        asked = served.asked
        until(lambda: served.asked >= asked + 30, "five readings: it goes on")
        if by == "C-c":
            terminal.press("C-c")
        else:
            os.kill(host_pid, signal.SIGTERM)
        terminal.wait("ended with 1")
        left_as_it_was(terminal, tmp_path)


def test_defect_is_shown_on_a_restored_terminal(served: Served, tmp_path: Path) -> None:
    code = (
        "import resolver.cli._top.screen as screen; from resolver.cli import main\n"
        "real, calls = screen.row_line, []\n"
        "def row_line(*args):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 90: raise RuntimeError('a defect')\n"
        "    return real(*args)\n"
        f"screen.row_line = row_line; main(['top', '--interval', '100ms', '--socket', '{served.path}'])"
    )
    command = f"{sys.executable} -c {shlex.quote(code)}"
    with Terminal(AND_AFTER.format(tmp_path, command), 80, 40) as terminal:
        text = terminal.wait("ended with 1")
        assert "RuntimeError: a defect" in text
        assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()
        assert terminal.get("alternate_on") == "0"


def test_stopped_and_continued(served: Served, tmp_path: Path) -> None:
    """Ctrl-Z in a shell with job control gives the terminal to the shell; `fg` draws the frame again."""
    with Terminal("exec bash --norc --noprofile -i") as terminal:
        terminal.wait("$")
        terminal.type(f"stty -g > {tmp_path}/before; {TOP} --socket {served.path}\n")
        terminal.wait("q quit")
        terminal.press("C-z")
        terminal.wait("Stopped")
        assert terminal.get("alternate_on") == "0"
        assert terminal.get("cursor_flag") == "1"
        terminal.resize(100, 30)
        terminal.type("fg\n")
        terminal.wait(lambda text: "q quit" in text and len(text.splitlines()) == 30)
        terminal.press("n")
        terminal.wait("by name")
        terminal.press("C-z")
        terminal.wait("Stopped")
        terminal.type(f"kill %1; fg; stty -g > {tmp_path}/after; clear; echo 'ended' with\n")
        left_as_it_was(terminal, tmp_path)


def test_a_terminal_that_goes_away_ends_it(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        with Terminal(top(served)) as terminal:
            terminal.wait("q quit")
            gone = stack.enter_context(watched(int(terminal.get("pane_pid"))))
        until(gone, "its end without a terminal")


# ---- the daemon ---------------------------------------------------------------------------------------------------


def test_a_daemon_that_goes_away_is_told_and_waited_for(served: Served) -> None:
    with Terminal(top(served), 120, 40) as terminal:
        terminal.wait(shows("research/llm-serving-0/vllm"))
        served.stop()
        stale = r"no daemon since \d\d:\d\d:\d\d, retrying; the values shown are from before"
        terminal.wait(lambda text: re.search(stale, text) and shows("research/llm-serving-0/vllm")(text))
        terminal.press("n")  # keys work as before
        terminal.wait("by name")
        served.start()
        terminal.wait(shows("by name", lacks="no daemon"))
        served.hang()
        terminal.wait("it does not answer in time")
        terminal.press("u")
        terminal.wait(shows("it does not answer in time", "by utilization"))
        served.recover()
        terminal.wait(shows("by utilization", lacks="no daemon"))


# ---- style --------------------------------------------------------------------------------------------------------


def styled(served: Served, environment: dict[str, str]) -> str:
    with Terminal(top(served), 120, 60, environment) as terminal:
        terminal.wait(shows("unknown_size"))
        return terminal.styled()


GREEN, CYAN, BOLD = "\x1b[32m", "\x1b[36m", "\x1b[1m"


def test_colours_and_no_colours(served: Served) -> None:
    with_colours = styled(served, {})
    assert GREEN in with_colours
    assert CYAN in with_colours
    without = styled(served, {"NO_COLOR": "1"})
    assert BOLD in without
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", without)
    assert "━" in without


@pytest.mark.parametrize("locale", ["POSIX", "xx_YY.UTF-8"])  # the second comes from another machine by ssh
def test_every_locale_has_the_same_frame(served: Served, locale: str) -> None:
    with Terminal(top(served), 120, 60, {"LC_ALL": locale}) as terminal:
        terminal.wait(shows("━", "模型服务", "≥3.3G"))


@pytest.mark.parametrize(("options", "environment"), [("--once", {}), ("", {"TERM": "dumb"})])
def test_once_and_on_a_dumb_terminal_it_is_a_plain_table(
    served: Served, options: str, environment: dict[str, str]
) -> None:
    command = f"{TOP} --socket {served.path} {options}; echo ended with $?; exec cat"
    with Terminal(command, 160, 60, environment) as terminal:
        text = terminal.wait("ended with 0")
        assert "unknown_size" in text
        assert re.search(r"^container +0 +ml-prod/", text, re.MULTILINE)
        assert "q quit" not in text
