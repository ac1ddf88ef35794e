"""Decisions of a rank at its start: how much KV it has, which weights it may quantise, whether it compiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringserve.cp_core.errors import ConfigError
from ringserve.workers.model.info import read_model_info
from ringserve.workers.protocol.ranks import RankSettings
from ringserve.workers.rank import parts
from ringserve.workers.rank.parts import check_quantization, compilation_of, num_blocks_of
from tests.rings import LLAMA_8B

GPU = RankSettings(
    model_path="model", device="cuda:0", num_blocks=9, block_tokens=16, kv_memory_fraction=0.5, kv_slot_bytes=1 << 20
)
BLOCK_BYTES = 16 * LLAMA_8B.kv_bytes_per_token


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a GPU have 1001 blocks free once torch has given back what it does not use."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda device: (1001 * BLOCK_BYTES if calls else 0, 10**12) if device == "cuda:0" else (),
    )
    return calls


@pytest.mark.parametrize("has_nixl", [False, True])
def test_kv_takes_its_part_of_the_memory_that_the_weights_leave_without_the_staging_slots(
    freed: list[str], monkeypatch: pytest.MonkeyPatch, has_nixl: bool
) -> None:
    monkeypatch.setattr(parts, "has_nixl", lambda: has_nixl)
    staging = 16 * (1 << 20) if has_nixl else 0
    fitting = num_blocks_of(GPU, LLAMA_8B)
    assert fitting == (1001 * BLOCK_BYTES // 2 - staging) // BLOCK_BYTES
    assert fitting == (492 if has_nixl else 500)
    assert freed == ["empty_cache"]


def test_a_part_that_holds_no_block_is_refused_in_a_sentence(freed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "has_nixl", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (BLOCK_BYTES, 10**12))
    with pytest.raises(ConfigError, match=r"^kv_cache.memory_fraction: 0.5 of the 0.0 GB .* holds no block of 2.1 MB"):
        num_blocks_of(GPU, LLAMA_8B)


SETTINGS = RankSettings(model_path="", num_blocks=1, quantization="fp8", device="cuda:1")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_a_gpu_without_8_bit_floats_is_refused_by_what_it_has(
    capability: tuple[int, int], model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = read_model_info(model_paths["llama_gqa"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(ConfigError) as refused:
        check_quantization(SETTINGS, info)
    assert str(refused.value) == (
        "model.quantization: 'fp8' needs a GPU of compute capability 8.9 or more, and cuda:1 has "
        f"{capability[0]}.{capability[1]}; only 'none' is allowed there"
    )
    check_quantization(replace(SETTINGS, quantization="none"), info)


def test_a_share_that_the_kernels_do_not_take_is_refused_by_its_size(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    info = read_model_info(model_paths["llama_gqa"])
    check_quantization(SETTINGS, info)
    with pytest.raises(
        ConfigError, match="multiples of 16, and MLPs of a rank have 64 x 24; only 'none' is allowed for them"
    ):
        check_quantization(SETTINGS, replace(info, intermediate_size=24))


def test_ranks_on_gpus_alone_compile_their_model() -> None:
    settings = replace(SETTINGS, compile="auto")
    assert compilation_of(settings) is not None
    assert compilation_of(replace(settings, compile="off")) is None
    assert compilation_of(replace(settings, device="cpu")) is None
