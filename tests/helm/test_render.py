"""Effect of each value of the chart."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, lint
from pydantic import TypeAdapter

from ringserve.services.cluster.kubernetes import INDEX
from ringserve.services.config import Config, config_from
from ringserve.services.config.sections import InternalTlsConfig, KvTransferConfig, TlsConfig, TracingConfig
from tests.helm.charts import (
    ALL_OPTIONS,
    AUTOSCALED,
    CHART,
    CUDA,
    REQUIRED,
    SECURE,
    kinds,
    merged,
    mounted_config,
    only,
    pod_templates,
    render,
    render_files,
)

OPTIONS: dict[str, tuple[Mapping[str, Any], set[str]]] = {
    "serviceMonitor": ({"metrics": {"serviceMonitor": {"enabled": True}}}, {"ServiceMonitor"}),
    "podMonitor": ({"metrics": {"podMonitor": {"enabled": True}}}, {"PodMonitor"}),
    "prometheusRule": ({"metrics": {"prometheusRule": {"enabled": True}}}, {"PrometheusRule"}),
    "networkPolicy": ({"networkPolicy": {"enabled": True}}, {"NetworkPolicy"}),
    "podDisruptionBudget": ({"podDisruptionBudget": {"enabled": True}}, {"PodDisruptionBudget"}),
    "autoscaling": ({"gateway": {"autoscaling": {"enabled": True}}}, {"HorizontalPodAutoscaler"}),
}


def configuration(*values: Mapping[str, Any]) -> Config:
    """Read the pods' configuration as ringserve reads it."""
    return config_from(yaml.safe_load(mounted_config(render(*values))["config.yaml"]))


def test_what_is_optional_is_off_by_default() -> None:
    assert kinds(render()) == {"ConfigMap", "Deployment", "Pod", "RayCluster", "Service", "ServiceAccount"}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_adds_its_own_kind_and_nothing_else(name: str) -> None:
    values, added = OPTIONS[name]
    assert kinds(render(values)) - kinds(render()) == added


@pytest.mark.parametrize("values", [{}, CUDA, ALL_OPTIONS, merged(CUDA, ALL_OPTIONS)])
def test_the_chart_lints_strictly(values: Mapping[str, Any]) -> None:
    report = lint(CHART, merged(REQUIRED, values), strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


def test_the_rendered_configuration_is_one_that_ringserve_takes() -> None:
    config = configuration()
    assert (config.prefill.rings, config.prefill.cp, config.decode.rings, config.decode.cp) == (1, 2, 1, 2)
    assert config.ray.address == "auto"
    assert config.router.listen == "0.0.0.0:50050"
    assert config.timeouts.start == 1800
    assert config.kv_transfer == KvTransferConfig()


def test_the_carrier_of_kv_and_its_slots_are_those_of_the_values() -> None:
    plain = {"secretName": "inside", "insecure": False, "allowPlainRing": True, "allowPlainKv": True}
    chosen = configuration(CUDA, {"internalTls": plain, "kvTransfer": {"carrier": "nixl", "slotBytes": 4 << 20}})
    assert chosen.kv_transfer == KvTransferConfig(carrier="nixl", slot_bytes=4 << 20)


def test_further_configuration_is_passed_on_but_not_what_the_chart_must_know() -> None:
    config = configuration(
        CUDA,
        {"prefill": {"config": {"chunk_tokens": 8192, "cp": 3}, "threadsPerRank": 2}},
        {"decode": {"config": {"max_batch": 64}}},
        {
            "config": {
                "kv_cache": {"tokens_per_rank": 1_000_000},
                "ray": {"address": "elsewhere:1"},
                "logs": {"level": "debug"},
            }
        },
    )
    assert (config.prefill.rings, config.prefill.cp, config.prefill.tp) == (2, 4, 2)
    assert (config.prefill.chunk_tokens, config.prefill.threads_per_rank, config.decode.max_batch) == (8192, 2, 64)
    assert (config.kv_cache.tokens_per_rank, config.logs.level) == (1_000_000, "debug")
    assert config.ray.address == "auto"
    assert (config.model.path, config.model.device) == ("/models/llama", "cuda")


@pytest.mark.parametrize(("role", "replicas", "hosts"), [("prefill", 2, 2), ("decode", 1, 2)])
def test_a_ring_is_a_replica_that_fills_its_pods_with_ranks(role: str, replicas: int, hosts: int) -> None:
    cluster = only(render(CUDA), "RayCluster")["spec"]
    ring = next(ring for ring in cluster["workerGroupSpecs"] if ring["groupName"] == role)
    per_pod = 4 if role == "prefill" else 1
    assert (ring["replicas"], ring["minReplicas"], ring["maxReplicas"]) == (replicas, replicas, replicas)
    assert ring["numOfHosts"] == hosts
    assert ring["rayStartParams"]["num-gpus"] == str(per_pod)
    # Parsed as KubeRay's shell parses it.
    (resources,) = shlex.split(ring["rayStartParams"]["resources"])
    assert json.loads(resources) == {f"ringserve-{role}": per_pod}
    assert getattr(configuration(CUDA).ray, f"{role}_resource") == f"ringserve-{role}"


def test_ranks_never_run_on_the_head() -> None:
    head = only(render(), "RayCluster")["spec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "resources" not in head["rayStartParams"]


def test_the_gateway_is_told_where_the_router_listens() -> None:
    objects = render()
    args = pod_templates(objects)["gateway"]["spec"]["containers"][0]["args"]
    service = only(objects, "Service", "-router")
    assert f"--router={service['metadata']['name']}:{service['spec']['ports'][0]['port']}" in args
    assert configuration().router.listen.endswith(f":{service['spec']['ports'][0]['port']}")
    assert service["spec"]["selector"] == {"ray.io/cluster": "test-ringserve", "ray.io/node-type": "head"}
    ports = pod_templates(objects)["head"]["spec"]["containers"][0]["ports"]
    assert {"name": "router", "containerPort": 50050} in ports


def test_the_gateways_arguments_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from ringserve.services.cli.main import parse

    container = pod_templates(render(ALL_OPTIONS))["gateway"]["spec"]["containers"][0]
    assert container["command"] == ["ringserve", "gateway"]
    options = parse([*container["command"][1:], *container["args"]]).options
    assert (options.listen, options.metrics, options.metric_names) == ("0.0.0.0:50051", "0.0.0.0:9464", "vllm")
    hosts = "http.hosts=test-ringserve.serving chat.example"
    assert options.http == "0.0.0.0:8000"
    assert options.config.overrides == [hosts, "gateway.insecure=true", "metrics.tenants=20"]
    assert (options.model, options.dtype, options.max_seconds) == ("builtin:tiny", "auto", 600.0)


def test_a_guarded_gateway_reads_its_secrets_where_they_are_mounted() -> None:
    from ringserve.services.cli.main import parse

    objects = render(SECURE)
    pod = pod_templates(objects)["gateway"]["spec"]
    container = pod["containers"][0]
    config = parse([*container["command"][1:], *container["args"]]).options.config.load()
    assert not config.gateway.insecure
    assert config.tls == TlsConfig(
        cert="/etc/ringserve-tls/tls.crt", key="/etc/ringserve-tls/tls.key", client_ca="/etc/ringserve-tls/ca.crt"
    )
    assert config.auth.tokens == "/etc/ringserve-tokens/who.yaml"
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert secrets == {"tls": "gateway-tls", "tokens": "tenants", "internal": "inside"}
    for name in secrets:
        assert (mounts[name]["mountPath"], mounts[name]["readOnly"]) == (f"/etc/ringserve-{name}", True)
    for component in ("head", "prefill", "decode"):
        spec = pod_templates(objects)[component]["spec"]
        own = {volume["name"] for volume in spec["volumes"] if "secret" in volume}
        assert own == {"internal"}, "the gateway's are the gateway's alone"


def test_http_is_served_beside_grpc_unless_switched_off() -> None:
    http = {
        "modelName": "llama",
        "page": False,
        "unknownFields": "refuse",
        "origins": "https://a.example *",
        "hosts": "a.example",
    }
    routes = {"httpHostnames": ["llm.example", "*.example"]}
    objects = render({"gateway": {"service": {"httpPort": 80}, "http": http, "routes": routes}}, ALL_OPTIONS)
    ports = {port["name"]: port for port in only(objects, "Service")["spec"]["ports"]}
    assert (ports["http"]["port"], ports["http"]["targetPort"], ports["http"]["appProtocol"]) == (80, "http", "http")
    container = pod_templates(objects)["gateway"]["spec"]["containers"][0]
    settings = ("gateway.page=false", "http.unknown_fields=refuse", "http.origins=https://a.example *")
    for setting in (*settings, "http.hosts=test-ringserve.serving chat.example llm.example a.example"):
        assert {f"--set={setting}", "--http=0.0.0.0:8000", "--model-name=llama"} < set(container["args"])
    allowed = only(objects, "NetworkPolicy", "-gateway")["spec"]["ingress"][0]["ports"]
    assert {port["port"] for port in allowed} == {50051, 8000}
    without = render(ALL_OPTIONS, {"gateway": {"http": {"enabled": False}, "ingress": {"enabled": False}}})
    assert "--http" not in str(pod_templates(without)["gateway"]["spec"]["containers"][0]["args"])
    assert "http" not in {port["name"] for port in only(without, "Service")["spec"]["ports"]}


def test_every_ring_has_a_metrics_port_and_every_metrics_port_is_scraped() -> None:
    objects = render(CUDA, ALL_OPTIONS, {"decode": {"replicas": 3}})
    config = configuration(CUDA, {"decode": {"replicas": 3}})
    ports = {
        port["name"]: port["containerPort"] for port in pod_templates(objects)["head"]["spec"]["containers"][0]["ports"]
    }
    bases = {role: int(getattr(config.metrics, role).rpartition(":")[2]) for role in ("prefill", "decode")}
    wanted = {
        f"m-{role}-{index}": bases[role] + index for role, n in (("prefill", 2), ("decode", 3)) for index in range(n)
    }
    wanted["m-router"] = int(config.metrics.router.rpartition(":")[2])
    assert {name: port for name, port in ports.items() if name.startswith("m-")} == wanted
    monitor = only(objects, "PodMonitor", "-rings")["spec"]
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} == set(wanted)
    service = only(objects, "Service", "-metrics")
    labels = only(objects, "ServiceMonitor", "-gateway")["spec"]["selector"]["matchLabels"]
    assert labels.items() <= service["metadata"]["labels"].items()
    assert "metrics" in {port["name"] for port in service["spec"]["ports"]}


def is_selected(selector: Mapping[str, Any], template: Mapping[str, Any]) -> bool:
    labels = template["metadata"]["labels"]
    return selector["matchLabels"].items() <= labels.items() and all(
        rule["operator"] == "In" and labels.get(rule["key"]) in rule["values"]
        for rule in selector.get("matchExpressions", ())
    )


def test_tls_between_processes_is_that_of_the_secret_in_every_pod() -> None:
    from ringserve.services.cli.main import parse

    objects = render(SECURE, {"internalTls": {"serverName": "rings.example"}})
    files = {f"/etc/ringserve-internal/{name}" for name in ("tls.crt", "tls.key", "ca.crt")}
    inside = configuration(SECURE, {"internalTls": {"serverName": "rings.example"}}).internal_tls
    assert {inside.cert, inside.key, inside.ca} == files
    assert (inside.server_name, inside.insecure, inside.allow_plain_ring) == ("rings.example", False, False)
    assert not inside.allow_plain_kv
    for template in pod_templates(objects).values():
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes["internal"]["secret"] == {"secretName": "inside"}
        (mount,) = (each for each in template["spec"]["containers"][0]["volumeMounts"] if each["name"] == "internal")
        assert (mount["mountPath"], mount["readOnly"]) == ("/etc/ringserve-internal", True)
    gateway = pod_templates(objects)["gateway"]["spec"]["containers"][0]
    assert parse([*gateway["command"][1:], *gateway["args"]]).options.config.load().internal_tls == inside


def test_without_tls_between_processes_the_configuration_says_so_by_name() -> None:
    assert configuration().internal_tls == InternalTlsConfig(insecure=True)
    plain = {"insecure": False, "secretName": "inside", "allowPlainRing": True, "allowPlainKv": True}
    inside = configuration(CUDA, {"internalTls": plain}).internal_tls
    assert (inside.allow_plain_ring, inside.allow_plain_kv) == (True, True)


def test_the_network_policy_lets_in_only_who_is_named() -> None:
    clients = [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}]
    objects = render({"networkPolicy": {"enabled": True, "clients": clients}})
    grpc, metrics = only(objects, "NetworkPolicy", "-gateway")["spec"]["ingress"]
    assert (grpc["from"], grpc["ports"][0]["port"]) == (clients, 50051)
    assert "from" not in metrics
    ranks, head = (only(objects, "NetworkPolicy", f"-{name}")["spec"] for name in ("ranks", "head"))
    templates = pod_templates(objects)
    for policy, guarded, let_in in (
        (ranks, {"prefill", "decode"}, {"head", "prefill", "decode"}),
        (head, {"head"}, {"head", "prefill", "decode", "gateway"}),
    ):
        assert {name for name, each in templates.items() if is_selected(policy["podSelector"], each)} == guarded
        inside = policy["ingress"][0]
        assert "ports" not in inside
        (peer,) = inside["from"]
        assert {name for name, each in templates.items() if is_selected(peer["podSelector"], each)} == let_in
    assert len(ranks["ingress"]) == 1
    ranges = [(port["port"], port.get("endPort", port["port"])) for port in head["ingress"][1]["ports"]]
    for port in (9465, 9500, 9600, 9699):
        assert any(low <= port <= high for low, high in ranges)
    assert not any(low <= 50050 <= high for low, high in ranges), "the router is for this release's gateways"


@pytest.mark.parametrize("role", ["prefill", "decode", "head", "gateway"])
def test_pods_go_where_they_are_told(role: str) -> None:
    values = {
        "nodeSelector": {"pool": role},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "podAnnotations": {"note": role},
        "podLabels": {"cost": "research"},
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "resources": {"requests": {"cpu": "3"}},
    }
    template = pod_templates(render({role: values}))[role]
    spec, container = template["spec"], template["spec"]["containers"][0]
    for key in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert spec[key] == values[key]
    assert template["metadata"]["annotations"]["note"] == role
    assert template["metadata"]["labels"]["cost"] == "research"
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]
    assert container["resources"]["requests"]["cpu"] == "3"


def test_models_are_mounted_read_only_in_every_pod() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    for template in pod_templates(render({"model": {"path": "/models/llama", "volume": claim}})).values():
        assert {"name": "model", **claim} in template["spec"]["volumes"]
        mounts = template["spec"]["containers"][0]["volumeMounts"]
        assert {"name": "model", "mountPath": "/models", "readOnly": True} in mounts


def test_the_image_is_that_of_the_device() -> None:
    images = {each["spec"]["containers"][0]["image"] for each in pod_templates(render(CUDA)).values()}
    assert images == {"registry.example/ringserve:0.1.0-cuda"}
    images = {
        each["spec"]["containers"][0]["image"] for each in pod_templates(render({"image": {"tag": "mine"}})).values()
    }
    assert images == {"registry.example/ringserve:mine"}


def test_a_change_of_the_configuration_changes_the_head_alone() -> None:
    """Rings get theirs from the head, gateways as arguments."""
    first, second = (
        pod_templates(render({"config": {"router": {"max_conversations": number}}})) for number in (100, 200)
    )
    assert [name for name in first if first[name] != second[name]] == ["head"]
    louder = pod_templates(render({"logs": {"level": "debug"}}))
    assert [name for name in first if pod_templates(render())[name] != louder[name]] == ["gateway", "head"]


def test_rings_beyond_the_least_leave_by_load_where_that_is_asked_for() -> None:
    pools = {"pools": {"short": {"replicas": 3, "parallelism": {"cp": 1, "tp": 1}}}}
    values = merged(AUTOSCALED, {"prefill": pools})
    assert configuration(values).least_rings == {}
    by_load = configuration(values, {"ray": {"autoscaling": {"byLoad": True}}})
    assert by_load.least_rings == {"prefill": 3 + 0}, "the rings of further pools always serve"


def test_ray_is_guarded_by_a_token_unless_switched_off() -> None:
    assert only(render(), "RayCluster")["spec"]["authOptions"] == {"mode": "token"}
    assert "authOptions" not in only(render({"ray": {"tokenAuthentication": False}}), "RayCluster")["spec"]


def test_traces_of_gateways_and_rings_go_to_one_collector() -> None:
    from ringserve.services.cli.main import parse

    tracing = {"endpoint": "http://otel-collector.monitoring:4317", "sampleRatio": 0.25}
    wanted = TracingConfig(endpoint="http://otel-collector.monitoring:4317", sample_ratio=0.25)
    container = pod_templates(render({"tracing": tracing}))["gateway"]["spec"]["containers"][0]
    gateway = parse([*container["command"][1:], *container["args"]]).options.config.load()
    assert gateway.tracing == configuration({"tracing": tracing}).tracing == wanted
    assert configuration().tracing == TracingConfig()
    plain = pod_templates(render())["gateway"]["spec"]["containers"][0]["args"]
    assert not any("tracing" in argument for argument in plain)


def test_autoscaling_leaves_the_number_of_gateways_to_the_autoscaler() -> None:
    assert only(render(), "Deployment", "-gateway")["spec"]["replicas"] == 2
    scaled = render({"gateway": {"autoscaling": {"enabled": True, "maxReplicas": 9}}})
    assert "replicas" not in only(scaled, "Deployment", "-gateway")["spec"]
    autoscaler = only(scaled, "HorizontalPodAutoscaler", "-gateway")["spec"]
    assert (autoscaler["maxReplicas"], autoscaler["scaleTargetRef"]["name"]) == (9, "test-ringserve-gateway")


def test_a_service_account_of_ones_own_may_be_named() -> None:
    objects = render({"serviceAccount": {"create": False, "name": "mine"}})
    assert "ServiceAccount" not in kinds(objects)
    assert {each["spec"]["serviceAccountName"] for each in pod_templates(objects).values()} == {"mine"}


def test_the_notes_tell_how_to_call_the_service() -> None:
    notes = render_files(merged(REQUIRED, CUDA))["NOTES.txt"]
    assert "kubectl -n serving port-forward service/test-ringserve 50051" in notes
    assert "2 prefill rings of 4 x 2, 1 decode rings of 2 x 1" in notes
    assert (
        "gateway.insecure lets the gateway serve without TLS and tokens. Restrict its network to permitted clients"
        in notes
    )
    assert "base_url=http://test-ringserve.serving.svc:8000/v1" in notes
    secure = render_files(merged(REQUIRED, SECURE))["NOTES.txt"]
    assert "--tls-ca CA.pem --tls-server-name NAME_IN_THE_CERTIFICATE --tls-cert" in secure
    assert "export RINGSERVE_TOKEN" in secure
    assert "base_url=https://" in secure
    assert "gateway.insecure" not in secure


def test_the_notes_of_an_upgrade_name_the_command_that_does_the_rest_and_the_pods_of_each_ring() -> None:
    values = merged(REQUIRED, CUDA)
    with Chart.load(CHART) as chart:
        rendered = chart.render(values, name="test", namespace="serving", is_upgrade=True, is_install=False)
    (notes,) = (text for name, text in rendered.items() if name.endswith("NOTES.txt"))
    assert "  ringserve restart --kubernetes test-ringserve --namespace serving\n" in notes
    selectors = re.findall(r"kubectl -n serving delete pod -l (\S+)", notes)
    labels = [dict(pair.split("=") for pair in selector.split(",")) for selector in selectors]
    assert [(each.get("ray.io/group"), each.get(INDEX)) for each in labels] == [
        ("prefill", "0"), ("prefill", "1"), ("decode", "0"), (None, None),
    ]  # fmt: skip
    assert {each["ray.io/cluster"] for each in labels} == {"test-ringserve"}
    assert labels[-1]["ray.io/node-type"] == "head"
    assert "restart --kubernetes" not in render_files(values)["NOTES.txt"]


def test_the_values_shown_in_the_readme_render() -> None:
    (example,) = re.findall(
        r"^```\n(image:.*?)^```", (CHART.parent / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    values = yaml.safe_load(example)
    assert render_files(values), "nothing more is required"
    config = configuration(values)
    assert (config.prefill.cp, config.prefill.tp, config.kv_cache.tokens_per_rank) == (4, 2, 1_000_000)
    hosts = [ring["numOfHosts"] for ring in only(render(values), "RayCluster")["spec"]["workerGroupSpecs"]]
    assert hosts == [1, 1]


def test_every_value_is_documented_and_has_its_place_in_the_schema() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load("\n".join(lines))

    def check(node: Mapping[str, Any], part: Mapping[str, Any], path: str) -> None:
        part = schema["definitions"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        for key, value in node.items():
            assert key in part["properties"], f"{path}{key} is not in the schema"
            inner = part["properties"][key]
            inner = schema["definitions"][inner["$ref"].rpartition("/")[2]] if "$ref" in inner else inner
            if isinstance(value, dict) and "properties" in inner:
                assert inner["additionalProperties"] is False
                check(value, inner, f"{path}{key}.")

    check(values, schema, "")
    for number, line in enumerate(lines):
        is_leaf = ": " in line and not line.strip().startswith("#")
        if is_leaf and not line.startswith("    requests") and "limits:" not in line and not _in_context(lines, number):
            above = lines[number - 1].strip()
            assert above.startswith("#"), f"values.yaml:{number + 1} has no comment: {line.strip()}"


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("model.dtype", "model.dtype"),
        ("model.device", "model.device"),
        ("gateway.maxSeconds", "gateway.max_seconds"),
        ("gateway.http.unknownFields", "http.unknown_fields"),
        ("kvTransfer.carrier", "kv_transfer.carrier"),
        ("kvTransfer.slotBytes", "kv_transfer.slot_bytes"),
        ("metrics.tenants", "metrics.tenants"),
        ("tracing.sampleRatio", "tracing.sample_ratio"),
        ("logs.level", "logs.level"),
        ("logs.format", "logs.format"),
    ],
)
def test_a_value_allows_what_its_key_of_the_configuration_allows(value: str, key: str) -> None:
    part = json.loads((CHART / "values.schema.json").read_text())
    for name in value.split("."):
        part = part["properties"][name]
    section, name = key.split(".")
    described = TypeAdapter(Config).json_schema()
    reference = described["properties"][section]["$ref"].rpartition("/")[2]
    allowed = described["$defs"][reference]["properties"][name]
    rules = ("enum", "minimum", "maximum")
    assert any(rule in allowed for rule in rules)
    assert {rule: part.get(rule) for rule in rules} == {rule: allowed.get(rule) for rule in rules}


def _in_context(lines: list[str], number: int) -> bool:
    """Return True inside the two security contexts, which are documented as a whole."""
    tops = [line for line in lines[: number + 1] if line and line[0] not in " #"]
    return tops[-1].startswith(("podSecurityContext", "securityContext"))


def test_the_chart_needs_nothing_that_is_not_in_its_folder() -> None:
    assert not (CHART / "charts").exists()
    assert "dependencies" not in yaml.safe_load(Path(CHART, "Chart.yaml").read_text())
