"""Sizes of KV: what fits, and those that exclude each other."""

from __future__ import annotations

from typing import Any

import pytest

from ringserve.cp_core.errors import ConfigError
from ringserve.services.config import KvCacheConfig
from ringserve.services.config.reading import config_from

FRACTION: dict[str, dict[str, Any]] = {"kv_cache": {"memory_fraction": 0.9}}


def test_a_rank_has_the_whole_blocks_that_fit() -> None:
    assert KvCacheConfig(block_tokens=16, tokens_per_rank=100).num_blocks == 6


def test_fewer_tokens_than_one_block_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        config_from({"kv_cache": {"block_tokens": 64, "tokens_per_rank": 63}})
    assert str(refused.value) == f"kv_cache.tokens_per_rank: 63 is out of range; allowed is 64 to {1 << 30}"


@pytest.mark.parametrize("model", [{}, {"device": "cuda", "gpus_per_rank": 0.5}])
def test_memory_sizes_the_kv_of_whole_gpus_alone(model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from(FRACTION | {"model": model})
    assert str(refused.value) == (
        "kv_cache.memory_fraction: 0.9 is for ranks with a whole GPU each; allowed is kv_cache.tokens_per_rank instead"
    )


def test_memory_and_a_number_of_tokens_exclude_each_other() -> None:
    gpu: dict[str, dict[str, Any]] = {"model": {"device": "cuda"}}
    assert config_from(FRACTION | gpu).kv_cache.memory_fraction == 0.9
    with pytest.raises(ConfigError) as refused:
        config_from(gpu | {"kv_cache": {"memory_fraction": 0.9, "tokens_per_rank": 1000}})
    assert str(refused.value) == (
        "kv_cache.memory_fraction: 0.9 is set beside kv_cache.tokens_per_rank 1000; allowed is one of them"
    )
