"""Ends of pods: turns end first. Evictions: which pods may be evicted."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from ringserve.services.cli.main import parse
from tests.helm.charts import AUTOSCALED, CUDA, SECURE, mounted_config, only, pod_templates, render


def configuration(*values: Mapping[str, Any]) -> Any:
    return yaml.safe_load(mounted_config(render(*values))["config.yaml"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pod_of_a_ring_drains_it_before_it_ends(role: str) -> None:
    spec = pod_templates(render(SECURE, {role: {"terminationGracePeriodSeconds": 400}}))[role]["spec"]
    (container,) = spec["containers"]
    shell, flag, line = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    program, *words = shlex.split(line.removeprefix("exec ").replace("$POD_IP", "10.0.0.7"))
    assert program == "ringserve"
    options = parse(words).options
    assert (options.node, options.router.target) == ("10.0.0.7", "test-ringserve-router:50050")
    assert options.router.config.config is None, "the head alone mounts the configuration"
    tls = options.router.config.load().internal_tls
    assert tls.files is not None
    assert (str(tls.cert), tls.server_name) == ("/etc/ringserve-internal/tls.crt", "ringserve.internal")
    assert options.seconds == 340 < spec["terminationGracePeriodSeconds"] == 400
    (address,) = (each for each in container["env"] if each["name"] == "POD_IP")
    assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_the_head_lets_turns_end_before_it_ends() -> None:
    spec = pod_templates(render({"head": {"terminationGracePeriodSeconds": 200}}))["head"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 200
    command = spec["containers"][0]["command"]
    assert command == ["/bin/bash", "/etc/ringserve/head.sh", "/etc/ringserve/config.yaml", "140"]
    short = pod_templates(render({"head": {"terminationGracePeriodSeconds": 9}}))["head"]["spec"]
    assert short["containers"][0]["command"][-1] == "0"


def test_a_gateway_serves_until_nobody_is_sent_to_it_and_then_ends_its_turns() -> None:
    values = {"gateway": {"terminationGracePeriodSeconds": 120, "preStopSeconds": 7}}
    spec = pod_templates(render(values))["gateway"]["spec"]
    (container,) = spec["containers"]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert "--drain-seconds=98" in container["args"]
    assert spec["terminationGracePeriodSeconds"] == 120
    (at_once,) = pod_templates(render({"gateway": {"preStopSeconds": 0}}))["gateway"]["spec"]["containers"]
    assert "lifecycle" not in at_once
    rolling = only(render(), "Deployment", "-gateway")["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxUnavailable": 0, "maxSurge": 1}


def test_rings_may_be_away_one_of_a_pool_at_a_time_and_the_head_never() -> None:
    """Kubernetes refuses every eviction of a RayCluster's pods under a budget with maxUnavailable, for ever."""
    long = {"parallelism": {"cp": 4, "tp": 1}, "ranksPerPod": 2, "replicas": 3}
    decode = {"replicas": 2, "parallelism": {"cp": 2, "tp": 1}, "ranksPerPod": 2}
    sizes = {"prefill": {"replicas": 1, "pools": {"long": long}}, "decode": decode}
    objects = render({"podDisruptionBudget": {"enabled": True, "ringsMaxUnavailable": 1}}, sizes)
    specs = {
        each["metadata"]["name"].removeprefix("test-ringserve-"): each["spec"]
        for each in objects
        if each["kind"] == "PodDisruptionBudget"
    }
    assert specs.pop("gateway")["maxUnavailable"] == 1, "a Deployment's pods can be counted"
    assert {name: spec["minAvailable"] for name, spec in specs.items()} == {
        "head": 1,
        "prefill": 0,
        "prefill-long": 4,  # two of three rings, each of two pods
        "decode": 1,
    }
    assert not any("maxUnavailable" in spec for spec in specs.values())
    groups = {each["groupName"] for each in only(objects, "RayCluster")["spec"]["workerGroupSpecs"]}
    for name, spec in specs.items():
        labels = dict(spec["selector"]["matchLabels"])
        if name != "head":
            assert labels.pop("ray.io/group") in groups, "KubeRay labels pods so"
        template = pod_templates(objects)[labels["app.kubernetes.io/component"]]
        assert labels.items() <= template["metadata"]["labels"].items()


def test_pods_follow_rings_where_ray_scales() -> None:
    cluster = only(render(CUDA, AUTOSCALED), "RayCluster")["spec"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["autoscalerOptions"]["idleTimeoutSeconds"] == 120
    assert cluster["autoscalerOptions"]["securityContext"]["readOnlyRootFilesystem"] is True
    replicas = {
        ring["groupName"]: tuple(ring[key] for key in ("replicas", "minReplicas", "maxReplicas", "numOfHosts"))
        for ring in cluster["workerGroupSpecs"]
    }
    # As many hosts as a ring has pods: Ray adds and removes whole rings.
    assert replicas == {"prefill": (2, 0, 3, 2), "decode": (1, 1, 1, 2)}
    assert configuration(CUDA, AUTOSCALED)["prefill"]["rings"] == 2
    further = render(
        AUTOSCALED, {"prefill": {"pools": {"short": {"parallelism": {"cp": 1, "tp": 1}, "maxReplicas": 2}}}}
    )
    short = only(further, "RayCluster")["spec"]["workerGroupSpecs"][1]
    assert (short["groupName"], short["minReplicas"], short["maxReplicas"]) == ("prefill-short", 1, 2), "of its own"
    tokens = {
        name: each["spec"]["automountServiceAccountToken"] for name, each in pod_templates(render(AUTOSCALED)).items()
    }
    assert tokens == {"head": True, "gateway": False, "prefill": False, "decode": False}
    assert "enableInTreeAutoscaling" not in only(render(), "RayCluster")["spec"]
