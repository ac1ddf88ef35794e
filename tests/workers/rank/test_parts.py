"""Checks of a rank's parts: which device may have quantised weights, and which compiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cp_core.errors import ConfigError
from workers.model.info import read_model_info
from workers.protocol.ranks import RankSettings
from workers.rank.parts import check_quantization, compilation_of

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
        f"{capability[0]}.{capability[1]}; allowed there is none"
    )
    check_quantization(replace(SETTINGS, quantization="none"), info)


def test_a_share_that_the_kernels_do_not_take_is_refused_by_its_size(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    info = read_model_info(model_paths["llama_gqa"])
    check_quantization(SETTINGS, info)
    with pytest.raises(ConfigError, match="multiples of 16, and MLPs of a rank have 64 x 24; allowed for them is none"):
        check_quantization(SETTINGS, replace(info, intermediate_size=24))


def test_ranks_on_gpus_alone_compile_their_model() -> None:
    settings = replace(SETTINGS, compile="auto")
    assert compilation_of(settings) is not None
    assert compilation_of(replace(settings, compile="off")) is None
    assert compilation_of(replace(settings, device="cpu")) is None
