"""Containers by the names that people use; the look-up itself checks that the container is right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resolver.api.shapes import Containers
from resolver.base.errors import Ambiguous, NotFound, UsageError
from resolver.cli import container_names
from resolver.cli.container_names import resolve
from resolver.config import Settings
from resolver.containers.log_names import POD_LOGS_DIR
from resolver.state import Container
from tests.fakes.socket_server import SocketServer, http

UID = "23c50244-5588-46da-b958-f3cfca0c0cef"
OTHER = "23c50299-5588-46da-b958-f3cfca0c0cef"
LISTED = [
    ("a" * 64, "research", "train-0", UID, "main"),
    ("b" * 64, "research", "train-0", UID, "sidecar"),
    ("c" * 64, "batch", "train-0", OTHER, "etl"),
    ("d" * 64, "batch", "train-0", OTHER, None),  # the sandbox has no name
    ("e" * 64, None, None, None, None),
]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[str]:
    listed = [
        Container(container_id, pod_uid, name, namespace, pod, None, None, None, (), 0.0)
        for container_id, namespace, pod, pod_uid, name in LISTED
    ]
    with SocketServer(tmp_path / "d.sock", http(msgspec.json.encode(Containers(0.0, listed)))):
        yield str(tmp_path / "d.sock")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("research/train-0/main", "a"),
        ("batch/train-0", "c"),
        ("batch/train-0/etl", "c"),
        ("23c50299", "c"),
        ("23c50299/etl", "c"),
        (f"{UID}/sidecar", ""),
        (f"{UID.replace('-', '_')}/sidecar", ""),
        (f"{UID[:13]}/sidecar", "b"),
        ("sidecar", "b"),
        (OTHER, "c"),
        ("containerd://aaaaaa", ""),
        ("nobody", ""),
        ("23c5", ""),
    ],
)
def test_a_name_that_fits_one(daemon: str, text: str, meant: str) -> None:
    """If ``meant`` is empty, the look-up gets the text as written."""
    assert resolve(text, daemon) == (meant * 64 or text)


@pytest.mark.parametrize(("text", "ids"), [("research/train-0", "ab"), ("23c502", "abc"), (UID, "ab")])
def test_one_that_fits_several_is_refused_with_them(daemon: str, text: str, ids: str) -> None:
    with pytest.raises(Ambiguous, match=f"fits {len(ids)} containers") as caught:
        resolve(text, daemon)
    assert [candidate[0] for candidate in caught.value.candidates] == list(ids)
    assert caught.value.candidates[0].endswith("  research/train-0/main")


@pytest.mark.parametrize("text", ["research/train-9", "research/train-0/etl", "23c50299/main"])
def test_a_pod_that_is_not_here(daemon: str, text: str) -> None:
    with pytest.raises(NotFound, match=r"no container here is called .*, or resolver slots without a daemon"):
        resolve(text, daemon)


@pytest.mark.parametrize("text", ["a/b/c/d", "a/", "/b", f"{UID}/"])
def test_impossible_container_names_are_refused(daemon: str, text: str) -> None:
    with pytest.raises(UsageError, match="NAMESPACE/POD"):
        resolve(text, daemon)


def test_a_name_that_a_container_without_id_has_as_well(daemon: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids: dict[str, Any] = {"main": {"main"}, "abcdef": {"abcdef" + "0" * 58}}
    monkeypatch.setattr(container_names, "ids_from_kernel", lambda text: ids.get(text, set()))
    with pytest.raises(Ambiguous) as caught:
        resolve("main", daemon)
    assert caught.value.candidates == (f"{'a' * 64}  research/train-0/main", "main")
    assert resolve("abcdef", daemon) == "abcdef"


def test_without_a_daemon_kubelets_logs_have_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"research_train-0_{UID}/main").mkdir(parents=True)
    (tmp_path / f"batch_train-0_{OTHER}/etl").mkdir(parents=True)
    monkeypatch.setenv("RESOLVER_POD_LOGS_DIR", str(tmp_path))
    none = str(tmp_path / "none.sock")
    assert resolve("research/train-0", none) == f"{UID}/main"
    assert resolve("etl", none) == f"{OTHER}/etl"
    monkeypatch.setenv("RESOLVER_POD_LOGS_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(NotFound, match="no container here is called 'research/train-0'"):
        resolve("research/train-0", none)


def test_directory_of_logs_is_the_setting_by_default() -> None:
    assert Settings().pod_logs_dir == POD_LOGS_DIR  # for look-ups, which load no settings
