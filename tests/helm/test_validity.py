"""Rendered objects against the schemas of Kubernetes and of KubeRay, and the restricted pod security standard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.helm.charts import ALL_OPTIONS, AUTOSCALED, CUDA, POOLS, SECURE, Object, merged, only, pod_templates, render

LIVE = "ringserve.live"
CUSTOM = {"RayCluster", "ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute", "GRPCRoute"}
KUBERNETES = "1.34"
CASES = {
    "defaults": {},
    "cuda": CUDA,
    "every option": ALL_OPTIONS,
    "both": merged(CUDA, ALL_OPTIONS),
    "autoscaled rings": merged(CUDA, AUTOSCALED),
    "pools": merged(CUDA, POOLS),
    "secure": merged(ALL_OPTIONS, SECURE),
}


@pytest.mark.parametrize("case", CASES)
def test_core_objects_are_valid_to_the_letter(case: str) -> None:
    checked = [item for item in render(CASES[case]) if item["kind"] not in CUSTOM]
    for item in checked:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
    assert len(checked) >= 5


@pytest.mark.parametrize("case", CASES)
def test_pods_of_every_component_are_valid_to_the_letter(case: str) -> None:
    templates = pod_templates(render(CASES[case]))
    labels = (template["metadata"]["labels"] for template in templates.values())
    components = {each["app.kubernetes.io/component"] for each in labels}
    assert components == {"gateway", "head", "prefill", "decode"}
    for component, template in templates.items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": component}}
        kubernetes_validate.validate(pod | {"spec": template["spec"]}, KUBERNETES, strict=True)


def test_the_check_finds_a_misspelt_field() -> None:
    gateway = only(render(), "Deployment", "-gateway")
    gateway["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(gateway, KUBERNETES, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_the_ray_cluster_is_as_kuberay_wants_it(case: str) -> None:
    schema = json.loads(Path(__file__).with_name("raycluster.schema.json").read_text())
    cluster = only(render(CASES[case]), "RayCluster")
    jsonschema.validate(cluster, schema)
    cluster["spec"]["workerGroupSpecs"][0]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster, schema)


@pytest.mark.parametrize("case", CASES)
def test_objects_of_other_operators_are_as_their_definitions_want_them(case: str) -> None:
    schemas = json.loads(Path(__file__).with_name("custom.schema.json").read_text())
    found = [item for item in render(CASES[case]) if item["kind"] in CUSTOM - {"RayCluster"}]
    for item in found:
        jsonschema.validate(item, schemas[item["kind"]])
        item["spec"]["selectors"] = {}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(item, schemas[item["kind"]])
    assert {item["kind"] for item in found} in (set(), set(schemas) - {"$comment"})


def containers(template: Object) -> list[Mapping[str, Any]]:
    return [*template["spec"]["containers"], *template["spec"].get("initContainers", ())]


@pytest.mark.parametrize("component", ["gateway", "head", "prefill", "decode"])
def test_pods_meet_the_restricted_security_standard(component: str) -> None:
    template = pod_templates(render(CUDA, ALL_OPTIONS))[component]
    spec = template["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert not any("hostPath" in volume for volume in spec["volumes"])
    assert spec["automountServiceAccountToken"] is False
    for container in containers(template):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "privileged" not in context


@pytest.mark.parametrize(
    ("component", "service"), [("gateway", "ringserve.admitting"), ("head", "ringserve.v1.RouterService")]
)
def test_what_serves_grpc_is_probed_by_grpc(component: str, service: str) -> None:
    container = pod_templates(render())[component]["spec"]["containers"][0]
    ports = {port["containerPort"] for port in container["ports"]}
    # A process that is not ready gets no calls, and is not ended for it.
    names = {"startupProbe": LIVE, "readinessProbe": service, "livenessProbe": LIVE}
    if component == "head":
        del names["livenessProbe"]  # KubeRay asks Ray: see raycluster.yaml
    assert {each for each in container if each.endswith("Probe")} == names.keys()
    for probe, name in names.items():
        asked = container[probe]["grpc"]
        assert asked["service"] == name
        assert asked["port"] in ports


@pytest.mark.parametrize(("component", "port"), [("gateway", "metrics"), ("head", "m-router")])
def test_behind_tls_pods_are_probed_by_what_a_kubelet_can_speak(component: str, port: str) -> None:
    container = pod_templates(render(SECURE))[component]["spec"]["containers"][0]
    paths = {"startupProbe": "/live", "readinessProbe": "/ready"}
    if component == "gateway":
        paths |= {"readinessProbe": "/admitting", "livenessProbe": "/live"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"] == {"port": port, "path": path}
    assert port in {each["name"] for each in container["ports"]}


def test_names_stay_short_enough_for_what_is_appended_to_them() -> None:
    for item in render({"fullnameOverride": "n" * 60}, ALL_OPTIONS):
        assert len(item["metadata"]["name"]) <= 52
    for component, template in pod_templates_of_long_release().items():
        for port in template["spec"]["containers"][0].get("ports", ()):
            assert len(port["name"]) <= 15, component


def pod_templates_of_long_release() -> dict[str, Object]:
    return pod_templates(render({"prefill": {"replicas": 100}, "decode": {"replicas": 100}}))
