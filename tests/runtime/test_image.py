"""The image, built from its recipe in a fresh Debian: it repairs slots as the deployed pod, and is lean."""

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolver.base.version import VERSION
from tests.fakes.bpf import lives
from tests.fakes.daemon import children_of, runs
from tests.fakes.node import Node
from tests.kernel.conftest import DRIVER, NVML, WRITER
from tests.kernel.rights import works
from tests.manifests import KUSTOMIZE, container_of, pod_of, render
from tests.patience import until
from tests.runtime.conftest import StartPod, fast
from tests.runtime.image import ARCHITECTURES, KEEP, SUITES, Builder, Image
from tests.runtime.pods import confined

#: A build from nothing takes most of a minute on an idle machine.
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

#: `make image-check` names each in turn.
SUITE = os.environ.get("IMAGE_SUITE", "trixie")
REVISION = "0123456789abcdef0123456789abcdef01234567"
SITE = "opt/resolver/lib/python3*/site-packages"


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    with Builder(tmp_path_factory.mktemp("image")) as builder:
        yield builder


@pytest.fixture(scope="module")
def image(builder: Builder) -> Image:
    return builder.build(SUITE, revision=REVISION)


@pytest.fixture(scope="module")
def without_bpf(builder: Builder) -> Image:
    return builder.build(SUITE, with_bpf=False)


def test_image_labels_name_version_and_source(image: Image) -> None:
    labels = {
        name.removeprefix("org.opencontainers.image."): text for name, text in image.config["Labels"].items()
    }
    assert labels["title"] == "resolver"
    assert labels["version"] == VERSION
    assert labels["revision"] == REVISION
    assert labels["licenses"] == "Apache-2.0"
    assert image.config["architecture"] == ARCHITECTURES[os.uname().machine]
    assert (image.config["Entrypoint"], image.config["Cmd"]) == (["resolver"], ["run"])
    assert not {"Healthcheck", "ExposedPorts", "Volumes"} & image.config.keys()
    assert "find-links" not in json.dumps(image.config), "pip's settings are a secret"


def test_image_has_no_build_tools(image: Image) -> None:
    (site,) = image.root.glob(SITE)
    assert {"resolver", "msgspec", "pynvml.py", "h11"} <= set(os.listdir(site))
    there = {
        path.name
        for place in ("usr/bin", "usr/sbin", "opt/resolver/bin")
        for path in (image.root / place).iterdir()
    }
    assert {"python3", "resolver", "sh"} <= there
    unwanted = re.compile(
        r"(.*-)?(gcc|cc|g\+\+|c\+\+|clang|ld|as|make|cmake|pip3?|hatch(ling)?|git|curl|wget)(-?[\d.]+)?"
    )
    assert [name for name in there if unwanted.fullmatch(name)] == []
    assert [
        path.name for path in site.iterdir() if path.name.startswith(("pip", "setuptools", "hatch"))
    ] == []
    for empty in (
        "var/lib/apt/lists",
        "var/cache/apt",
        "var/log/apt",
        "tmp",
        "srv",
        "run/lock",
        "root/.cache",
        "src",
        "opt/build",
    ):
        files = [path for path in (image.root / empty).rglob("*") if not path.is_dir()]
        assert files == [], f"/{empty} is not empty"
    assert os.listdir(image.root / "opt") == ["resolver"]
    assert not (image.root / "steps").exists()
    assert not list((image.root / "usr/include").glob("*.h"))


def test_modules_are_compiled_in_the_image(image: Image) -> None:
    (lib,) = image.root.glob("opt/resolver/lib")
    sources = list(lib.rglob("*.py"))
    assert len(sources) > 500
    for source in sources:
        (compiled,) = (source.parent / "__pycache__").glob(f"{source.stem}.cpython-*.pyc")
        flags = int.from_bytes(compiled.read_bytes()[4:8], "little")
        assert flags == 1, f"{compiled} is checked against its source at every start"


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_locked_packages_have_wheels_for_both_machines(builder: Builder, machine: str) -> None:
    assert list(builder.wheels(SUITES[SUITE], machine).iterdir())


def test_only_root_can_change_the_images_files(image: Image) -> None:
    for path in (image.root / "opt").rglob("*"):
        mode = path.lstat()
        assert (mode.st_uid, mode.st_gid) == (0, 0)
        assert stat.S_ISLNK(mode.st_mode) or not mode.st_mode & 0o022, path


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node whose driver's library every user may read, like a real node's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(KEEP))
    with Node(tmp_path / "node", DRIVER) as node:
        yield node


@pytest.mark.parametrize(("where", "source"), [("base", "bpf"), ("overlays/netlink", "netlink")])
def test_daemonset_repairs_with_the_image(
    node: Node, start_pod: StartPod, image: Image, where: str, source: str
) -> None:
    rendered = pod_of(render(KUSTOMIZE / where))
    pod = start_pod(fast(rendered), image=image)
    works(node, pod, source)
    confined(pod, set(container_of(rendered)["securityContext"]["capabilities"]["add"]))
    until(lambda: pod.get("/readyz") == 200, "ready")
    children = children_of(pod.host_pid)
    assert {WRITER, NVML} <= children.keys()
    everyone = lives.children_of(pod.host_pid)
    assert sorted(everyone) == sorted(children.values()), "a child has ended and was not waited for"
    assert pod.stop() == 0
    assert not any(map(runs, children.values()))
    assert {path.name for path in pod.run_dir.iterdir()} <= {"bpf-program"}


def test_image_commands_run_by_exec(node: Node, start_pod: StartPod, image: Image) -> None:
    container = node.container()
    tenant = container.tenant(guess="none", load=30)
    pod = start_pod(fast(pod_of(render(KUSTOMIZE / "base"))), image=image)
    tenant.until_repaired()
    pod.wait_for("source", source="bpf")
    assert pod.inside("resolver", "--version") == f"resolver {VERSION}\n"
    found = pod.inside("resolver", "lookup", container.container_id, str(tenant.ns_pid))
    assert found == f"{tenant.host_pid}\n"
    assert "main" in pod.inside("resolver", "top", "--once")
    # `inside` requires exit code 0, which doctor gives if no check failed.
    checks = {each["check"]: each["state"] for each in json.loads(pod.inside("resolver", "doctor", "--json"))}
    assert {checks[name] for name in ("view", "bpf", "nvml", "writer", "daemon")} == {"ok"}


def test_image_without_bcc_scans_and_says_why(node: Node, start_pod: StartPod, without_bpf: Image) -> None:
    pod = start_pod(fast(pod_of(render(KUSTOMIZE / "base"))), image=without_bpf)
    works(node, pod, "scan")
    why = pod.wait_for("source_unavailable", source="bpf")["why"]
    assert "bcc" in why


def test_image_outside_host_pidns_ends_with_reason(node: Node, start_pod: StartPod, image: Image) -> None:
    """It is process 1 there, which no unhandled signal ends."""
    pod = start_pod(pod_of(render(KUSTOMIZE / "base")) | {"hostPID": False}, image=image)
    assert pod.wait() == 4
    (sentence,) = pod.other_output
    assert "hostPID: true (Kubernetes)" in sentence
    pod.other_output.clear()
