"""Endpoints of our own processes: which may be plain, and where."""

from __future__ import annotations

from ringserve.services.config import config_from
from tests.services.config.test_config import ELSEWHERE, LOOPBACK, refusal

INSIDE = {"cert": "/c.pem", "key": "/k.pem", "ca": "/ca.pem"}


def test_endpoints_between_our_own_processes_are_refused_elsewhere_unless_asked_for() -> None:
    for address in LOOPBACK:
        config_from({"router": {"listen": address}})
    for address in ELSEWHERE:
        endpoint = {"router": {"listen": address}}
        assert refusal(endpoint) == (
            f"router.listen: {address} is reached from other machines and lacks TLS (internal_tls.cert); "
            "give it, or say internal_tls.insecure: true"
        )
        config_from(endpoint | {"internal_tls": INSIDE})
        config_from(endpoint | {"internal_tls": {"insecure": True}})
    cluster = {"ray": {"address": "auto"}}
    said = refusal(cluster)
    assert said.startswith("ray.address: on the Ray cluster at auto leaders and ranks listen at the addresses of their")
    assert said.endswith("lack TLS (internal_tls.cert); give it, or say internal_tls.insecure: true")
    config_from(cluster | {"internal_tls": INSIDE})
    config_from(cluster | {"internal_tls": {"insecure": True}})


def test_kv_by_nixl_is_refused_beside_tls_unless_asked_for_and_auto_takes_sockets() -> None:
    by_name = {"kv_transfer": {"carrier": "nixl"}}
    said = refusal(by_name | {"internal_tls": INSIDE})
    assert said.startswith("kv_transfer.carrier: nixl does not encrypt KV between rings, and internal_tls is set")
    assert said.endswith("use sockets, or say internal_tls.allow_plain_kv: true")
    allowed = INSIDE | {"allow_plain_kv": True}
    assert config_from(by_name | {"internal_tls": allowed}).kv_carrier == "nixl"
    assert config_from({"internal_tls": INSIDE}).kv_carrier == "sockets"
    assert config_from({"internal_tls": allowed}).kv_carrier == "auto"
    assert config_from({}).kv_carrier == "auto"


def test_a_ring_that_does_not_encrypt_is_refused_beside_tls_unless_asked_for() -> None:
    named = {"device": "cuda", "ring_transport": "nccl"}
    for model, name in ((named, "nccl"), ({"device": "cuda"}, "nccl")):
        said = refusal({"model": model, "internal_tls": INSIDE})
        assert said.startswith(
            f"model.ring_transport: {name} does not encrypt what the ranks of a ring send each other"
        )
        assert said.endswith("use sockets, or say internal_tls.allow_plain_ring: true")
        config_from({"model": model, "internal_tls": INSIDE | {"allow_plain_ring": True}})
        config_from({"model": model})
        # Ranks that are alone send nothing.
        config_from({"model": model, "internal_tls": INSIDE, "prefill": {"cp": 1}, "decode": {"cp": 1}})
