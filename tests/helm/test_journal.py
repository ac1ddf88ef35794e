"""The router's journal in the chart."""

from __future__ import annotations

import ray

from tests.helm.charts import Object, only, pod_templates, render
from tests.helm.test_render import configuration


def test_the_journal_has_a_volume_on_the_head_alone_and_is_written_there() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "journal"}}
    values = {"head": {"journalVolume": claim}}
    assert configuration(values).router.journal == "/var/lib/ringserve/journal"
    assert configuration().router.journal == "auto"
    for name, template in pod_templates(render(values)).items():
        mounts = template["spec"]["containers"][0]["volumeMounts"]
        is_head = name == "head"
        assert ({"name": "journal", **claim} in template["spec"]["volumes"]) == is_head
        assert ({"name": "journal", "mountPath": "/var/lib/ringserve"} in mounts) == is_head


def test_rays_own_state_lies_beside_the_journal_so_that_ranks_outlive_the_head() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "journal"}}
    templates = pod_templates(render({"head": {"journalVolume": claim}, "ray": {"gcsStorage": "volume"}}))
    env = {
        name: {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}
        for name, template in templates.items()
    }
    assert env["head"]["RAY_gcs_storage"] == "rocksdb"
    assert env["head"]["RAY_gcs_storage_path"] == f"/var/lib/ringserve/gcs-{ray.__version__}"
    for name in ("prefill", "decode"):
        assert env[name]["RAY_gcs_rpc_server_reconnect_timeout_s"] == "600"
        assert "RAY_gcs_storage" not in env[name]
    assert not any(key.startswith("RAY_gcs") for key in env["gateway"])
    assert not any("RAY_gcs" in str(template) for template in pod_templates(render()).values())


def test_redis_is_handed_to_kuberay_with_its_password_by_reference() -> None:
    redis = {"address": "redis.serving:6379", "passwordSecret": "redis"}
    spec = only(render({"ray": {"gcsStorage": "redis", "redis": redis}}), "RayCluster")["spec"]
    assert spec["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.serving:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
    }


def test_further_fields_of_the_raycluster_are_passed_on_but_not_its_groups() -> None:
    further = {"upgradeStrategy": {"type": "Recreate"}, "tlsOptions": {"enabled": True}, "headGroupSpec": {}}
    spec = only(render({"ray": {"spec": further}}), "RayCluster")["spec"]
    assert spec["upgradeStrategy"] == {"type": "Recreate"}
    assert spec["tlsOptions"] == {"enabled": True}
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["template"]


def test_each_content_of_the_configuration_has_an_object_of_its_own_that_never_changes() -> None:
    """A container that restarts after `helm upgrade` still reads what its pod began with."""
    first, second = render(), render({"config": {"router": {"max_conversations": 7}}})

    def name(objects: list[Object]) -> str:
        (found,) = (item for item in objects if item["kind"] == "ConfigMap" and "config.yaml" in item["data"])
        assert found["immutable"] is True
        mounted = {
            volume["configMap"]["name"]
            for template in pod_templates(objects).values()
            for volume in template["spec"]["volumes"]
            if "configMap" in volume
        }
        assert mounted == {found["metadata"]["name"]}, "the head mounts it"
        return str(found["metadata"]["name"])

    assert name(first) == name(render())
    assert name(first) != name(second)
