"""What the documents say is held against the code: names, defaults, options, reasons, paths and links."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

import pytest

from resolver.cli import COMMANDS
from resolver.config.settings import SETTINGS
from resolver.gpu.health import REASONS
from resolver.gpu.inventory import GpuReport
from resolver.linux.capabilities import TO_START, WHILE_RUNNING
from resolver.pids.ladder import LADDER
from resolver.reasons import BrokerRefusal, RegionReason, RepairReason, SampleReason, UnresolvedReason

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bpf/README.md", "docs", "docs/runbooks")


def documents(root: Path) -> list[Path]:
    found = [path for name in DOCUMENTS for path in (sorted((root / name).glob("*.md")) or [root / name])]
    assert len(found) > len(DOCUMENTS)
    return found


def first_cells(text: str) -> list[str]:
    """What stands in the first column of every table, without its back quotes."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def section_of(document: Path, heading: str) -> str:
    sections = re.split(r"^## ", document.read_text(), flags=re.MULTILINE)
    (section,) = [section for section in sections if section.startswith(heading)]
    return section


def said_by(root: Path) -> set[str]:
    """Every string in the code that is shipped, with ``...`` for what is put in."""
    said = set()
    for path in (*root.glob("resolver/**/*.py"), *root.glob("bpf/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                said.add("".join(map(str, parts)))
    return said


@pytest.mark.parametrize(
    ("reasons", "document", "heading"),
    [
        (UnresolvedReason, "troubleshooting.md", "A slot stays unresolved"),
        (RegionReason, "troubleshooting.md", "A cache file is ignored"),
        (SampleReason, "troubleshooting.md", "A utilization sample finds no slot"),
        (RepairReason, "how-it-works.md", "When a slot is repaired"),
        (BrokerRefusal, "broker.md", "When it gives no number"),
    ],
)
def test_every_reason_is_told(reasons: type[StrEnum], document: str, heading: str, root: Path) -> None:
    section = section_of(root / "docs" / document, heading)
    assert set(first_cells(section)) == {reason.value for reason in reasons}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_told(command: str, root: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "resolver", command, "--help"], capture_output=True, text=True, check=True
    ).stdout
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown)) - {"--help"}
    section = section_of(root / "docs/cli.md", f"resolver {command}")
    told = set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE)) | (options & {"--socket"})
    if "Every setting is an option here" in section:
        told |= {setting.flag for setting in SETTINGS.values()} | {"--config"}
    assert told == options


def test_the_rights_are_those_of_the_code(root: Path) -> None:
    section = section_of(root / "docs/security.md", "Rights")
    told = {
        source: (set(re.findall(r"`(\w+)`", start)), set(re.findall(r"`(\w+)`", running)))
        for source, start, running in re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", section, re.MULTILINE)
    }
    assert told == {source: (set(TO_START[source]), set(WHILE_RUNNING[source])) for source in LADDER}


def test_the_sources_are_told_best_first(root: Path) -> None:
    introduction = (root / "docs/sources.md").read_text().split("\n## ")[0]
    assert tuple(first_cells(introduction)) == LADDER


def test_what_is_quoted_is_what_is_said(root: Path) -> None:
    said = said_by(root)
    reasons = re.findall(
        r"^\| `([^`]+)`", section_of(root / "docs/sources.md", "What the reasons mean"), re.MULTILINE
    )
    assert len(reasons) > 15
    for reason in reasons:
        assert any(reason in sentence for sentence in said), f"nobody says {reason!r}"


def test_what_is_read_of_a_gpu_is_told(root: Path) -> None:
    told = section_of(root / "docs/gpus.md", "What is read")
    assert tuple(first_cells(told)) == GpuReport.__struct_fields__
    workers = [(root / "resolver/workers" / name).read_text() for name in ("nvml.py", "nvml_devices.py")]
    calls = set(re.findall(r"nvml(?:Device|System)Get\w+", "".join(workers)))
    for call in re.findall(r"`(nvmlDevice\w+)`", (root / "docs/gpus.md").read_text()):
        assert call in calls, f"nobody calls {call}"


def test_every_reason_why_a_gpu_is_unhealthy_is_told(root: Path) -> None:
    section = section_of(root / "docs/gpus.md", "When a GPU is unhealthy")
    assert first_cells(section) == [*REASONS]


def test_every_link_leads_somewhere(root: Path) -> None:
    for document in documents(root):
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)|src(?:set)?=\"([^\":]+)\"", document.read_text())
        for target in filter(None, (name for pair in links for name in pair)):
            assert (document.parent / target).exists(), (
                f"{document.name} links to {target}, which is not there"
            )


def test_every_path_in_the_text_is_there(root: Path) -> None:
    pattern = re.compile(r"`((?:resolver|tests|scripts|docs|bpf|deploy)/[\w./-]+)`")
    for document in documents(root):
        for path in pattern.findall(document.read_text()):
            if path.startswith("resolver/_bpf"):
                continue  # inside the wheel only; test_wheel.py looks there
            assert (root / path).exists(), f"{document.name} speaks of {path}, which is not there"


def test_every_make_target_in_the_text_is_there(root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    assert {"setup", "run", "demo", "test", "bench", "lint", "format", "lock", "clean", "wheel"} <= targets
    for document in documents(root):
        told = re.findall(r"(?:`|\$ (?:sudo )?)make ([a-z-]+)", document.read_text())
        assert set(told) <= targets, f"{document.name} names a make target that is not there"
