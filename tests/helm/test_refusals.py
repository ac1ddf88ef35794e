"""Refusals of impossible values by a sentence, before anything is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from helm_python import HelmError

from tests.helm.charts import AUTOSCALED, CUDA, REQUIRED, merged, render_files

CASES: dict[str, tuple[Mapping[str, Any], str]] = {
    "no image": ({"image": {"repository": ""}}, "image.repository: required; build an image"),
    "tp without the number of KV heads": (
        {"decode": {"parallelism": {"cp": 1, "tp": 2}}},
        "model.numKvHeads: required because decode.parallelism.tp is 2",
    ),
    "tp that does not divide the KV heads": (
        {"model": {"numKvHeads": 8}, "prefill": {"parallelism": {"cp": 1, "tp": 3}}},
        "prefill.parallelism.tp: 3 does not divide the model's 8 KV heads",
    ),
    "pods that a ring does not fill": (
        {"prefill": {"parallelism": {"cp": 3, "tp": 1}, "ranksPerPod": 2}},
        "prefill.ranksPerPod: 2 does not divide cp * tp = 3",
    ),
    "processes of a rank in several pods": (
        {"model": {"numKvHeads": 8}, "decode": {"parallelism": {"cp": 2, "tp": 4}, "ranksPerPod": 2}},
        "decode.ranksPerPod: 2 is no multiple of tp = 4; the processes that share heads are in one pod",
    ),
    "a CUDA image without GPUs": (
        {"model": {"device": "cuda"}},
        "prefill.resources: limit nvidia.com/gpu is 0; model.device cuda and 1 processes in a pod need 1",
    ),
    "fewer GPUs than processes": (
        merged(CUDA, {"prefill": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}),
        "limit nvidia.com/gpu is 2; model.device cuda and 4 processes in a pod need 4",
    ),
    "GPUs for a CPU image": (
        {"decode": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
        "decode.resources: 1 GPUs would be idle, since model.device is cpu",
    ),
    "a model directory on no volume": (
        {"model": {"path": "/models/llama"}},
        "model.volume: required because model.path is /models/llama",
    ),
    "a model outside its volume": (
        {"model": {"path": "/data/llama", "volume": {"emptyDir": {}}}},
        "model.path: /data/llama does not lie under model.mountPath /models",
    ),
    "an open gateway without gateway.insecure": (
        {"gateway": {"insecure": False}},
        "gateway.tls.secretName and gateway.tokens.secretName: required, since the whole cluster reaches the gateway",
    ),
    "tokens in clear text": (
        {"gateway": {"insecure": False, "tokens": {"secretName": "tenants"}}},
        "gateway.tls.secretName: required, since the whole cluster reaches the gateway",
    ),
    "certificates of clients without TLS": (
        {"gateway": {"tls": {"clientCertificates": True}}},
        "gateway.tls.clientCertificates: clients show certificates only with gateway.tls.secretName",
    ),
    "open ranks without internalTls.insecure": (
        {"internalTls": {"insecure": False}},
        "internalTls.secretName: required, since the cluster reaches router, leaders and ranks",
    ),
    "an open Ray without internalTls.insecure": (
        {"internalTls": {"insecure": False, "secretName": "inside"}, "ray": {"tokenAuthentication": False}},
        "ray.tokenAuthentication: true is required, since Ray runs any peer's code",
    ),
    "Ray's state on a volume that is not there": (
        {"ray": {"gcsStorage": "volume"}},
        "ray.gcsStorage: volume is head.journalVolume, which is empty",
    ),
    "Ray's state in a Redis without an address": (
        {"ray": {"gcsStorage": "redis"}},
        "ray.redis.address: required with ray.gcsStorage redis",
    ),
    "certificates without a server name": (
        {"internalTls": {"secretName": "inside", "serverName": ""}},
        "internalTls.serverName: required with internalTls.secretName",
    ),
    "rings of GPUs without encryption and without allowPlainRing": (
        merged(CUDA, {"internalTls": {"secretName": "inside"}}),
        "internalTls.allowPlainRing: true is required with model.device cuda, since NCCL does not encrypt",
    ),
    "KV without encryption and without allowPlainKv": (
        {"internalTls": {"secretName": "inside"}, "kvTransfer": {"carrier": "nixl"}},
        "internalTls.allowPlainKv: true is required with kvTransfer.carrier nixl, since NIXL does not encrypt",
    ),
    "a maximum below the minimum": (
        {"gateway": {"autoscaling": {"minReplicas": 5}}},
        "gateway.autoscaling: maxReplicas 4 is less than minReplicas 5",
    ),
    "limits for the autoscaler while it is off": (
        {"decode": {"maxReplicas": 2}},
        "decode.maxReplicas: 2 is for Ray's autoscaler, which is off",
    ),
    "a minimum of pods above the number of rings": (
        merged(AUTOSCALED, {"prefill": {"minReplicas": 3}}),
        "prefill.minReplicas: 3 is more than the 2 rings of prefill.replicas",
    ),
    "a maximum of pods below the number of rings": (
        merged(AUTOSCALED, {"prefill": {"maxReplicas": 1}}),
        "prefill.maxReplicas: 1 is less than the 2 rings of prefill.replicas",
    ),
    "a gateway that is ended before its turns": (
        {"gateway": {"terminationGracePeriodSeconds": 19}},
        "gateway.terminationGracePeriodSeconds: 19 leaves turns no time; preStopSeconds 5 + 15 is the minimum",
    ),
    "a misspelt key": ({"prefil": {}}, "prefil"),
    "a misspelt inner key": ({"prefill": {"replica": 2}}, "replica"),
    "no rings": ({"decode": {"replicas": 0}}, "replicas"),
    "an unknown device": ({"model": {"device": "tpu"}}, "device"),
    "a relative model path": ({"model": {"path": "llama"}}, "path"),
    "a section that is none": ({"config": {"logs": "debug"}}, "logs"),
}


@pytest.mark.parametrize("case", CASES)
def test_values_that_cannot_work_are_refused(case: str) -> None:
    values, sentence = CASES[case]
    with pytest.raises(HelmError) as refusal:
        render_files(merged(REQUIRED, values))
    assert sentence in str(refusal.value)
