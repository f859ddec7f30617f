"""`resolver bundle`: a part that hangs or is too long loses only itself, and --redact removes all names."""

import errno
import io
import json
import os
import re
import stat
import sys
import tarfile
import time
from pathlib import Path

import pytest

from resolver import client
from resolver.cli import bundle, main
from resolver.cli._bundle import facts
from resolver.cli._bundle.redaction import Redactor
from resolver.cli.bundle import Part, gather, parts
from tests.fakes.pictures import FULL, picture
from tests.fakes.served import Served, serving
from tests.patience import PATIENCE_S

CID, POD = "ab" * 32, "11111111-2222-3333-4444-555555555555"


def unpacked(data: bytes) -> dict[str, str]:
    """Return ``{file: text}``, without the common directory."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = archive.getmembers()
        assert {member.mode for member in members} == {0o600}
        assert len({member.name.partition("/")[0] for member in members}) == 1
        return {m.name.partition("/")[2]: archive.extractfile(m).read().decode() for m in members}  # type: ignore[union-attr]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the parts that query the whole machine."""

    def few(socket_path: str) -> tuple[Part, ...]:
        return tuple(
            part for part in parts(socket_path) if part.name not in ("doctor.json", "cache-files.json")
        )

    monkeypatch.setattr(bundle, "parts", few)


@pytest.mark.usefixtures("quick")
def test_bundle_has_daemons_answers_and_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with serving(tmp_path / "s", group=os.getgid(), **FULL) as served:
            assert main(["bundle", "-o", str(tmp_path / "b.tar.gz"), "--socket", served.path]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "b.tar.gz").stat().st_mode) == 0o600
    files = unpacked((tmp_path / "b.tar.gz").read_bytes())
    manifest = json.loads(files["MANIFEST.json"])
    assert manifest["redacted"] is False
    assert json.loads(files["slots.json"])["slots"][0]["hostpid"] == 4711
    assert json.loads(files["kernel.json"])["release"] == os.uname().release
    assert json.loads(files["versions.json"])["distributions"]["msgspec"]


@pytest.mark.usefixtures("quick")
def test_without_a_daemon_there_is_a_bundle_all_the_same_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bundle", "--socket", str(tmp_path / "none")]) == 0
    told = capsys.readouterr()
    files = unpacked(Path(told.out.strip()).read_bytes())
    manifest = json.loads(files["MANIFEST.json"])
    assert "slots.json" not in files
    for name in ("slots.json", "events.jsonl"):
        assert "there is no such socket" in manifest["parts"][name]["trouble"]
    assert "slots.json" in told.err
    assert json.loads(files["kernel.json"])


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b").write_text("mine")
    assert main(["bundle", "-o", str(tmp_path / "b")]) == 2
    assert "File exists" in capsys.readouterr().err
    assert (tmp_path / "b").read_text() == "mine"


def test_hanging_part_is_ended_and_others_go_on(tmp_path: Path) -> None:
    with Served(tmp_path / "s", picture()) as served:
        served.hang()
        hangs = Part("hangs", "", lambda: client.get_json("/v1/status", served.path, seconds=5.0), 1.0)
        began = time.monotonic()
        gathered = list(gather([hangs, Part("kernel", "", facts.kernel, 60.0)]))
        served.recover()
    assert [bool(part.text) for part in gathered] == [False, True]
    assert "hangs" in str(gathered[0].trouble)
    assert gathered[1].trouble is None
    assert time.monotonic() - began < PATIENCE_S


def test_too_long_part_is_cut_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MOST_LETTERS", 100)
    (part,) = gather([Part("kernel", "", facts.kernel, 60.0)])
    assert (len(part.text), "cut off" in str(part.trouble)) == (100, True)


# ---- redaction ----------------------------------------------------------------------------------------------------

CONTAINERS = {
    "containers": [
        {"container_id": CID, "pod_uid": POD, "container_name": "main", "namespace": "acme-corp", "pod": "train-0",
         "runtime": "containerd", "regions": [f"/x/{POD}_main/a.cache"]},
        {"container_id": None, "pod_uid": POD, "container_name": "train", "namespace": "acme", "pod": "train-0-b"},
    ]
}  # fmt: skip
FIELDS = ("namespace", "pod", "container_name", "pod_uid")
METRICS = (
    "# HELP resolver_slots About namespaces\n# TYPE resolver_slots gauge\n"
    f'resolver_slots{{namespace="acme-corp",pod="train-0",container="main",pod_uid="{POD}",reason="missing"}} 4711\n'
)


def redacted(*texts: str) -> list[str]:
    redactor = Redactor(["gpu-node-7"])
    for text in texts:
        redactor.learn(text)
    return [redactor.redact(text) for text in texts]


def test_the_same_name_has_the_same_pseudonym_in_every_part() -> None:
    sentence = f"1 file left alone: {POD}_main/a.cache on gpu-node-7 of acme-corp/train-0"
    doctor = [{"check": "regions", "found": sentence}]
    one, two, three = redacted(json.dumps(CONTAINERS), METRICS, json.dumps(doctor))
    first, second = json.loads(one)["containers"]
    labels = dict(re.findall(r'(\w+)=("\w[^"]*")', two.splitlines()[2]))
    for label, field in zip(("namespace", "pod", "container", "pod_uid"), FIELDS, strict=True):
        assert labels[label] == f'"{first[field]}"'
    sentence = json.loads(three)[0]["found"]
    assert f"{first['namespace']}/{first['pod']}" in sentence
    assert f"{first['pod_uid']}_{first['container_name']}/a.cache on host-1" in sentence
    assert first["regions"] == [f"/x/{first['pod_uid']}_{first['container_name']}/a.cache"]
    assert len({first["pod"], second["pod"]}) == len({first["namespace"], second["namespace"]}) == 2
    assert (first["runtime"], labels["reason"]) == ("containerd", '"missing"')
    for text in (one, two, three):
        for name in (POD, CID, CID[:12], "acme", "train", "gpu-node-7"):
            assert name not in text.replace("container", "")


def test_keys_numbers_and_names_of_metrics_stay() -> None:
    container = {"namespace": "x", "pod": "slots", "container_name": "resolver_slots", "pod_uid": POD}
    policy = {"namespace": "host", "why": "samples carry host PIDs"}  # the driver's namespace, not a pod's
    assert redacted('# HELP x An odd " in it\nx{pod="a",comm="b"} 1\n') == [
        '# HELP x An odd " in it\nx{pod="pod-1",comm="command-1"} 1\n'
    ]
    status = {"slots": 3, "counters": {"repairs_missing": 1}, "at": 1.5, "policy": policy}
    one, two, three = redacted(
        json.dumps(container),
        METRICS,
        json.dumps(status),
    )
    assert json.loads(three) == status
    assert two.startswith(
        "# HELP resolver_slots About namespaces\n# TYPE resolver_slots gauge\nresolver_slots{"
    )
    assert two.endswith(" 4711\n")
    assert "slots" not in json.loads(one).values()


def test_pythons_own_words_are_no_names() -> None:
    """A container is often called ``main``; the word stays in Python's version and in its module's name."""
    container = {"container_name": "main", "pod_uid": POD}
    own = {"python": sys.version, "why": "File /x/__main__.py, of main"}
    assert json.loads(redacted(json.dumps(container), json.dumps(own))[1]) == {
        "python": sys.version,
        "why": "File /x/__main__.py, of container-1",
    }


def test_lines_of_json_stay_lines_and_a_half_of_one_is_text() -> None:
    events = [
        {"kind": "repair", "fields": {"pod_uid": POD, "container_name": "main", "n": n}} for n in range(2)
    ]
    text = "\n".join(map(json.dumps, events)) + "\n"
    (lines,) = redacted(text)
    assert [json.loads(line)["fields"]["n"] for line in lines.splitlines()] == [0, 1]
    assert POD not in lines
    (cut,) = redacted(json.dumps(CONTAINERS, indent=1)[:-40])
    for name in (POD, CID, "main", "acme", "train"):
        assert name not in cut


@pytest.mark.usefixtures("quick")
def test_a_bundle_that_finds_no_room_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_arguments: object, **_more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tarfile, "open", full)
    assert main(["bundle", "-o", str(tmp_path / "b.tar.gz"), "--socket", str(tmp_path / "none")]) == 5
    assert "No space left on device" in capfd.readouterr().err
    assert os.listdir(tmp_path) == []
