"""The policies that mount the tenants' view: their expressions, evaluated on pods as an API server and Kyverno do."""

import re
from typing import Any

import cel
import jmespath
import pytest

from tests.manifests import KUSTOMIZE, load, merged, validate

COMPONENT = KUSTOMIZE / "components/tenants-view"
MOUNT = {"name": "resolver-view", "mountPath": "/run/resolver", "readOnly": True}
VOLUME = {"name": "resolver-view", "hostPath": {"path": "/run/resolver/tenants", "type": "DirectoryOrCreate"}}
HAMI = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}


def container(name: str, limits: dict[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """Return a container; without ``limits`` it has no resources at all."""
    resources = {} if limits is None else {"resources": {"limits": limits}}
    return {"name": name, "image": "example.com/train"} | resources | more


def pod(*containers: dict[str, Any], **more: Any) -> dict[str, Any]:
    metadata = {"name": "trainer", "namespace": "ml"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": list(containers), **more},
    }


def by_policy(original: dict[str, Any]) -> dict[str, Any]:
    """Apply the MutatingAdmissionPolicy. Its ``Object...{}`` are maps here; the pod's schema checks their fields."""
    (spec,) = (each["spec"] for each in load(COMPONENT / "policy.yaml") if "mutations" in each["spec"])
    variables = {
        each["name"]: cel.evaluate(each["expression"], {"object": original}) for each in spec["variables"]
    }
    for mutation in spec["mutations"]:
        text = re.sub(r"Object(\.\w+)*\{", "{", mutation["applyConfiguration"]["expression"])
        text = re.sub(r"(\w+): ", r"'\1': ", text)
        original = merged(original, cel.evaluate(text, {"object": original, "variables": variables}))
    return original


def by_kyverno(original: dict[str, Any]) -> dict[str, Any]:
    """Apply Kyverno's policy: for each container that fits, its strategic merge with the anchor ``(name)``."""
    ((rule,),) = (each["spec"]["rules"] for each in load(COMPONENT / "kyverno.yaml"))
    assert rule["match"] == {"any": [{"resources": {"kinds": ["Pod"], "operations": ["CREATE"]}}]}
    (step,) = rule["mutate"]["foreach"]
    for element in jmespath.search(step["list"], {"request": {"object": original}}):

        def filled(value: Any, element: dict[str, Any] = element) -> Any:
            if isinstance(value, dict):
                return {key.strip("()"): filled(each) for key, each in value.items()}
            if isinstance(value, list):
                return list(map(filled, value))
            expression = re.fullmatch(r"\{\{ (.*) \}\}", str(value))
            return jmespath.search(expression[1], {"element": element}) if expression else value

        (condition,) = step["preconditions"]["any"]
        assert condition["operator"] == "NotEquals"
        if filled(condition["key"]) != condition["value"]:
            original = merged(original, filled(step["patchStrategicMerge"]))
    return original


POLICIES = {"MutatingAdmissionPolicy": by_policy, "Kyverno": by_kyverno}


@pytest.mark.parametrize("policy", POLICIES)
def test_container_with_gpu_gets_the_mount(policy: str) -> None:
    data = {"name": "data", "mountPath": "/data"}
    before = pod(
        container("sidecar"),
        container("main", HAMI, volumeMounts=[data]),
        container("other", {"cpu": 1}),
        volumes=[{"name": "data", "emptyDir": {}}],
    )
    after = POLICIES[policy](before)
    validate([after])
    sidecar, main, other = after["spec"]["containers"]
    assert {each["name"]: each for each in main["volumeMounts"]} == {"data": data, "resolver-view": MOUNT}
    assert [sidecar, other] == [before["spec"]["containers"][index] for index in (0, 2)]
    assert VOLUME in after["spec"]["volumes"]
    again = POLICIES[policy](after)
    assert again["spec"] == after["spec"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("limits", [None, {}, {"cpu": 1}, {"amd.com/gpu": 1}])
def test_pod_without_gpu_is_unchanged(policy: str, limits: dict[str, int] | None) -> None:
    before = pod(container("main", limits))
    assert POLICIES[policy](before) == before


@pytest.mark.parametrize(
    "name", ["nvidia.com/gpu", "nvidia.com/gpumem", "volcano.sh/vgpu-number", "koordinator.sh/gpu"]
)
def test_policy_knows_each_schedulers_resource(name: str) -> None:
    assert by_policy(pod(container("main", {name: 1})))["spec"]["containers"][0]["volumeMounts"] == [MOUNT]


def test_policy_leaves_an_own_mount_alone() -> None:
    own = {"name": "mine", "mountPath": "/run/resolver"}
    before = pod(container("main", HAMI, volumeMounts=[own]), volumes=[{"name": "mine", "emptyDir": {}}])
    assert by_policy(before) == before
