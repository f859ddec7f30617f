"""Container ids and pod UIDs in every form of path that container runtimes are known to make."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resolver.linux.cgroup import (
    ContainerCgroup,
    cgroup_paths,
    container_id_of,
    names_in,
    only_container,
    parse_cgroup,
    parse_cgroup_path,
    pod_uid_of,
    strip_scheme,
)

A = "a1b2c3d4e5f60718" * 4
B = "0f1e2d3c4b5a6978" * 4
UID = "0a1b2c3d-1111-4222-8333-444455556666"
OTHER_UID = UID.replace("0a1b", "9a1b")
UID_ = UID.replace("-", "_")
STATIC = "5dbb3c4e2a90fd1870c2b1b0e1a2f3c4"
BURSTABLE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice"

SCOPE = f"cri-containerd-{A}.scope"
BURSTABLE_STATIC = BURSTABLE.replace(UID_, STATIC)
KUBELET = "/kubelet.slice/kubelet-kubepods-burstable.slice"

PATHS = {
    "containerd systemd": (f"{BURSTABLE}/{SCOPE}", A, UID, "containerd"),
    "containerd systemd, guaranteed": (
        f"/kubepods.slice/kubepods-pod{UID_}.slice/{SCOPE}",
        A,
        UID,
        "containerd",
    ),
    "containerd cgroupfs": (f"/kubepods/besteffort/pod{UID}/{A}", A, UID, None),
    "containerd cgroupfs, guaranteed": (f"/kubepods/pod{UID}/{A}", A, UID, None),
    "crio systemd": (f"{BURSTABLE}/crio-{A}.scope", A, UID, "cri-o"),
    "crio systemd, child": (f"{BURSTABLE}/crio-{A}.scope/container", A, UID, "cri-o"),
    "crio cgroupfs": (f"/kubepods/burstable/pod{UID}/crio-{A}", A, UID, "cri-o"),
    "crio cgroupfs, child": (f"/kubepods/burstable/pod{UID}/crio-{A}/container", A, UID, "cri-o"),
    "docker under kubernetes, systemd": (f"{BURSTABLE}/docker-{A}.scope", A, UID, "docker"),
    "docker under kubernetes, cgroupfs": (f"/kubepods/burstable/pod{UID}/{A}", A, UID, None),
    "docker systemd": (f"/system.slice/docker-{A}.scope", A, None, "docker"),
    "docker cgroupfs": (f"/docker/{A}", A, None, "docker"),
    "podman systemd": (f"/machine.slice/libpod-{A}.scope", A, None, "podman"),
    "podman systemd, child": (f"/machine.slice/libpod-{A}.scope/container", A, None, "podman"),
    "podman with systemd inside": (f"/machine.slice/libpod-{A}.scope/init.scope", A, None, "podman"),
    "podman rootless": (
        f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{A}.scope/container",
        A,
        None,
        "podman",
    ),
    "podman cgroupfs": (f"/libpod_parent/libpod-{A}", A, None, "podman"),
    "podman pod": (f"/machine.slice/machine-libpod_pod_{B}.slice/libpod-{A}.scope", A, None, "podman"),
    "nerdctl": (f"/system.slice/nerdctl-{A}.scope", A, None, "containerd"),
    "drivers mixed up": (f"{BURSTABLE}:cri-containerd:{A}", A, UID, "containerd"),
    "drivers mixed up, static pod": (
        f"/system.slice/kubepods-burstable-pod{STATIC}.slice:docker:{A}",
        A,
        STATIC,
        "docker",
    ),
    "static pod, systemd": (f"{BURSTABLE_STATIC}/{SCOPE}", A, STATIC, "containerd"),
    "static pod, cgroupfs": (f"/kubepods/burstable/pod{STATIC}/{A}", A, STATIC, None),
    "kind, systemd": (f"{KUBELET}/kubelet-kubepods-burstable-pod{UID_}.slice/{SCOPE}", A, UID, "containerd"),
    "kind in docker": (f"/docker/{B}/kubelet/kubepods/besteffort/pod{UID}/{A}", A, UID, None),
    "kind in docker, systemd": (
        f"/system.slice/docker-{B}.scope/kubelet.slice/kubelet-kubepods-pod{UID_}.slice/{SCOPE}",
        A,
        UID,
        "containerd",
    ),
    "the kind node's own processes": (f"/docker/{B}/kubelet.slice/kubelet.service", B, None, "docker"),
    "docker in a pod": (f"/kubepods/pod{UID}/{A}/docker/{B}", A, UID, None),
    "docker in docker": (f"/docker/{A}/docker/{B}", A, None, "docker"),
    "named as another container": (f"/kubepods/pod{UID}/{A}/{B}", A, UID, None),
    "named as another pod's": (f"/kubepods/pod{UID}/{A}/kubepods/pod{STATIC}/{B}", A, UID, None),
    "named as another's scope": (f"{BURSTABLE}/{SCOPE}/crio-{B}.scope", A, UID, "containerd"),
    "from a private cgroup namespace": (f"/../../../kubepods/pod{UID}/{A}", A, UID, None),
    "from a private cgroup namespace, a sibling": (f"/../{SCOPE}", A, None, "containerd"),
    "kubelet below another cgroup root": (f"/k8s.slice/k8s-pod{UID_}.slice/crio-{A}.scope", A, UID, "cri-o"),
    "removed, with a zombie in it": (f"{BURSTABLE}/{SCOPE} (deleted)", A, UID, "containerd"),
    "the monitor of a node's pod": (
        f"/docker/{B}/kubelet/kubepods/pod{UID}/crio-conmon-{A}",
        B,
        None,
        "docker",
    ),
    "an unknown runtime": (f"/some.slice/newruntime-{A}.scope", A, None, None),
}

NO_CONTAINER = [
    "/",
    "",
    "/init.scope",
    "/system.slice/containerd.service",
    "/user.slice/user-1000.slice/session-2.scope",
    BURSTABLE,
    f"/kubepods/burstable/pod{UID}",
    f"{BURSTABLE}/crio-conmon-{A}.scope",
    f"/kubepods/burstable/pod{UID}/crio-conmon-{A}",
    f"/machine.slice/libpod-conmon-{A}.scope",
    f"/machine.slice/machine-libpod_pod_{A}.slice",
    "/default/nginx",  # ctr: any name
    f"/kubepods/burstable/pod{UID}/{A[:63]}",
    f"/kubepods/burstable/pod{UID}/{A}0",
    f"/kubepods/burstable/pod{UID}/{A}.mount",
    f"/kubepods/burstable/pod{UID}/{A.upper()}",
    f"/kubepods/burstable/pod{UID}/x{A}",
    "/process/955451962d616a2fbe8c13242384cf26",
]


@pytest.mark.parametrize(("path", "container_id", "pod_uid", "runtime"), PATHS.values(), ids=PATHS)
def test_a_path_of_every_runtime(
    path: str, container_id: str, pod_uid: str | None, runtime: str | None
) -> None:
    expected = ContainerCgroup(container_id, pod_uid, runtime)
    assert parse_cgroup_path(path) == expected
    assert parse_cgroup(f"0::{path}\n") == expected
    lines = [
        "12:pids:/",
        "4:memory:/api/955451962d616a2fbe8c13242384cf26",
        f"5:cpu:{BURSTABLE}/crio-conmon-{B}.scope",
    ]
    for position in range(len(lines) + 1):
        text = "\n".join([*lines[:position], f"9:devices:{path}", *lines[position:], ""])
        assert parse_cgroup(text) == expected


def test_the_paths_of_a_file_and_an_id_alone() -> None:
    assert list(cgroup_paths("0::/a\n/b\n\n5:x\n")) == ["/a", "/b"]
    assert parse_cgroup_path(A) == parse_cgroup_path(f"/{A}") == ContainerCgroup(A, None, None)
    assert (names_in("lxc.payload.web"), names_in("web")) == (("web", "lxc.payload.web"), ("web",))


@pytest.mark.parametrize("path", NO_CONTAINER)
def test_a_path_without_a_container(path: str) -> None:
    assert parse_cgroup_path(path) is None
    assert parse_cgroup(f"5:pids:{path}\n0::{path}\n") is None


@pytest.mark.parametrize(
    ("text", "pod_uid"),
    [
        (f"0::{BURSTABLE}\n", UID),
        (f"3:cpu:/\n0::/kubepods/pod{UID}\n", UID),
        (f"0::/kubepods/burstable/pod{STATIC}/{A}\n", STATIC),
        (f"{BURSTABLE}/cri-containerd-{A}.scope", UID),
        (f"0::/docker/{A}\n", None),
        (f"0::/kubepods/mypod{UID}\n", None),
        (f"0::/kubepods/pod{UID}0\n", None),
        ("0::/machine.slice/machine-libpod_pod_" + A + ".slice\n", None),
        ("", None),
    ],
)
def test_pod_uid_without_a_container(text: str, pod_uid: str | None) -> None:
    assert pod_uid_of(text) == pod_uid


@pytest.mark.parametrize(
    ("name", "container_id"),
    [
        (A, A),
        (f"crio-{A}", A),
        (f"docker-{A}.scope", A),
        (f"x.slice:cri-containerd:{A}", A),
        (f"crio-conmon-{A}.scope", None),
        (f"pod_{A}", None),
        ("container", None),
    ],
)
def test_the_name_of_a_directory(name: str, container_id: str | None) -> None:
    assert container_id_of(name) == container_id


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        (f"containerd://{A}", A),
        (f"docker://{A}", A),
        (f"cri-o://{A}", A),
        ("any-thing.1://abcdef", "abcdef"),
        (A, A),
        (f"{UID}/main", f"{UID}/main"),
        ("a/b://c", "a/b://c"),
        ("", ""),
    ],
)
def test_schemes_that_people_paste(text: str, bare: str) -> None:
    assert strip_scheme(text) == bare


HOSTILE = st.lists(
    st.sampled_from([*"/:-._ \n\v\x85a0f", A, UID, UID_, "pod", ".scope", "conmon-", "docker"]), max_size=100
).map("".join)


@given(st.one_of(st.text(max_size=500), HOSTILE))
def test_no_text_makes_it_raise(text: str) -> None:
    found = parse_cgroup(text)
    assert found is None or found.container_id in text
    for parser in (parse_cgroup_path, pod_uid_of, container_id_of, strip_scheme):
        parser(text)


@settings(max_examples=30)
@given(
    st.sampled_from(
        [A[:63] + "g", A[:63], f"pod{UID}", ":", "-", "a", "0", f"{A}/", f"conmon-{A}/", "pod", "pod0/"]
    )
)
def test_no_text_makes_it_slow(piece: str) -> None:
    # The kernel limits a path to 4 KiB; even a hundred times as much must be parsed quickly.
    text = "0::/" + piece * (400_000 // len(piece))
    started = time.process_time()
    parse_cgroup(text)
    pod_uid_of(text)
    container_id_of(text)
    assert time.process_time() - started < 1


def slice_of(pod: str, container: str) -> str:
    return f"/kubepods.slice/kubepods-pod{pod.replace('-', '_')}.slice/cri-containerd-{container}.scope"


@pytest.mark.parametrize(
    ("text", "pod", "container"),
    [
        (f"0::{slice_of(UID, A)}\n", UID, A),
        (f"0::{slice_of(UID, A)}/init.scope\n", UID, A),
        (f"0::/docker/{B}/kubelet{slice_of(UID, A)}\n", UID, A),  # a node in a container
        (f"3:memory:{slice_of(UID, A)}\n2:cpu:/\n0::/\n", UID, A),
        (f"0::{slice_of(UID, A)}/pod{OTHER_UID}/{B}\n", None, None),  # made by the tenant inside
        (f"0::{slice_of(UID, A)}/{B}\n", None, None),
        (f"3:memory:{slice_of(UID, A)}\n2:cpu:{slice_of(OTHER_UID, B)}\n", None, None),
        (f"0::/system.slice/docker-{A}.scope\n", None, None),
        ("0::/\n", None, None),
    ],
)
def test_the_only_container_in_a_cgroup(text: str, pod: str | None, container: str | None) -> None:
    found = only_container(text)
    assert (found and found.pod_uid, found and found.container_id) == (pod, container)
