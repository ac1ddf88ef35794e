"""Ways into and out of the pods: services, routes, network policies; and what a pod asks of its node."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helm.charts import ALL_OPTIONS, CHART, CUDA, Object, merged, only, pod_templates, released_rules, render


def component(item: Object) -> str:
    return str(item["metadata"]["labels"]["app.kubernetes.io/component"])


def test_clients_and_metrics_have_services_of_their_own() -> None:
    """A load balancer for clients must not show the plain metrics to the world."""
    objects = render(ALL_OPTIONS, {"gateway": {"service": {"type": "LoadBalancer"}}})
    clients, metrics = only(objects, "Service"), only(objects, "Service", "-metrics")
    assert clients["spec"]["type"] == "LoadBalancer"
    assert {port["name"] for port in clients["spec"]["ports"]} == {"grpc", "http"}
    assert [(port["name"], port["port"]) for port in metrics["spec"]["ports"]] == [("metrics", 9464)]
    assert metrics["spec"]["clusterIP"] == "None"
    assert "type" not in metrics["spec"]
    monitor = only(objects, "ServiceMonitor", "-gateway")["spec"]
    labels = monitor["selector"]["matchLabels"].items()
    selected = [each for each in objects if each["kind"] == "Service" and labels <= each["metadata"]["labels"].items()]
    assert selected == [metrics]


def test_a_client_that_balances_by_itself_finds_every_gateway() -> None:
    pods = only(render(), "Service", "-pods")["spec"]
    gateway = pod_templates(render())["gateway"]["metadata"]["labels"]
    assert (pods["clusterIP"], [port["port"] for port in pods["ports"]]) == ("None", [50051])
    assert pods["selector"].items() <= gateway.items()


def test_routes_lead_to_the_ports_of_the_clients_service() -> None:
    objects = render(ALL_OPTIONS, {"gateway": {"service": {"httpPort": 80}, "maxSeconds": 900}})
    ports = {port["name"]: port["port"] for port in only(objects, "Service")["spec"]["ports"]}
    http, grpc = only(objects, "HTTPRoute", "-http")["spec"], only(objects, "GRPCRoute", "-grpc")["spec"]
    for route, port in ((http, ports["http"]), (grpc, ports["grpc"])):
        assert route["rules"][0]["backendRefs"] == [{"name": "test-ringserve", "port": port}]
        assert route["parentRefs"] == [{"name": "public"}]
    assert http["rules"][0]["timeouts"] == {"request": "900s"}
    assert grpc["hostnames"] == ["grpc.example"]
    assert "hostnames" not in http
    ingress = only(objects, "Ingress")["spec"]
    assert ingress["rules"][0]["host"] == "chat.example"
    assert ingress["rules"][0]["http"]["paths"][0]["backend"]["service"]["port"] == {"name": "http"}
    assert ingress["tls"] == [{"hosts": ["chat.example"], "secretName": "public"}]
    without = render(ALL_OPTIONS, {"gateway": {"http": {"enabled": False}, "ingress": {"enabled": False}}})
    assert {each["kind"] for each in without} & {"Ingress", "HTTPRoute", "GRPCRoute"} == {"GRPCRoute"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"ingress": {"enabled": True}}, "gateway.ingress.host: required with gateway.ingress.enabled"),
        (
            {"ingress": {"enabled": True, "host": "a.example"}, "http": {"enabled": False}},
            "gateway.ingress.enabled: an Ingress leads to HTTP, and gateway.http.enabled is false",
        ),
    ],
)
def test_an_ingress_that_leads_nowhere_is_refused(values: Object, sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        render({"gateway": values})


def test_egress_is_free_unless_restricted_to_the_release_and_name_servers() -> None:
    free = [each for each in render({"networkPolicy": {"enabled": True}}) if each["kind"] == "NetworkPolicy"]
    assert all(each["spec"]["policyTypes"] == ["Ingress"] and "egress" not in each["spec"] for each in free)
    collector = {"ports": [{"port": 4317}]}
    bound = render({"networkPolicy": {"enabled": True, "egress": {"enabled": True, "rules": [collector]}}})
    policies = [each["spec"] for each in bound if each["kind"] == "NetworkPolicy"]
    assert len(policies) == len(free) == 3
    for policy in policies:
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        own, names, further = policy["egress"]
        (peer,) = own["to"]
        labels = peer["podSelector"]["matchLabels"]
        assert labels.items() <= policy["podSelector"]["matchLabels"].items()
        assert "app.kubernetes.io/component" not in labels, "any pod of the release is meant"
        assert {(each["port"], each["protocol"]) for each in names["ports"]} == {(53, "UDP"), (53, "TCP")}
        assert further == collector


RESOURCES: dict[str, tuple[Any, Any]] = {
    "nothing": ({}, {"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}),
    "limits": (
        {"limits": {"cpu": "16", "memory": "200Gi"}},
        {"requests": {"cpu": "16", "memory": "200Gi"}, "limits": {"cpu": "16", "memory": "200Gi"}},
    ),
    "requests": (
        {"requests": {"memory": "10Gi", "cpu": "500m"}},
        {"requests": {"memory": "10Gi", "cpu": "500m"}, "limits": {}},
    ),
}


@pytest.mark.parametrize("given", RESOURCES)
def test_a_pod_of_ranks_asks_for_what_it_may_take(given: str) -> None:
    """A pod that asks for less lands on a node that is full, and is the first to be evicted."""
    resources, expected = RESOURCES[given]
    prefill = {"ranksPerPod": 2, "threadsPerRank": 2, "parallelism": {"cp": 4, "tp": 1}, "resources": resources}
    cluster = only(render({"prefill": prefill}), "RayCluster")["spec"]
    (group,) = (each for each in cluster["workerGroupSpecs"] if each["groupName"] == "prefill")
    assert group["template"]["spec"]["containers"][0]["resources"] == expected
    assert group["rayStartParams"]["num-cpus"] == "4"


def test_pods_with_gpus_ask_for_the_memory_of_their_limits() -> None:
    limits = {"nvidia.com/gpu": 4, "memory": "200Gi"}
    resources = pod_templates(render(CUDA, {"prefill": {"resources": {"limits": limits}}}))["prefill"]["spec"][
        "containers"
    ][0]["resources"]
    assert resources == {"limits": limits, "requests": {"cpu": "4", "memory": "200Gi"}}


@pytest.mark.parametrize("part", ["prefill", "decode", "head", "gateway"])
def test_pods_take_further_volumes_and_first_containers(part: str) -> None:
    fetch = {"name": "fetch", "image": "registry.example/fetch", "volumeMounts": [{"name": "mine", "mountPath": "/m"}]}
    volume, mount = {"name": "mine", "emptyDir": {}}, {"name": "mine", "mountPath": "/mine"}
    values = {"initContainers": [fetch], "extraVolumes": [volume], "extraVolumeMounts": [mount]}
    templates = pod_templates(render({part: values}))
    for name, template in templates.items():
        spec = template["spec"]
        has = (
            spec.get("initContainers") == [fetch],
            volume in spec["volumes"],
            mount in spec["containers"][0]["volumeMounts"],
        )
        assert set(has) == {name == part}, name


def test_gateways_keep_off_each_others_nodes_and_scale_from_their_number() -> None:
    objects = render({"gateway": {"replicas": 3, "autoscaling": {"enabled": True}}})
    (spread,) = pod_templates(objects)["gateway"]["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    labels = pod_templates(objects)["gateway"]["metadata"]["labels"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    assert only(objects, "HorizontalPodAutoscaler", "-gateway")["spec"]["minReplicas"] == 3
    assert "topologySpreadConstraints" not in pod_templates(objects)["head"]["spec"]


def test_the_volume_for_logs_has_a_limit_unless_none_is_wanted() -> None:
    def volumes(*values: Object) -> list[Object]:
        return [
            volume
            for template in pod_templates(render(*values)).values()
            for volume in template["spec"]["volumes"]
            if volume["name"] == "tmp"
        ]

    assert volumes() == [{"name": "tmp", "emptyDir": {"sizeLimit": "20Gi"}}] * 4
    assert volumes({"tmpSizeLimit": ""}) == [{"name": "tmp", "emptyDir": {}}] * 4


def test_helm_test_asks_a_gateway_whether_it_is_ready() -> None:
    objects = render(merged(ALL_OPTIONS))
    pod = only(objects, "Pod", "-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    port = only(objects, "Service", "-metrics")["spec"]["ports"][0]["port"]
    assert pod["spec"]["containers"][0]["command"][-1] == f"http://test-ringserve-metrics:{port}/ready"


def test_every_scraped_series_carries_the_release_it_is_from() -> None:
    objects = render(ALL_OPTIONS)
    endpoints = [
        *only(objects, "PodMonitor", "-rings")["spec"]["podMetricsEndpoints"],
        *only(objects, "ServiceMonitor", "-gateway")["spec"]["endpoints"],
    ]
    for endpoint in endpoints:
        labels = {each["targetLabel"]: each["replacement"] for each in endpoint["relabelings"]}
        labels.pop("ringserve_role", None)  # tells gateways apart, whose series carry no role
        assert labels == {"job": "ringserve", "ringserve_cluster": "test-ringserve"}


def test_dashboards_and_rules_are_the_files_of_the_chart() -> None:
    objects = render(ALL_OPTIONS)
    dashboards = only(objects, "ConfigMap", "-dashboards")
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    files = {path.name: json.loads(path.read_text()) for path in (CHART / "files/dashboards").glob("*.json")}
    assert {name: json.loads(text) for name, text in dashboards["data"].items()} == files
    assert only(objects, "PrometheusRule")["spec"] == released_rules("test-ringserve")
