"""Pools of several sizes in the chart: ringserve's configuration agrees with the Kubernetes objects."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from helm_python import HelmError, lint

from ringserve.services.cluster.hosts import LeaderHost
from ringserve.services.config import Config, config_from
from tests.helm.charts import (
    ALL_OPTIONS,
    CHART,
    CUDA,
    POOLS,
    REQUIRED,
    Object,
    merged,
    mounted_config,
    only,
    pod_templates,
    render,
    render_files,
)


def configuration(objects: list[Object]) -> Config:
    return config_from(yaml.safe_load(mounted_config(objects)["config.yaml"]))


def worker_groups(objects: list[Object]) -> dict[str, Object]:
    return {group["groupName"]: group for group in only(objects, "RayCluster")["spec"]["workerGroupSpecs"]}


def test_each_pool_is_a_worker_group_whose_pods_its_rings_fill() -> None:
    objects = render(CUDA, POOLS)
    groups, config = worker_groups(objects), configuration(objects)
    found = {pool.ring_name(0).rpartition("-")[0]: pool for pool in config.pools}
    assert list(groups) == list(found) == ["prefill", "prefill-short", "prefill-wide", "decode", "decode-small"]
    for name, pool in found.items():
        group = groups[name]
        (text,) = shlex.split(group["rayStartParams"]["resources"])
        ((resource, per_pod),) = json.loads(text).items()
        assert (pool.rings, pool.resource) == (group["replicas"], resource)
        assert pool.cp * pool.tp == group["numOfHosts"] * per_pod
        assert group["rayStartParams"]["num-gpus"] == str(per_pod)
        assert group["rayStartParams"]["num-cpus"] == str(per_pod * pool.threads_per_rank)
        assert group["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == pool.role
    resources = [pool.resource for pool in config.pools]
    assert len(set(resources)) == len(resources), "no ring takes the place of another pool's"
    assert [(pool.rings, pool.cp, pool.tp) for pool in config.pools_of("prefill")] == [(2, 4, 2), (3, 1, 1), (1, 8, 2)]
    assert config.prefill.chunk_tokens == 8192


def test_what_a_pool_does_not_say_is_as_its_role_says_it_and_what_it_says_is_taken_whole() -> None:
    groups = worker_groups(render(CUDA, POOLS))
    wide, short = (groups[f"prefill-{name}"]["template"]["spec"] for name in ("wide", "short"))
    assert wide["nodeSelector"] == {"gpu": "large"}
    assert wide["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert groups["prefill-wide"]["numOfHosts"] == 4
    assert short["nodeSelector"] == {"disk": "fast"}
    assert short["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 1, "memory": "4Gi"}


def test_every_ring_of_every_pool_serves_its_metrics_where_it_is_scraped() -> None:
    objects = render(CUDA, ALL_OPTIONS, POOLS)
    config = configuration(objects)
    ports = pod_templates(objects)["head"]["spec"]["containers"][0]["ports"]
    opened = {port["containerPort"]: port["name"] for port in ports}
    hosts = [
        LeaderHost(config=config, model_path="", fingerprint="", pool=pool, number=number, router_endpoint="")
        for pool in config.pools
        for number in range(pool.rings)
    ]
    served = [int(host.metrics_address().rpartition(":")[2]) for host in hosts]
    assert len(set(served)) == len(hosts) == 8
    names = {opened[port] for port in served}
    monitored = {each["port"] for each in only(objects, "PodMonitor", "-rings")["spec"]["podMetricsEndpoints"]}
    assert names | {"m-router"} == monitored
    assert all(len(port["name"]) <= 15 for port in ports), "Kubernetes takes no longer names"


def test_a_pool_without_a_size_of_its_own_is_one_ring() -> None:
    config = configuration(render({"decode": {"replicas": 4, "pools": {"small": {"parallelism": {"cp": 1, "tp": 1}}}}}))
    assert [pool.rings for pool in config.pools_of("decode")] == [4, 1]


def test_the_notes_name_the_rings_of_all_pools() -> None:
    notes = render_files(merged(REQUIRED, CUDA, POOLS))["NOTES.txt"]
    assert (
        "2 prefill rings of 4 x 2, 3 prefill rings of 1 x 1, 1 prefill rings of 8 x 2, 1 decode rings of 2 x 1" in notes
    )


def test_the_pool_shown_in_the_readme_renders() -> None:
    found = re.findall(r"^```(\w*)\n(.*?)^```", (CHART.parent / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    values = [yaml.safe_load(example) for language, example in found if not language]
    (pools,) = (each for each in values if "pools" in each["prefill"])
    (whole,) = (each for each in values if "image" in each)
    config = configuration(render(whole, pools))
    assert [(pool.rings, pool.cp, pool.tp) for pool in config.pools_of("prefill")] == [(1, 4, 2), (4, 1, 2)]


def test_a_chart_with_pools_lints_strictly() -> None:
    report = lint(CHART, merged(REQUIRED, CUDA, ALL_OPTIONS, POOLS), strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"model": {"numKvHeads": 8}, "prefill": {"pools": {"odd": {"parallelism": {"cp": 1, "tp": 3}}}}},
            "prefill.pools.odd.parallelism.tp: 3 does not divide the model's 8 KV heads",
        ),
        (
            merged(CUDA, {"prefill": {"pools": {"short": {"parallelism": {"cp": 1, "tp": 1}}}}}),
            "prefill.pools.short.ranksPerPod: 4 does not divide cp * tp = 1",
        ),
        (
            merged(CUDA, {"prefill": {"pools": {"short": {"parallelism": {"cp": 2, "tp": 1}, "ranksPerPod": 2}}}}),
            "prefill.pools.short.resources: limit nvidia.com/gpu is ",
        ),
        (
            {"decode": {"replicas": 60, "pools": {"a": {"replicas": 41, "parallelism": {"cp": 1, "tp": 1}}}}},
            "decode: its pools have 101 rings together; at most 100 have metrics ports",
        ),
        ({"decode": {"pools": {"Small": {"parallelism": {"cp": 1, "tp": 1}}}}}, "Small"),
        ({"decode": {"pools": {"small": {}}}}, "parallelism"),
        ({"decode": {"pools": {"small": {"parallelism": {"cp": 1, "tp": 1}, "config": {}}}}}, "config"),
        ({"decode": {"pools": {"small": {"parallelism": {"cp": 0, "tp": 1}}}}}, "cp"),
    ],
)
def test_pools_that_cannot_work_are_refused(values: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(HelmError) as refusal:
        render_files(merged(REQUIRED, values))
    assert sentence in str(refusal.value)
