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
    "a CUDA image without GPUs": (
        {"model": {"device": "cuda"}},
        "prefill.resources: model.device is cuda and 1 processes run in a pod, so its limit nvidia.com/gpu must be 1 ",
    ),
    "fewer GPUs than processes": (
        merged(CUDA, {"prefill": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}),
        "must be 4 and is 2",
    ),
    "GPUs for a CPU image": (
        {"decode": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
        "decode.resources: 1 GPUs are asked for and model.device is cpu",
    ),
    "a model directory on no volume": (
        {"model": {"path": "/models/llama"}},
        "model.volume: required because model.path is /models/llama",
    ),
    "a model outside its volume": (
        {"model": {"path": "/data/llama", "volume": {"emptyDir": {}}}},
        "model.path: /data/llama does not lie under model.mountPath /models",
    ),
    "doors open to all, and nobody said so": (
        {"gateway": {"insecure": False}},
        "gateway.tls.secretName and gateway.tokens.secretName: required, since the whole cluster reaches the gateway",
    ),
    "tokens in clear text": (
        {"gateway": {"insecure": False, "tokens": {"secretName": "tenants"}}},
        "gateway.tls.secretName: required, since the whole cluster reaches the gateway",
    ),
    "certificates of clients without TLS": (
        {"gateway": {"tls": {"clientCertificates": True}}},
        "gateway.tls.clientCertificates: clients can prove themselves only to a gateway with gateway.tls.secretName",
    ),
    "ranks open to all, and nobody said so": (
        {"internalTls": {"insecure": False}},
        "internalTls.secretName: required, since the whole cluster reaches router, leaders and ranks",
    ),
    "a Ray open to all, and nobody said so": (
        {"internalTls": {"insecure": False, "secretName": "inside"}, "ray": {"tokenAuthentication": False}},
        "ray.tokenAuthentication: required, since whoever reaches Ray can run code",
    ),
    "certificates that name nobody": (
        {"internalTls": {"secretName": "inside", "serverName": ""}},
        "internalTls.serverName: required with internalTls.secretName",
    ),
    "rings of GPUs that do not encrypt, and nobody said so": (
        merged(CUDA, {"internalTls": {"secretName": "inside"}}),
        "internalTls.allowPlainRing: required, since with model.device cuda rings go by NCCL",
    ),
    "an autoscaler upside down": (
        {"gateway": {"autoscaling": {"minReplicas": 5}}},
        "gateway.autoscaling: maxReplicas 4 is less than minReplicas 5",
    ),
    "ring pods that scale without the autoscaler": (
        {"decode": {"maxReplicas": 2}},
        "decode.maxReplicas: 2 is for Ray's autoscaler, which is off",
    ),
    "more pods kept than there are rings": (
        merged(AUTOSCALED, {"prefill": {"minReplicas": 3}}),
        "prefill.minReplicas: 3 is more than the 2 rings of prefill.replicas",
    ),
    "fewer pods than there are rings": (
        merged(AUTOSCALED, {"prefill": {"maxReplicas": 1}}),
        "prefill.maxReplicas: 1 is less than the 2 rings of prefill.replicas",
    ),
    "a gateway that is ended before its turns": (
        {"gateway": {"terminationGracePeriodSeconds": 19}},
        "gateway.terminationGracePeriodSeconds: 19 leaves turns no time after preStopSeconds 5",
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
