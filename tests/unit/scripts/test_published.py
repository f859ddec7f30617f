"""The public address stands in one place, and every file that has it copies it from there."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import jsonschema_rs
import pytest
import yaml

from scripts import published
from scripts.tables import TABLES, written
from tests.programs import completed

ADDRESS: Final = "https://git.example.com/gpu/resolver"
FILES: Final = ("deploy/chart/resolver/Chart.yaml", "security-insights.yml")


@pytest.mark.parametrize("file", FILES)
def test_file_says_that_the_address_is_unset(root: Path, file: str) -> None:
    text = (root / file).read_text()
    yaml.safe_load(text)
    assert (published.UNSET in text) is (published.published()["ADDRESS"] == "")


def test_chart_gets_address_and_image(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADDRESS", ADDRESS + "/")
    monkeypatch.setenv("IMAGE_NAME", "registry.example.com/gpu/resolver")
    published.pack(root / "deploy/chart/resolver", tmp_path / "resolver")
    chart = yaml.safe_load((tmp_path / "resolver/Chart.yaml").read_text())
    assert (chart["home"], chart["sources"]) == (ADDRESS, [ADDRESS])
    assert chart["icon"].startswith(ADDRESS)
    assert ADDRESS in chart["annotations"]["artifacthub.io/links"]
    values = yaml.safe_load((tmp_path / "resolver/values.yaml").read_text())
    assert values["image"]["repository"] == "registry.example.com/gpu/resolver"


def test_icon_and_pages_of_the_address_exist(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADDRESS", ADDRESS)
    makers = (published.chart, published.chart_annotations, published.insights, published.insights_project)
    text = "\n".join(line for maker in makers for line in maker())
    paths = re.findall(rf"{ADDRESS}/(?:blob|raw)/main/(\S+)", text)
    assert paths
    assert [path for path in paths if not (root / path).exists()] == []


def test_insights_are_valid_with_an_address(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADDRESS", ADDRESS)
    text = (root / "security-insights.yml").read_text()
    for (file, name), lines in TABLES.items():
        if file == "security-insights.yml":
            text = written(text, name, lines())
    schema = yaml.safe_load((root / "tests/fixtures/security-insights.schema.yaml").read_text())
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    assert [
        f"{error.instance_path}: {error.message}" for error in validator.iter_errors(yaml.safe_load(text))
    ] == []


def test_linter_finds_no_fault_in_a_workflow(root: Path) -> None:
    tools, files = Path(sys.executable).parent, root.glob(".github/workflows/*.yml")
    done = completed(str(tools / "actionlint"), "-shellcheck", str(tools / "shellcheck"), *map(str, files))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("address", ["", ADDRESS])
def test_wheel_has_a_homepage_only_with_an_address(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("ADDRESS", address)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    assert (f"Project-URL: Homepage, {ADDRESS}\n" in metadata) is bool(address)


def test_image_names_its_source_only_with_an_address(root: Path) -> None:
    for address in ("", ADDRESS):
        command = ["make", "--dry-run", "image", "ENGINE=podman", f"ADDRESS={address}"]
        text = completed(*command, cwd=root, check=True).stdout
        assert (f"--label org.opencontainers.image.source={ADDRESS}" in text) is bool(address)


def test_each_step_of_a_workflow_is_a_target(root: Path) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (root / "Makefile").read_text()))
    for workflow in sorted(root.glob(".github/workflows/*.yml")):
        content = yaml.safe_load(workflow.read_text())
        assert content["permissions"] == {}, "a job names what it needs"
        steps = [step for job in content["jobs"].values() for step in job["steps"]]
        commands = [step["run"] for step in steps if "run" in step]
        assert commands
        for command in commands:
            made = re.match(r"(?:sudo )?make ([a-z-]+)", command)
            assert made[1] in targets if made else command.startswith(("sudo .ci/run", "gh release create"))


def test_release_refuses_the_tag_of_another_version(root: Path) -> None:
    done = completed("make", "release-check", "TAG=v0.0.1", cwd=root)
    assert done.returncode == 2
    assert "the tag is 'v0.0.1'" in done.stderr
