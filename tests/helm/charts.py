"""Rendering of the chart by Helm, offline."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "ringserve"
Object = dict[str, Any]
"""A Kubernetes object."""
REQUIRED: Object = {
    "image": {"repository": "registry.example/ringserve"},
    "gateway": {"insecure": True},
    "internalTls": {"insecure": True},
}
SECURE: Object = {
    "gateway": {
        "insecure": False,
        "tls": {"secretName": "gateway-tls", "clientCertificates": True},
        "tokens": {"secretName": "tenants", "key": "who.yaml"},
    },
    "internalTls": {"insecure": False, "secretName": "inside"},
}
CUDA: Object = {
    "model": {"device": "cuda", "path": "/models/llama", "numKvHeads": 8, "volume": {"emptyDir": {}}},
    "prefill": {
        "replicas": 2,
        "parallelism": {"cp": 4, "tp": 2},
        "ranksPerPod": 4,
        "resources": {"limits": {"nvidia.com/gpu": 4}},
    },
    "decode": {"parallelism": {"cp": 2, "tp": 1}, "resources": {"limits": {"nvidia.com/gpu": 1}}},
}
ALL_OPTIONS: Object = {
    "image": {"pullSecrets": [{"name": "registry"}]},
    "gateway": {
        "autoscaling": {"enabled": True},
        "service": {"annotations": {"a": "b"}},
        "ingress": {"enabled": True, "host": "chat.example", "className": "nginx", "tlsSecretName": "public"},
        "routes": {"parentRefs": [{"name": "public"}], "grpcHostnames": ["grpc.example"]},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
    },
    "metrics": {
        "vllmNames": True,
        "serviceMonitor": {"enabled": True},
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True},
    },
    "networkPolicy": {"enabled": True, "egress": {"enabled": True}},
    "podDisruptionBudget": {"enabled": True},
}
POOLS: Object = {
    "prefill": {
        "nodeSelector": {"gpu": "large"},
        "config": {"chunk_tokens": 8192},
        "pools": {
            "wide": {"parallelism": {"cp": 8, "tp": 2}},
            "short": {
                "replicas": 3,
                "parallelism": {"cp": 1, "tp": 1},
                "ranksPerPod": 1,
                "threadsPerRank": 2,
                "nodeSelector": {"disk": "fast"},
                "resources": {"limits": {"nvidia.com/gpu": 1}},
            },
        },
    },
    "decode": {"pools": {"small": {"parallelism": {"cp": 1, "tp": 1}}}},
}
"""Further values, to be merged over CUDA."""

AUTOSCALED: Object = {
    "ray": {"autoscaling": {"enabled": True, "idleTimeoutSeconds": 120}},
    "prefill": {"replicas": 2, "minReplicas": 0, "maxReplicas": 3},
}


def merged(*parts: Mapping[str, Any]) -> Object:
    """Merge values recursively; later ones override earlier ones."""
    result: Object = {}
    for part in parts:
        for key, value in part.items():
            is_both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if is_both else copy.deepcopy(value)
    return result


def render_files(values: Mapping[str, Any]) -> dict[str, str]:
    """Return rendered texts by file name; errors are Helm's."""
    with Chart.load(CHART) as chart:
        rendered = chart.render(dict(values), name="test", namespace="serving")
    return {Path(name).name: text for name, text in rendered.items()}


def render(*values: Mapping[str, Any]) -> list[Object]:
    """Render all objects of a release `test` with the required values and `values` over them."""
    files = render_files(merged(REQUIRED, *values))
    texts = (text for name, text in files.items() if name.endswith(".yaml"))
    return [item for text in texts for item in yaml.safe_load_all(text) if item]


def only(objects: Sequence[Object], kind: str, suffix: str = "") -> Object:
    """Return the one object of a kind whose name is the release's and `suffix`."""
    name = f"test-ringserve{suffix}"
    (found,) = (item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name)
    return found


def mounted_config(objects: Sequence[Object]) -> Object:
    """Return the files that every pod mounts at /etc/ringserve, by name."""
    (found,) = (item["data"] for item in objects if item["kind"] == "ConfigMap" and "config.yaml" in item["data"])
    files: Object = found
    return files


def kinds(objects: Sequence[Object]) -> set[str]:
    return {item["kind"] for item in objects}


def pod_templates(objects: Sequence[Object]) -> dict[str, Object]:
    """Return pod templates by component: gateway, head, prefill, decode."""
    cluster = only(objects, "RayCluster")["spec"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    gateway = only(objects, "Deployment", "-gateway")["spec"]["template"]
    return {"gateway": gateway, "head": cluster["headGroupSpec"]["template"], **groups}


def released_rules(release: str) -> Any:
    """Return the chart's rules as a release installs them: it misses its own processes and has limits of its own."""
    text = (CHART / "files/rules.yaml").read_text()
    assert text.count("absent_over_time(") == text.count("absent_over_time(ringserve_build_info{") == 2
    return yaml.safe_load(
        text.replace("ringserve_build_info{", f'ringserve_build_info{{ringserve_cluster="{release}", ')
    )
