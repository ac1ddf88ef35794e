"""Rules of single sections and across them: what belongs together, and what excludes each other."""

from __future__ import annotations

from typing import Any

import pytest

from ringserve.orchestration.protocol.rings import PrefillScheduling
from ringserve.services.config import Config, KvCacheConfig, config_from
from tests.services.config.test_config import at, refusal, value_of

ADDRESSES = [
    *("gateway.listen", "gateway.http", "gateway.metrics", "router.listen"),
    *("metrics.router", "metrics.prefill", "metrics.decode"),
]
LOOPBACK = ["127.0.0.1:1", "127.5.5.5:1", "[::1]:1", "localhost:1"]
ELSEWHERE = ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "gateway.example:1", "localhost.example:1"]
TLS = {"cert": "/c.pem", "key": "/k.pem"}
INSIDE = TLS | {"ca": "/ca.pem"}
GPU = {"device": "cuda"}


def test_the_scheduler_gets_the_keys_of_prefill() -> None:
    config = config_from({"prefill": {"step_budget": 2e4, "whole_tokens": 0}})
    assert config.prefill.scheduling == PrefillScheduling(step_budget=2e4, step_seconds=0.5, whole_tokens=0)


def test_a_rank_has_the_whole_blocks_that_fit() -> None:
    assert KvCacheConfig(block_tokens=16, tokens_per_rank=100).num_blocks == 6


@pytest.mark.parametrize("key", ADDRESSES)
@pytest.mark.parametrize("value", ["localhost", ":1", "h:", "h:x", "h:65536", "h:-1", "h:²"])
def test_an_address_is_host_and_port(key: str, value: str) -> None:
    assert refusal(at(key, value)).startswith(f"{key}: {value!r} is not allowed; give HOST:PORT")
    assert value_of(config_from(at(key, "[::1]:65535")), key) == "[::1]:65535"


def test_an_endpoint_is_switched_off_by_an_empty_address_unless_it_is_needed() -> None:
    for key in ADDRESSES:
        if key.endswith("listen"):
            assert refusal(at(key, "")).startswith(f"{key}: '' is not allowed; give HOST:PORT")
        else:
            assert value_of(config_from(at(key, "")), key) == ""


@pytest.mark.parametrize("key", ["listen", "http"])
def test_an_endpoint_that_strangers_would_reach_is_refused_unless_it_is_asked_for(key: str) -> None:
    for address in LOOPBACK:
        config_from({"gateway": {key: address}})
    for address in ELSEWHERE:
        endpoint = {"gateway": {key: address}}
        said = refusal(endpoint)
        assert said.startswith(f"gateway.{key}: {address} is reached from other machines and lacks TLS (tls.cert) and")
        assert said.endswith("gateway.insecure: true")
        assert "lacks tokens (auth.tokens);" in refusal(endpoint | {"tls": TLS})
        assert "lacks TLS (tls.cert);" in refusal(endpoint | {"auth": {"tokens": "/t"}})
        config_from(endpoint | {"tls": TLS, "auth": {"tokens": "/t"}})
        config_from({"gateway": {key: address, "insecure": True}})


def test_endpoints_between_our_own_processes_need_tls_elsewhere_unless_it_is_asked_for() -> None:
    for address in LOOPBACK:
        config_from({"router": {"listen": address}})
    cluster = ("ray.address: the Ray cluster at auto reaches", {"ray": {"address": "auto"}})
    routers = [(f"router.listen: {address} is", {"router": {"listen": address}}) for address in ELSEWHERE]
    for begins, values in (cluster, *routers):
        said = refusal(values)
        assert said.startswith(begins)
        assert said.endswith("lacks TLS (internal_tls.cert); give it, or internal_tls.insecure: true")
        config_from(values | {"internal_tls": INSIDE})
        config_from(values | {"internal_tls": {"insecure": True}})


def test_kv_by_nixl_is_refused_beside_tls_unless_asked_for_and_auto_takes_sockets() -> None:
    by_name, allowed = {"kv_transfer": {"carrier": "nixl"}}, INSIDE | {"allow_plain_kv": True}
    assert refusal(by_name | {"internal_tls": INSIDE}).startswith("kv_transfer.carrier: nixl does not encrypt KV")
    assert config_from(by_name | {"internal_tls": allowed}).kv_carrier == "nixl"
    assert config_from({"internal_tls": INSIDE}).kv_carrier == "sockets"
    assert config_from({"internal_tls": allowed}).kv_carrier == "auto"
    assert config_from({}).kv_carrier == "auto"


def test_a_ring_that_does_not_encrypt_is_refused_beside_tls_unless_asked_for() -> None:
    for model in (GPU, GPU | {"ring_transport": "nccl"}):
        said = refusal({"model": model, "internal_tls": INSIDE})
        assert said.startswith("model.ring_transport: nccl does not encrypt the messages of a ring")
        config_from({"model": model, "internal_tls": INSIDE | {"allow_plain_ring": True}})
        config_from({"model": model})
        # Ranks that are alone send nothing.
        config_from({"model": model, "internal_tls": INSIDE, "prefill": {"cp": 1}, "decode": {"cp": 1}})


def test_paths_of_secrets_are_absolute_as_other_processes_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Config().tls.files, Config().internal_tls.files, Config().auth.tokens) == (None, None, "")
    monkeypatch.chdir("/")
    config = config_from(
        {
            "tls": {"cert": "a/c.pem", "key": "a/k.pem", "client_ca": ""},
            "internal_tls": {"cert": "c", "key": "k", "ca": "/ca", "server_name": "inside"},
            "auth": {"tokens": "t"},
        }
    )
    server, peer = config.tls.files, config.internal_tls.files
    assert server is not None
    assert peer is not None
    assert (server.cert, server.key, server.client_ca) == ("/a/c.pem", "/a/k.pem", "")
    assert (peer.cert, peer.key, peer.ca, peer.server_name) == ("/c", "/k", "/ca", "inside")
    assert config.auth.tokens == "/t"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tls": {"cert": "c"}}, "tls.cert: belongs together with tls.key"),
        ({"tls": {"key": "k"}}, "tls.cert: belongs together with tls.key"),
        ({"tls": {"client_ca": "c"}}, "tls.client_ca: client certificates need a server with TLS"),
        ({"internal_tls": {"cert": "c", "key": "k"}}, "internal_tls.cert: belongs together with"),
        ({"internal_tls": {"ca": "c"}}, "internal_tls.cert: belongs together with"),
        (
            {"timeouts": {"heartbeat": 3.0, "lost": 5.0}},
            "timeouts.lost: 5 is not allowed with timeouts.heartbeat 3; give twice that or more",
        ),
        (
            {"kv_cache": {"block_tokens": 64, "tokens_per_rank": 63}},
            "kv_cache.tokens_per_rank: 63 is not allowed; give at least one block, which is 64 tokens",
        ),
        (
            {"kv_cache": {"memory_fraction": 0.9}},
            "kv_cache.memory_fraction: 0.9 needs ranks with a whole GPU each; give kv_cache.tokens_per_rank instead",
        ),
        (
            {"kv_cache": {"memory_fraction": 0.9}, "model": GPU | {"gpus_per_rank": 0.5}},
            "kv_cache.memory_fraction: 0.9 needs ranks with a whole GPU each",
        ),
        (
            {"kv_cache": {"memory_fraction": 0.9, "tokens_per_rank": 1000}, "model": GPU},
            "kv_cache.memory_fraction: 0.9 is not allowed beside kv_cache.tokens_per_rank 1000; give one of them",
        ),
        (
            {"model": {"quantization": "fp8", "dtype": "bfloat16"}},
            "model.quantization: 'fp8' is not allowed with cpu and bfloat16; give model.device cuda and model.dtype",
        ),
        (
            {"model": GPU | {"quantization": "fp8", "dtype": "float16"}},
            "model.quantization: 'fp8' is not allowed with cuda and float16",
        ),
        (
            {"decode": {"rings": 2, "min_rings": 4, "pools": {"a": {"rings": 1}}}},
            "decode.min_rings: 4 is not allowed with 3 decode rings; give 0 to 3",
        ),
        (
            {"decode": {"variant": "helix", "tp": 2}},
            "decode.variant: 'helix' is not allowed with decode.tp 2; give tp 1",
        ),
        (
            {"decode": {"variant": "helix", "pools": {"a": {"tp": 2}}}},
            "decode.variant: 'helix' is not allowed with decode.pools.a.tp 2",
        ),
        (
            {"model": {"ring_transport": "nccl"}},
            "model.ring_transport: ring transport 'nccl' does not support device 'cpu'; allowed are auto, sockets",
        ),
        ({"logs": {"levels": "x"}}, "logs.levels: 'x' is not allowed; give MODULE=LEVEL"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(values: dict[str, dict[str, Any]], said: str) -> None:
    assert refusal(values).startswith(said)


def test_memory_sizes_the_kv_of_whole_gpus() -> None:
    assert config_from({"kv_cache": {"memory_fraction": 0.9}, "model": GPU}).kv_cache.memory_fraction == 0.9
